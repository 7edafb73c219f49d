"""A gateway worker's end of the control socket; see `headwater_server.control.control_server`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headwater_server.control import messages
from headwater_server.control.load import LoadReport
from headwater_server.control.messages import (
    Cancel,
    CancelCount,
    Command,
    CommandAnswer,
    Drain,
    Drained,
    Hello,
    QuarantinedRequest,
    ReplicaLoss,
    encode_line,
)
from headwater_server.control.routing import RoutingTable
from headwater_server.control.table_change import TableChange
from headwater_server.errors import Unavailable

__all__ = ["SupervisorLink"]

logger = logging.getLogger("headwater")


class SupervisorLink:
    """The lower end of a control connection: of a gateway worker, or of a cluster's gateway for all its workers.

    Args:
        on_drain: carries out a `Drain`.
        on_quarantined: called with the model and fingerprint of each request that another worker quarantined.
        on_cancel: cancels the streams here that have a request's id, and returns their number; None: there are no
            streams.
        on_message: called at each message, which is a sign of the supervisor's life.
    """

    def __init__(
        self,
        on_drain: Callable[[Drain], Awaitable[Drained]],
        on_quarantined: Callable[[str, bytes], None] = lambda model, fingerprint: None,
        on_cancel: Callable[[str], Awaitable[int]] | None = None,
        on_message: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_drain = on_drain
        self._on_quarantined = on_quarantined
        self._on_cancel = on_cancel
        self._on_message = on_message
        self._table: RoutingTable | None = None
        """The latest table, from any supervisor."""
        self._writer: asyncio.StreamWriter | None = None
        self._answers: dict[int, asyncio.Future[Any]] = {}
        """Futures of awaited answers, by message id."""
        self._numbers = itertools.count()
        self._working: set[asyncio.Task[None]] = set()

    async def tables(self, path: Path) -> AsyncGenerator[RoutingTable, None]:
        """Yield each new routing table as it comes, and handle other messages; ends when the supervisor does.

        Each table is complete, although the supervisor sends only changes after the first table.

        Raises:
            OSError: the socket can't be reached.
            ValueError, msgspec.MsgspecError: a message is invalid.
        """
        reader, writer = await asyncio.open_unix_connection(path, limit=messages.MAX_MESSAGE_BYTES)
        async for table in self.tables_from(reader, writer):
            yield table

    async def tables_from(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: Hello | None = None
    ) -> AsyncGenerator[RoutingTable, None]:
        """Like `tables`, on an open connection, on which ``hello`` is sent first; None: nothing is sent. May be called
        again, for the next supervisor."""
        self._writer = writer
        if hello is not None:
            self._send(hello)
        try:
            while line := await reader.readline():
                self._on_message()
                message = messages.DOWNWARD.decode(line)
                if isinstance(message, (RoutingTable, TableChange)):
                    if (table := self._later(message)) is not None:
                        self._table = table
                        yield table
                elif isinstance(message, (CommandAnswer, CancelCount)):
                    future = self._answers.get(message.id)
                    if future is not None and not future.done():
                        future.set_result(message)
                elif isinstance(message, messages.Ping):
                    self._send(messages.Pong())
                elif isinstance(message, QuarantinedRequest):
                    self._on_quarantined(message.model, bytes.fromhex(message.fingerprint))
                else:
                    work = self._cancel(message) if isinstance(message, Cancel) else self._drain(message)
                    task = asyncio.create_task(work)
                    self._working.add(task)
                    task.add_done_callback(self._working.discard)
        except ConnectionError:
            return
        finally:
            self._writer.close()
            self._writer = None
            for task in self._working:
                task.cancel()
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(_supervisor_gone())

    def leave(self) -> None:
        """Tell the supervisor that nothing is in flight here, and that this gateway will not reconnect."""
        self._send(messages.Goodbye())

    def report(self, load: LoadReport) -> None:
        """Report the load here to the supervisor."""
        self._send(load)

    def report_quarantined(self, model: str, fingerprint: bytes) -> None:
        """Report a request that took two replicas down; the supervisor tells the other workers."""
        self._send(QuarantinedRequest(model, fingerprint.hex()))

    def report_lost(self, loss: ReplicaLoss) -> None:
        """Report the loss of a replica to the supervisor."""
        self._send(loss)

    async def command(self, action: str, model: str, arguments: Mapping[str, Any] | None = None) -> CommandAnswer:
        """Have the supervisor carry out an operator's command, and wait for its answer.

        A command that exceeds `MAX_MESSAGE_BYTES` ends the connection. The answer may take as long as a model's load.

        Raises:
            Unavailable: the supervisor is gone.
        """
        answer: CommandAnswer = await self._ask(Command(next(self._numbers), action, model, dict(arguments or {})))
        return answer

    async def cancel_elsewhere(self, request_id: str) -> int:
        """Cancel the streams that run under a request's id in all other workers. Returns their number; 0 if the
        supervisor is gone."""
        with contextlib.suppress(Unavailable):
            count: CancelCount = await self._ask(Cancel(next(self._numbers), request_id))
            return count.streams
        return 0

    def _later(self, message: RoutingTable | TableChange) -> RoutingTable | None:
        """The table that results from a message. None if the message is not newer than the present table, or changes
        another table; in the second case the whole table is requested."""
        held = self._table
        if held is not None and (message.epoch, message.version) <= held.age:
            if message.epoch < held.epoch:
                logger.error(
                    "the table of an earlier supervisor is ignored (epoch %d, not %d)", message.epoch, held.epoch
                )
            return None
        if isinstance(message, RoutingTable):
            return message
        if held is None or not message.follows(held):
            self._send(messages.TableWanted())
            return None
        return message.applied(held)

    async def _ask(self, message: Command | Cancel) -> Any:
        if self._writer is None:
            raise _supervisor_gone()
        future = self._answers[message.id] = asyncio.get_running_loop().create_future()
        self._send(message)
        try:
            return await future
        finally:
            del self._answers[message.id]

    async def _cancel(self, order: Cancel) -> None:
        self._send(CancelCount(order.id, await self._on_cancel(order.request_id) if self._on_cancel else 0))

    async def _drain(self, order: Drain) -> None:
        try:
            drained = await self._on_drain(order)
        except Exception:
            logger.exception("model %s: draining failed in the gateway", order.model)
            drained = Drained()
        self._send(msgspec.structs.replace(drained, id=order.id))

    def _send(self, message: msgspec.Struct) -> None:
        if self._writer is not None:
            self._writer.write(encode_line(message))


def _supervisor_gone() -> Unavailable:
    return Unavailable("the supervisor is gone: the server is stopping")
