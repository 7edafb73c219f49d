"""Holds a replica on a node of the cluster, and opens its port.

`headwater_server.cluster.holder` runs it as ``python -m headwater_server.cluster.agent``, with an `AgentSpec` on its
standard input. Its first line of output has the port's address, the replica's token, and the token for orders. When its
standard input ends, it ends the replica and exits. It also exits some time after the replica has ended by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from headwater.metrics_file import used_bytes
from headwater_server.cluster.agent_messages import (
    BEAT_S,
    LISTENER,
    Adapters,
    AgentHello,
    AgentState,
    Ask,
    Beat,
    Order,
    Said,
    encode,
)
from headwater_server.cluster.holder import outlive_no_holder, read_spec
from headwater_server.cluster.port import Port
from headwater_server.config.content import content
from headwater_server.config.schema import Deployment
from headwater_server.control.messages import Drained
from headwater_server.control.routing import ReplicaRoute
from headwater_server.process.sweep import make_instance_folder, sweep_stale
from headwater_server.security.file_watch import FileWatch
from headwater_server.security.peer_tls import PeerTls
from headwater_server.supervisor.child_processes import ChildProcesses
from headwater_server.supervisor.kind_programs import program_of
from headwater_server.supervisor.memory_budget import ReplicaMemory
from headwater_server.supervisor.replica_process import ReplicaProcess
from headwater_server.telemetry.logs import set_up_logging

__all__ = ["AgentSpec", "digest", "main"]

logger = logging.getLogger("headwater")

UNREAD_BYTES: Final = 16 * 1024 * 1024
"""Limit of the bytes that wait for a listener to read them; a listener beyond it is cut off."""
COUNTS: Final = "counts"
"""The file with the model's custom metrics, in the agent's folder."""
LINGER_S: Final = 10.0
"""Seconds that the port stays open after the replica has ended, so that the supervisor can read the reason."""


class AgentSpec(NamedTuple):
    """Everything that an agent is started with."""

    name: str
    """Name of the deployment."""
    id: str
    """Id of the replica."""
    deployment: Deployment
    user_paths: tuple[str, ...]
    """Folders of the user's modules, for the replica's ``sys.path``."""
    token: str
    """Access token of the replica and of its port."""
    order_token: str
    """See `AgentHello.token`."""
    runtime_dir: Path | None
    """Folder to make the agent's folder in; None: the system's folder for temporary files."""
    host: str | None
    """Address that the port listens on. None: this node's address with TLS, 127.0.0.1 without it."""
    tls: Path | None
    """The folder with the cluster's certificates; None: plain text."""
    log_format: Literal["auto", "human", "json"]

    def encoded(self) -> bytes:
        """Encode as JSON."""
        return json.dumps({name: content(value) for name, value in self._asdict().items()}).encode()

    @classmethod
    def decoded(cls, raw: bytes) -> AgentSpec:
        """Decode from JSON."""
        fields = json.loads(raw)
        for name in ("runtime_dir", "tls"):
            fields[name] = None if fields[name] is None else Path(fields[name])
        fields["deployment"] = Deployment.model_validate(fields["deployment"])
        return cls(**{**fields, "user_paths": tuple(fields["user_paths"])})


def digest(deployment: Deployment) -> bytes:
    """A digest of a deployment without its adapters, which may change while replicas run. Replicas with equal digests
    were started alike."""
    return hashlib.sha256(repr(deployment.with_adapters({})).encode()).digest()[:16]


class Agent:
    """A replica, its port, and the supervisors and gateways that follow the replica's state."""

    def __init__(self, spec: AgentSpec, tls: PeerTls | None) -> None:
        self._spec = spec
        self._tls = tls
        self._children = ChildProcesses(ReplicaMemory(), spec.user_paths, _no_drain, lambda: None)
        self._replica: ReplicaProcess | None = None
        self._port: Port | None = None
        self._address = ""
        self._stage = ""
        self._is_let_go = False
        self._epoch = 0
        self._listeners: dict[asyncio.StreamWriter, int] = {}
        """Epoch of each listener; 0: a gateway."""
        self._sent = b""
        """The last state that was sent, as a line."""
        self._sent_counts = b""
        """The counts of the last beat with counts, since the last listener came."""

    async def run(self) -> None:
        """Run the replica to its end; end it when the standard input ends.

        Raises:
            OSError: the folder, the replica or the port can't be opened or started.
            ConfigError: see `Port.start`.
        """
        spec = self._spec
        loop = asyncio.get_running_loop()
        for stale in sweep_stale(spec.runtime_dir):
            logger.warning("removed leftovers of an earlier replica: %s", stale)
        self._children.folder, lock = make_instance_folder(spec.runtime_dir)
        orders = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin.buffer)
        tasks: list[asyncio.Task[None]] = []
        try:
            folder = self._children.folder / "r"
            replica = ReplicaProcess(
                spec.name, spec.id, spec.deployment, folder, spec.user_paths, self._note, self._children.folder / COUNTS
            )
            replica.token = spec.token
            self._children.adopt_orphans()
            guardian = replica.start()
            exited = self._children.follow(guardian, f"the guardian of {spec.id}", replica)
            pidfd = os.pidfd_open(guardian.pid)  # uvloop keeps SIGCHLD to itself
            loop.add_reader(pidfd, self._children.reap)
            exited.add_done_callback(lambda _: loop.remove_reader(pidfd))
            replica.exited = self._children.spawn(replica.follow(exited, self._children.end_orphans))
            self._replica = replica
            sockets = ReplicaRoute(spec.id, f"unix:{folder / 'h'}", spec.token, f"unix:{folder / 'g:1'}")
            relayed = program_of(spec.deployment.kind).relayed
            self._port = Port(spec.name, sockets, relayed=relayed, tls=self._tls, on_control=self._listen)
            node = os.environ.get("HEADWATER_NODE", "127.0.0.1")
            self._address = await self._port.start(spec.host or (node if self._tls is not None else "127.0.0.1"))
            if spec.host in ("0.0.0.0", "::"):
                self._address = f"{node}:{self._address.rpartition(':')[2]}"
            print(self._address, spec.token, spec.order_token, flush=True)
            tasks = [
                asyncio.create_task(work) for work in (self._children.watch(), self._beat(), self._tell_ending(replica))
            ]
            replica.ready.add_done_callback(lambda _: self._tell())
            held = asyncio.create_task(orders.read())
            await asyncio.wait({replica.exited, held}, return_when=asyncio.FIRST_COMPLETED)
            if held.done():
                self._is_let_go = not replica.ending.is_set()
                replica.kill()
                guardian.send_signal(signal.SIGCONT)  # the guardian may be stopped
                await replica.exited
            self._send(encode(Beat(counts=self._counts())))
            # Remove the folder before announcing the end: a supervisor that hears of the end has Ray kill the actor,
            # and Ray kills the actor's child processes, too.
            shutil.rmtree(self._children.folder, ignore_errors=True)
            self._tell()
            if not held.done():
                await asyncio.wait({held}, timeout=LINGER_S)
        finally:
            for task in tasks:
                task.cancel()
            if self._port is not None:
                await self._port.close()
            if self._replica is not None:
                self._replica.kill()  # no effect if it has ended
            await self._children.finish()
            shutil.rmtree(self._children.folder, ignore_errors=True)
            os.close(lock)

    def _note(self, stage: str) -> None:
        self._stage = stage
        self._tell()

    async def _tell_ending(self, replica: ReplicaProcess) -> None:
        await replica.ending.wait()
        self._tell()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._tell()  # for changes that no event announces, such as `batch_limit`
            if self._replica is None or not self._listeners:
                continue
            try:
                use = await self._replica.use()
            except OSError as error:
                logger.error("the replica's memory can't be measured: %s", error)
                continue
            counts = self._counts()
            self._send(encode(Beat(use.threads, use.resident_bytes, use.gpu_bytes, use.gpu_utilization, counts)))

    def _counts(self) -> bytes:
        """See `Beat.counts`."""
        try:
            counts = used_bytes(self._children.folder / COUNTS)
        except OSError:  # the model has declared no metric
            return b""
        before, self._sent_counts = self._sent_counts, counts
        return counts if counts != before else b""

    def _tell(self) -> None:
        """Send the replica's state to all listeners, if it has changed."""
        line = encode(self._state())
        if line != self._sent:
            self._sent = line
            if self._replica is not None and self._replica.exited.done():
                self._send(encode(Beat(counts=self._counts())))
            self._send(line)

    def _send(self, line: bytes) -> None:
        for writer in self._listeners:
            if writer.transport.get_write_buffer_size() > UNREAD_BYTES:
                writer.transport.abort()
            elif not writer.is_closing():
                writer.write(line)

    def _state(self, *, is_stale: bool = False) -> AgentState:
        replica, address = self._replica, self._address
        assert replica is not None
        signature = replica.signature
        frames = signature is not None and signature.is_framed
        node = os.environ.get("HEADWATER_NODE", "")
        route = ReplicaRoute(replica.id, address, replica.token, address if frames else "", replica.facts, node)
        return AgentState(
            route=route,
            deployment=digest(self._spec.deployment),
            name=self._spec.name,
            node=os.environ.get("HEADWATER_NODE_ID", ""),
            stage=self._stage,
            is_ready=signature is not None,
            is_ending=replica.ending.is_set(),
            has_exited=replica.exited.done(),
            is_let_go=self._is_let_go,
            signature=None if signature is None else msgspec.to_builtins(signature),
            facts=replica.facts,
            adapters=replica.adapters,
            batch_limit=replica.batch_limit,
            reason=replica.reason,
            is_permanent=replica.is_permanent,
            is_shortage=replica.is_shortage,
            account=replica.account(),
            cause=replica.cause(),
            leftovers=replica.leftovers,
            is_stale=is_stale,
        )

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the control connection of a supervisor or a gateway."""
        answers: set[asyncio.Task[None]] = set()
        try:
            hello = LISTENER.decode(await reader.readline())
            if not isinstance(hello, AgentHello):
                raise ValueError("expected hello")
            if hello.epoch and not hmac.compare_digest(hello.token.encode(), self._spec.order_token.encode()):
                raise ValueError("expected the supervisor's token, got another")
            if hello.epoch and hello.epoch < self._epoch:
                writer.write(encode(self._state(is_stale=True)))
                await writer.drain()
                return
            if hello.epoch > self._epoch:
                self._epoch = hello.epoch
                for listener, epoch in self._listeners.items():
                    if epoch:
                        listener.write(encode(self._state(is_stale=True)))
            self._listeners[writer] = hello.epoch
            self._sent_counts = b""
            writer.write(encode(self._state()))
            while line := await reader.readline():
                message = LISTENER.decode(line)
                if not hello.epoch or hello.epoch < self._epoch:
                    raise ValueError("not obeyed")
                if isinstance(message, Order):
                    self._obey(message)
                elif isinstance(message, Adapters):
                    assert self._replica is not None
                    self._replica.adapters = message.adapters
                    self._tell()
                elif isinstance(message, Ask):
                    task = asyncio.create_task(self._ask(message, writer))
                    answers.add(task)
                    task.add_done_callback(answers.discard)
        except (ValueError, msgspec.MsgspecError) as error:
            logger.warning("%s: a connection for control is closed: %s", self._spec.id, error)
        finally:
            self._listeners.pop(writer, None)
            for task in answers:
                task.cancel()

    def _obey(self, order: Order) -> None:
        assert self._replica is not None
        if order.what == "stop":
            self._replica.stop()
        else:
            self._replica.kill()

    async def _ask(self, message: Ask, writer: asyncio.StreamWriter) -> None:
        replica = self._replica
        assert replica is not None
        try:
            status, body = await replica.ask_vllm(message.url, message.body, message.timeout_s)
        except Exception as error:  # the supervisor reports any error to the operator
            writer.write(encode(Said(message.number, 0, str(error) or type(error).__name__)))
            return
        writer.write(encode(Said(message.number, status, body.decode(errors="replace"))))
        self._tell()


async def _no_drain(*_: object) -> Drained:
    return Drained()


def main() -> None:
    """Entry point; see the module's docstring."""
    outlive_no_holder()
    spec = AgentSpec.decoded(read_spec(sys.stdin.buffer))
    set_up_logging(spec.log_format)
    os.set_blocking(sys.stdin.fileno(), True)

    async def run() -> None:
        tls = None if spec.tls is None else PeerTls(spec.tls)
        watch = None if tls is None else asyncio.create_task(FileWatch(tls.paths).run(tls.renew))
        try:
            await Agent(spec, tls).run()
        finally:
            if watch is not None:
                watch.cancel()

    try:
        import uvloop
    except ImportError:
        asyncio.run(run())
    else:
        uvloop.run(run())


if __name__ == "__main__":
    main()
