"""The dispatcher of a deployment that serves a model repository: relays requests to its replicas' Triton.

Bodies pass in both directions as they are: Triton checks requests, joins them and words its errors. What the gateway
adds is around that: the choice of a replica, the deadline, the limit of requests, and the end of a request whose client
has left.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple, NoReturn

from headwater_server.codecs.tensors import InferRequest
from headwater_server.control.load import Moment
from headwater_server.control.messages import ReplicaLoss
from headwater_server.control.route_kinds import TritonKind
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, check_key, unavailable
from headwater_server.dispatch.deployment_protocol import Dispatcher, Fail
from headwater_server.dispatch.pool import Replica, ReplicaPool
from headwater_server.errors import (
    RETRY_AFTER_LOST_S,
    BadRequest,
    DeadlineExceeded,
    HeadwaterError,
    QueueFull,
    ReplicaLost,
    ReplicaUnreachable,
    Unavailable,
)
from headwater_server.transport.address import ClientTls
from headwater_server.transport.relay_client import RelayClient, UpstreamAnswer

__all__ = ["RelayedRequest", "TritonAnswer", "TritonDispatcher"]

TRIES: Final = 2
"""Number of replicas that a request may be offered to. Only a request that no replica got is offered again: whether a
model may compute a request twice is not known."""
MAX_NAME: Final = 100
"""Longest name of a header that is passed on, in characters."""
_KEPT_BACK: Final = frozenset({
    "authorization", "connection", "content-encoding", "content-length", "content-type", "expect", "host",
    "inference-header-content-length", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "x-api-key",
})  # fmt: skip
"""Headers that are not passed on: of the connection, of the body's form, and the gateway's keys."""
_EVENT_END: Final = b"\n\n"
_DATA: Final = b"data: "
_ANSWER_HEADERS: Final = frozenset({b"content-type", b"inference-header-content-length", b"allow"})
"""The headers of Triton's answers that clients get."""


class RelayedRequest(NamedTuple):
    """A request to Triton."""

    method: str
    path: str
    body: bytes = b""
    content_type: str = "application/json"
    headers: str = ""
    """More headers, each with its line end."""


class TritonAnswer(NamedTuple):
    """An answer of Triton."""

    status: int
    headers: list[tuple[bytes, bytes]]
    """The headers that clients get."""
    body: bytes


@dataclass(slots=True, eq=False)
class _TritonReplica(Replica):
    """A replica and its number of requests in flight."""

    client: RelayClient
    requests: int = 0


class _RelayedCall:
    """A request in flight.

    Args:
        dispatcher: has the replicas.
        request: the request.
        key: the name of its API key; empty without a key.
        timeout_s: its deadline.
    """

    __slots__ = ("_dispatcher", "_error", "_request", "_timeout_s", "_timer", "_upstream", "key", "replica")

    def __init__(self, dispatcher: TritonDispatcher, request: RelayedRequest, key: str, timeout_s: float) -> None:
        self._dispatcher = dispatcher
        self._request = request
        self._timeout_s = timeout_s
        self._error: HeadwaterError | None = None
        self._upstream: UpstreamAnswer | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.key = key
        self.replica: _TritonReplica | None = None
        self.watch()

    def watch(self) -> None:
        """Begin the time until the deadline, again."""
        self.rest()
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)

    def rest(self) -> None:
        """End the time until the deadline: what comes next is the client's to do."""
        if self._timer is not None:
            self._timer.cancel()

    async def send(self) -> UpstreamAnswer:
        """Send the request to a replica. Returns the answer, whose status is known.

        Raises:
            HeadwaterError: there is no replica, the replica is lost, or `fail` was called.
        """
        tried: _TritonReplica | None = None
        for tries in range(TRIES, 0, -1):
            replica = self.replica = self._dispatcher.choose(tried)
            replica.requests += 1
            request = self._request
            try:
                self._upstream = await replica.client.connect()
                if self._error is not None:
                    raise self._error.again()
                await self._upstream.send(
                    request.method, request.path, request.body, request.headers, request.content_type
                )
                return self._upstream
            except HeadwaterError as error:
                self._raise_failure()
                self._lose(error)
                if tries == 1 or not isinstance(error, ReplicaUnreachable):
                    raise
                self._leave()
                tried = replica
        raise AssertionError("the last try returns or raises")

    async def read(self, upstream: UpstreamAnswer) -> bytes:
        """The next bytes of the answer, empty at its end. Raises the same errors as `send`."""
        try:
            return await upstream.read()
        except HeadwaterError as error:
            self._raise_failure()
            self._lose(error)
            raise

    def fail(self, error: HeadwaterError) -> None:
        """End the request with an error, which `send` or `read` then raises."""
        if self._error is None:
            self._error = error
            if self._upstream is not None:
                self._upstream.close()

    def end(self) -> None:
        """Leave the replica; the connection of an answer that isn't complete is closed."""
        self.rest()
        self._leave()

    def _leave(self) -> None:
        replica, self.replica = self.replica, None
        if replica is not None:
            replica.requests -= 1
        upstream, self._upstream = self._upstream, None
        if upstream is not None:
            upstream.release()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error.again() from None

    def _lose(self, error: HeadwaterError) -> None:
        if isinstance(error, ReplicaLost) and self.replica is not None:
            self._dispatcher.lose(self.replica)

    def _expire(self) -> None:
        self.fail(DeadlineExceeded(f"the deadline of {self._timeout_s:g} s passed"))


class TritonDispatcher(Dispatcher):
    """Relays requests for the models of a repository.

    Args:
        route: the deployment.
        tls: the cluster's certificates, for replicas on other machines.
        on_lost: called with the report of each replica that is lost.
    """

    def __init__(
        self,
        route: DeploymentRoute,
        tls: ClientTls | None = None,
        on_lost: Callable[[ReplicaLoss], None] = lambda loss: None,
    ) -> None:
        self.route = route
        self._tls = tls
        self._calls: set[_RelayedCall] = set()
        self._pool = ReplicaPool(route.name, self._open, on_lost=on_lost, keys_of=self._keys_of)
        self.update(route)

    @property
    def in_flight(self) -> int:
        """See `Dispatcher.in_flight`."""
        return len(self._calls)

    @property
    def kind(self) -> TritonKind:
        """The facts about its kind."""
        assert isinstance(self.route.kind, TritonKind)
        return self.route.kind

    def update(self, route: DeploymentRoute) -> None:
        super().update(route)
        pattern = self.kind.header_pattern
        self._forwarded = re.compile(pattern, re.IGNORECASE) if pattern else None
        self._pool.update(route)

    def close(self) -> None:
        super().close()
        self._pool.close()

    def under_way(self, replicas: Collection[str] | None) -> list[Fail]:
        return [
            call.fail
            for call in self._calls
            if replicas is None or (call.replica is not None and call.replica.route.id in replicas)
        ]

    def moment(self) -> Moment:
        count = len(self._calls)
        return Moment(count, count)

    def check_whole(self) -> None:
        self.check_ready()
        raise self._refusal()

    async def infer(self, request: InferRequest, *, is_step: bool = False) -> NoReturn:
        raise self._refusal()

    def stream(self, request: InferRequest) -> NoReturn:
        raise self._refusal()

    def check_model(self, name: str) -> None:
        """Check that the repository has a model.

        Raises:
            Unavailable: no requests are accepted now.
            BadRequest: it has none of this name.
        """
        self.check_ready()
        if name not in self._names():
            raise self._refusal()

    def forwarded_headers(self, headers: Collection[tuple[bytes, bytes]]) -> str:
        """The headers of a client's request that Triton gets, each with its line end; never those of `_KEPT_BACK`."""
        if self._forwarded is None:
            return ""
        texts = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)
        matches = self._forwarded.fullmatch
        return "".join(
            f"{name}: {value}\r\n"
            for name, value in texts
            if len(name) <= MAX_NAME and matches(name) and name.lower() not in _KEPT_BACK
        )

    async def ask(self, request: RelayedRequest, key: str = "") -> TritonAnswer:
        """Send a request, and return the answer, within the deployment's ``timeout_s``.

        Args:
            request: the request.
            key: the name of its API key; empty without a key.

        Raises:
            HeadwaterError: no requests are accepted now, there are too many, the replica is lost, or the deadline
                passed.
        """
        call = self._begin(request, key)
        try:
            upstream = await call.send()
            pieces = []
            while piece := await call.read(upstream):
                pieces.append(piece)
            return TritonAnswer(upstream.status, _kept(upstream), pieces[0] if len(pieces) == 1 else b"".join(pieces))
        finally:
            self._end(call)

    async def events(self, request: RelayedRequest, key: str = "") -> AsyncGenerator[bytes | TritonAnswer, None]:
        """Send a request whose answer is a stream of events. Yields the data of each event as they come; or a single
        `TritonAnswer`, if Triton refuses the request. The deadline is the longest time without an event.

        Raises:
            HeadwaterError: see `ask`, also after the first event.
        """
        call = self._begin(request, key)
        try:
            upstream = await call.send()
            is_stream = upstream.status == 200 and any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in upstream.headers
            )
            rest = b""
            while piece := await call.read(upstream):
                call.rest()
                rest += piece
                if is_stream:
                    *events, rest = rest.split(_EVENT_END)
                    for event in events:
                        yield event.removeprefix(_DATA)
                call.watch()
            if not is_stream:
                yield TritonAnswer(upstream.status, _kept(upstream), rest)
        finally:
            self._end(call)

    async def ask_all(self, request: RelayedRequest) -> TritonAnswer:
        """Send a request to all replicas that get requests, one after another. Returns the answer of the first that
        refuses, or else of the last.

        Raises:
            HeadwaterError: no requests are accepted now, or a replica is lost.
        """
        self.check_ready()
        answer: TritonAnswer | None = None
        for replica in list(self._pool.eligible()):
            upstream = await replica.client.connect()
            try:
                await upstream.send(request.method, request.path, request.body, request.headers, request.content_type)
                answer = TritonAnswer(upstream.status, _kept(upstream), await upstream.whole())
            finally:
                upstream.release()
            if answer.status != 200:
                break
        if answer is None:
            raise unavailable(self.route)
        return answer

    # Of calls

    def choose(self, tried: _TritonReplica | None) -> _TritonReplica:
        """The least busy replica, if possible not the one that was tried.

        Raises:
            Unavailable: there is no replica.
        """
        candidates = self._pool.candidates()
        candidates = [replica for replica in candidates if replica is not tried] or candidates
        if not candidates:
            if not self.route.replicas:
                raise unavailable(self.route)
            raise Unavailable(f"model `{self.route.name}`: its replica ended", retry_after_s=RETRY_AFTER_LOST_S)
        return min(candidates, key=attrgetter("requests"))

    def lose(self, replica: _TritonReplica) -> None:
        """Give a replica no more requests: its connection has ended."""
        self._pool.lose(replica)

    def _begin(self, request: RelayedRequest, key: str) -> _RelayedCall:
        self.check_ready()
        check_key(self.route, key)
        if len(self._calls) >= self.kind.max_requests:
            raise QueueFull(
                f"model `{self.route.name}`: {len(self._calls)} requests are in flight, as many as "
                "options.max_requests allows",
                retry_after_s=1,
            )
        call = _RelayedCall(self, request, key, self.route.timeout_s)
        self._calls.add(call)
        return call

    def _end(self, call: _RelayedCall) -> None:
        self._calls.discard(call)
        call.end()

    def _open(self, route: ReplicaRoute) -> _TritonReplica:
        return _TritonReplica(route, RelayClient(route.http_address, route.token, self._tls))

    def _keys_of(self, replica: _TritonReplica) -> set[str]:
        return {call.key for call in self._calls if call.replica is replica}

    def _refusal(self) -> BadRequest:
        names = ", ".join(f"`{name}`" for name in self._names()) or "none"
        message = f"model: `{self.route.name}` is a model repository, expected one of its models: {names}"
        return BadRequest(message, field="model")

    def _names(self) -> tuple[str, ...]:
        signature = self.signature
        return () if signature is None or signature.triton is None else signature.triton.models


def _kept(upstream: UpstreamAnswer) -> list[tuple[bytes, bytes]]:
    return [header for header in upstream.headers if header[0] in _ANSWER_HEADERS]
