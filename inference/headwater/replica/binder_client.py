"""The host's end of the link to its binder, which binds the model to Triton (`headwater.wire.handshake`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec

from headwater.errors import ReplicaError
from headwater.signature import Signature
from headwater.wire.handshake import BindRequest, ReplicaStatus, WarmUpRequest
from headwater.wire.link import Link

__all__ = ["BinderClient", "BinderFailed"]

ENDED = "the process that binds the model to Triton has ended"


class BinderFailed(ReplicaError):
    """The model can't be bound, or Triton can't serve it.

    Args:
        status: the binder's answer, which says why.
    """

    def __init__(self, status: ReplicaStatus) -> None:
        super().__init__(status.text)
        self.status = status


class BinderClient:
    """Has a binder work.

    Args:
        fd: of the socket to the binder.
    """

    def __init__(self, fd: int) -> None:
        self._link = Link(fd)
        self._lock = threading.Lock()
        self._is_watched = True
        """Whether the thread of `watch` receives a failure, and not the thread that asks; guarded by the lock."""

    def watch(self, on_failure: Callable[[ReplicaError], None]) -> None:
        """Have a failure noticed while the model loads.

        Args:
            on_failure: called in another thread, with what `warm_up` would raise.
        """
        threading.Thread(target=self._await_failure, args=(on_failure,), name="binder", daemon=True).start()

    def bind(self, signature: Signature) -> None:
        """Have a model bound under the signature's name, and Triton started; `warm_up` waits for it.

        Raises:
            ReplicaError: the binder has ended.
        """
        self._ask(BindRequest(msgspec.structs.replace(signature, example=None)))

    def warm_up(self, signature: Signature, sizes: Sequence[int], progress: Callable[[str], None]) -> dict[str, str]:
        """Wait until Triton serves the model, and have it called through Triton. Returns the binder's facts.

        Args:
            signature: the model's, now complete.
            sizes: the numbers of rows that it is called with. Those of a language model follow from its limits.
            progress: called with each stage.

        Raises:
            BinderFailed: Triton did not start, or a call failed; the message includes the callable's own.
            ReplicaError: the binder has ended.
        """
        self._end_watch()
        self._ask(WarmUpRequest(signature, list(sizes)))
        while (answer := self._receive()).event == "progress":
            progress(answer.text)
        self._link.close()
        return answer.facts

    def _await_failure(self, on_failure: Callable[[ReplicaError], None]) -> None:
        self._link.wait()
        with self._lock:
            if not self._is_watched:
                return
            try:
                self._receive()
            except ReplicaError as error:
                on_failure(error)

    def _end_watch(self) -> None:
        with self._lock:
            self._is_watched = False

    def _ask(self, request: msgspec.Struct) -> None:
        try:
            self._link.send(request)
        except OSError:
            self._end_watch()
            self._receive()  # if it said why
            raise ReplicaError(ENDED) from None

    def _receive(self) -> ReplicaStatus:
        try:
            answer = self._link.receive(ReplicaStatus)
        except OSError:
            raise ReplicaError(ENDED) from None
        if answer.event == "failed":
            raise BinderFailed(answer)
        return answer
