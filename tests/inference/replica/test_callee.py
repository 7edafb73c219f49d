"""`headwater.replica.callee`: calls that arrive in pieces, and answers that wait."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headwater.replica.callee import Answers, Callee
from headwater.wire.bridge import HEAD, describe, message, read_body, tensors

SIZES = st.lists(st.sampled_from([0, 1, 3, 1000, 16_000, 17_000, 100_000]), min_size=1, max_size=5)
"""Numbers of FLOAT64 elements, in messages below and above the size of the buffer."""


class Written:
    """The transport of a connection, which keeps what is written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, piece: bytes) -> None:
        self.data += piece

    def answers(self) -> list[Any]:
        """What the messages say: for each request its tensors, the text of an error, or None for an end."""
        found = []
        data, self.data = self.data, b""
        while data:
            call, length, more = HEAD.unpack_from(data)
            body, data = data[HEAD.size : HEAD.size + length + more], data[HEAD.size + length + more :]
            told = read_body(call, body, length)
            content = told.content
            if isinstance(content, list):
                start = told.start
                content = []
                for described in told.content:
                    outputs, start = tensors(described, body, start)
                    content.append({name: array.tolist() for name, array in outputs.items()})
            found.append((call, content))
        return found


def connected(answers: Answers) -> tuple[Callee, Written]:
    written = Written()
    callee = Callee(answers)
    callee.connection_made(cast(asyncio.Transport, written))
    return callee, written


def called(number: int, x: np.ndarray[Any, Any]) -> bytes:
    data: list[bytes | memoryview] = []
    content = [(describe([("x", x)], data), "{}")]
    return b"".join(message(number, content, data))


def feed(callee: Callee, data: bytes, most: Sequence[int]) -> None:
    """Let data arrive in pieces of at most these sizes, again and again."""
    number = 0
    while data:
        buffer = callee.get_buffer(-1)
        size = min(len(buffer), len(data), most[number % len(most)])
        buffer[:size] = data[:size]
        callee.buffer_updated(size)
        data, number = data[size:], number + 1


@given(sizes=SIZES, most=st.lists(st.integers(1, 200_000), min_size=1, max_size=4))
def test_calls_are_the_same_however_they_arrive(sizes: list[int], most: list[int]) -> None:
    async def sums(requests: list[Any]) -> list[dict[str, Any]]:
        (request,) = requests
        x = request.data["x"]
        assert not x.flags.writeable
        assert x.flags.aligned
        return [{"sum": x.sum(keepdims=True)}]

    callee, written = connected(sums)
    calls = [called(number, np.arange(size, dtype=np.float64)) for number, size in enumerate(sizes)]
    most = [max(size, sum(sizes) // 50) for size in most]  # a byte at a time is for small calls
    feed(callee, b"".join(calls), most)
    expected = [(number, [{"sum": [sum(range(size))]}]) for number, size in enumerate(sizes)]
    assert written.answers() == expected


async def test_an_answer_that_waits_leaves_the_loop_to_others() -> None:
    seen = contextvars.ContextVar("seen", default=0)
    release = asyncio.Event()

    async def waits(requests: list[Any]) -> list[dict[str, Any]]:
        (request,) = requests
        assert seen.get() == 0  # each call has a context of its own
        seen.set(int(request.data["x"][0]))
        await asyncio.sleep(0)
        assert asyncio.current_task() is not None
        await release.wait()
        return [{"y": np.array([seen.get()])}]

    callee, written = connected(waits)
    feed(callee, called(0, np.array([5])) + called(1, np.array([6])), [1000])
    assert written.answers() == []
    release.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert sorted(written.answers()) == [(0, [{"y": [5]}]), (1, [{"y": [6]}])]


async def test_an_answer_must_not_wait_for_anything_without_a_task() -> None:
    async def waits(requests: list[Any]) -> list[dict[str, Any]]:
        await asyncio.get_running_loop().create_future()
        return []

    callee, written = connected(waits)
    feed(callee, called(7, np.array([1])), [1000])
    ((call, error),) = written.answers()
    assert call == 7
    assert "expected a coroutine that waits for asyncio.sleep(0) first" in error


async def test_frames_wait_for_their_reader() -> None:
    async def counting(requests: list[Any]) -> AsyncIterator[list[dict[str, Any]]]:
        for number in range(3):
            yield [{"y": np.array([number])}]

    callee, written = connected(counting)
    callee.pause_writing()
    feed(callee, called(0, np.array([1])), [1000])
    for _ in range(10):
        await asyncio.sleep(0)
    assert written.answers() == [(0, [{"y": [0]}])]
    callee.resume_writing()
    for _ in range(10):
        await asyncio.sleep(0)
    assert written.answers() == [(0, [{"y": [1]}]), (0, [{"y": [2]}]), (0, None)]
