"""Both ends of the channel that a worker's streams go over, without what is between."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.runtime import channel as replica_channel
from headwater.runtime.channel import StreamChannels
from headwater.runtime.stream_control import StreamControl
from headwater.wire.parcel import (
    PARCEL_BYTES,
    PARCEL_WINDOW,
    STREAM_WINDOW,
    STREAM_WINDOW_BYTES,
    ChannelNote,
    decode_parcel,
)
from headwater.wire.report import CallNote
from headwater_server.transport import channel as worker_channel
from headwater_server.transport.channel import StreamChannel, Taken

Array = np.ndarray[Any, np.dtype[np.uint8]]
numbers = itertools.count()


@pytest.fixture(autouse=True)
async def nothing_left(anyio_backend: object) -> AsyncIterator[None]:
    """After a test nothing that it began may be under way."""
    tasks = len(asyncio.all_tasks())  # anyio's own
    yield
    assert len(asyncio.all_tasks()) == tasks


def frame(number: int, size: int = 8) -> Array:
    """One that says its number."""
    return np.frombuffer(number.to_bytes(8, "big").ljust(size, b"."), np.uint8).reshape(1, -1)


class Source:
    """A stream's frames, and how many were asked for."""

    def __init__(self, count: int, size: int = 8) -> None:
        self.made = 0
        self.is_closed = False
        self.name = f"stream-{next(numbers)}"
        self._count = count
        self._size = size

    async def frames(self, stream: StreamControl) -> AsyncGenerator[Array, None]:
        """Ends when it is cancelled, as a `BatchRun` does."""
        try:
            while self.made < self._count and not stream.is_cancelled:
                await asyncio.sleep(0)
                self.made += 1
                yield frame(self.made - 1, self._size)
        finally:
            self.is_closed = True


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def settle(turns: int = 400) -> None:
    """Let everything happen that can."""
    for _ in range(turns):
        await asyncio.sleep(0)


def note(pid: int | None = None, number: int = 1, **fields: Any) -> ChannelNote:
    return ChannelNote(os.getpid() if pid is None else pid, number, **fields)


class Listener:
    """Who has opened a channel, and acknowledges nothing by himself."""

    def __init__(self, channels: StreamChannels, opening: ChannelNote) -> None:
        self.parcels: list[list[tuple[str, bytes | None]]] = []
        self.task = asyncio.create_task(self._listen(channels, opening))

    async def _listen(self, channels: StreamChannels, opening: ChannelNote) -> None:
        async for array in parcels_of(channels, opening):
            self.parcels.append(decode_parcel(array.tobytes()))

    def of(self, source: Source) -> list[bytes | None]:
        """What came of a stream."""
        return [raw for parcel in self.parcels for name, raw in parcel if name == source.name]


def parcels_of(channels: StreamChannels, opening: ChannelNote) -> AsyncGenerator[Array, None]:
    answers = channels.answers(CallNote(channel=opening), no_frames)
    assert answers is not None
    return answers


def no_frames(stream: StreamControl) -> AsyncGenerator[Array, None]:
    raise AssertionError("the call has no frames of its own")


def acknowledge(channels: StreamChannels, said: ChannelNote) -> None:
    assert channels.answers(CallNote(channel=said), no_frames) is None


def start(channels: StreamChannels, source: Source, channel: ChannelNote | None = None, **fields: Any) -> None:
    call = CallNote(stream=source.name, channel=channel or note(**fields))
    assert channels.answers(call, source.frames) is None


def opened() -> tuple[StreamChannels, Listener]:
    """A replica's channels, and who has opened this process's."""
    channels = StreamChannels()
    return channels, Listener(channels, note(opens=True))


async def close(channels: StreamChannels, *listeners: Listener) -> None:
    """As a worker does that opens another channel, and ends."""
    other = Listener(channels, note(number=10**6, opens=True))
    await asyncio.wait([listener.task for listener in listeners])
    other.task.cancel()
    await asyncio.wait([other.task])


async def test_what_is_said_before_the_channel_is_open_and_after_comes_in_order() -> None:
    channels = StreamChannels()
    source = Source(10)
    start(channels, source)
    await settle()
    listener = Listener(channels, note(opens=True))
    await until(lambda: None in listener.of(source))
    assert listener.of(source) == [*(frame(number).tobytes() for number in range(10)), None]
    await close(channels, listener)


async def test_a_stream_waits_for_its_reader_and_the_others_do_not() -> None:
    channels, listener = opened()
    stalled, read = Source(10**6), Source(3 * STREAM_WINDOW)
    start(channels, stalled)
    start(channels, read)
    taken = 0
    while None not in listener.of(read):
        await asyncio.sleep(0.001)
        taken = len(listener.of(read))
        acknowledge(channels, note(parcels=len(listener.parcels), taken={read.name: (taken, 8 * taken)}))
    assert stalled.made == STREAM_WINDOW
    acknowledge(channels, note(taken={stalled.name: (10, 80)}))
    await until(lambda: stalled.made == STREAM_WINDOW + 10)
    await settle()
    assert stalled.made == STREAM_WINDOW + 10
    await close(channels, listener)


async def test_a_stream_of_large_frames_waits_sooner() -> None:
    channels, listener = opened()
    source = Source(100, size=STREAM_WINDOW_BYTES // 4)
    start(channels, source)
    await until(lambda: len(listener.of(source)) == 4)
    await settle()
    assert source.made == 4
    await close(channels, listener)


async def test_a_channel_waits_for_its_worker_and_gathers_meanwhile() -> None:
    channels, listener = opened()
    while len(listener.parcels) < PARCEL_WINDOW:
        start(channels, Source(1))
        await asyncio.sleep(0.001)
    sources = [Source(3) for _ in range(5)]
    for source in sources:
        start(channels, source)
    await until(lambda: all(source.is_closed for source in sources))
    await asyncio.sleep(0.01)
    assert len(listener.parcels) == PARCEL_WINDOW
    acknowledge(channels, note(parcels=PARCEL_WINDOW))
    await until(lambda: all(len(listener.of(source)) == 4 for source in sources))
    assert len(listener.parcels) == PARCEL_WINDOW + 1
    await close(channels, listener)


async def test_no_parcel_is_much_larger_than_it_may_be() -> None:
    channels = StreamChannels()
    sources = [Source(3, size=PARCEL_BYTES // 4 + 1) for _ in range(4)]
    for source in sources:
        start(channels, source)
    await until(lambda: all(source.is_closed for source in sources))
    listener = Listener(channels, note(opens=True))
    await until(lambda: all(None in listener.of(source) for source in sources))
    sizes = [sum(len(raw or b"") for _, raw in parcel) for parcel in listener.parcels]
    assert sum(sizes) == 12 * (PARCEL_BYTES // 4 + 1)
    assert max(sizes) < 1.3 * PARCEL_BYTES
    await close(channels, listener)


@pytest.mark.parametrize("is_held", [True, False], ids=["held up", "running"])
async def test_a_stream_that_is_cancelled_ends_even_while_it_waits(is_held: bool) -> None:
    channels, listener = opened()
    source = Source(10**9)
    start(channels, source)
    if is_held:
        await until(lambda: source.made == STREAM_WINDOW)
    else:
        await until(lambda: source.made > 3)
    made = source.made
    assert channels.answers(CallNote(cancel=source.name), no_frames) is None
    await until(lambda: None in listener.of(source))
    assert source.is_closed
    if is_held:  # the next one might be long in coming
        assert source.made == made
    await close(channels, listener)


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """A worker's process."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process


async def test_the_end_of_the_worker_s_process_ends_its_streams_and_no_others(worker: subprocess.Popen[bytes]) -> None:
    channels = StreamChannels()
    own = Listener(channels, note(opens=True))
    other = Listener(channels, note(worker.pid, opens=True))
    held, late, stays = Source(10**9), Source(10**9), Source(10**9)
    start(channels, held, pid=worker.pid)
    start(channels, stays)
    await until(lambda: held.made == stays.made == STREAM_WINDOW)
    worker.kill()
    await asyncio.wait_for(other.task, 10)
    await until(lambda: held.is_closed)
    assert not stays.is_closed
    start(channels, late, pid=worker.pid)  # what it had said may come after its end
    await until(lambda: late.is_closed)
    assert late.made <= 1
    worker.wait()
    gone = Source(10**9)
    start(channels, gone, pid=worker.pid, number=2)
    await until(lambda: gone.is_closed)
    await close(channels, own)


async def test_another_channel_of_a_worker_ends_the_former_one_whatever_comes_late() -> None:
    channels = StreamChannels()
    former, late, latest = Source(10**9), Source(10**9), Source(2)
    first = Listener(channels, note(number=1, opens=True))
    start(channels, former, number=1)
    await until(lambda: former.made == STREAM_WINDOW)
    second = Listener(channels, note(number=2, opens=True))
    await asyncio.wait_for(first.task, 10)
    await until(lambda: former.is_closed)
    start(channels, late, number=1)
    await until(lambda: late.is_closed)
    acknowledge(channels, note(number=1, parcels=99))
    start(channels, latest, number=2)
    await until(lambda: None in second.of(latest))
    await close(channels, second)


def test_a_worker_tells_in_time_how_far_a_reader_has_got() -> None:
    taken = Taken()
    told = [taken.add(1) for _ in range(STREAM_WINDOW)]
    assert told.index(True) < STREAM_WINDOW - 1
    assert taken.acknowledge() == (STREAM_WINDOW, STREAM_WINDOW)
    assert not taken.add(1)
    assert taken.add(STREAM_WINDOW_BYTES)
    assert taken.acknowledge() == (STREAM_WINDOW + 2, STREAM_WINDOW + 1 + STREAM_WINDOW_BYTES)


async def test_what_a_worker_has_to_say_gathers_while_a_message_is_on_its_way() -> None:
    posted: list[ChannelNote] = []
    channel = StreamChannel(posted.append)
    assert channel.opening().opens
    assert not channel.note.opens
    for number in range(3):
        taken = Taken()
        taken.add(number)
        channel.note_taken(f"s{number}", taken)
    assert not posted
    await asyncio.sleep(0)
    assert [sorted(one.taken) for one in posted] == [["s0", "s1", "s2"]]
    channel.note_taken("s0", Taken())
    channel.note_taken("s9", Taken())
    await asyncio.sleep(0)
    assert len(posted) == 1
    channel.end_post()
    await asyncio.sleep(0)
    assert sorted(posted[1].taken) == ["s0", "s9"]
    channel.end_post()
    await asyncio.sleep(0)
    assert len(posted) == 2  # there is nothing to say
    assert {(one.pid, one.number) for one in posted} == {(channel.note.pid, channel.note.number)}


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(0, 200), st.sampled_from([8, 100, STREAM_WINDOW_BYTES // 3])), min_size=1, max_size=6
    ),
    st.integers(0, 2**32),
)
async def test_every_frame_arrives_once_in_order_and_no_window_is_passed(
    asked: list[tuple[int, int]], seed: int
) -> None:
    """Both ends, messages that take their time, and readers that read when they like."""
    dice = random.Random(seed)

    channels = StreamChannels()
    worker: StreamChannel
    posts: list[asyncio.Task[None]] = []

    async def deliver(said: ChannelNote) -> None:
        for _ in range(dice.randint(0, 5)):
            await asyncio.sleep(0)
        acknowledge(channels, said)
        worker.end_post()

    worker = StreamChannel(lambda said: posts.append(asyncio.create_task(deliver(said))))
    sources = [Source(count, size) for count, size in asked]
    waiting: dict[str, list[bytes | None]] = {source.name: [] for source in sources}
    got: dict[str, list[bytes]] = {name: [] for name in waiting}

    async def receive() -> None:
        parcels = 0
        async for array in parcels_of(channels, worker.opening()):
            parcels += 1
            for name, raw in worker.open_parcel(array.tobytes()):
                waiting[name].append(raw)

    async def read(source: Source) -> None:
        name, taken = source.name, Taken()
        while True:
            await until(lambda: bool(waiting[name]))
            for _ in range(dice.randint(0, 3)):
                await asyncio.sleep(0)
            assert source.made - len(got[name]) <= STREAM_WINDOW + 1
            raw = waiting[name].pop(0)
            if raw is None:
                return
            got[name].append(raw)
            if taken.add(len(raw)):
                worker.note_taken(name, taken)

    receiving = asyncio.create_task(receive())
    for source in sources:
        start(channels, source, worker.note)
    await asyncio.gather(*(read(source) for source in sources))
    for source, (count, size) in zip(sources, asked, strict=True):
        assert got[source.name] == [frame(number, size).tobytes() for number in range(count)]
    await until(lambda: all(post.done() for post in posts))
    other = Listener(channels, ChannelNote(worker.note.pid, worker.note.number + 1, opens=True))
    await asyncio.wait([receiving])
    other.task.cancel()
    await asyncio.wait([other.task])


async def test_a_worker_on_another_machine_that_is_not_heard_loses_its_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_channel, "LEASE_S", 0.05)

    channels = StreamChannels()
    source = Source(10**9)
    start(channels, source, pid=-7)
    listener = Listener(channels, note(pid=-7, opens=True))
    await listener.task
    await until(lambda: source.is_closed)
    assert listener.parcels


async def test_any_message_renews_the_lease_and_time_alone_does_not_end_it() -> None:
    channels = StreamChannels()
    source = Source(3)
    listener = Listener(channels, note(pid=-7, opens=True))
    await settle()
    # private: the test calls the checks, since their timer would make it depend on the machine's speed
    ((channel, look),) = ((one, one._look) for one in channels._channels.values())
    for said in (note(pid=-7, parcels=0), note(pid=-7, parcels=1)):
        for _ in range(replica_channel.LEASE_LOOKS - 1):
            look()
        assert not channel.is_closed
        acknowledge(channels, said)
    for _ in range(replica_channel.LEASE_LOOKS - 1):
        look()
    start(channels, source, pid=-7)
    for _ in range(replica_channel.LEASE_LOOKS - 1):
        look()
    assert not channel.is_closed
    look()
    assert channel.is_closed
    await listener.task
    await until(lambda: source.is_closed)


async def test_a_leased_channel_is_renewed_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_channel, "LEASE_S", 0.03)

    posted: list[ChannelNote] = []

    def post(said: ChannelNote) -> None:
        posted.append(said)
        channel.end_post()

    channel = StreamChannel(post, is_leased=True)
    assert channel.note.pid < 0
    assert channel.opening().pid == channel.note.pid
    await until(lambda: len(posted) == 5)
    assert {(one.pid, one.number) for one in posted} == {(channel.note.pid, channel.note.number)}
    channel.close()
    await settle()
    assert len(posted) == 5
    other = StreamChannel(post, is_leased=True)
    assert other.note.pid == channel.note.pid  # so that it ends the former one
    assert other.note.number > channel.note.number
    other.close()


async def test_a_local_channel_has_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_channel, "LEASE_S", 0.0)

    posted: list[ChannelNote] = []
    channel = StreamChannel(posted.append)
    await settle()
    assert channel.note.pid == os.getpid()
    assert not posted
