"""Memory that a worker shares with its replicas: what is in it, and when it is used again."""

from __future__ import annotations

import asyncio
import errno
import gc

import msgspec
import numpy as np
import pytest

from headwater.signature import Signature, TensorSpec
from headwater.wire.report import HEADWATER, CallNote
from headwater.wire.shared_memory import SHARED_FROM_BYTES, MappedCall, SharedCall
from headwater_server.codecs.tensors import InferRequest, OutputWish, RawTensor
from headwater_server.transport.batch import encode_batch
from headwater_server.transport.segments import Segment, Segments

SIGNATURE = Signature(
    name="m",
    inputs=(TensorSpec("x", "FP32", (-1,)), TensorSpec("t", "BYTES", (1,)), TensorSpec("b", "BF16", (-1,))),
    outputs=(TensorSpec("y", "FP32", (-1,)), TensorSpec("z", "BF16", (-1, 2))),
    max_batch_size=4,
)
LARGE = SHARED_FROM_BYTES // 4
"""So many floats are."""


def opens(shared: SharedCall) -> bool:
    try:
        MappedCall(shared)
    except OSError:
        return False
    return True


async def gone(shared: SharedCall) -> None:
    while opens(shared):  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0)


@pytest.fixture
async def segments() -> Segments:
    return Segments()


def floats(count: int, first: float = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.arange(first, first + count, dtype=np.float32).reshape(1, count)


def expecting(segments: Segments, answer_bytes: int) -> None:
    segments.note_answer([RawTensor("FP32", (1, answer_bytes // 4), bytes(answer_bytes))], 1)


def taken(segments: Segments, inputs_bytes: int, rows: int = 1) -> Segment:
    segment = segments.take(inputs_bytes, rows)
    assert segment is not None
    return segment


def path_of(segment: Segment) -> str:
    return segment.shared().path


def note_of(head: bytes) -> CallNote:
    return msgspec.json.decode(msgspec.json.decode(head)["parameters"][HEADWATER], type=CallNote)


def shapes_in(head: bytes) -> dict[str, list[int]]:
    return {one["name"]: one["shape"] for one in msgspec.json.decode(head)["inputs"]}


def request(**inputs: RawTensor) -> InferRequest:
    return InferRequest("", inputs, 1, [OutputWish("y", True)], {}, {})


async def test_what_one_side_places_the_other_reads_and_the_way_back(segments: Segments) -> None:
    expecting(segments, 4 * LARGE)
    segment = taken(segments, 8 * LARGE)
    one, two = floats(LARGE), floats(LARGE, first=7)
    segment.place("x", [2, LARGE], [one.tobytes(), memoryview(two.tobytes())])
    there = MappedCall(segment.shared())
    assert there.input(SIGNATURE.inputs[0]).tolist() == [*one.tolist(), *two.tolist()]
    small = np.ones((1, 3), np.float32)
    bits = np.arange(SHARED_FROM_BYTES // 2, dtype=np.uint16).reshape(1, -1, 2)
    assert there.leave({"y": small, "z": bits}) == {"z"}
    outputs = segment.outputs(SIGNATURE)
    assert list(outputs) == ["z"]
    assert outputs["z"].datatype == "UINT16"
    assert outputs["z"].shape == bits.shape
    assert bytes(outputs["z"].data) == bits.tobytes()


async def test_an_answer_that_there_is_no_room_for_stays_where_it_is(segments: Segments) -> None:
    segment = taken(segments, SHARED_FROM_BYTES)
    segment.place("x", [1, LARGE], [floats(LARGE).tobytes()])
    there = MappedCall(segment.shared())
    assert there.leave({"y": floats(16 * LARGE)}) == set()
    assert segment.outputs(SIGNATURE) == {}


async def test_what_a_call_left_is_not_taken_for_the_next_ones(segments: Segments) -> None:
    expecting(segments, 4 * LARGE)
    segment = taken(segments, 0)
    assert MappedCall(segment.shared()).leave({"y": floats(LARGE)}) == {"y"}
    path = path_of(segment)
    del segment
    segment = taken(segments, 0)
    assert path_of(segment) == path
    assert segment.outputs(SIGNATURE) == {}


async def test_small_calls_take_none(segments: Segments) -> None:
    assert segments.take(0, 4) is None
    expecting(segments, SHARED_FROM_BYTES - 4)
    assert segments.take(0, 4) is None


@pytest.mark.slow
async def test_memory_is_used_again_once_nobody_has_a_view_of_it(segments: Segments) -> None:
    expecting(segments, 4 * LARGE)
    segment = taken(segments, 0)
    path = path_of(segment)
    MappedCall(segment.shared()).leave({"y": floats(LARGE)})
    rows = segment.outputs(SIGNATURE)["y"].data[4:8]
    del segment
    gc.collect()
    other = taken(segments, 0)
    assert path_of(other) != path
    assert np.frombuffer(rows, np.float32).tolist() == [1]
    del rows
    assert path_of(taken(segments, 0)) == path


async def test_memory_of_a_call_that_went_wrong_is_not_used_again(segments: Segments) -> None:
    segment = taken(segments, SHARED_FROM_BYTES)
    there = MappedCall(segment.shared())
    segment.spoil()
    del segment
    other = taken(segments, SHARED_FROM_BYTES)
    other.place("x", [1, LARGE], [floats(LARGE, first=3).tobytes()])
    there.inputs["x"] = (0, [1, LARGE])
    assert not there.input(SIGNATURE.inputs[0]).any()  # it is the old one's still


async def test_what_is_not_used_for_a_while_is_let_go(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater_server.transport.segments.KEPT_FOR_S", 0.001)

    shared = taken(segments, SHARED_FROM_BYTES).shared()
    await asyncio.wait_for(gone(shared), 10)


async def test_what_is_used_for_longer_than_that_is_let_go_afterwards(
    segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater_server.transport.segments.KEPT_FOR_S", 0.001)

    segment = taken(segments, SHARED_FROM_BYTES)
    shared = segment.shared()
    outlived = asyncio.Event()
    asyncio.get_running_loop().call_later(0.002, outlived.set)  # fires after the timer of the segment
    await outlived.wait()
    del segment
    await asyncio.wait_for(gone(shared), 10)


async def test_large_inputs_are_placed_and_others_travel(segments: Segments) -> None:
    x = RawTensor("FP32", (1, LARGE), floats(LARGE).tobytes())
    text = RawTensor("BYTES", (1, 1), (2 * SHARED_FROM_BYTES).to_bytes(4, "little") + bytes(2 * SHARED_FROM_BYTES))
    bits = RawTensor("BF16", (1, 2), b"\1\2\3\4")
    head, data, segment = encode_batch(SIGNATURE, [(request(), {"x": x, "t": text, "b": bits}, 1)] * 2,
                                       segments=segments)  # fmt: skip
    assert segment is not None
    note = note_of(head)
    assert note.shared is not None
    assert list(note.shared.inputs) == ["x"]
    assert MappedCall(note.shared).input(SIGNATURE.inputs[0]).tolist() == floats(LARGE).tolist() * 2
    assert [len(piece) for piece in data] == [8, *[4 + 2 * SHARED_FROM_BYTES] * 2, 4, 4]
    assert shapes_in(head) == {"x": [2, 1], "t": [2, 1], "b": [2, 2]}


def test_without_segments_everything_travels() -> None:
    x = RawTensor("FP32", (1, LARGE), floats(LARGE).tobytes())
    head, data, segment = encode_batch(SIGNATURE, [(request(), {"x": x}, 1)])
    assert segment is None
    assert b"".join(data) == x.data
    assert shapes_in(head) == {"x": [1, LARGE]}


@pytest.mark.slow
def test_segments_end_with_their_owner() -> None:
    async def share() -> SharedCall:
        return taken(Segments(), SHARED_FROM_BYTES).shared()

    shared = asyncio.run(share())
    gc.collect()
    assert not opens(shared)


async def test_without_room_for_another_file_all_goes_inline(
    segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    kept = segments.take(2 * SHARED_FROM_BYTES, 1)
    assert kept is not None
    monkeypatch.setattr("headwater_server.transport.segments.os.memfd_create", no_room)
    assert segments.take(2 * SHARED_FROM_BYTES, 1) is None
