"""Has a callable answer the calls that come over `headwater.wire.bridge`."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NamedTuple

import numpy as np

from headwater.runtime.call_loop import CallLoop
from headwater.wire.bridge import HEAD, Message, describe, message, read_body, tensors

__all__ = ["Answers", "CalleeRequest", "start"]

_BUFFER_BYTES: Final = 1 << 20

Answers = Callable[[list[Any]], Awaitable[list[dict[str, Any]]] | AsyncIterator[list[dict[str, Any]]]]
"""A function that answers the requests that Triton merged: with a single result, or in frames."""


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
    return await asyncio.start_unix_server(Callee(answers).serve, path, limit=_BUFFER_BYTES)


class Callee:
    """Answers the calls of an instance."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until its instance ends."""
        try:
            while True:
                call, length, more = HEAD.unpack(await reader.readexactly(HEAD.size))
                call_message = read_body(call, await reader.readexactly(length + more), length)
                task = asyncio.create_task(self._answer(call_message, writer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (asyncio.IncompleteReadError, ConnectionError):
            for task in self._tasks:
                task.cancel()
        finally:
            writer.close()

    async def _answer(self, call_message: Message, writer: asyncio.StreamWriter) -> None:
        try:
            start = call_message.start
            requests = []
            for described, parameters in call_message.content:
                inputs, start = tensors(described, call_message.body, start)
                requests.append(CalleeRequest(inputs, json.loads(parameters)))
            answers = self._answers(requests)
            if isinstance(answers, AsyncIterator):
                async for outputs in answers:
                    await _send(writer, call_message.call, outputs)
                await _send(writer, call_message.call, None)
            else:
                await _send(writer, call_message.call, await answers)
        except Exception:
            await _send(writer, call_message.call, traceback.format_exc())


async def _send(writer: asyncio.StreamWriter, call: int, answer: list[dict[str, Any]] | str | None) -> None:
    """Send a call's outputs, the text of its error, or the end of its frames (None)."""
    data: list[bytes | memoryview] = []
    content = [describe(outputs.items(), data) for outputs in answer] if isinstance(answer, list) else answer
    for piece in message(call, content, data):
        writer.write(piece)
    await writer.drain()
