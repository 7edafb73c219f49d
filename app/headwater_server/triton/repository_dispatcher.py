"""The dispatcher of a deployment that serves a model repository: relays requests to its replicas' Triton.

Bodies pass in both directions as they are: Triton checks requests, joins them and words its errors. What the gateway
adds is around that: the choice of a replica, the deadline, the limit of requests, and the end of a request whose client
has left.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from headwater.wire.open_requests import OpenRequests
from headwater_server.codecs.tensors import InferRequest
from headwater_server.control.load import Moment
from headwater_server.control.messages import ReplicaLoss
from headwater_server.control.model_commands import ModelCommands
from headwater_server.control.route_kinds import TritonKind
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, check_key, unavailable
from headwater_server.dispatch.deployment_protocol import Dispatcher, Fail
from headwater_server.dispatch.pool import ReplicaPool
from headwater_server.dispatch.sequence_table import SequenceRequest, SequenceTable
from headwater_server.errors import RETRY_AFTER_LOST_S, BadRequest, QueueFull, Unavailable
from headwater_server.transport.address import ClientTls
from headwater_server.transport.relay_client import RelayClient
from headwater_server.triton.model_change import change_model
from headwater_server.triton.relayed_calls import HttpCall, RelayedCall, RelayedRequest, TritonAnswer, TritonReplica
from headwater_server.triton.sequence_turn import SequenceTurn, sequence_of

if TYPE_CHECKING:
    from headwater_server.triton.rpc_call import RpcCall

__all__ = ["TritonDispatcher"]

MAX_NAME: Final = 100
"""Longest name of a header that is passed on, in characters."""
_KEPT_BACK: Final = frozenset({
    "authorization", "connection", "content-encoding", "content-length", "content-type", "expect", "host",
    "inference-header-content-length", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "x-api-key",
})  # fmt: skip
"""Headers that are not passed on: of the connection, of the body's form, and the gateway's keys."""
_EVENT_END: Final = b"\n\n"
_DATA: Final = b"data: "

C = TypeVar("C", bound=RelayedCall)


class TritonDispatcher(Dispatcher):
    """Relays requests for the models of a repository.

    Args:
        route: the deployment.
        tls: the cluster's certificates, for replicas on other machines.
        on_lost: called with the report of each replica that is lost.
        sequences: the sequences of all repositories; default: a table of its own.
        commands: keeps loads and unloads of models for replicas that start later; None: nothing is kept.
        open_requests: the open requests of this worker; default: of this dispatcher.
    """

    def __init__(
        self,
        route: DeploymentRoute,
        tls: ClientTls | None = None,
        on_lost: Callable[[ReplicaLoss], None] = lambda loss: None,
        sequences: SequenceTable | None = None,
        commands: ModelCommands | None = None,
        open_requests: OpenRequests | None = None,
    ) -> None:
        self.route = route
        self._tls = tls
        self._sequences = sequences or SequenceTable()
        self._commands = commands
        self._open_requests = open_requests or OpenRequests()
        self._calls: set[RelayedCall] = set()
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

    def forwarded(self, headers: Collection[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
        """The headers of a client's request that Triton gets; never those of `_KEPT_BACK`."""
        if self._forwarded is None:
            return []
        texts = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)
        matches = self._forwarded.fullmatch
        return [
            (name, value)
            for name, value in texts
            if len(name) <= MAX_NAME and matches(name) and name.lower() not in _KEPT_BACK
        ]

    def sequence_of(self, model: str, read: Callable[[], Mapping[str, Any]]) -> SequenceRequest | None:
        """What a request says of its sequence; None: it belongs to none.

        Args:
            model: the model's name.
            read: reads the request's parameters; only called if the model has sequences.
        """
        signature = self.signature
        sequences = {} if signature is None or signature.triton is None else signature.triton.sequences
        return sequence_of(model, read(), has_state=sequences[model]) if model in sequences else None

    async def ask(
        self, request: RelayedRequest, key: str = "", sequence: SequenceRequest | None = None
    ) -> TritonAnswer:
        """Send a request, and return the answer, within the deployment's ``timeout_s``.

        Args:
            request: the request.
            key: the name of its API key; empty without a key.
            sequence: what the request says of its sequence.

        Raises:
            HeadwaterError: no requests are accepted now, there are too many, the replica is lost, the deadline passed,
                or the sequence is not known or lost.
        """
        self._admit(key)
        async with self._turn(sequence) as turn:
            with self._during(HttpCall(self, key, self.route.timeout_s, turn, self._open_requests)) as call:
                upstream, body = await call.answer(request)
                if turn is not None and upstream.status == 200:
                    turn.end()
                return TritonAnswer.of(upstream, body)

    async def events(
        self, request: RelayedRequest, key: str = "", sequence: SequenceRequest | None = None
    ) -> AsyncGenerator[bytes | TritonAnswer, None]:
        """Send a request whose answer is a stream of events. Yields the data of each event as they come; or a single
        `TritonAnswer`, if Triton refuses the request. The deadline is the longest time without an event. Arguments as
        for `ask`.

        Raises:
            HeadwaterError: see `ask`, also after the first event.
        """
        self._admit(key)
        async with self._turn(sequence) as turn:
            with self._during(HttpCall(self, key, self.route.timeout_s, turn, self._open_requests)) as call:
                upstream = await call.send(request)
                is_stream = upstream.status == 200 and any(
                    name == b"content-type" and value.startswith(b"text/event-stream")
                    for name, value in upstream.headers
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
                if turn is not None and upstream.status == 200:
                    turn.end()
                if not is_stream:
                    yield TritonAnswer.of(upstream, rest)

    @contextlib.asynccontextmanager
    async def rpc(
        self, metadata: Sequence[tuple[str, str]], key: str = "", sequence: SequenceRequest | None = None
    ) -> AsyncIterator[RpcCall]:
        """A request over gRPC, for the time of the context, which no error ends if the request is answered.

        Args:
            metadata: the call's metadata.
            key, sequence: see `ask`.

        Raises:
            HeadwaterError: see `ask`.
        """
        from headwater_server.triton.rpc_call import RpcCall  # imported only when needed: gRPC takes memory

        self._admit(key)
        async with self._turn(sequence) as turn:
            with self._during(RpcCall(self, key, self.route.timeout_s, turn, metadata)) as call:
                yield call
                if turn is not None:
                    turn.end()

    @contextlib.asynccontextmanager
    async def _turn(self, sequence: SequenceRequest | None) -> AsyncIterator[SequenceTurn | None]:
        """The request's turn in its sequence. With implicit states, the requests of a sequence are answered one after
        another, so that each has the state that the one before it has left."""
        if sequence is None:
            yield None
            return
        turn = SequenceTurn(self._sequences, self.route.name, sequence)
        if not sequence.has_state:
            yield turn
            return
        async with self._sequences.turn(self.route.name, sequence, self.route.timeout_s):
            try:
                yield turn
            except BaseException:
                turn.give_up()
                raise

    @contextlib.contextmanager
    def _during(self, call: C) -> Iterator[C]:
        self._calls.add(call)
        try:
            yield call
        finally:
            self._calls.discard(call)
            call.end()

    async def change_model(self, model: str, request: RelayedRequest) -> TritonAnswer:
        """Have all replicas that get requests load or unload a model; see `change_model`.

        Raises:
            Conflict: another command on the model is under way.
            HeadwaterError: no requests are accepted now; or see `change_model`.
        """
        self.check_ready()
        replicas = list(self._pool.eligible())
        if not replicas:
            raise unavailable(self.route)
        commands = self._commands
        with contextlib.nullcontext() if commands is None else commands.alone(model):
            answer = await change_model(model, request, replicas, self.kind.load_timeout_s)
            if commands is not None and answer.status == 200:
                folders = [Path(replica.route.http_address).parent.name for replica in replicas]
                commands.keep(model, request.path, request.body, folders)
            return answer

    # Of calls

    def choose(self, tried: TritonReplica | None, turn: SequenceTurn | None = None) -> TritonReplica:
        """See `ReplicaChoice.choose`. A replica that gets no new requests still gets those of the sequences whose
        states only it has."""
        if turn is not None:
            candidates = self._pool.candidates()
            reached = candidates if turn.request.has_state else self._pool.connected.values()
            by_id = {replica.route.id: replica for replica in reached if not replica.is_lost and replica is not tried}
            if (owner := turn.owner(by_id)) is not None:
                turn.note(owner, is_owner=True)
                return by_id[owner]
        replica = self._least_busy(tried)
        if turn is not None:
            turn.note(replica.route.id, is_owner=False)
        return replica

    def _least_busy(self, tried: TritonReplica | None) -> TritonReplica:
        candidates = self._pool.candidates()
        candidates = [replica for replica in candidates if replica is not tried] or candidates
        if not candidates:
            if not self.route.replicas:
                raise unavailable(self.route)
            raise Unavailable(f"model `{self.route.name}`: its replica ended", retry_after_s=RETRY_AFTER_LOST_S)
        return min(candidates, key=attrgetter("requests"))

    def lose(self, replica: TritonReplica) -> None:
        """Give a replica no more requests: its connection has ended."""
        self._pool.lose(replica)

    def _admit(self, key: str) -> None:
        """Check that a request may be sent.

        Args:
            key: the name of its API key.

        Raises:
            Unavailable: no requests are accepted now.
            RateLimited: the key's requests have ended too many replicas.
            QueueFull: too many requests are in flight.
        """
        self.check_ready()
        check_key(self.route, key)
        if len(self._calls) >= self.kind.max_requests:
            raise QueueFull(
                f"model `{self.route.name}`: {len(self._calls)} requests are in flight, as many as "
                "options.max_requests allows",
                retry_after_s=1,
            )

    def _open(self, route: ReplicaRoute) -> TritonReplica:
        return TritonReplica(route, RelayClient(route.http_address, route.token, self._tls))

    def _keys_of(self, replica: TritonReplica) -> set[str]:
        return {call.key for call in self._calls if call.replica is replica}

    def _refusal(self) -> BadRequest:
        names = ", ".join(f"`{name}`" for name in self._names()) or "none"
        message = f"model: `{self.route.name}` is a model repository, expected one of its models: {names}"
        return BadRequest(message, field="model")

    def _names(self) -> tuple[str, ...]:
        signature = self.signature
        return () if signature is None or signature.triton is None else signature.triton.models
