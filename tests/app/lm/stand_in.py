"""A replica that speaks `headwater.wire.lm` in this process, and says what the test has it say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable

from headwater.engine import EngineLimits
from headwater.signature import LanguageModelSpec, Signature, TensorSpec
from headwater.wire.lm import (
    Ending,
    Load,
    Message,
    Open,
    Post,
    SequenceEvent,
    StepFrame,
    Submit,
    decode_message,
    encode,
)
from headwater.wire.report import CallNote
from headwater_server.control.route_kinds import LanguageKind
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, State
from headwater_server.errors import HeadwaterError, ReplicaLost, ReplicaUnreachable
from headwater_server.lm.language_model import LmDispatcher
from headwater_server.lm.sequence import SequenceSpec
from headwater_server.transport.replica_protocol import FrameRequest
from headwater_server.transport.segments import RemoteSegment

UNKNOWN = "channel: unknown name"
LIMITS = EngineLimits(max_sequences=4, max_waiting=8, context_length=64, cache_tokens=256, vocab_size=100)
SIGNATURE = Signature(
    "lm",
    (TensorSpec("text_input", "BYTES", (1,)),),
    (TensorSpec("text_output", "BYTES", (1,)),),
    streams=True,
    language_model=LanguageModelSpec("/folder", LIMITS),
)


def route_of(*replicas: str, **fields: object) -> DeploymentRoute:
    """A language model that is ready on these replicas."""
    routes = tuple(ReplicaRoute(id, "unix:", "", "unix:grpc") for id in replicas)
    return DeploymentRoute("lm", State.READY, "", SIGNATURE, routes, kind=LanguageKind(), **fields)  # type: ignore[arg-type]


class Replica:
    """A `FrameReplicaClient`: every channel that is opened here, and every message."""

    def __init__(self) -> None:
        self.opened: list[FrameRequest] = []
        self.messages: list[Message] = []
        self.names: list[str] = []
        self.channels: list[ReplicaChannel] = []
        self.submits: dict[int, Submit] = {}
        """Of the last channel, by number."""
        self.cancels: list[int] = []
        self.answers_open = asyncio.Event()
        self.answers_open.set()
        self.answers_posts = asyncio.Event()
        """Without it, a post is on its way for ever."""
        self.answers_posts.set()
        self.refuses_posts = ""
        """What it says to every post, having taken in nothing of it."""
        self.loses_posts = False
        """Whether posts that are on their way when it ends never reach it."""
        self.posts_under_way = 0
        self.most_posts_under_way = 0
        self.is_closed = False
        self.is_gone = False
        """Whether nothing reaches it any more."""

    @property
    def posts(self) -> list[Post]:
        return [message for message in self.messages if isinstance(message, Post)]

    @property
    def channel(self) -> ReplicaChannel:
        return self.channels[-1]

    def open(self, nothing: FrameRequest, *, streams: bool = False) -> None:
        self.opened.append(nothing)

    def placed(self, segment: RemoteSegment) -> contextlib.AbstractAsyncContextManager[str]:
        raise NotImplementedError  # it is on this machine

    def cancel(self, name: str) -> None:
        for channel in self.channels:
            channel.is_ended = channel.is_ended or channel.name == name

    def close(self) -> None:
        self.is_closed = True
        self.lose()

    def lose(self) -> None:
        """The replica ends."""
        self.is_gone = True
        self.answers_posts.set()
        for channel in self.channels:
            channel.answers.put_nowait(ReplicaLost("the replica ended while it had the request"))

    async def frames(self, name: str, request: FrameRequest) -> AsyncGenerator[bytes, None]:
        if self.is_gone:
            raise ReplicaUnreachable("the replica ended")
        ((input, datatype, shape, (raw,)),) = request.inputs
        message = decode_message(raw)
        note = CallNote(stream=name) if isinstance(message, Open) else CallNote()
        assert (input, datatype, shape, request.note) == ("control", "UINT8", [1, len(raw)], note)
        assert name not in self.names
        self.names.append(name)
        self.messages.append(message)
        if isinstance(message, Open):
            channel = ReplicaChannel(message.channel)
            self.channels.append(channel)
            self.submits, self.cancels = {}, []
            await self.answers_open.wait()
            channel.say()
            while (answer := await channel.answers.get()) is not None:
                if isinstance(answer, HeadwaterError):
                    raise answer
                yield answer
        else:
            self.posts_under_way += 1
            self.most_posts_under_way = max(self.most_posts_under_way, self.posts_under_way)
            try:
                await self.answers_posts.wait()
            finally:
                self.posts_under_way -= 1
            if self.is_gone:
                lost = ReplicaUnreachable if self.loses_posts else ReplicaLost
                raise lost("the replica ended")
            if self.refuses_posts or not self.channels or message.channel != self.channel.name or self.channel.is_ended:
                yield encode(StepFrame(0, [], Load(), closed=self.refuses_posts or UNKNOWN))
                return
            for submit in message.submits:
                assert submit.number not in self.submits
                self.submits[submit.number] = submit
            self.cancels += message.cancels

    def say(self, *events: SequenceEvent, load: Load | None = None, closed: str = "") -> None:
        """A frame on the last channel."""
        self.channel.say(*events, load=load or Load(), closed=closed)


class ReplicaChannel:
    """One channel, as the replica has it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.answers: asyncio.Queue[bytes | HeadwaterError | None] = asyncio.Queue()
        self.frames = 0
        self.is_ended = False
        self.told: dict[int, int] = {}
        """Tokens, by sequence."""

    def say(
        self, *events: SequenceEvent, load: Load | None = None, closed: str = "", number: int | None = None
    ) -> None:
        self.answers.put_nowait(
            encode(StepFrame(self.frames if number is None else number, list(events), load or Load(), closed=closed))
        )
        self.frames += 1
        for one in events:
            self.told[one.number] = one.index + len(one.tokens)


def event(
    number: int, index: int, tokens: Iterable[int] = (), *, finish: Ending | None = None, error: str = ""
) -> SequenceEvent:
    return SequenceEvent(number, index, list(tokens), finish=finish, error=error)


def spec(max_tokens: int = 10, **fields: object) -> SequenceSpec:
    return SequenceSpec([1, 2, 3], max_tokens, **fields)  # type: ignore[arg-type]


class Bench:
    """A dispatcher with stand-ins for replicas."""

    def __init__(self, *replicas: str, **fields: object) -> None:
        self.replicas: dict[str, Replica] = {}
        self.loaded: list[str] = []
        self.dispatcher = LmDispatcher(
            route_of(*(replicas or ("a",)), **fields),
            self._connect,
            self._load_text,  # type: ignore[arg-type]
        )

    def _connect(self, name: str, route: ReplicaRoute) -> Replica:
        self.replicas[route.id] = Replica()
        return self.replicas[route.id]

    def _load_text(self, spec: LanguageModelSpec) -> str:
        self.loaded.append(spec.folder)
        return "text"

    @property
    def replica(self) -> Replica:
        (replica,) = self.replicas.values()
        return replica


async def settle() -> None:
    """Let everything that is due happen."""
    for _ in range(20):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object], timeout_s: float = 10) -> None:
    """Wait for what time brings."""
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline_s, "it never came"
        await asyncio.sleep(0.002)
