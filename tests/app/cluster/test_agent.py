"""An agent with its port and a real process group; only the replica's host is a script, without a Triton."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from headwater.metrics_file import decode_counts
from headwater_server.cluster.agent import AgentSpec, digest
from headwater_server.cluster.agent_messages import (
    AGENT,
    Adapters,
    AgentHello,
    AgentState,
    Ask,
    Beat,
    Order,
    Said,
    encode,
)
from headwater_server.cluster.holder import write_spec
from headwater_server.config.schema import Deployment
from headwater_server.process.proc import group_members
from headwater_server.process.sweep import Journal
from headwater_server.transport.address import host_and_port
from tests.app.cluster.stand_in import until

TOKEN, ORDER_TOKEN = "secret", "other"
HOST = """
import http.server, json, os, signal, socketserver, sys, time
folder = sys.argv[2]
spec = json.load(open(folder + "/spec.json"))
fd = int(sys.argv[3])
def say(**status):
    os.write(fd, json.dumps(status).encode() + b"\\n")
counter = None
if spec["options"]["mode"] == "counts":
    from pathlib import Path
    from headwater.model_metrics import metrics
    metrics.open(Path(spec["counts"]), "m")
    counter = metrics.counter("rows", "Rows.")
    counter.inc()
def end(number, frame):
    if counter is not None:
        counter.inc()
    say(event="unloaded")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
say(event="progress", text="loading")
if spec["options"]["mode"] == "fails":
    say(event="failed", text="model m:M: no weights at /srv/m.py:3", cause="no weights", is_permanent=True)
    sys.exit(1)
class Vllm(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = f"{self.path} {asked['lora_name']}".encode()
        self.send_response(400 if asked["lora_name"] == "bad" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def address_string(self):
        return ""
if spec["options"]["mode"] == "vllm":
    server = socketserver.UnixStreamServer(folder + "/h", Vllm)
os.fork()
open(folder + "/ready", "w").close()
signature = {"name": "m", "inputs": [], "outputs": [], "max_batch_size": 1}
say(event="ready", signature=signature, facts={"device": "cpu"})
if spec["options"]["mode"] == "vllm":
    server.serve_forever()
while True:  # briefly: a signal just before a sleep begins does not end it
    time.sleep(0.05)
"""
AGENT_WITH_SCRIPT = f"""
import sys
from headwater_server.cluster import agent
from headwater_server.supervisor.replica_process import ReplicaProcess
ReplicaProcess._command = lambda self, fd: [sys.executable, "-c", {HOST!r}, "m", str(self.directory), str(fd)]
agent.LINGER_S = float(sys.argv[1])
agent.BEAT_S = 0.05
agent.main()
"""


class Listener:
    """A connection to an agent's port, for control."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def next(self) -> AgentState | Said | Beat | None:
        """The next message; None: the agent has closed the connection."""
        try:
            line = await self._reader.readline()
        except ConnectionResetError:
            line = b""
        return AGENT.decode(line) if line else None

    async def heard(self, holds: Callable[[AgentState], bool]) -> AgentState:
        """The next state of which this holds."""
        while True:
            said = await self.next()
            assert said is not None
            if isinstance(said, AgentState) and holds(said):
                return said

    async def said(self) -> Said:
        """The next answer."""
        while not isinstance(found := await self.next(), Said):
            assert found is not None
        return found

    async def beat(self) -> Beat:
        """The next sign of life."""
        while not isinstance(found := await self.next(), Beat):
            assert found is not None
        return found

    async def end(self) -> None:
        """Wait until the agent has closed the connection."""
        while await self.next() is not None:
            continue

    def send(self, message: Any) -> None:
        self._writer.write(encode(message))

    def close(self) -> None:
        self._writer.close()


class Bench:
    """An agent's process."""

    def __init__(self, folder: Path, mode: str, linger_s: float) -> None:
        self.folder = folder
        self.deployment = Deployment.model_validate({"model": "m:M", "options": {"mode": mode}})
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT_WITH_SCRIPT, str(linger_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        spec = AgentSpec("m", "m-1.1", self.deployment, (), TOKEN, ORDER_TOKEN, folder, None, None, "human")
        assert self.process.stdin is not None
        write_spec(self.process.stdin, spec.encoded())
        self.address = ""
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self) -> None:
        """Wait until the port is open."""
        assert self.process.stdout is not None
        line = (await asyncio.to_thread(self.process.stdout.readline)).decode()
        self.address, *tokens = line.split()
        assert tokens == [TOKEN, ORDER_TOKEN]

    async def connect(self, token: str = TOKEN) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that asks for control."""
        reader, writer = await asyncio.open_connection(*host_and_port(self.address))
        self._writers.append(writer)
        writer.write(f"GET /control HTTP/1.1\r\nHost: replica\r\ntriton-access-token: {token}\r\n\r\n".encode())
        return reader, writer

    async def listen(self, epoch: int) -> Listener:
        """A supervisor, or with epoch 0 a gateway."""
        reader, writer = await self.connect()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        found = Listener(reader, writer)
        found.send(AgentHello(epoch, ORDER_TOKEN if epoch else ""))
        return found

    async def serving(self) -> tuple[Listener, int]:
        """A supervisor, once the replica is ready, and the process group of the replica's host."""
        found = await self.listen(1)
        await found.heard(lambda state: state.is_ready)
        await until(lambda: self.group() > 0)  # the guardian records the group while the host starts
        group = self.group()
        assert len(group_members({group})) == 2
        return found, group

    def group(self) -> int:
        """The process group of the replica's host, while its folder is there."""
        (folder,) = self.folder.glob("headwater-*")
        return Journal(folder / "r").host_pid

    def let_go(self) -> None:
        """End the agent's standard input."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    async def close(self) -> None:
        """End the process, and the connections to it."""
        self.let_go()
        try:
            await asyncio.to_thread(self.process.wait, 60)
        finally:
            self.process.kill()  # nobody could cancel a wait without a limit
        assert self.process.stdout is not None
        self.process.stdout.close()
        for writer in self._writers:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def status(self) -> int:
        """The process's exit status, once it has ended; nothing of it may be left."""
        found = await asyncio.to_thread(self.process.wait, 60)
        assert list(self.folder.iterdir()) == []
        return found


@contextlib.asynccontextmanager
async def agent(mode: str = "", linger_s: float = 60) -> AsyncIterator[Bench]:
    """An agent whose port is open."""
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        bench = Bench(Path(folder), mode, linger_s)
        try:
            await bench.open()
            yield bench
        finally:
            await bench.close()


async def test_what_it_says_from_hello_to_ready() -> None:
    async with agent() as bench:
        one, gateway = await bench.listen(1), await bench.listen(0)
        state = await one.heard(lambda state: state.is_ready)
        assert state.route.http_address == bench.address
        assert (state.route.id, state.route.token, state.route.device) == ("m-1.1", TOKEN, "cpu")
        assert state.deployment == digest(bench.deployment)
        assert (state.name, state.stage, state.facts) == ("m", "loading", {"device": "cpu"})
        assert (state.is_ending, state.has_exited, state.is_stale) == (False, False, False)
        assert await gateway.heard(lambda state: state.is_ready) == state
        for listener in (one, gateway):
            assert (await listener.beat()).resident_bytes > 0
        late = await bench.listen(1)
        assert await late.next() == state  # without a change


async def test_custom_metrics_are_in_its_beats_and_the_last_before_its_end() -> None:
    async with agent("counts") as bench:
        supervisor = await bench.listen(1)
        counts, is_ready, has_exited = b"", False, False
        while not has_exited:
            message = await supervisor.next()
            assert message is not None
            if isinstance(message, Beat):
                counts = message.counts or counts
            elif isinstance(message, AgentState):
                is_ready, has_exited = message.is_ready, message.has_exited
            if is_ready and counts:
                supervisor.send(Order("stop"))
        ((_, _, numbers),) = decode_counts(counts).series
        assert numbers == [2]


async def test_the_greatest_epoch_is_obeyed() -> None:
    async with agent() as bench:
        first = await bench.listen(4)
        await first.heard(lambda state: state.is_ready)
        earlier = await bench.listen(3)
        assert (await earlier.heard(lambda state: True)).is_stale
        assert await earlier.next() is None
        gateway, second = await bench.listen(0), await bench.listen(5)
        await second.heard(lambda state: state.is_ready)
        await first.heard(lambda state: state.is_stale)
        first.send(Order("kill"))
        await first.end()
        state = await (await bench.listen(5)).heard(lambda state: True)
        assert state.is_ready
        assert not state.is_ending
        second.send(Order("stop"))
        state = await second.heard(lambda state: state.has_exited)
        assert (state.is_ending, state.is_let_go) == (True, False)
        # A gateway is told, but not that supervisors have changed.
        assert not (await gateway.heard(lambda state: state.has_exited or state.is_stale)).is_stale


@pytest.mark.slow
@pytest.mark.parametrize("message", [Order("kill"), Adapters({"a": "a"}), Ask(1, "/v1/load_lora_adapter", "{}", 1)])
async def test_a_gateway_can_order_nothing(message: Any) -> None:
    async with agent() as bench:
        gateway = await bench.listen(0)
        await gateway.heard(lambda state: state.is_ready)
        gateway.send(message)
        await gateway.end()
        state = await (await bench.listen(0)).heard(lambda state: True)
        assert (state.is_ending, state.adapters) == (False, {})
        await until(lambda: bench.group() > 0)
        assert len(group_members({bench.group()})) == 2


@pytest.mark.slow
@pytest.mark.parametrize("token", ["", TOKEN, "oth\xe9r"])
async def test_who_has_the_replicas_token_only_is_no_supervisor(token: str) -> None:
    async with agent() as bench:
        one = await bench.listen(4)
        await one.heard(lambda state: state.is_ready)
        reader, writer = await bench.connect()
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        other = Listener(reader, writer)
        for message in (AgentHello(5, token), Order("kill")):
            other.send(message)
        assert await other.next() is None
        one.send(Adapters({"a": "a"}))  # it is still obeyed
        state = await one.heard(lambda state: bool(state.adapters) or state.is_stale or state.is_ending)
        assert (state.adapters, state.is_stale, state.is_ending) == ({"a": "a"}, False, False)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["stop", "kill"])
async def test_an_order_ends_the_replica_and_the_port_lingers(what: str) -> None:
    async with agent() as bench:
        one, group = await bench.serving()
        one.send(Order(what))
        state = await one.heard(lambda state: state.has_exited)
        assert (state.is_ending, state.leftovers, group_members({group})) == (True, [], [])
        assert await (await bench.listen(1)).heard(lambda state: True) == state
        assert bench.process.poll() is None
        bench.let_go()
        assert await bench.status() == 0


@pytest.mark.slow
async def test_a_replica_that_does_not_start_says_why_for_a_while() -> None:
    async with agent("fails", linger_s=1) as bench:
        one = await bench.listen(1)
        state = await one.heard(lambda state: state.has_exited)
        assert (state.reason, state.cause) == ("model m:M: no weights at /srv/m.py:3", "no weights")
        assert (state.account, state.is_permanent, state.is_ready) == (state.reason, True, False)
        assert await bench.status() == 0  # by itself
        await one.end()


async def test_with_its_standard_input_all_of_it_ends_the_port_last() -> None:
    async with agent() as bench:
        one, group = await bench.serving()
        bench.let_go()
        state = await one.heard(lambda state: state.is_ending)
        assert state.is_let_go
        await one.heard(lambda state: state.has_exited)  # the port is still there
        assert group_members({group}) == []
        await one.end()
        assert await bench.status() == 0
        with pytest.raises(ConnectionRefusedError):
            await bench.listen(1)


@pytest.mark.slow
async def test_with_its_standard_input_a_guardian_ends_that_is_stopped() -> None:
    async with agent() as bench:
        one = await bench.listen(1)
        await one.heard(lambda state: state.is_ready)
        group = bench.group()
        (guardian,) = psutil.Process(bench.process.pid).children()
        guardian.suspend()
        await until(lambda: guardian.status() == psutil.STATUS_STOPPED)
        bench.let_go()
        assert await bench.status() == 0
        assert group_members({group}) == []


@pytest.mark.slow
async def test_what_is_asked_of_vllm_is_answered_and_adapters_are_kept() -> None:
    async with agent("vllm") as bench:
        one, gateway = await bench.listen(1), await bench.listen(0)
        await one.heard(lambda state: state.is_ready)
        for number, name in enumerate(("a", "b")):
            body = json.dumps({"lora_name": name, "lora_path": f"/{name}"})
            one.send(Ask(number, "/v1/load_lora_adapter", body, 10))
            assert await one.said() == Said(number, 200, f"/v1/load_lora_adapter {name}")
        one.send(Ask(3, "/v1/load_lora_adapter", json.dumps({"lora_name": "bad", "lora_path": "/bad"}), 10))
        assert await one.said() == Said(3, 400, "/v1/load_lora_adapter bad")
        state = await (await bench.listen(1)).heard(lambda state: True)
        assert state.adapters == {}  # the supervisor tells what they are called
        one.send(Adapters({"a": "a", "b": "b"}))
        await gateway.heard(lambda state: state.adapters == {"a": "a", "b": "b"})
        # The next supervisor learns what there is.
        assert (await (await bench.listen(2)).heard(lambda state: True)).adapters == {"a": "a", "b": "b"}


async def test_a_vllm_that_does_not_answer_is_told() -> None:
    async with agent() as bench:
        one = await bench.listen(1)
        await one.heard(lambda state: state.is_ready)
        one.send(Ask(1, "/v1/load_lora_adapter", json.dumps({"lora_name": "a", "lora_path": "/a"}), 1))
        said = await one.said()
        assert (said.number, said.status, "No such file" in said.text) == (1, 0, True)
        assert (await (await bench.listen(1)).heard(lambda state: True)).adapters == {}


@pytest.mark.slow
@pytest.mark.parametrize("first", [b"nonsense\n", encode(Order("kill")), b"x" * 200_000, b"x" * 2_000_000])
async def test_who_does_not_say_hello_is_cut(first: bytes) -> None:
    async with agent() as bench:
        for token, status in (("secre", b"401"), (TOKEN, b"101")):
            reader, writer = await bench.connect(token)
            writer.write(first)
            with contextlib.suppress(ConnectionError):
                found = await reader.read()
                assert found.startswith(b"HTTP/1.1 " + status)
                assert b'"state"' not in found
        state = await (await bench.listen(1)).heard(lambda state: state.is_ready)
        assert not state.is_ending


@pytest.mark.slow
async def test_listeners_that_have_gone_are_forgotten() -> None:
    async with agent() as bench:
        for epoch in (0, 1):
            one = await bench.listen(epoch)
            await one.heard(lambda state: state.is_ready)
            one.close()  # the agent must not write to it any more
        rest = await bench.listen(1)
        for _ in range(3):
            await rest.beat()
        assert bench.process.poll() is None
