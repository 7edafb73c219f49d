"""Has a callable answer the calls that come over `headwater.wire.bridge`."""

from __future__ import annotations

import asyncio
import json
import os
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, NamedTuple, cast

import numpy as np

from headwater.runtime.call_loop import CallLoop, begin
from headwater.wire.bridge import HEAD, Message, describe, message, read_body, tensors

__all__ = ["Answers", "Callee", "CalleeRequest", "start"]

_BUFFER_BYTES: Final = 1 << 16
"""Up to this size, messages are read into a buffer that a connection keeps."""

Outputs = list[dict[str, Any]]
Answers = Callable[[list[Any]], Coroutine[Any, Any, Outputs] | AsyncIterator[Outputs]]
"""A function that answers the requests that Triton merged: with a single result, or in frames. A coroutine that waits
for something must wait for ``asyncio.sleep(0)`` before (see `headwater.runtime.call_loop.begin`)."""


class CalleeRequest(NamedTuple):
    """A request of a call. Triton may merge several requests into a call."""

    data: dict[str, np.ndarray[Any, np.dtype[Any]]]
    """The request's inputs, read-only."""
    parameters: dict[str, Any]


def start(path: str, answers: Answers, loop: CallLoop) -> None:
    """Answer the calls of an instance, which come over the socket at ``path``, until the process ends. Calls that are
    answered in frames may overlap."""
    loop.wait(_listen(path, answers))


async def _listen(path: str, answers: Answers) -> asyncio.Server:
    return await asyncio.get_running_loop().create_unix_server(lambda: Callee(answers), path)


class Callee(asyncio.BufferedProtocol):
    """Answers the calls of an instance, which come over a connection."""

    def __init__(self, answers: Answers) -> None:
        self._pid = os.getpid()
        self._answers = answers
        self._tasks: set[asyncio.Task[None]] = set()
        self._transport: asyncio.Transport | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._buffer = bytearray(_BUFFER_BYTES)
        self._large: tuple[int, int, bytearray] | None = None
        """While a call arrives that is too large for the buffer: its number, the length of its JSON, and its body."""
        self._filled = 0
        """Number of bytes in the body of `_large`, or in the buffer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.BaseProtocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The instance has ended: cancel its calls."""
        self._can_write.set()
        for task in self._tasks:
            task.cancel()

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._can_write.clear()

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._can_write.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `asyncio.BufferedProtocol`."""
        return memoryview(self._buffer if self._large is None else self._large[2])[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Begin to answer the calls that have arrived whole."""
        self._filled += nbytes
        if self._large is not None:
            call, length, large = self._large
            if self._filled == len(large):
                self._large, self._filled = None, 0
                self._begin(call, length, memoryview(large).toreadonly())
            return
        arrived = memoryview(self._buffer)[: self._filled]
        while len(arrived) >= HEAD.size:
            call, length, more = HEAD.unpack_from(arrived)
            end = HEAD.size + length + more
            if len(arrived) < end:
                if end > _BUFFER_BYTES:
                    self._large = call, length, bytearray(length + more)
                    self._filled = len(arrived) - HEAD.size
                    self._large[2][: self._filled] = arrived[HEAD.size :]
                    return
                break
            body, arrived = bytes(arrived[HEAD.size : end]), arrived[end:]  # a copy: each body is aligned in memory
            self._begin(call, length, body)
        self._filled = len(arrived)
        self._buffer[: self._filled] = bytes(arrived)

    def _begin(self, call: int, length: int, body: bytes | memoryview) -> None:
        """Answer a call at once, or begin to answer it."""
        try:
            answers = self._answers(_requests(read_body(call, body, length)))
            answer = answers if isinstance(answers, AsyncIterator) else begin(answers)
        except Exception:
            self._send(call, traceback.format_exc())
            return
        if isinstance(answer, list):
            self._send(call, answer)
            return
        task = asyncio.get_running_loop().create_task(self._answer(call, answer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, call: int, answer: asyncio.Task[Outputs] | AsyncIterator[Outputs]) -> None:
        """Send an answer when it is there, or its frames as they come."""
        try:
            if isinstance(answer, AsyncIterator):
                async for outputs in answer:
                    self._send(call, outputs)
                    await self._can_write.wait()
                self._send(call, None)
            else:
                self._send(call, await answer)
        except Exception:
            self._send(call, traceback.format_exc())

    def _send(self, call: int, answer: Outputs | str | None) -> None:
        """Send a call's outputs, the text of its error, or the end of its frames (None). A child that the callable has
        forked, and in which the call returns too, ends here: it would answer the same calls."""
        assert self._transport is not None
        if os.getpid() != self._pid:
            os._exit(1)
        data: list[bytes | memoryview] = []
        content = [describe(outputs.items(), data) for outputs in answer] if isinstance(answer, list) else answer
        for piece in message(call, content, data):
            self._transport.write(piece)


def _requests(call: Message) -> list[CalleeRequest]:
    start = call.start
    requests = []
    for described, parameters in call.content:
        inputs, start = tensors(described, call.body, start)
        requests.append(CalleeRequest(inputs, json.loads(parameters)))
    return requests
