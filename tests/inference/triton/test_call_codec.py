"""Messages between the bridge and a model's host, through a real pair of sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from headwater.triton.backend_utils import TRITON_STRING_TO_NUMPY
from headwater.triton.call_codec import Disconnected, Frames, Received, read_request, request_content
from headwater.wire.bridge import message

ALIGNED = 16
TYPES = [np.dtype(kind) for kind in TRITON_STRING_TO_NUMPY.values() if kind is not np.object_]
SHAPES = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
NUMBERS = st.sampled_from(TYPES).flatmap(lambda kind: npst.arrays(kind, SHAPES))
BYTES = npst.arrays(object, SHAPES, elements=st.binary(max_size=40))
TENSORS = st.lists(st.tuples(st.text(max_size=8), NUMBERS | BYTES), max_size=4)
SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
REQUESTS = st.lists(
    st.tuples(
        TENSORS, st.lists(st.text(max_size=8), max_size=3), st.dictionaries(st.text(max_size=8), SCALARS, max_size=3)
    ),
    max_size=4,
)


@contextlib.contextmanager
def connected() -> Iterator[tuple[Frames, Frames]]:
    """Both ends of a connection, until the block ends."""
    with contextlib.closing(FramesPair()) as pair:
        yield pair.near, pair.far


class FramesPair:
    """Both ends of a connection."""

    def __init__(self) -> None:
        near, far = socket.socketpair()
        self.near, self.far = Frames(near), Frames(far)

    def close(self) -> None:
        self.near.close()
        self.far.close()


def sent(near: Frames, far: Frames, content: Any, data: list[bytes | memoryview]) -> Received:
    """What arrives of a message."""
    sender = threading.Thread(target=near.send, args=[content, data])
    sender.start()
    try:
        return far.receive()
    finally:
        sender.join()


def same(one: Any, other: Any) -> bool:
    """Whether two arrays are equal in all that a model sees; NaNs of the same bits are."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return bool(one.tolist() == other.tolist() if one.dtype.hasobject else one.tobytes() == other.tobytes())


@given(REQUESTS)
def test_requests_arrive_as_they_are(requests: list[Any]) -> None:
    data: list[bytes | memoryview] = []
    content = [request_content(inputs, data, wanted, about) for inputs, wanted, about in requests]
    with connected() as (near, far):
        received = sent(near, far, content, data)
    assert received.start % ALIGNED == 0
    start = received.start
    for (inputs, wanted, about), described in zip(requests, received.content, strict=True):
        got, got_wanted, got_about, start = read_request(described, received.body, start)
        assert (got_wanted, got_about) == (wanted, about)
        assert [name for name, _ in got] == [name for name, _ in inputs]
        for (_, array), (_, original) in zip(got, inputs, strict=True):
            assert same(array, original)
            assert array.flags.writeable
            if array.size and not array.dtype.hasobject:
                assert array.ctypes.data % ALIGNED == 0
    assert start == len(received.body)


@given(NUMBERS, st.data())
def test_an_array_in_another_order_arrives_with_its_values(array: Any, data: Any) -> None:
    axes = data.draw(st.permutations(range(array.ndim)))
    turned = array.transpose(axes)
    pieces: list[bytes | memoryview] = []
    content = request_content([("x", turned)], pieces, [], {})
    with connected() as (near, far):
        received = sent(near, far, content, pieces)
    ((_, arrived),), _, _, _ = read_request(received.content, received.body, received.start)
    assert same(arrived, np.array(turned, order="C"))


def test_a_message_may_be_larger_than_a_socket_takes_at_once() -> None:
    array = np.arange(1 << 20, dtype=np.int64)
    data: list[bytes | memoryview] = []
    content = request_content([("x", array), ("y", np.array([b"z" * 5_000_000], object))], data, ["y"], {})
    with connected() as (near, far):
        received = sent(near, far, content, data)
    (x, y), _, _, _ = read_request(received.content, received.body, received.start)
    assert np.array_equal(x[1], array)
    assert len(y[1][0]) == 5_000_000


def test_messages_of_several_threads_do_not_mix() -> None:
    count = 50

    def send_each(number: int) -> None:
        for at in range(count):
            near.send([number, at])

    with connected() as (near, far):
        threads = [threading.Thread(target=send_each, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        received = [far.receive().content for _ in range(4 * count)]
        for thread in threads:
            thread.join()
    for number in range(4):
        assert [at for sender, at in received if sender == number] == list(range(count))


def test_what_was_sent_before_the_end_arrives_and_then_the_end() -> None:
    with connected() as (near, far):
        near.send(["last"])
        near.close()
        assert far.receive().content == ["last"]
        for _ in range(2):
            with pytest.raises(Disconnected):
                far.receive()


@pytest.mark.parametrize("size", [1, 19, 20, 30])
def test_a_message_that_is_cut_off_is_the_end(size: int) -> None:
    left, right = socket.socketpair()
    frames = Frames(right)
    whole = b"".join(bytes(piece) for piece in _pieces())
    left.sendall(whole[:size])
    left.close()
    with contextlib.closing(frames), pytest.raises(Disconnected):
        frames.receive()


def _pieces() -> list[bytes | memoryview]:
    data: list[bytes | memoryview] = []
    content = request_content([("x", np.arange(4))], data, [], {})
    return message(0, content, data)


def test_sending_to_a_closed_end_is_refused() -> None:
    with connected() as (near, far):
        far.close()
        with pytest.raises(Disconnected):
            near.receive()
        with pytest.raises(Disconnected):
            near.send(["x" * 1_000_000])


def test_a_close_ends_a_receive_that_is_under_way() -> None:
    ended = threading.Event()

    def receive(frames: Frames) -> None:
        with contextlib.suppress(Disconnected):
            frames.receive()
        ended.set()

    with connected() as (near, _):
        thread = threading.Thread(target=receive, args=[near])
        thread.start()
        near.close()
        assert ended.wait(30)
        thread.join()
