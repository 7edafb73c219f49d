"""The supervisor's end of the control socket, which has one JSON message per line.

Downwards: `RoutingTable`, whole, whenever anything changes; `Drain`, answered by a worker's `Drained`; and a worker's
`Command`, answered by a `CommandAnswer`. Any number of each may be under way; a message's ``id`` tells which answer is
whose. A `Ping` is answered by a `Pong`. What one worker says is `Quarantined`, the others are told. What one
worker asks to `Cancel`, the others cancel, and the one gets the sum of their `CancelCount`. The connection's end tells
the supervisor that a worker is gone, and with it all that was in flight there; and a worker that its supervisor is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec

from app.control.load import LoadReport
from app.control.messages import (
    CANCEL_TIMEOUT_S,
    DRAIN_GRACE_S,
    LOAD_FRESH_S,
    MAX_MESSAGE_BYTES,
    UPWARD,
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
)
from app.control.routing import RoutingTable

__all__ = ["ControlServer"]

logger = logging.getLogger("headwater")
_CREDENTIALS: Final = struct.Struct("3i")


class ControlServer:
    """The supervisor's end.

    Args:
        on_command: carries out a command, however long it takes, even if the worker that sent it ends.
    """

    def __init__(self, on_command: Callable[[Command], Awaitable[CommandAnswer]] | None = None) -> None:
        self._on_command = on_command
        self._table = RoutingTable()
        self._writers: set[asyncio.StreamWriter] = set()
        self._pids: dict[asyncio.StreamWriter, int] = {}
        self._unanswered: dict[asyncio.StreamWriter, int] = {}
        """The number of consecutive unanswered pings."""
        self._loads: dict[asyncio.StreamWriter, tuple[float, LoadReport]] = {}
        """Each worker's last report, and its time."""
        self._drains: dict[int, tuple[asyncio.StreamWriter, asyncio.Future[Drained]]] = {}
        self._cancels: dict[int, tuple[asyncio.StreamWriter, asyncio.Future[int]]] = {}
        self._numbers = itertools.count()
        self._commands: set[asyncio.Task[None]] = set()
        self._server: asyncio.AbstractServer | None = None

    async def start(self, path: Path) -> None:
        """Listen on a unix socket; its folder must be closed to others (0700)."""
        self._server = await asyncio.start_unix_server(self._serve, path, limit=MAX_MESSAGE_BYTES)

    def publish(self, table: RoutingTable) -> None:
        """Send the table to every worker, and to those that come later."""
        self._table = table
        line = encode_line(table)
        for writer in self._writers:
            writer.write(line)

    async def drain(self, model: str, timeout_s: float, replicas: list[str] | None = None) -> Drained:
        """Wait until nothing of a deployment is in flight in any worker; see `Drain`.

        A worker that ends has nothing in flight, and one that connects later has accepted nothing.
        """
        waiting = []
        for writer in self._writers:
            number = next(self._numbers)
            future: asyncio.Future[Drained] = asyncio.get_running_loop().create_future()
            self._drains[number] = writer, future
            waiting.append(future)
            writer.write(encode_line(Drain(number, model, timeout_s, replicas)))
        if not waiting:
            return Drained()
        done, late = await asyncio.wait(waiting, timeout=timeout_s + DRAIN_GRACE_S)
        if late:
            logger.error("%s: %d gateway workers did not report in time that they have drained", model, len(late))
        for number, (_, future) in list(self._drains.items()):
            if future in late:
                del self._drains[number]
        return sum((future.result() for future in done), Drained())

    def loads(self) -> list[LoadReport]:
        """Each worker's last load report, unless it is older than `LOAD_FRESH_S`."""
        oldest_s = asyncio.get_running_loop().time() - LOAD_FRESH_S
        return [report for when_s, report in self._loads.values() if when_s >= oldest_s]

    def ping(self) -> dict[int, int]:
        """Ping every worker.

        Returns:
            By process id, the number of earlier consecutive pings that are unanswered.
        """
        found: dict[int, int] = {}
        for writer in self._writers:
            unanswered = self._unanswered.get(writer, 0)
            found[self._pids[writer]] = unanswered
            self._unanswered[writer] = unanswered + 1
            if not unanswered:
                writer.write(encode_line(Ping()))
        return found

    async def finish(self) -> None:
        """Wait for the commands under way."""
        while self._commands:
            await asyncio.wait(self._commands)

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.close()
        for task in self._commands:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._pids[writer] = _peer(writer)
        try:
            writer.write(encode_line(self._table))
            while line := await reader.readline():
                self._take(UPWARD.decode(line), writer)
        except ConnectionError:
            pass
        except (ValueError, msgspec.MsgspecError) as error:  # disconnected, the worker ends and is replaced
            logger.error("invalid message from a gateway worker: %s", error)
        finally:
            self._writers.discard(writer)
            self._unanswered.pop(writer, None)
            del self._pids[writer]
            self._loads.pop(writer, None)
            for number, (other, future) in list(self._drains.items()):
                if other is writer:
                    del self._drains[number]
                    future.set_result(Drained())
            for cancelling, counted in self._cancels.values():
                if cancelling is writer and not counted.done():
                    counted.set_result(0)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _take(
        self,
        message: Command | Drained | Pong | Quarantined | LoadReport | Cancel | CancelCount,
        writer: asyncio.StreamWriter,
    ) -> None:
        if isinstance(message, LoadReport):
            self._loads[writer] = asyncio.get_running_loop().time(), message
            return
        if isinstance(message, Pong):
            self._unanswered.pop(writer, None)
            return
        if isinstance(message, Quarantined):
            for other in self._writers - {writer}:
                other.write(encode_line(message))
            return
        if isinstance(message, Drained):
            _, future = self._drains.pop(message.id, (None, None))
            if future is not None:  # None: it came too late
                future.set_result(message)
            return
        if isinstance(message, CancelCount):
            _, counted = self._cancels.get(message.id, (None, None))
            if counted is not None and not counted.done():
                counted.set_result(message.streams)
            return
        carry_out = self._cancel(message, writer) if isinstance(message, Cancel) else self._carry_out(message, writer)
        task = asyncio.create_task(carry_out)
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)

    async def _carry_out(self, command: Command, writer: asyncio.StreamWriter) -> None:
        try:
            if self._on_command is None:
                raise RuntimeError("this server carries out no commands")
            answer = await self._on_command(command)
        except Exception:
            logger.exception("%s: %s failed in the supervisor", command.model, command.action)
            text = f"model `{command.model}`: {command.action} failed in the supervisor; see its log"
            answer = CommandAnswer(command.id, 500, {"error": text})
        if writer in self._writers:
            writer.write(encode_line(answer))

    async def _cancel(self, order: Cancel, asking: asyncio.StreamWriter) -> None:
        """Have all other workers cancel what one was asked to, and tell it how much that was."""
        asked: dict[int, asyncio.Future[int]] = {}
        for writer in self._writers - {asking}:
            number = next(self._numbers)
            asked[number] = asyncio.get_running_loop().create_future()
            self._cancels[number] = writer, asked[number]
            writer.write(encode_line(Cancel(number, order.request_id)))
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=CANCEL_TIMEOUT_S)
        finally:
            for number in asked:
                del self._cancels[number]
        if late := sum(not counted.done() for counted in asked.values()):
            logger.warning("%d gateway workers don't say what they cancelled", late)
        if asking in self._writers:
            streams = sum(counted.result() for counted in asked.values() if counted.done())
            asking.write(encode_line(CancelCount(order.id, streams)))


def _peer(writer: asyncio.StreamWriter) -> int:
    """The process id at the other end."""
    raw = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(raw)[0]
    return pid
