"""Requests that are relayed to a replica's Triton, while they are in flight; `headwater_server.triton.rpc_call` has
those over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from headwater.wire.open_requests import REQUEST, OpenRequests
from headwater_server.dispatch.pool import Replica
from headwater_server.errors import DeadlineExceeded, HeadwaterError, ReplicaLost, ReplicaUnreachable
from headwater_server.transport.relay_client import RelayClient, UpstreamAnswer
from headwater_server.triton.request_json import with_parameters
from headwater_server.triton.sequence_turn import SequenceTurn

__all__ = ["HttpCall", "RelayedCall", "RelayedRequest", "ReplicaChoice", "RpcRefused", "TritonAnswer", "TritonReplica"]

TRIES: Final = 2
"""Number of replicas that a request may be offered to. Only a request that no replica got is offered again: whether a
model may compute a request twice is not known."""
STATE_TRIES: Final = 4
"""The same for a request of a sequence with implicit state, which has the same effect if it is computed twice."""
_ANSWER_HEADERS: Final = frozenset({b"content-type", b"inference-header-content-length", b"allow"})
"""The headers of Triton's answers that clients get."""

_Answer = TypeVar("_Answer")


class _Changeable(Protocol):
    def with_parameters(self, more: Mapping[str, Any]) -> Any: ...


_Request = TypeVar("_Request", bound=_Changeable)


class RelayedRequest(NamedTuple):
    """A request to Triton over HTTP."""

    method: str
    path: str
    body: bytes = b""
    content_type: str = "application/json"
    headers: str = ""
    """More headers, each with its line end."""
    header_length: int | None = None
    """The length of the JSON before binary tensors; None: the whole body is JSON."""

    def with_parameters(self, more: Mapping[str, Any]) -> RelayedRequest:
        """The request with further parameters."""
        if not more:
            return self
        is_infer = self.path.endswith("/infer")
        body, length = with_parameters(self.body, self.header_length, more, are_fields=not is_infer)
        return self._replace(body=body, header_length=length)


class TritonAnswer(NamedTuple):
    """An answer of Triton."""

    status: int
    headers: list[tuple[bytes, bytes]]
    """The headers that clients get."""
    body: bytes

    @classmethod
    def of(cls, upstream: UpstreamAnswer, body: bytes) -> TritonAnswer:
        """The answer of a connection, with its body."""
        headers = [header for header in upstream.headers if header[0] in _ANSWER_HEADERS]
        return cls(upstream.status, headers, body)


class RpcRefused(Exception):
    """Triton's refusal of a gRPC call.

    Args:
        code: the number of gRPC's status.
        message: Triton's message.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(slots=True, eq=False)
class TritonReplica(Replica):
    """A replica and its number of requests in flight."""

    client: RelayClient
    requests: int = 0
    channel: Any = None
    """The ``grpc.aio.Channel``, once there was a call over gRPC."""
    closing: asyncio.Task[None] | None = None
    """Closes the channel."""

    def close(self, reason: str) -> None:
        """See `Replica.close`."""
        Replica.close(self, reason)  # a dataclass with slots is another class than `super` knows
        if self.channel is not None:
            self.closing = asyncio.get_running_loop().create_task(self.channel.close())
            self.channel = None


class ReplicaChoice(Protocol):
    """Has the replicas for calls."""

    def choose(self, tried: TritonReplica | None, turn: SequenceTurn | None) -> TritonReplica:
        """The least busy replica, if possible not the replica that was tried; or the replica of a sequence.

        Raises:
            Unavailable: there is no replica.
            BadRequest, Conflict: see `SequenceTurn.owner`.
        """
        ...

    def lose(self, replica: TritonReplica) -> None:
        """Give a replica no more requests: its connection has ended."""
        ...


class RelayedCall(ABC):
    """A request in flight.

    Args:
        replicas: has the replicas.
        key: the name of the request's API key; empty without a key.
        timeout_s: its deadline.
        turn: the request's turn in its sequence; None: it belongs to no sequence.
    """

    def __init__(self, replicas: ReplicaChoice, key: str, timeout_s: float, turn: SequenceTurn | None = None) -> None:
        self._replicas = replicas
        self._timeout_s = timeout_s
        self._turn = turn
        self._error: HeadwaterError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.key = key
        self.replica: TritonReplica | None = None
        self.watch()

    def watch(self) -> None:
        """Begin the time until the deadline, again."""
        self.rest()
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)

    def rest(self) -> None:
        """End the time until the deadline: what comes next is the client's to do."""
        if self._timer is not None:
            self._timer.cancel()

    def fail(self, error: HeadwaterError) -> None:
        """End the request with an error, which its methods then raise."""
        if self._error is None:
            self._error = error
            self._cut()

    def end(self) -> None:
        """Leave the replica; an answer that isn't complete is given up."""
        self.rest()
        self._leave()

    async def _offer(self, ask: Callable[[TritonReplica], Awaitable[_Answer]]) -> _Answer:
        """Offer the request to a replica, and to a further one if the first didn't get it.

        Raises:
            HeadwaterError: there is no replica, the replica is lost, or `fail` was called.
        """
        tried: TritonReplica | None = None
        turn = self._turn
        may_repeat: type[HeadwaterError] = ReplicaUnreachable
        most = TRIES
        if turn is not None and turn.request.has_state:
            may_repeat, most = ReplicaLost, STATE_TRIES
        for tries in range(most, 0, -1):
            replica = self.replica = self._replicas.choose(tried, turn)
            replica.requests += 1
            try:
                return await ask(replica)
            except HeadwaterError as error:
                self._raise_failure()
                self._lose(error)
                if tries == 1 or not isinstance(error, may_repeat):
                    raise
                self._leave()
                tried = replica
        raise AssertionError("the last try returns or raises")

    def _changed(self, request: _Request) -> _Request:
        """A request with the parameters of its turn in its sequence."""
        return request if self._turn is None else request.with_parameters(self._turn.parameters)

    @abstractmethod
    def _cut(self) -> None:
        """End what waits for the replica."""

    def _leave(self) -> None:
        replica, self.replica = self.replica, None
        if replica is not None:
            replica.requests -= 1

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error.again() from None

    def _lose(self, error: HeadwaterError) -> None:
        if isinstance(error, ReplicaLost) and self.replica is not None:
            self._replicas.lose(self.replica)

    def _expire(self) -> None:
        self.fail(DeadlineExceeded(f"the deadline of {self._timeout_s:g} s passed"))


class HttpCall(RelayedCall):
    """A request over HTTP. Arguments as for `RelayedCall`, and:

    Args:
        open_requests: notes the request until its end, if it is of the generate extension: Triton refuses other
            requests to decoupled models, the only models that can ask whether a request has ended.
    """

    def __init__(
        self,
        replicas: ReplicaChoice,
        key: str,
        timeout_s: float,
        turn: SequenceTurn | None,
        open_requests: OpenRequests,
    ) -> None:
        self._upstream: UpstreamAnswer | None = None
        self._open_requests = open_requests
        self._name = ""
        super().__init__(replicas, key, timeout_s, turn)

    def end(self) -> None:
        """See `RelayedCall.end`."""
        super().end()
        if self._name:
            self._open_requests.close(self._name)

    async def answer(self, request: RelayedRequest) -> tuple[UpstreamAnswer, bytes]:
        """Send the request to a replica. Returns the answer and its whole body.

        Raises:
            HeadwaterError: there is no replica, the replica is lost, or `fail` was called.
        """

        async def ask(replica: TritonReplica) -> tuple[UpstreamAnswer, bytes]:
            upstream = await self._sent(replica, request)
            return upstream, await upstream.whole()

        return await self._offer(ask)

    async def send(self, request: RelayedRequest) -> UpstreamAnswer:
        """Send the request to a replica. Returns the answer, whose status is known. Raises as `answer`."""

        async def ask(replica: TritonReplica) -> UpstreamAnswer:
            return await self._sent(replica, request)

        return await self._offer(ask)

    async def read(self, upstream: UpstreamAnswer) -> bytes:
        """The next bytes of the answer, empty at its end. Raises as `answer`."""
        try:
            return await upstream.read()
        except HeadwaterError as error:
            self._raise_failure()
            self._lose(error)
            raise

    async def _sent(self, replica: TritonReplica, request: RelayedRequest) -> UpstreamAnswer:
        upstream = self._upstream = await replica.client.connect()
        self._raise_failure()
        method, path, body, content_type, headers, length = self._noted(self._changed(request))
        if length is not None:
            headers = f"{headers}Inference-Header-Content-Length: {length}\r\n"
        await upstream.send(method, path, body, headers, content_type)
        return upstream

    def _noted(self, request: RelayedRequest) -> RelayedRequest:
        if request.method == "GET" or not request.path.endswith(("/generate", "/generate_stream")):
            return request
        self._name = self._name or self._open_requests.open()
        with contextlib.suppress(ValueError):  # Triton says what is wrong with the body
            return request.with_parameters({REQUEST: self._name})
        return request

    def _cut(self) -> None:
        if self._upstream is not None:
            self._upstream.close()

    def _leave(self) -> None:
        super()._leave()
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.release()
