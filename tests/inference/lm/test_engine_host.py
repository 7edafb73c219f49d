"""The host of an engine, asked as PyTriton asks it: in a real event loop, with the engine in its thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from headwater.engine import EngineLimits, SequenceRequest, TokenEvent
from headwater.lm.engine_host import EngineHost
from headwater.lm.host_channel import ChannelLimits
from headwater.lm.null_engine import NullEngine
from headwater.wire.arrays import Array
from headwater.wire.frame import FRAME
from headwater.wire.lm import CONTROL, Message, Open, Post, SequenceEvent, StepFrame, Submit, decode_frame, encode
from headwater.wire.parcel import PARCEL_WINDOW, STREAM_WINDOW, ChannelNote, decode_parcel
from headwater.wire.report import HEADWATER, CallNote
from tests.services.engines import Fault, FaultyEngine

LIMITS = EngineLimits(
    max_sequences=4, max_waiting=2, context_length=1_000_000, cache_tokens=4_000_000, vocab_size=1_000_000
)
ENDLESS = 900_000
BOUND_S = 20.0


class Asked:
    """A Triton request, as PyTriton has it."""

    def __init__(self, data: bytes | None, note: CallNote | None) -> None:
        self.data: dict[str, Array] = {} if data is None else {CONTROL: np.frombuffer(data, np.uint8)[None]}
        self.parameters = None if note is None else {HEADWATER: msgspec.json.encode(note).decode()}


class Gated:
    """An engine whose steps wait until they are allowed; else as the engine that it is given."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._allowed = threading.Semaphore(0)
        self._is_open = False
        self.begun = 0
        """Steps that have begun; the events of earlier steps are on their way."""
        self.threads: set[int] = set()
        self.closed = 0

    def __getattr__(self, name: str) -> Any:
        if name != "limits":  # they are a constant
            self.threads.add(threading.get_ident())
        return getattr(self._engine, name)

    def allow(self, steps: int) -> None:
        self._allowed.release(steps)

    def open(self) -> None:
        """Allow all."""
        self._is_open = True
        self._allowed.release()

    def step(self) -> list[TokenEvent]:
        self.begun += 1
        if not self._is_open:
            self._allowed.acquire()
        self.threads.add(threading.get_ident())
        events: list[TokenEvent] = self._engine.step()
        return events

    def close(self) -> None:
        self.closed += 1
        self._engine.close()


class Worker:
    """A worker's channel whose frames are read directly; steps that are not read yet are merged."""

    def __init__(self, host: EngineHost, name: str = "c") -> None:
        self.host = host
        self.name = name
        self.answers = _frames(host, Open(name), CallNote(stream=name))
        self.frames: list[StepFrame] = []
        self.reading: asyncio.Task[StepFrame | None] | None = None

    async def next(self) -> StepFrame | None:
        """The next frame; None at the end."""
        if self.reading is None:
            self.reading = asyncio.ensure_future(anext(self.answers, None))
        frame = await asyncio.wait_for(self.reading, BOUND_S)
        self.reading = None
        if frame is not None:
            assert frame.number == len(self.frames)
            self.frames.append(frame)
        return frame

    async def frame(self) -> StepFrame:
        """The next frame, which there must be."""
        frame = await self.next()
        assert frame is not None
        return frame

    async def post(self, **said: Any) -> list[StepFrame]:
        return [frame async for frame in _frames(self.host, Post(self.name, **said))]

    async def close(self) -> None:
        assert [frame async for frame in _frames(self.host, Post(self.name), CallNote(cancel=self.name))] == []

    async def submit(self, *numbers: int, tokens: int = ENDLESS, prompt: int = 1) -> None:
        assert await self.post(submits=[Submit(one, "r", [0] * prompt, tokens) for one in numbers]) == []

    async def to_end(self, *numbers: int) -> dict[int, list[SequenceEvent]]:
        """Read until these sequences have ended; their events by number."""
        found: dict[int, list[SequenceEvent]] = {}
        left = set(numbers)
        while left:
            frame = await self.frame()
            assert not frame.closed
            for event in frame.events:
                events = found.setdefault(event.number, [])
                assert all(earlier.finish is None for earlier in events)
                events.append(event)
                if event.finish is not None:
                    left.discard(event.number)
        return found

    async def end_of(self, number: int) -> SequenceEvent:
        return (await self.to_end(number))[number][-1]


def _answers(
    host: EngineHost, message: Message | bytes | None, note: CallNote | None = None
) -> AsyncGenerator[list[dict[str, Array]], None]:
    data = message if isinstance(message, bytes) or message is None else encode(message)
    return cast(AsyncGenerator[list[dict[str, Array]], None], host.handle([Asked(data, note)]))


def _frames(
    host: EngineHost, message: Message | bytes | None, note: CallNote | None = None
) -> AsyncGenerator[StepFrame, None]:
    answers = _answers(host, message, note)

    async def read() -> AsyncIterator[StepFrame]:
        async with contextlib.aclosing(answers):
            async for (answer,) in answers:
                (array,) = answer.values()
                assert list(answer) == [FRAME]
                assert array.shape == (1, array.size)
                assert array.dtype == np.uint8
                yield decode_frame(array.tobytes())

    return cast(AsyncGenerator[StepFrame, None], read())


@contextlib.asynccontextmanager
async def hosted(engine: Any, broken: list[str] | None = None, **settings: Any) -> AsyncIterator[EngineHost]:
    """A host of an engine. It ends whatever a test leaves under way."""
    limits = ChannelLimits(**{name: settings.pop(name) for name in ChannelLimits._fields if name in settings})
    on_broken = (broken if broken is not None else []).append
    host = EngineHost(engine, on_broken=on_broken, channel_limits=limits, **settings)
    try:
        yield host
    finally:
        if isinstance(engine, Gated):
            engine.open()
        await asyncio.to_thread(host.close)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():  # of what the engine's thread does
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


def is_held_up(host: EngineHost) -> bool:
    """Whether the worker c holds the engine up."""
    # private: a worker sees it only from a frame, which ends it
    return host._channels["c"].held_up is not None


def numbers_of(events: Sequence[SequenceEvent]) -> list[int]:
    """A sequence's tokens, known to follow each other."""
    got: list[int] = []
    for event in events:
        assert event.index == len(got)
        got += event.tokens
    return got


async def test_a_sequence_from_submit_to_its_end() -> None:
    engine = Gated(NullEngine(LIMITS))

    async with hosted(engine) as host:
        worker = Worker(host)
        first = await worker.frame()
        assert (first.number, first.events, first.closed) == (0, [], "")
        engine.allow(1000)
        await worker.submit(7, tokens=100)
        events = (await worker.to_end(7))[7]
        assert numbers_of(events) == list(range(100))
        assert [event.finish for event in events][:-1] == [None] * (len(events) - 1)
        assert events[-1].finish == "length"
        assert all(event.logprobs is None and event.tops is None for event in events)
        assert worker.frames[-1].load.active == 0
        await worker.close()
        assert await worker.next() is None
    assert len(engine.threads) == 1  # one thread makes all calls
    assert threading.get_ident() not in engine.threads
    assert engine.closed == 1


async def test_steps_that_are_not_read_are_merged() -> None:
    engine = Gated(NullEngine(LIMITS))

    async with hosted(engine) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.submit(0, 1, tokens=50)
        engine.allow(1)
        assert [event.tokens for event in (await worker.frame()).events] == [[0], [0]]
        engine.allow(40)
        await until(lambda: engine.begun == 42)
        assert [(event.number, event.index, event.tokens) for event in (await worker.frame()).events] == [
            (0, 1, list(range(1, 41))), (1, 1, list(range(1, 41))),
        ]  # fmt: skip


async def test_steps_past_a_workers_window_are_merged_and_an_acknowledgement_releases_them() -> None:
    engine = Gated(NullEngine(LIMITS))

    async with hosted(engine, blocked_s=1000) as host:
        channel = ChannelNote(os.getpid(), 1)
        got: list[SequenceEvent] = []
        frames = parcels = 0

        async def listen() -> None:
            nonlocal frames, parcels
            async for (answer,) in _answers(host, Post(""), CallNote(channel=structs.replace(channel, opens=True))):
                parcels += 1
                for name, raw in decode_parcel(answer[FRAME].tobytes()):
                    assert name == "c"
                    if raw is not None:
                        got.extend(decode_frame(raw).events)
                        frames += 1

        async def have_come(count: int) -> None:
            await until(lambda: frames == count)

        async def acknowledge(taken: int) -> None:
            note = structs.replace(channel, parcels=parcels, taken={"c": (taken, 0)})
            assert [one async for one in _answers(host, Post(""), CallNote(channel=note))] == []

        listening = asyncio.create_task(listen())
        assert [one async for one in _answers(host, Open("c"), CallNote(stream="c", channel=channel))] == []
        await until(lambda: frames == 1)
        assert [one async for one in _answers(host, Post("c", [Submit(0, "r", [1], ENDLESS)]))] == []
        for step in range(1, STREAM_WINDOW):  # with the first frame, a whole window
            engine.allow(1)
            await have_come(step + 1)
            if step % (PARCEL_WINDOW // 2) == 0:
                await acknowledge(0)
        engine.allow(500)
        await until(lambda: engine.begun == STREAM_WINDOW + 500)
        assert frames == STREAM_WINDOW
        await acknowledge(1)
        await until(lambda: frames == STREAM_WINDOW + 1)
        assert [len(event.tokens) for event in got] == [1] * (STREAM_WINDOW - 1) + [500]
        assert numbers_of(got) == list(range(STREAM_WINDOW - 1 + 500))
        listening.cancel()  # as PyTriton does with a request whose answer can't be sent
        await asyncio.wait([listening])
        engine.open()
        await until(lambda: engine._engine.active == 0)


class Scripted:
    """Reports what a test says, for the one sequence that it takes."""

    limits = LIMITS

    def __init__(self, *steps: list[Any]) -> None:
        self.steps = list(steps)
        self.id = ""
        self.active = self.waiting = self.cache_used = 0

    @property
    def has_work(self) -> bool:
        return bool(self.id and self.steps)

    def submit(self, request: SequenceRequest) -> None:
        self.id = request.id

    def cancel(self, id: str) -> bool:
        return False

    def step(self) -> list[TokenEvent]:
        events = self.steps.pop(0)
        return [TokenEvent(self.id, *event) for event in events]

    def close(self) -> None:
        self.id = ""


async def events_of(*steps: list[Any]) -> list[SequenceEvent]:
    """What a worker is told in one frame of all these steps."""
    engine = Gated(Scripted(*steps, []))
    async with hosted(engine) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.submit(0)
        engine.allow(len(steps))
        await until(lambda: engine.begun > len(steps))
        return (await worker.frame()).events


async def test_logprobs_and_tops_travel_if_there_are_any() -> None:
    top = ((4, -0.5), (5, -1.0))
    (event,) = await events_of([(0, 4, -0.5, top)], [(1, 5, -1.0, top, "stop")])
    assert (event.tokens, event.logprobs, event.tops, event.finish) == ([4, 5], [-0.5, -1.0], [top, top], "stop")
    (event,) = await events_of([(0, 4, -0.5)], [(1, 5, -1.0)], [(2, None, None, (), "cancelled")])
    assert (event.tokens, event.logprobs, event.tops, event.finish) == ([4, 5], [-0.5, -1.0], None, "cancelled")


async def test_what_is_told_of_a_prompt_is_never_merged_with_tokens() -> None:
    part = ((-0.5, ((4, -0.5),)),)
    events = await events_of(
        [(0, None, None, (), None, "", 0, part)], [(0, None, None, (), None, "", 0, part * 2)], [(0, 4, -1.0)],
        [(1, 5, -2.0, (), "stop")],
    )  # fmt: skip
    assert [(one.index, one.prompt, one.tokens, one.logprobs, one.finish) for one in events] == [
        (0, part, [], None, None), (0, part * 2, [], None, None), (0, (), [4, 5], [-1.0, -2.0], "stop"),
    ]  # fmt: skip


@pytest.mark.parametrize("indices", [[0, 1, 1], [0, 2], [0, 1, 0, 1], [5]])
async def test_indices_that_do_not_follow_each_other_are_told_as_they_are(indices: list[int]) -> None:
    steps = [[(index, 100 + place)] for place, index in enumerate(indices)]
    events = await events_of(*steps, [(99, None, None, (), "stop")])
    assert [event.finish for event in events] == [None] * (len(events) - 1) + ["stop"]
    told = [event.index + place for event in events for place in range(len(event.tokens))]
    assert told == indices
    assert [token for event in events for token in event.tokens] == [100 + place for place in range(len(indices))]


async def test_an_end_that_is_none_is_an_error() -> None:
    (event,) = await events_of([(0, 1, None, (), "done")])
    assert event.finish == "error"
    assert "finish: expected one of cancelled, error, length, out_of_memory, rejected, stop, got 'done'" in event.error


async def test_a_sequence_that_the_engine_forgets_is_ended() -> None:
    async with hosted(Scripted([(0, 1)], [])) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.submit(0)
        event = await worker.end_of(0)
    assert (event.finish, event.error) == ("error", "the engine has no more work, but did not end the sequence")
    assert event.index + len(event.tokens) == 1


async def test_tokens_that_are_no_numbers_end_the_channel() -> None:
    async with hosted(Scripted([(0, object())], [])) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.submit(0)
        assert "the engine's events can't be sent: TypeError" in (await worker.frame()).closed
        assert await worker.next() is None


async def test_a_load_that_is_no_number_ends_each_channel_with_the_reason() -> None:
    engine = Scripted([(0, 1)], [])
    engine.cache_used = object()  # type: ignore[assignment]

    async with hosted(engine) as host:
        worker, other = Worker(host), Worker(host, "other")
        await worker.frame()
        await worker.submit(0)
        frame = await worker.frame()
        assert (frame.number, frame.events) == (1, [])
        assert frame.closed.startswith("the engine's events can't be sent: TypeError")
        assert await worker.next() is None
        assert (await other.frame()).closed == frame.closed
        (answer,) = await worker.post()
        assert answer.closed == "channel: unknown name 'c'"


async def test_what_the_engine_has_no_room_for_is_full() -> None:
    async with hosted(NullEngine(LIMITS, step_s=0.001)) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.submit(*range(7))
        end = await worker.end_of(6)
        assert (end.finish, end.tokens) == ("full", [])
        assert "`max_waiting` is 2" in end.error


@pytest.mark.parametrize(
    ("tokens", "prompt", "says"),
    [(2_000_000, 1, "the model's context"), (5, 0, "prompt: expected"), (-1, 1, "max_tokens: expected at least 0")],
)
async def test_what_the_engine_can_never_take_is_rejected(tokens: int, prompt: int, says: str) -> None:
    async with hosted(NullEngine(LIMITS)) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.submit(0, tokens=tokens, prompt=prompt)
        end = await worker.end_of(0)
        assert (end.finish, end.index) == ("rejected", 0)
        assert says in end.error


class Refusing(NullEngine):
    def submit(self, request: SequenceRequest) -> None:
        raise ZeroDivisionError("on purpose")


async def test_a_submit_that_raises_is_an_error_of_that_sequence() -> None:
    async with hosted(Refusing(LIMITS)) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.submit(0)
        end = await worker.end_of(0)
        assert (end.finish, end.error) == ("error", "ZeroDivisionError: on purpose")


async def test_cancel_by_number_frees_the_place_before_the_next_step() -> None:
    engine = NullEngine(LIMITS, step_s=0.001)
    async with hosted(engine) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.submit(*range(6))  # four run, two wait
        await until(lambda: engine.waiting == 2)
        await worker.post(cancels=[1, 2, 99])
        found = await worker.to_end(1, 2)
        assert [found[number][-1].finish for number in (1, 2)] == ["cancelled"] * 2
        assert numbers_of(found[1]) == list(range(len(numbers_of(found[1]))))
        await until(lambda: (engine.active, engine.waiting) == (4, 0))


async def test_cancel_in_the_post_that_submits() -> None:
    engine = NullEngine(LIMITS)
    async with hosted(engine) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.post(submits=[Submit(0, "r", [1], ENDLESS)], cancels=[0])
        end = await worker.end_of(0)
        assert end.finish == "cancelled"
        await until(lambda: engine.active == 0)


async def test_two_channels_use_the_same_numbers_and_know_nothing_of_each_other() -> None:
    async with hosted(NullEngine(LIMITS)) as host:
        one, other = Worker(host, "one"), Worker(host, "other")
        await one.frame()
        await other.frame()  # reads nothing more for now, and holds up nobody
        await other.submit(0, tokens=30)
        await one.submit(0, tokens=50)
        assert numbers_of((await one.to_end(0))[0]) == list(range(50))
        assert numbers_of((await other.to_end(0))[0]) == list(range(30))
        await one.close()
        assert await one.next() is None
        await other.submit(1, tokens=2)
        assert (await other.end_of(1)).finish == "length"


async def test_a_step_that_raises_ends_what_runs_and_the_engine_goes_on() -> None:
    engine = FaultyEngine(NullEngine(LIMITS), "raise", after=3, is_faulty=lambda id: id == "c/0")
    broken: list[str] = []

    async with hosted(engine, broken) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.submit(0, 1)
        found = await worker.to_end(0, 1)
        for events in found.values():
            assert numbers_of(events) == [0, 1, 2]
            assert (events[-1].finish, events[-1].error) == (
                "error", "RuntimeError: a deliberate fault in sequence c/0",
            )  # fmt: skip
        await worker.submit(2, tokens=10)
        assert numbers_of((await worker.to_end(2))[2]) == list(range(10))
    assert broken == []


class Unmendable(NullEngine):
    def step(self) -> list[TokenEvent]:
        raise RuntimeError("first")

    def close(self) -> None:
        raise RuntimeError("second")


async def test_an_engine_that_can_not_even_be_reset_ends_the_replica() -> None:
    broken: list[str] = []

    async with hosted(Unmendable(LIMITS), broken) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.submit(0)
        await until(lambda: bool(broken))
        assert broken == ["the engine: RuntimeError: second"]
        while not (frame := await worker.frame()).closed:
            assert [event.error for event in frame.events] == ["RuntimeError: first"]
        assert "RuntimeError: second" in frame.closed
        (answer,) = [one async for one in _frames(host, Open("late"))]
        assert "RuntimeError: second" in answer.closed


@pytest.mark.parametrize("fault", ["repeat", "skip", "history"])
async def test_a_fault_of_the_engine_stays_visible(fault: Fault) -> None:
    async with hosted(FaultyEngine(NullEngine(LIMITS), fault)) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.submit(0, tokens=12)
        events = (await worker.to_end(0))[0]
        counts, expected = [], 0
        for event in events:
            counts.append(event.index - expected)
            expected = event.index + len(event.tokens)
        assert any(counts)


async def test_a_worker_that_is_behind_holds_the_engine_up_until_it_reads() -> None:
    async with hosted(NullEngine(LIMITS), most_pending=500) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.submit(0)
        for _ in range(3):
            await until(lambda: is_held_up(host))
            (event,) = (await worker.frame()).events
            assert len(event.tokens) == 500
        await until(lambda: is_held_up(host))
        await worker.post(cancels=[0])  # heard although the engine waits
        assert (await worker.end_of(0)).finish == "cancelled"


async def test_a_worker_that_never_reads_loses_its_channel_although_it_is_heard_of() -> None:
    async with hosted(NullEngine(LIMITS), most_pending=500, blocked_s=0.3) as host:
        worker, other = Worker(host), Worker(host, "other")
        await worker.frame()
        await other.frame()
        await worker.submit(0)
        await other.submit(0, tokens=2000)
        reading = asyncio.ensure_future(other.to_end(0))
        refused: list[StepFrame] = []
        while not (refused and reading.done()):
            refused = await worker.post()
            await asyncio.sleep(0.02)
        assert numbers_of(reading.result()[0]) == list(range(2000))
        assert (await worker.frame()).closed == "its worker left 500 tokens unread for 0.3 s"


async def test_a_full_queue_is_told_while_a_step_is_under_way() -> None:
    engine = Gated(NullEngine(LIMITS))

    async with hosted(engine) as host:
        worker, other = Worker(host), Worker(host, "other")
        await worker.frame()
        await other.frame()
        await worker.submit(*range(5), tokens=2)
        await until(lambda: engine._engine.active == 4)  # and now it waits in the first step
        await other.submit(0, 1, 2)
        ends = {event.number: event for event in (await other.frame()).events}
        assert {number: (end.finish, end.index, end.tokens) for number, end in ends.items()} == {
            1: ("full", 0, []), 2: ("full", 0, []),
        }  # fmt: skip
        assert ends[1].error == "6 sequences run or wait; `max_sequences` is 4, `max_waiting` is 2"
        await worker.post(cancels=[4])
        await other.submit(3, tokens=2)  # in the place of the one that is cancelled
        await other.post(submits=[Submit(4, "r", [0], 2)])
        assert [(event.number, event.finish) for event in (await other.frame()).events] == [(4, "full")]
        engine.open()
        found = await other.to_end(3)
        assert numbers_of(found[3]) == [0, 1]
        await other.submit(5, tokens=1)
        assert (await other.end_of(5)).finish == "length"


class Leaving(NullEngine):
    """Raises SystemExit in one of its methods, so many times."""

    def __init__(self, where: str, times: int) -> None:
        super().__init__(LIMITS)
        self.where = where
        self.times = times

    def leave(self, where: str) -> None:
        if where == self.where and self.times:
            self.times -= 1
            raise SystemExit("on purpose")

    @property
    def cache_used(self) -> int:
        self.leave("cache_used")
        return super().cache_used

    def submit(self, request: SequenceRequest) -> None:
        self.leave("submit")
        super().submit(request)

    def cancel(self, id: str) -> bool:
        self.leave("cancel")
        return super().cancel(id)

    def step(self) -> list[TokenEvent]:
        self.leave("step")
        return super().step()

    def close(self) -> None:
        self.leave("close")
        super().close()


@pytest.mark.parametrize("where", ["submit", "cancel", "step"])
async def test_an_engine_that_raises_system_exit_has_failed_as_with_any_exception(where: str) -> None:
    broken: list[str] = []

    engine = Leaving(where, 1)
    async with hosted(engine, broken) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.submit(0)
        if where == "cancel":
            await until(lambda: engine.active == 1)
            await worker.post(cancels=[0])
        end = await worker.end_of(0)
        assert (end.finish, end.error) == ("error", "SystemExit: on purpose")
        await worker.submit(1, tokens=5)
        assert numbers_of((await worker.to_end(1))[1]) == list(range(5))
    assert broken == []


async def test_whatever_ends_the_engines_thread_ends_the_replica() -> None:
    broken: list[str] = []

    async with hosted(Leaving("cache_used", 2), broken) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.submit(0)
        while not (frame := await worker.frame()).closed:
            pass
        assert frame.closed == "the engine: SystemExit: on purpose"
        await until(lambda: bool(broken))
        assert broken == [frame.closed]
        (answer,) = await worker.post()
        assert answer.closed == frame.closed


async def test_an_engine_that_raises_system_exit_at_the_end_has_ended() -> None:
    broken: list[str] = []
    async with hosted(Leaving("close", 1), broken):
        pass
    assert broken == []


async def test_a_step_that_does_not_return_ends_the_replica() -> None:
    engine = Gated(NullEngine(LIMITS))
    broken: list[str] = []

    async with hosted(engine, broken, max_step_s=0.3) as host:
        worker = Worker(host)
        await worker.frame()
        await until(lambda: host._watch._sleeps)  # private: the watchdog is to be woken from its sleep, which is silent
        engine.allow(3)
        began = time.monotonic()
        await worker.submit(0)
        while not (frame := await worker.frame()).closed:
            pass
        assert time.monotonic() - began >= 0.3
        assert [token for one in worker.frames for event in one.events for token in event.tokens] == [0, 1, 2]
        assert frame.closed == "the engine: a step takes longer than `max_step_s`, 0.3 s"
        await until(lambda: bool(broken))
        assert broken == [frame.closed]
        (answer,) = [one async for one in _frames(host, Open("late"))]
        assert answer.closed == frame.closed
    assert len(broken) == 1


@pytest.mark.slow
async def test_many_steps_may_take_longer_than_one_and_rest_is_no_step() -> None:
    broken: list[str] = []

    async with hosted(NullEngine(LIMITS, step_s=0.001), broken, max_step_s=0.2) as host:
        worker = Worker(host)
        await worker.frame()
        for number in range(2):
            began = time.monotonic()
            await worker.submit(number)
            while time.monotonic() < began + 0.5:
                await worker.frame()
            await worker.post(cancels=[number])
            await worker.end_of(number)
            idle = time.monotonic()
            await until(lambda idle=idle: time.monotonic() > idle + 0.5)  # type: ignore[misc]
        assert not worker.frames[-1].closed
    assert broken == []


class Clock:
    """Monotonic time that a test can move on, as it is found moved on by a process that was stopped."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self.read: list[float] = []
        """`ahead_s` at each reading."""

    def monotonic(self) -> float:
        self.read.append(self.ahead_s)
        return time.monotonic() + self.read[-1]


async def test_a_pause_of_the_replica_costs_a_worker_that_is_there_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("headwater.lm.engine_host.time", clock)
    engine = Gated(NullEngine(LIMITS))

    async with hosted(engine, most_pending=5, blocked_s=4) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.submit(0)
        engine.open()
        await until(lambda: is_held_up(host))
        clock.ahead_s = 3600
        await worker.submit(1)  # wakes the engine's thread
        await until(lambda: clock.read.count(3600) > 1)
        await worker.post(cancels=[0])  # what was sent meanwhile
        assert (await worker.end_of(0)).finish == "cancelled"
        assert await worker.post() == []


async def test_a_channel_is_opened_once() -> None:
    async with hosted(NullEngine(LIMITS)) as host:
        worker, again = Worker(host), Worker(host)
        await worker.frame()
        assert (await again.frame()).closed == "channel: expected a new name, got 'c'"
        assert await again.next() is None
        await worker.submit(0, tokens=3)
        assert (await worker.end_of(0)).finish == "length"
        await worker.close()
        assert await worker.next() is None


async def test_a_number_twice_ends_the_channel() -> None:
    engine = NullEngine(LIMITS, step_s=0.001)
    async with hosted(engine) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.submit(3)
        await worker.submit(3)
        while not (frame := await worker.frame()).closed:
            pass
        assert frame.closed == "submits: expected new numbers, got 3"
        await until(lambda: engine.active == 0)


@pytest.mark.parametrize("data", [None, b"", b"\x01", b"\x92\xa4open\xc1", b"\x92\xa4open\xa1\xff", b"\xff" * 50])
async def test_what_is_no_message_is_answered_so(data: bytes | None) -> None:
    async with hosted(NullEngine(LIMITS)) as host:
        (frame,) = [frame async for frame in _frames(host, data)]
        assert frame.closed.startswith("control: expected a message of headwater.wire.lm: ")


async def test_a_request_that_is_dropped_ends_its_channel() -> None:
    engine = NullEngine(LIMITS, step_s=0.001)
    async with hosted(engine) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.submit(0)
        await worker.frame()
        await worker.answers.aclose()
        (answer,) = await worker.post()
        assert answer.closed
        await until(lambda: engine.active == 0)


async def test_close_ends_channels_with_a_reason_and_the_engine() -> None:
    engine = Gated(NullEngine(LIMITS))

    async with hosted(engine) as host:
        worker = Worker(host)
        await worker.frame()
        engine.allow(5)
        await worker.submit(0, tokens=100)
        await until(lambda: engine._engine.active == 1)
        closing = asyncio.create_task(asyncio.to_thread(host.close, "for a test"))
        while not (frame := await worker.frame()).closed:
            pass
        assert frame.closed == "for a test"
        assert await worker.next() is None
        engine.open()
        await closing
        assert engine.closed == 1
        assert engine._engine.active == 0
        (answer,) = await worker.post()
        assert answer.closed == "for a test"


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=9),
    pattern=st.lists(st.integers(0, 4), min_size=1, max_size=8),
)
async def test_each_token_arrives_once_and_in_order_whenever_it_is_read(lengths: list[int], pattern: list[int]) -> None:
    limits = EngineLimits(max_sequences=4, max_waiting=9, context_length=99, cache_tokens=396, vocab_size=99)
    async with hosted(NullEngine(limits)) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.post(submits=[Submit(number, "r", [1], most) for number, most in enumerate(lengths)])
        turns = itertools.cycle(pattern)
        found: dict[int, list[SequenceEvent]] = {number: [] for number in range(len(lengths))}
        while any(not events or events[-1].finish is None for events in found.values()):
            for _ in range(next(turns)):
                await asyncio.sleep(0.0005)
            for event in (await worker.frame()).events:
                assert not found[event.number] or found[event.number][-1].finish is None
                found[event.number].append(event)
        for number, events in found.items():
            assert numbers_of(events) == list(range(lengths[number]))
            assert events[-1].finish == "length"


CUDA_ERROR = "RuntimeError: CUDA error: device-side assert triggered"


class Raising(NullEngine):
    def step(self) -> list[TokenEvent]:
        raise RuntimeError(CUDA_ERROR.partition(": ")[2])


class Telling(NullEngine):
    def step(self) -> list[TokenEvent]:
        return [TokenEvent(event.id, 0, None, finish="error", error=CUDA_ERROR) for event in super().step()]


class RaisingAtOnce(NullEngine):
    def submit(self, request: SequenceRequest) -> None:
        raise RuntimeError(CUDA_ERROR.partition(": ")[2])


@pytest.mark.parametrize("kind", [Raising, Telling, RaisingAtOnce])
async def test_a_poisoned_device_ends_the_replica_and_is_no_sequences_fault(kind: type[NullEngine]) -> None:
    broken: list[str] = []

    async with hosted(kind(LIMITS), broken) as host:
        worker = Worker(host)
        await worker.frame()
        await worker.submit(0)
        while not (frame := await worker.frame()).closed:
            assert frame.events == []
        assert frame.closed == CUDA_ERROR
        await until(lambda: bool(broken))
    assert broken == [CUDA_ERROR]
