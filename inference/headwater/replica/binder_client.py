"""The host's end of the link to its binder, which binds the model to Triton (`headwater.wire.handshake`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

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
        status: the binder's answer, with the reason.
    """

    def __init__(self, status: ReplicaStatus) -> None:
        super().__init__(status.text)
        self.status = status


class BinderClient:
    """Sends requests to a binder, and receives its answers.

    Args:
        link: this process's end of the link to the binder.
        directory: the replica's folder.
    """

    def __init__(self, link: Link, directory: Path) -> None:
        self._link = link
        self._directory = directory
        self._lock = threading.Lock()
        self._is_watched = True
        """Whether a failure is received by the thread of `watch` instead of the requesting thread; guarded by the
        lock."""

    def watch(self, on_failure: Callable[[ReplicaError], None]) -> None:
        """Report a failure of the binder while the model loads.

        Args:
            on_failure: called in another thread, with the exception that `warm_up` would raise.
        """
        threading.Thread(target=self._await_failure, args=(on_failure,), name="binder", daemon=True).start()

    def bind(self, signature: Signature) -> None:
        """Have the binder bind a model under the signature's name, and start Triton; `warm_up` waits for the result.

        Raises:
            BinderFailed: the binder has ended, and has sent the reason.
            ReplicaError: the binder has ended.
        """
        self._ask(BindRequest(str(self._directory), msgspec.structs.replace(signature, example=None)))

    def warm_up(
        self, signature: Signature, sizes: Sequence[int], report: Callable[[ReplicaStatus], None], *, skips_slow: bool
    ) -> dict[str, str]:
        """Wait until Triton serves the model, and have the binder call the model through Triton. Returns the binder's
        facts.

        Args:
            signature: the model's signature, now complete.
            sizes: the numbers of rows of the calls. For a language model they follow from its limits.
            report: called with each stage, as a ``progress``, and with each ``warning``.
            skips_slow: see `WarmUpRequest.skips_slow`.

        Raises:
            BinderFailed: Triton did not start, or a call failed; the message includes the callable's message.
            ReplicaError: the binder has ended.
        """
        self._end_watch()
        self._ask(WarmUpRequest(signature, list(sizes), skips_slow))
        while (answer := self._receive()).event != "done":
            report(answer)
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
            self._receive()  # raises the binder's reason, if it sent a reason
            raise ReplicaError(ENDED) from None

    def _receive(self) -> ReplicaStatus:
        try:
            answer = self._link.receive(ReplicaStatus)
        except OSError:
            raise ReplicaError(ENDED) from None
        if answer.event == "failed":
            raise BinderFailed(answer)
        return answer
