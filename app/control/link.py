"""A gateway worker's end of the control socket; see `app.control.server`."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from app.control.load import LoadReport
from app.control.messages import (
    DOWNWARD,
    MAX_MESSAGE_BYTES,
    Cancel,
    CancelCount,
    Command,
    CommandAnswer,
    Drain,
    Drained,
    Ping,
    Pong,
    Quarantined,
    encode_line,
    supervisor_gone,
)
from app.control.routing import RoutingTable

__all__ = ["SupervisorLink"]

logger = logging.getLogger("headwater")


class SupervisorLink:
    """A worker's end.

    Args:
        on_drain: does what a `Drain` says.
        on_quarantined: takes in what another worker found, the model and the fingerprint.
        on_cancel: cancels the streams here that have a request's id, and counts them.
    """

    def __init__(
        self,
        on_drain: Callable[[Drain], Awaitable[Drained]],
        on_quarantined: Callable[[str, bytes], None] = lambda model, mark: None,
        on_cancel: Callable[[str], int] = lambda request_id: 0,
    ) -> None:
        self._on_drain = on_drain
        self._on_quarantined = on_quarantined
        self._on_cancel = on_cancel
        self._writer: asyncio.StreamWriter | None = None
        self._answers: dict[int, asyncio.Future[CommandAnswer]] = {}
        self._cancels: dict[int, asyncio.Future[int]] = {}
        self._numbers = itertools.count()
        self._draining: set[asyncio.Task[None]] = set()

    async def tables(self, path: Path) -> AsyncGenerator[RoutingTable, None]:
        """Yield each routing table as it comes, and handle other messages; ends when the supervisor does."""
        reader, self._writer = await asyncio.open_unix_connection(path, limit=MAX_MESSAGE_BYTES)
        try:
            while line := await reader.readline():
                message = DOWNWARD.decode(line)
                if isinstance(message, RoutingTable):
                    yield message
                elif isinstance(message, CommandAnswer):
                    future = self._answers.pop(message.id, None)
                    if future is not None and not future.done():
                        future.set_result(message)
                elif isinstance(message, Ping):
                    self._writer.write(encode_line(Pong()))
                elif isinstance(message, Quarantined):
                    self._on_quarantined(message.model, bytes.fromhex(message.fingerprint))
                elif isinstance(message, Cancel):
                    self._writer.write(encode_line(CancelCount(message.id, self._on_cancel(message.request_id))))
                elif isinstance(message, CancelCount):
                    counted = self._cancels.get(message.id)
                    if counted is not None and not counted.done():
                        counted.set_result(message.streams)
                else:
                    task = asyncio.create_task(self._drain(message))
                    self._draining.add(task)
                    task.add_done_callback(self._draining.discard)
        except ConnectionError:
            return
        finally:
            self._writer.close()
            self._writer = None
            for task in self._draining:
                task.cancel()
            answers, self._answers = self._answers, {}
            for future in answers.values():
                if not future.done():
                    future.set_exception(supervisor_gone())
            for counted in self._cancels.values():
                if not counted.done():
                    counted.set_result(0)

    def report(self, load: LoadReport) -> None:
        """Report this worker's load to the supervisor."""
        if self._writer is not None:
            self._writer.write(encode_line(load))

    def tell_quarantined(self, model: str, fingerprint: bytes) -> None:
        """Report a request that took two replicas down to the other workers."""
        if self._writer is not None:
            self._writer.write(encode_line(Quarantined(model, fingerprint.hex())))

    async def command(self, action: str, model: str, arguments: Mapping[str, Any] | None = None) -> CommandAnswer:
        """Have the supervisor carry out an operator's command, and wait for its answer.

        Args:
            action: the command.
            model: the model it is for.
            arguments: the command's other arguments; small, since a message is one line.

        Raises:
            Unavailable: the supervisor is gone.
        """
        if self._writer is None:
            raise supervisor_gone()
        number = next(self._numbers)
        future: asyncio.Future[CommandAnswer] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        self._writer.write(encode_line(Command(number, action, model, dict(arguments or {}))))
        try:
            return await future
        finally:
            self._answers.pop(number, None)

    async def cancel_elsewhere(self, request_id: str) -> int:
        """Cancel in all other workers what runs under a request's id. Returns how many streams that were; none once the
        supervisor is gone."""
        if self._writer is None:
            return 0
        number = next(self._numbers)
        counted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._cancels[number] = counted
        self._writer.write(encode_line(Cancel(number, request_id)))
        try:
            return await counted
        finally:
            del self._cancels[number]

    async def _drain(self, order: Drain) -> None:
        try:
            drained = await self._on_drain(order)
        except Exception:
            logger.exception("model %s: draining failed in the gateway", order.model)
            drained = Drained()
        if self._writer is not None:
            self._writer.write(encode_line(msgspec.structs.replace(drained, id=order.id)))
