"""The control socket between the supervisor and its gateway workers: one JSON line a message.

Downwards: `RoutingTable`, whole, whenever anything changes; `Drain`, answered by a worker's `Drained`; and a worker's
`Command`, answered by a `CommandAnswer`. Any number of each may be under way; a message's ``id`` tells which answer is
whose. The connection's end tells the supervisor that a worker is gone, and with it all that was in flight there; and a
worker that its supervisor is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from app.errors import Unavailable
from app.routing import RoutingTable

__all__ = ["Command", "CommandAnswer", "ControlServer", "Drain", "Drained", "SupervisorLink"]

logger = logging.getLogger("headwater")

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
DRAIN_GRACE_S: Final = 5.0
"""How much longer than it should a worker may take to say that it has drained."""


class Command(msgspec.Struct, frozen=True, tag="command"):
    """What an operator wants, as a worker was asked."""

    id: int
    action: str
    model: str


class CommandAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """What came of it, as the operator is told."""

    id: int
    status: int
    content: dict[str, Any]


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Tells a worker to say when nothing of a deployment is in flight in it any more.

    It comes behind the table that keeps new requests away.
    """

    id: int
    model: str
    timeout_s: float
    """After which the worker ends what is left."""
    replicas: list[str] | None = None
    """Only what these have; None: everything."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """Nothing is in flight any more."""

    drained: int = 0
    """Requests that were answered meanwhile."""
    ended: int = 0
    """Those that took too long."""
    id: int = 0

    def __add__(self, other: Drained) -> Drained:
        """Both together."""
        return Drained(self.drained + other.drained, self.ended + other.ended)


_DOWN: Final = msgspec.json.Decoder(RoutingTable | Drain | CommandAnswer)
_UP: Final = msgspec.json.Decoder(Command | Drained)


def _line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"


class ControlServer:
    """The supervisor's end.

    Args:
        on_command: carries a command out, however long that takes; it is not ended with the worker that asked.
    """

    def __init__(self, on_command: Callable[[Command], Awaitable[CommandAnswer]] | None = None) -> None:
        self._on_command = on_command
        self._table = RoutingTable()
        self._writers: set[asyncio.StreamWriter] = set()
        self._drains: dict[int, tuple[asyncio.StreamWriter, asyncio.Future[Drained]]] = {}
        self._numbers = itertools.count()
        self._commands: set[asyncio.Task[None]] = set()
        self._server: asyncio.AbstractServer | None = None

    async def start(self, path: Path) -> None:
        """Listen on a unix socket; its folder must be closed to others (0700)."""
        self._server = await asyncio.start_unix_server(self._serve, path, limit=MAX_MESSAGE_BYTES)

    def publish(self, table: RoutingTable) -> None:
        """Send the table to every worker, and to those that come later."""
        self._table = table
        line = _line(table)
        for writer in self._writers:
            writer.write(line)

    async def drain(self, model: str, timeout_s: float, replicas: list[str] | None = None) -> Drained:
        """Wait until nothing of a deployment is in flight in any worker; see `Drain`.

        A worker that ends has nothing in flight, and one that comes later hasn't taken anything in.
        """
        waiting = []
        for writer in self._writers:
            number = next(self._numbers)
            future: asyncio.Future[Drained] = asyncio.get_running_loop().create_future()
            self._drains[number] = writer, future
            waiting.append(future)
            writer.write(_line(Drain(number, model, timeout_s, replicas)))
        if not waiting:
            return Drained()
        done, late = await asyncio.wait(waiting, timeout=timeout_s + DRAIN_GRACE_S)
        if late:
            logger.error("%s: %d gateway workers don't say that they have drained", model, len(late))
        for number, (_, future) in list(self._drains.items()):
            if future in late:
                del self._drains[number]
        return sum((future.result() for future in done), Drained())

    async def finish(self) -> None:
        """Wait for the commands that are being carried out."""
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
        try:
            writer.write(_line(self._table))
            while line := await reader.readline():
                self._take(_UP.decode(line), writer)
        except ConnectionError:
            pass
        except (ValueError, msgspec.MsgspecError) as error:  # the worker ends without us, and another takes its place
            logger.error("a gateway worker says what can't be understood: %s", error)
        finally:
            self._writers.discard(writer)
            for number, (other, future) in list(self._drains.items()):
                if other is writer:
                    del self._drains[number]
                    future.set_result(Drained())
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _take(self, message: Command | Drained, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, Drained):
            _, future = self._drains.pop(message.id, (None, None))
            if future is not None:  # None: it came too late
                future.set_result(message)
            return
        task = asyncio.create_task(self._carry_out(message, writer))
        self._commands.add(task)
        task.add_done_callback(self._commands.discard)

    async def _carry_out(self, command: Command, writer: asyncio.StreamWriter) -> None:
        try:
            if self._on_command is None:
                raise RuntimeError("there is nobody to carry out commands")
            answer = await self._on_command(command)
        except Exception:
            logger.exception("%s: %s failed in the supervisor", command.model, command.action)
            text = f"model `{command.model}`: {command.action} failed in the supervisor; its log has more"
            answer = CommandAnswer(command.id, 500, {"error": text})
        if writer in self._writers:
            writer.write(_line(answer))


class SupervisorLink:
    """A worker's end.

    Args:
        on_drain: does what a `Drain` says.
    """

    def __init__(self, on_drain: Callable[[Drain], Awaitable[Drained]]) -> None:
        self._on_drain = on_drain
        self._writer: asyncio.StreamWriter | None = None
        self._answers: dict[int, asyncio.Future[CommandAnswer]] = {}
        self._numbers = itertools.count()
        self._draining: set[asyncio.Task[None]] = set()

    async def tables(self, path: Path) -> AsyncGenerator[RoutingTable, None]:
        """Yield each table as it comes, and take in what else does; ends when the supervisor does."""
        reader, self._writer = await asyncio.open_unix_connection(path, limit=MAX_MESSAGE_BYTES)
        try:
            while line := await reader.readline():
                message = _DOWN.decode(line)
                if isinstance(message, RoutingTable):
                    yield message
                elif isinstance(message, CommandAnswer):
                    future = self._answers.pop(message.id, None)
                    if future is not None and not future.done():
                        future.set_result(message)
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
                    future.set_exception(_gone())

    async def command(self, action: str, model: str) -> CommandAnswer:
        """Have the supervisor do something, and wait for what comes of it.

        Raises:
            Unavailable: the supervisor is gone.
        """
        if self._writer is None:
            raise _gone()
        number = next(self._numbers)
        future: asyncio.Future[CommandAnswer] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        self._writer.write(_line(Command(number, action, model)))
        try:
            return await future
        finally:
            self._answers.pop(number, None)

    async def _drain(self, order: Drain) -> None:
        try:
            drained = await self._on_drain(order)
        except Exception:
            logger.exception("model %s: draining failed in the gateway", order.model)
            drained = Drained()
        if self._writer is not None:
            self._writer.write(_line(msgspec.structs.replace(drained, id=order.id)))


def _gone() -> Unavailable:
    return Unavailable("the supervisor is gone: the server is stopping")
