"""A call of ``ModelStreamInfer``: each of its requests is answered by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Final

import grpc
import grpc.aio

from headwater_server.gateway.grpc.asgi_call import RpcAnswer, error_text
from headwater_server.gateway.grpc.rpc_endpoint import stream_error
from headwater_server.gateway.grpc.tensor_messages import parameters_of

__all__ = ["RpcStream"]

STREAM_REQUESTS: Final = 256
"""Requests that are answered at once; further requests are not read until then."""

Ask = Callable[[Any, bytes, Callable[[bytes], Awaitable[None]]], Awaitable[RpcAnswer]]
"""Answers a request, given its message, the message's bytes, and what takes the answer's pieces."""


class RpcStream:
    """A call.

    Args:
        context: the call.
        parse: reads a message, or ends the call.
        ask: answers a request.
        write_timeout_s: seconds that a response may wait for a client that doesn't read.
    """

    def __init__(
        self, context: Any, parse: Callable[[bytes, Any], Awaitable[Any]], ask: Ask, write_timeout_s: float
    ) -> None:
        self._context = context
        self._parse = parse
        self._ask = ask
        self._write_timeout_s = write_timeout_s
        self._slots = asyncio.Semaphore(STREAM_REQUESTS)
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_of: dict[tuple[str, Any], asyncio.Task[None]] = {}
        """The last request of each sequence, while it is not answered."""
        self._reader = asyncio.current_task()
        self._fault = ""
        """Why the client is cut off; empty: it isn't."""

    async def run(self) -> None:
        """Answer the requests until the client has sent its last. A client that doesn't read ends the call."""
        try:
            while (raw := await self._context.read()) is not grpc.aio.EOF:
                message = await self._parse(raw, self._context)
                await self._slots.acquire()
                self._begin(message, raw)
            while self._tasks:
                await asyncio.wait(self._tasks)
        except asyncio.CancelledError:
            if not self._fault:
                raise
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._fault:
            await self._context.abort(grpc.StatusCode.CANCELLED, self._fault)

    def _begin(self, message: Any, raw: bytes) -> None:
        """Have a task answer a request; it waits for the request before it in its sequence."""
        id = parameters_of(message).get("sequence_id")
        sequence = (message.model_name, id) if id else None
        before = None if sequence is None else self._last_of.get(sequence)
        task = asyncio.get_running_loop().create_task(self._answer(message, raw, before))
        self._tasks.add(task)
        if sequence is not None:
            self._last_of[sequence] = task

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._slots.release()
            if sequence is not None and self._last_of.get(sequence) is task:
                del self._last_of[sequence]

        task.add_done_callback(ended)

    async def _answer(self, message: Any, raw: bytes, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        answer = await self._ask(message, raw, self._write)
        if answer.status != HTTPStatus.OK:
            await self._write(stream_error(error_text(answer), message.id))
        elif answer.body:
            await self._write(answer.body)

    async def _write(self, response: bytes) -> None:
        """Write a response. Where that fails or takes too long, the client counts as gone, and its requests are
        cancelled."""
        try:
            async with self._writing:
                await asyncio.wait_for(self._context.write(response), self._write_timeout_s)
        except Exception as error:  # gRPC's own are private
            self._fault = f"cut off: the client read no data ({type(error).__name__})"
            assert self._reader is not None
            self._reader.cancel()
            raise asyncio.CancelledError from None
