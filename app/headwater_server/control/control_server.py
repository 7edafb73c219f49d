"""The supervisor's end of the control socket. Each line is a message in JSON.

A worker that connects gets the whole `RoutingTable`, and then a `TableChange` with each `ControlServer.publish`. If a
change doesn't follow the worker's table, the worker asks for the whole table with `TableWanted`. A worker answers a
`Drain` with `Drained` and a `Ping` with a `Pong`; the supervisor answers a worker's `Command` with a `CommandAnswer`.
Any number of drains and commands may be unanswered; an answer has the ``id`` of its message. A worker's
`QuarantinedRequest` is forwarded to the other workers; a `ReplicaLoss` and a `LoadReport` are only for the supervisor.
A `Cancel` is forwarded too, and its sender gets the sum of the other workers' `CancelCount`.

The end of a connection tells each side that the other side is gone. A worker's requests in flight end with the worker.
A cluster's gateway, with its own `ControlServer` for its workers, connects over TCP and begins with `Hello`. It may
reconnect with requests still in flight, so it is gone only after its `Goodbye`, or after `GATEWAY_GONE_S` of silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from headwater_server.control import messages
from headwater_server.control.load import LoadReport, Tally
from headwater_server.control.messages import (
    Cancel,
    CancelCount,
    Command,
    CommandAnswer,
    Drain,
    Drained,
    QuarantinedRequest,
    ReplicaLoss,
    Upward,
    encode_line,
)
from headwater_server.control.routing import RoutingTable
from headwater_server.control.table_change import TableChange

__all__ = ["ControlServer"]

logger = logging.getLogger("headwater")

LOAD_FRESH_S: Final = 3.0
"""Seconds after which a load report is ignored."""
DRAIN_GRACE_S: Final = 5.0
"""Seconds that a worker's answer may come after the timeout of a drain."""
CANCEL_TIMEOUT_S: Final = 3.0
"""Seconds that a worker may take to report the streams that it cancelled."""
HELLO_TIMEOUT_S: Final = 5.0
"""Seconds that a gateway on another machine may take to send its `Hello`."""
GATEWAY_GONE_S: Final = 10.0
"""Seconds of silence after which a gateway on another machine counts as gone; until then drains wait for it."""
_CREDENTIALS: Final = struct.Struct("3i")


class PeerContexts(Protocol):
    """The TLS of the cluster, for a server."""

    def server_context(self) -> ssl.SSLContext:
        """The context for incoming connections. The caller must check each client with `is_peer`."""
        ...

    def is_peer(self, certificate: Mapping[str, Any] | None) -> bool:
        """Whether a client's certificate, in the form of the `ssl` module, belongs to the cluster."""
        ...


@dataclass(eq=False)
class _Worker:
    """A connected gateway worker on this machine, or a cluster's gateway with all its workers."""

    writer: asyncio.StreamWriter
    pid: int
    """The worker's process id; 0: a cluster's gateway."""
    workers: int = 1
    """The number of workers that the connection stands for."""
    gateway: str = ""
    """See `Hello`."""
    heard_s: float = 0.0
    """Loop time of the last message."""
    unanswered: int = 0
    """Calls of `ControlServer.ping` from the unanswered ping on; 0: all pings are answered."""
    load: tuple[float, LoadReport] | None = None
    """Loop time of the last report, and the report; None: no report has come."""
    tallies: dict[str, Tally] = field(default_factory=dict)
    """The last tally of each version, by `Tally.name`."""
    answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    """Futures of awaited answers, by message id. A result of None means that the worker has ended."""

    def send(self, message: msgspec.Struct) -> None:
        if not self.writer.is_closing():
            self.writer.write(encode_line(message))


class ControlServer:
    """The supervisor's end of the control socket.

    Args:
        on_command: carries out a command, however long it takes, even if the worker that sent the command ends. None:
            commands are answered with status 500.
        on_quarantined: called with each `QuarantinedRequest` of a worker.
        on_lost: called with each `ReplicaLoss` of a worker.
        on_cancel: cancels the streams of a request's id that run outside the workers connected here, and returns their
            number; None: all workers are connected here.
        on_workers: called when a worker or gateway has connected, or its connection has ended.
        epoch: must be greater than the epoch of any earlier supervisor of the same workers; None: the present time in
            nanoseconds, which suffices for workers on this machine.
    """

    def __init__(
        self,
        on_command: Callable[[Command], Awaitable[CommandAnswer]] | None = None,
        epoch: int | None = None,
        *,
        on_quarantined: Callable[[QuarantinedRequest], None] = lambda request: None,
        on_lost: Callable[[ReplicaLoss], None] = lambda loss: None,
        on_cancel: Callable[[str], Awaitable[int]] | None = None,
        on_workers: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_command = on_command
        self._on_quarantined = on_quarantined
        self._on_lost = on_lost
        self._on_cancel = on_cancel
        self._on_workers = on_workers
        self._table = RoutingTable(epoch=time.time_ns() if epoch is None else epoch)
        self.tallies: dict[str, Tally] = {}
        """Counts of compared versions since their workers' first reports, over all workers, by `Tally.name`."""
        self._workers: set[_Worker] = set()
        self._away: set[_Worker] = set()
        """Gateways on other machines that have lost their connection and may reconnect."""
        self._known_s = float("-inf")
        """Loop time from which each gateway of an earlier supervisor has reconnected or is gone."""
        self._numbers = itertools.count()
        self._commands: set[asyncio.Task[None]] = set()
        self._server: asyncio.AbstractServer | None = None

    async def start(self, path: Path) -> None:
        """Listen on a unix socket. Its folder must be closed to other users (0700). A second call replaces the socket
        with a new socket; existing connections stay.

        Raises:
            OSError: the socket can't be made.
        """
        if self._server is not None:
            self._server.close()
        self._server = await asyncio.start_unix_server(self._serve, path, limit=messages.MAX_MESSAGE_BYTES)

    async def start_for_gateways(
        self, host: str, port: int, token: str, tls: PeerContexts | None, *, is_successor: bool = False
    ) -> int:
        """Listen for a cluster's gateways, which must know the token. Returns the port.

        Args:
            host: an address of this machine.
            port: the port; 0: any free port.
            token: the token that gateways must send.
            tls: the cluster's TLS; None: plain text.
            is_successor: whether gateways of an earlier supervisor are about to reconnect; in the first
                `GATEWAY_GONE_S` drains then wait for them.

        Raises:
            OSError: the address can't be listened on.
        """
        if is_successor:
            self._known_s = asyncio.get_running_loop().time() + GATEWAY_GONE_S

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if tls is not None and not tls.is_peer(writer.get_extra_info("peercert")):
                logger.error("a gateway whose certificate has another name was refused")
                writer.close()
                return
            try:
                line = await asyncio.wait_for(reader.readline(), HELLO_TIMEOUT_S)
                hello = messages.HELLO.decode(line)
            except (asyncio.TimeoutError, ConnectionError, ValueError, msgspec.MsgspecError):
                writer.close()
                return
            if not hmac.compare_digest(hello.token.encode(), token.encode()):
                logger.error("a gateway with a wrong token was refused")
                writer.close()
                return
            await self._talk(reader, _Worker(writer, 0, hello.workers, hello.gateway))

        context = None
        if tls is not None:
            context = tls.server_context()
            # Certificates may be renewed while the server listens.
            context.sni_callback = lambda connection, name, first: setattr(connection, "context", tls.server_context())
        self._server = await asyncio.start_server(serve, host, port, ssl=context, limit=messages.MAX_MESSAGE_BYTES)
        bound_port: int = self._server.sockets[0].getsockname()[1]
        return bound_port

    @property
    def workers(self) -> int:
        """The number of connected gateway workers, on any machine."""
        return sum(worker.workers for worker in self._workers)

    @property
    def is_deserted(self) -> bool:
        """Whether no worker is connected and no gateway is expected to reconnect."""
        return not self._workers and not self._away and asyncio.get_running_loop().time() >= self._known_s

    def publish(self, table: RoutingTable) -> None:
        """Send the changes in the table to every connected worker. Workers that connect later get the whole table.

        The server sets the table's epoch and version.
        """
        before = self._table
        self._table = msgspec.structs.replace(table, epoch=before.epoch, version=before.version + 1)
        if self._workers:
            line = encode_line(TableChange.between(before, self._table))
            for worker in self._workers:
                worker.writer.write(line)

    async def drain(
        self, model: str, timeout_s: float, replicas: list[str] | None = None, adapters: Sequence[str] = ()
    ) -> Drained:
        """Wait until nothing of a deployment is in flight in any worker; see `Drain`. Returns the sum of the workers'
        answers. A worker that doesn't answer within `DRAIN_GRACE_S` after the timeout is logged.

        A worker that ends has nothing in flight, and a worker that connects later has accepted nothing. If a cluster's
        gateway has lost its connection, the drain waits until the gateway reconnects and then asks it, or until it
        counts as gone.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        unknown_s = min(max(0.0, self._known_s - loop.time()), timeout_s)
        if unknown_s:
            await asyncio.sleep(unknown_s)
        left_s = timeout_s - unknown_s
        drained, missing = Drained(), 0
        recipients: set[_Worker] = set()
        workers = self._workers | self._away
        while workers and loop.time() < end_s + DRAIN_GRACE_S:
            order = Drain(next(self._numbers), model, left_s, replicas, list(adapters))
            answers, late = await self._ask(workers, order, left_s + DRAIN_GRACE_S)
            drained, missing = sum(answers, drained), missing + late
            recipients |= workers
            workers = {worker for worker in self._workers | self._away if worker.gateway} - recipients
            left_s = max(0.0, end_s - loop.time())
        if missing:
            logger.error("%s: %d gateway workers did not report in time that they have drained", model, missing)
        return drained

    def loads(self) -> list[LoadReport]:
        """Each worker's last load report, unless it is older than `LOAD_FRESH_S`."""
        oldest_s = asyncio.get_running_loop().time() - LOAD_FRESH_S
        return [worker.load[1] for worker in self._workers if worker.load is not None and worker.load[0] >= oldest_s]

    def ping(self) -> dict[int, int]:
        """Ping each worker that has answered the ping before. Returns, for the workers on this machine by process id,
        how many calls of this method in a row have brought no answer. Aborts the connections of gateways that have been
        silent for `GATEWAY_GONE_S`."""
        unanswered: dict[int, int] = {}
        oldest_s = asyncio.get_running_loop().time() - GATEWAY_GONE_S
        for worker in self._workers:
            if worker.pid:
                unanswered[worker.pid] = worker.unanswered
            elif worker.heard_s < oldest_s:  # its machine is gone, or hangs
                worker.writer.transport.abort()
            if not worker.unanswered:
                worker.send(messages.Ping())
            worker.unanswered += 1
        return unanswered

    def quarantine(self, request: QuarantinedRequest, by: _Worker | None = None) -> None:
        """Tell all workers, except the worker ``by``, that a request is quarantined."""
        for worker in self._workers - {by}:
            worker.send(request)

    async def cancel(self, request_id: str, asking: _Worker | None = None) -> int:
        """Cancel everything that runs under a request's id in all workers except ``asking``. Returns the number of
        cancelled streams, as far as workers report it within `CANCEL_TIMEOUT_S`."""
        order = Cancel(next(self._numbers), request_id)
        answers, late = await self._ask(self._workers - {asking}, order, CANCEL_TIMEOUT_S)
        if late:
            logger.warning("%d gateway workers did not report their cancelled requests in time", late)
        return sum(answer.streams for answer in answers)

    async def finish(self) -> None:
        """Wait for the running commands."""
        while self._commands:
            await asyncio.wait(self._commands)

    async def close(self) -> None:
        """Stop listening, end all connections, and cancel running commands."""
        if self._server is not None:
            self._server.close()
        for worker in self._workers:
            worker.writer.close()
        for task in self._commands:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._talk(reader, _Worker(writer, _peer(writer)))

    async def _talk(self, reader: asyncio.StreamReader, worker: _Worker) -> None:
        writer, loop = worker.writer, asyncio.get_running_loop()
        for before in [peer for peer in self._workers | self._away if peer.gateway and peer.gateway == worker.gateway]:
            self._forget(before)
            before.writer.transport.abort()
        worker.heard_s = loop.time()
        self._workers.add(worker)
        worker.send(self._table)  # first, since changes refer to it
        self._on_workers()
        try:
            while line := await reader.readline():
                worker.heard_s = loop.time()
                self._take(messages.UPWARD.decode(line), worker)
        except ConnectionError:
            pass
        except (ValueError, msgspec.MsgspecError) as error:  # the worker is disconnected, ends, and is replaced
            logger.error("invalid message from a gateway worker: %s", error)
        finally:
            if worker.gateway and worker in self._workers:  # otherwise it has reconnected or said goodbye
                self._workers.remove(worker)
                self._away.add(worker)
                loop.call_at(worker.heard_s + GATEWAY_GONE_S, self._forget, worker)
            else:
                self._forget(worker)
            self._on_workers()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _add_up(self, tallies: Iterable[Tally], worker: _Worker) -> None:
        """Add a worker's counts since its last report to `tallies`. The first report only tells where the worker's
        counts begin."""
        for tally in tallies:
            before = worker.tallies.get(tally.name, tally)
            worker.tallies[tally.name] = tally
            news, total = tally.since(before), self.tallies.get(tally.name)
            self.tallies[tally.name] = news if total is None else total + news

    def _forget(self, worker: _Worker) -> None:
        """Drop a worker that is gone, and stop waiting for its answers."""
        self._workers.discard(worker)
        self._away.discard(worker)
        for future in worker.answers.values():
            if not future.done():
                future.set_result(None)

    def _take(self, message: Upward, worker: _Worker) -> None:
        if isinstance(message, LoadReport):
            worker.load = asyncio.get_running_loop().time(), message
            self._add_up(message.tallies, worker)
        elif isinstance(message, messages.Pong):
            worker.unanswered = 0
        elif isinstance(message, messages.TableWanted):
            worker.send(self._table)
        elif isinstance(message, messages.Goodbye):
            self._forget(worker)
        elif isinstance(message, QuarantinedRequest):
            self._on_quarantined(message)
            self.quarantine(message, worker)
        elif isinstance(message, ReplicaLoss):
            self._on_lost(message)
        elif isinstance(message, messages.Hello):
            raise ValueError("hello again")
        elif isinstance(message, (Drained, CancelCount)):
            future = worker.answers.get(message.id)
            if future is not None and not future.done():  # otherwise the answer came too late
                future.set_result(message)
        else:
            work = self._cancel(message, worker) if isinstance(message, Cancel) else self._carry_out(message, worker)
            task = asyncio.create_task(work)
            self._commands.add(task)
            task.add_done_callback(self._commands.discard)

    async def _ask(self, workers: set[_Worker], order: Drain | Cancel, timeout_s: float) -> tuple[list[Any], int]:
        """Send an order. Returns the answers, and the number of workers that did not answer in time. A worker that ends
        need not answer."""
        futures = {worker: asyncio.get_running_loop().create_future() for worker in workers}
        for worker, future in futures.items():
            worker.answers[order.id] = future
            worker.send(order)
        try:
            if futures:
                await asyncio.wait(futures.values(), timeout=timeout_s)
        finally:
            for worker in futures:
                del worker.answers[order.id]
        done = [future.result() for future in futures.values() if future.done()]
        return [answer for answer in done if answer is not None], len(futures) - len(done)

    async def _carry_out(self, command: Command, worker: _Worker) -> None:
        try:
            if self._on_command is None:
                raise RuntimeError("this server carries out no commands")
            answer = await self._on_command(command)
        except Exception:
            logger.exception("%s: %s failed in the supervisor", command.model, command.action)
            text = f"model `{command.model}`: {command.action} failed in the supervisor; see its log"
            answer = CommandAnswer(command.id, 500, {"error": text})
        if worker in self._workers:
            worker.send(answer)

    async def _cancel(self, order: Cancel, asking: _Worker) -> None:
        """Forward a worker's `Cancel`, and answer with the number of cancelled streams."""
        streams = await self.cancel(order.request_id, asking)
        if self._on_cancel is not None:
            streams += await self._on_cancel(order.request_id)
        if asking in self._workers:
            asking.send(CancelCount(order.id, streams))


def _peer(writer: asyncio.StreamWriter) -> int:
    """The process id of the peer."""
    raw = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(raw)[0]
    return pid
