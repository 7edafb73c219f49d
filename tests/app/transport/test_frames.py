"""The client of a replica that answers in frames, against a small gRPC server on a real unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import msgspec
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from headwater.wire.parcel import PARCEL_WINDOW, STREAM_WINDOW, ChannelNote, Entry, encode_parcel
from headwater.wire.report import HEADWATER, CallNote
from headwater_server.errors import CallableFailed, ReplicaLost, ReplicaUnreachable
from headwater_server.transport.frames import FrameClient
from headwater_server.transport.replica_protocol import FrameRequest

NOTHING = FrameRequest([("x", "FP32", [1, 1], [bytes(4)])], CallNote(cancel="-"))


def request(note: CallNote | None = None) -> FrameRequest:
    return FrameRequest([("x", "FP32", [2, 1], [b"abcd", memoryview(b"efgh")])], note or CallNote())


def frame(call: str, data: bytes) -> Any:
    return pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse(id=call, raw_output_contents=[data]))


def final(call: str) -> Any:
    response = pb.ModelInferResponse(id=call)
    response.parameters["triton_final_response"].bool_param = True
    return pb.ModelStreamInferResponse(infer_response=response)


def refused(call: str, message: str) -> Any:
    return pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse(id=call), error_message=message)


class Triton(pb_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """What a test reads and answers of the replica's Triton."""

    def __init__(self) -> None:
        self.streams = 0
        self.metadata: dict[str, str] = {}
        self.seen: asyncio.Queue[Any] = asyncio.Queue()
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.address: str
        self.stop: Callable[[], Awaitable[None]]

    async def next(self) -> Any:
        """The next message of a client."""
        return await self.seen.get()

    def say(self, *answers: Any) -> None:
        for answer in answers:
            self.answers.put_nowait(answer)

    async def ModelStreamInfer(self, messages: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        self.streams += 1
        self.metadata = dict(context.invocation_metadata())

        async def read() -> None:
            async for message in messages:
                self.seen.put_nowait(message)

        reading = asyncio.create_task(read())
        try:
            while True:
                yield await self.answers.get()
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"debug": True}


@pytest.fixture
async def triton() -> AsyncIterator[Triton]:
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        triton = Triton()
        server = grpc.aio.server()
        pb_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
        triton.address = f"unix:{folder}/g"
        server.add_insecure_port(triton.address)
        await server.start()
        triton.stop = lambda: server.stop(None)
        yield triton
        await server.stop(None)


@pytest.fixture
async def client(triton: Triton) -> AsyncIterator[FrameClient]:
    """A client of that Triton, of which nothing may be left."""
    before = asyncio.all_tasks()
    client = FrameClient("m", triton.address, "secret")
    mine = asyncio.all_tasks() - before
    yield client
    client.close()
    client.close()
    await asyncio.wait(mine, timeout=10)
    assert all(task.done() for task in mine)


def call(client: FrameClient, name: str, asked: FrameRequest | None = None) -> asyncio.Task[list[bytes]]:
    """All frames of a call."""

    async def frames() -> list[bytes]:
        return [raw async for raw in client.frames(name, asked or request())]

    return asyncio.create_task(frames())


async def test_a_call_is_a_message_and_its_frames_come_until_the_final_one(client: FrameClient, triton: Triton) -> None:
    task = call(client, "one", request(CallNote(patience_s=1.5)))
    message = await triton.next()
    assert (message.model_name, message.id) == ("m", "one")
    assert message.parameters[HEADWATER].string_param == '{"patience_s":1.5}'
    assert message.parameters["triton_enable_empty_final_response"].bool_param
    (x,) = message.inputs
    assert (x.name, x.datatype, list(x.shape)) == ("x", "FP32", [2, 1])
    assert list(message.raw_input_contents) == [b"abcdefgh"]
    assert triton.metadata["triton-grpc-protocol-triton-access-token"] == "secret"
    triton.say(frame("one", b"1"), frame("one", b"2"))
    await asyncio.sleep(0)
    assert not task.done()
    triton.say(final("one"))
    assert await task == [b"1", b"2"]


async def test_calls_share_a_stream_and_each_gets_its_own_frames(client: FrameClient, triton: Triton) -> None:
    tasks = [call(client, name) for name in ("one", "two", "three")]
    for _ in tasks:
        await triton.next()
    triton.say(frame("two", b"2a"), frame("one", b"1"), frame("two", b"2b"), final("three"), final("two"))
    assert await tasks[1] == [b"2a", b"2b"]
    assert await tasks[2] == []
    assert not tasks[0].done()
    triton.say(final("one"))
    assert await tasks[0] == [b"1"]
    assert triton.streams == 1


async def test_a_frame_is_read_before_the_next_is_there(client: FrameClient, triton: Triton) -> None:
    async with contextlib.aclosing(client.frames("one", request())) as frames:
        for data in (b"1", b"2", b"3"):
            triton.say(frame("one", data))
            if data == b"1":
                first = asyncio.ensure_future(anext(frames))
                await triton.next()
                assert await first == data
            else:
                assert await anext(frames) == data


async def test_a_refusal_is_one_line_of_what_triton_said_and_other_calls_go_on(
    client: FrameClient, triton: Triton
) -> None:
    tasks = [call(client, name) for name in ("one", "two")]
    await triton.next()
    await triton.next()
    triton.say(refused("one", "no such input\nTraceback"), frame("two", b"2"), final("two"))
    with pytest.raises(CallableFailed, match=r"^the replica refused the call: no such input$"):
        await tasks[0]
    assert await tasks[1] == [b"2"]


async def test_a_stub_that_triton_finds_dead_means_that_the_replica_is_lost(
    client: FrameClient, triton: Triton
) -> None:
    task = call(client, "one")
    await triton.next()
    triton.say(refused("one", "Stub process 'm_0_0' is not healthy."))
    with pytest.raises(ReplicaLost) as caught:
        await task
    assert not isinstance(caught.value, ReplicaUnreachable)


async def test_a_replica_that_ends_has_lost_the_calls_that_it_had(client: FrameClient, triton: Triton) -> None:
    tasks = [call(client, name) for name in ("one", "two")]
    await triton.next()
    await triton.next()
    triton.say(frame("one", b"1"))
    await triton.stop()
    for task in tasks:
        with pytest.raises(ReplicaLost) as caught:
            await task
        assert not isinstance(caught.value, ReplicaUnreachable)
    with pytest.raises(ReplicaUnreachable):
        await call(client, "three")


async def test_a_replica_that_cannot_be_reached_never_had_the_call_and_that_is_known_soon() -> None:
    client = FrameClient("m", "unix:/nonexistent/g", "secret")
    client.open(NOTHING)
    started_s = time.monotonic()
    for task in [call(client, name) for name in ("one", "two")]:
        with pytest.raises(ReplicaUnreachable):
            await asyncio.wait_for(task, 20)
    assert time.monotonic() - started_s < 15  # gRPC by itself tries again for longer
    client.close()


async def test_opening_connects_before_the_first_call_and_drops_the_answer(client: FrameClient, triton: Triton) -> None:
    client.open(NOTHING)
    message = await triton.next()
    assert message.parameters[HEADWATER].string_param == '{"cancel":"-"}'
    assert list(message.raw_input_contents) == [bytes(4)]
    triton.say(refused(message.id, "I don't like it"), final(message.id))
    task = call(client, "one")
    await triton.next()
    triton.say(frame("one", b"1"), final("one"))
    assert await task == [b"1"]
    assert triton.streams == 1


async def test_a_stream_is_cancelled_by_a_message_and_goes_on_until_the_replica_ends_it(
    client: FrameClient, triton: Triton
) -> None:
    client.open(NOTHING)
    await triton.next()
    task = call(client, "one")
    await triton.next()
    client.cancel("one")
    message = await triton.next()
    note = msgspec.json.decode(message.parameters[HEADWATER].string_param, type=CallNote)
    assert note == CallNote(cancel="one")
    assert [one.name for one in message.inputs] == ["x"]
    triton.say(final(message.id), frame("one", b"1"), final("one"))
    assert await task == [b"1"]


async def test_what_comes_for_a_call_that_was_left_is_dropped(client: FrameClient, triton: Triton) -> None:
    task = call(client, "one")
    await triton.next()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    triton.say(frame("one", b"1"), refused("one", "no"), final("one"))
    other = call(client, "two")
    await triton.next()
    triton.say(final("two"))
    assert await other == []


async def test_closing_ends_calls_under_way_and_refuses_others(client: FrameClient, triton: Triton) -> None:
    task = call(client, "one")
    await triton.next()
    client.close()
    with pytest.raises(ReplicaLost):
        await task
    client.cancel("one")
    with pytest.raises(ReplicaUnreachable):
        await call(client, "two")


async def test_a_call_that_was_not_sent_when_the_client_closes_never_reached_the_replica(
    client: FrameClient, triton: Triton
) -> None:
    task = call(client, "one")
    await asyncio.sleep(0)  # it waits for being written
    client.close()
    with pytest.raises(ReplicaUnreachable):
        await task


STREAM = CallNote(stream="one")


def noted(message: Any) -> CallNote:
    """What a message says."""
    return msgspec.json.decode(message.parameters[HEADWATER].string_param, type=CallNote)


def parcel(channel: str, *entries: Entry) -> Any:
    return frame(channel, encode_parcel(entries).tobytes())


async def test_streams_go_over_one_channel_and_a_call_of_its_own_goes_beside_it(
    client: FrameClient, triton: Triton
) -> None:
    client.open(NOTHING)
    await triton.next()
    streams = [call(client, name, request(CallNote(stream=name))) for name in ("one", "two")]
    opening, one, two = [await triton.next() for _ in range(3)]
    channel = noted(opening).channel
    assert channel is not None
    assert (channel.pid, channel.opens) == (os.getpid(), True)
    assert [one.name for one in opening.inputs] == ["x"]  # every message must have inputs
    for message in (one, two):
        told = noted(message).channel
        assert told == ChannelNote(channel.pid, channel.number)
    plain = call(client, "three")
    await triton.next()
    triton.say(final("one"), final("two"))  # they are asked for: that isn't their end
    triton.say(parcel(opening.id, ("one", b"1"), ("two", b"2"), ("one", b"11"), ("nobody", b"?"), ("one", None)))
    triton.say(frame("three", b"3"), final("three"))
    assert await streams[0] == [b"1", b"11"]
    assert await plain == [b"3"]
    assert not streams[1].done()
    triton.say(parcel(opening.id, ("two", None)))
    assert await streams[1] == [b"2"]


async def test_what_readers_take_and_what_came_is_acknowledged(client: FrameClient, triton: Triton) -> None:
    client.open(NOTHING)
    await triton.next()
    async with contextlib.aclosing(client.frames("one", request(STREAM))) as frames:
        first = asyncio.ensure_future(anext(frames))
        opening = await triton.next()
        await triton.next()
        triton.say(parcel(opening.id, *[("one", b"12") for _ in range(STREAM_WINDOW)]))
        await first
        for _ in range(STREAM_WINDOW // 2 - 1):
            await anext(frames)
        post = await triton.next()
        told = noted(post).channel
        assert told is not None
        assert told.taken == {"one": (STREAM_WINDOW // 2, STREAM_WINDOW)}
        assert told.parcels == 1
        for _ in range(PARCEL_WINDOW):
            triton.say(parcel(opening.id))
        triton.say(final(post.id))
        told = noted(await triton.next()).channel
        assert told is not None
        assert told.parcels > 1
        assert not told.taken


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda channel: final(channel), ReplicaLost),
        (lambda channel: refused(channel, "no"), CallableFailed),
        (lambda channel: refused(f"{channel}-post", "no"), CallableFailed),
        (lambda channel: frame(channel, b"no parcel"), CallableFailed),
    ],
    ids=["closed", "refused", "post refused", "garbage"],
)
async def test_a_channel_that_breaks_ends_its_streams_and_the_next_one_opens_another(
    client: FrameClient, triton: Triton, answer: Callable[[str], Any], error: type[Exception]
) -> None:
    streams = [call(client, name, request(CallNote(stream=name))) for name in ("one", "two")]
    plain = call(client, "three")
    opening = await triton.next()
    for _ in range(3):
        await triton.next()
    triton.say(answer(opening.id))
    for stream in streams:
        with pytest.raises(error):
            await stream
    again = call(client, "four", request(CallNote(stream="four")))
    other, message = await triton.next(), await triton.next()
    before, told, after = noted(opening).channel, noted(other).channel, noted(message).channel
    assert before is not None
    assert told is not None
    assert after is not None
    assert before.number < told.number == after.number
    triton.say(parcel(opening.id, ("four", b"late")), final(opening.id), parcel(other.id, ("four", None)))
    triton.say(final("three"))
    assert await again == await plain == []


async def test_a_stream_that_is_refused_ends_with_that(client: FrameClient, triton: Triton) -> None:
    streams = [call(client, name, request(CallNote(stream=name))) for name in ("one", "two")]
    for _ in range(3):
        await triton.next()
    triton.say(refused("one", "no such input"))
    triton.say(frame("two", b"a frame that says why"), final("two"))
    with pytest.raises(CallableFailed, match="no such input"):
        await streams[0]
    assert await streams[1] == [b"a frame that says why"]


async def test_streams_of_a_replica_that_ends_in_good_order_are_lost_if_it_had_them(
    client: FrameClient, triton: Triton
) -> None:
    names = ("accepted", "answered", "unknown")
    streams = [call(client, name, request(CallNote(stream=name))) for name in names]
    opening = await triton.next()
    for _ in names:
        await triton.next()
    triton.say(final("accepted"), parcel(opening.id, ("answered", b"1")))
    triton.say(refused(f"{opening.id}-post", "Request for unknown model: 'm' is not found"))
    for stream, error in zip(streams, (ReplicaLost, ReplicaLost, ReplicaUnreachable), strict=True):
        with pytest.raises(ReplicaLost) as caught:
            await stream
        assert type(caught.value) is error


async def test_opening_for_streams_opens_the_channel(client: FrameClient, triton: Triton) -> None:
    client.open(NOTHING, streams=True)
    opening = await triton.next()
    told = noted(opening).channel
    assert told is not None
    assert told.opens
    task = call(client, "one", request(STREAM))
    asked = noted(await triton.next()).channel
    assert asked is not None
    assert asked.number == told.number
    triton.say(parcel(opening.id, ("one", None)))
    assert await task == []
