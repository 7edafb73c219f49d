"""The control socket between the supervisor and its gateway workers: one JSON line a message.

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
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from app.errors import Unavailable
from app.load_report import LoadReport
from app.routing import RoutingTable

__all__ = ["Command", "CommandAnswer", "ControlServer", "Drain", "Drained", "SupervisorLink"]

logger = logging.getLogger("headwater")

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
LOAD_FRESH_S: Final = 3.0
"""A worker that said nothing of its load for so long has none that is known."""
DRAIN_GRACE_S: Final = 5.0
"""How much longer than it should a worker may take to say that it has drained."""
CANCEL_TIMEOUT_S: Final = 3.0
"""How long a worker may take to say what it cancelled."""


class Command(msgspec.Struct, frozen=True, tag="command"):
    """What an operator wants, as a worker was asked."""

    id: int
    action: str
    model: str
    arguments: dict[str, Any] = {}
    """What the action takes besides; of load and reload perhaps a ``config``, as the text that came."""


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


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks a worker for a sign of life."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """That sign: the worker's event loop goes round."""


class Quarantined(msgspec.Struct, frozen=True, tag="quarantined"):
    """A request took two replicas down; see `app.quarantine`."""

    model: str
    fingerprint: str
    """In hexadecimal digits."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Asks for the end of what runs under a request's id: a worker the supervisor, and that the other workers."""

    id: int
    request_id: str
    """As `app.security.key_check.owned_id` has it."""


class CancelCount(msgspec.Struct, frozen=True, tag="cancel_count"):
    """What a `Cancel` ended."""

    id: int
    streams: int = 0


_DOWN: Final = msgspec.json.Decoder(RoutingTable | Drain | CommandAnswer | Ping | Quarantined | Cancel | CancelCount)
_UP: Final = msgspec.json.Decoder(Command | Drained | Pong | Quarantined | LoadReport | Cancel | CancelCount)
_CREDENTIALS: Final = struct.Struct("3i")


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
        self._pids: dict[asyncio.StreamWriter, int] = {}
        self._unanswered: dict[asyncio.StreamWriter, int] = {}
        """How often in a row a worker was asked for a sign of life and gave none."""
        self._loads: dict[asyncio.StreamWriter, tuple[float, LoadReport]] = {}
        """What each worker said last, and when."""
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

    def loads(self) -> list[LoadReport]:
        """What each worker said of its load last, unless that was long ago."""
        oldest_s = asyncio.get_running_loop().time() - LOAD_FRESH_S
        return [report for when_s, report in self._loads.values() if when_s >= oldest_s]

    def ping(self) -> dict[int, int]:
        """Ask every worker for a sign of life.

        Returns:
            By process id, how often in a row a worker was asked before and has not answered.
        """
        found: dict[int, int] = {}
        for writer in self._writers:
            unanswered = self._unanswered.get(writer, 0)
            found[self._pids[writer]] = unanswered
            self._unanswered[writer] = unanswered + 1
            if not unanswered:
                writer.write(_line(Ping()))
        return found

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
        self._pids[writer] = _peer(writer)
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
                other.write(_line(message))
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
                raise RuntimeError("there is nobody to carry out commands")
            answer = await self._on_command(command)
        except Exception:
            logger.exception("%s: %s failed in the supervisor", command.model, command.action)
            text = f"model `{command.model}`: {command.action} failed in the supervisor; its log has more"
            answer = CommandAnswer(command.id, 500, {"error": text})
        if writer in self._writers:
            writer.write(_line(answer))

    async def _cancel(self, order: Cancel, asking: asyncio.StreamWriter) -> None:
        """Have all other workers cancel what one was asked to, and tell it how much that was."""
        asked: dict[int, asyncio.Future[int]] = {}
        for writer in self._writers - {asking}:
            number = next(self._numbers)
            asked[number] = asyncio.get_running_loop().create_future()
            self._cancels[number] = writer, asked[number]
            writer.write(_line(Cancel(number, order.request_id)))
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
            asking.write(_line(CancelCount(order.id, streams)))


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
                elif isinstance(message, Ping):
                    self._writer.write(_line(Pong()))
                elif isinstance(message, Quarantined):
                    self._on_quarantined(message.model, bytes.fromhex(message.fingerprint))
                elif isinstance(message, Cancel):
                    self._writer.write(_line(CancelCount(message.id, self._on_cancel(message.request_id))))
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
                    future.set_exception(_gone())
            for counted in self._cancels.values():
                if not counted.done():
                    counted.set_result(0)

    def report(self, load: LoadReport) -> None:
        """Tell the supervisor of the load here."""
        if self._writer is not None:
            self._writer.write(_line(load))

    def tell_quarantined(self, model: str, mark: bytes) -> None:
        """Tell the other workers of a request that took two replicas down."""
        if self._writer is not None:
            self._writer.write(_line(Quarantined(model, mark.hex())))

    async def command(self, action: str, model: str, arguments: Mapping[str, Any] | None = None) -> CommandAnswer:
        """Have the supervisor do something, and wait for what comes of it.

        Args:
            action: what.
            model: with which model.
            arguments: what the action takes besides; small, since a message is one line.

        Raises:
            Unavailable: the supervisor is gone.
        """
        if self._writer is None:
            raise _gone()
        number = next(self._numbers)
        future: asyncio.Future[CommandAnswer] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        self._writer.write(_line(Command(number, action, model, dict(arguments or {}))))
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
        self._writer.write(_line(Cancel(number, request_id)))
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
            self._writer.write(_line(msgspec.structs.replace(drained, id=order.id)))


def _peer(writer: asyncio.StreamWriter) -> int:
    """The process id at the other end."""
    raw = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(raw)[0]
    return pid


def _gone() -> Unavailable:
    return Unavailable("the supervisor is gone: the server is stopping")
