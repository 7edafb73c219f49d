"""What another client sees while a hostile request runs: gaps in its stream, health, and the server's memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from headwater_server.security.keys import Key, make_key
from headwater_server.security.keys_file import change_file
from tests.hostile.table import Hostile, Request
from tests.inference.hf.folders import vit, wav2vec2
from tests.running import Running, serve, wait_for

__all__ = ["GAP_S", "MEMORY_BYTES", "Harm", "Target", "measure", "send_all", "serve_target"]

GAP_S: Final = 0.5
"""The longest that a neighbour's stream may pause, and a health request may take."""
MEMORY_BYTES: Final = 100_000_000
"""What the server may have more afterwards."""
DEADLINE_S: Final = 60.0
"""Until a hostile request is answered."""
CALM_S: Final = 0.5
"""How long the stream runs before and after the request."""
LASTING: Final = ("headwater_server.gateway.worker", "headwater.replica", "bin/tritonserver")
"""In the command lines of processes that no request may end."""
HEALTH_EVERY_S: Final = 0.05
RETURNS_WITHIN_S: Final = 20.0
"""Until memory is back."""


@dataclass
class Target:
    """A server with two keys."""

    running: Running
    mallory: str
    """The key of hostile requests."""
    alice: str
    """The neighbour's key."""

    def processes(self) -> dict[int, str]:
        """The server's processes that must survive: id and command."""
        family = [psutil.Process(self.running.pid), *psutil.Process(self.running.pid).children(recursive=True)]
        found = {}
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                name = " ".join(process.cmdline()[:4])
                if any(word in name for word in LASTING):
                    found[process.pid] = name
        return found

    def memory_bytes(self) -> int:
        """The anonymous and shared memory of all processes.

        Files are left out: the end of another server changes the share of their pages that each process has.
        """
        total = 0
        for process in (psutil.Process(self.running.pid), *psutil.Process(self.running.pid).children(recursive=True)):
            with contextlib.suppress(OSError):  # it may have ended
                _, *lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
                kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
                total += 1024 * (kilobytes["Pss_Anon"] + kilobytes["Pss_Shmem"])
        return total

    def grown_bytes(self, before: int) -> int:
        """What the server has more than before, after a while in which memory may return."""
        deadline = time.monotonic() + RETURNS_WITHIN_S
        while (grown := self.memory_bytes() - before) > MEMORY_BYTES and time.monotonic() < deadline:
            time.sleep(0.2)
        return grown


@dataclass
class Harm:
    """What a hostile request did to others."""

    status: int
    """Its answer's; 0: the connection ended without one."""
    said: str
    took_s: float
    gap_s: float
    """The neighbour's longest pause between two events."""
    health_s: float
    """The slowest answer of ``/v2/health/live``."""
    grown_bytes: int
    faults: list[str]


@contextlib.contextmanager
def serve_target(folder: Path) -> Iterator[Target]:
    """Serve the shipped language model, one of images and one of speech, to two keys.

    Args:
        folder: for the models and the keys.
    """
    vit(folder / "pictures", ("a", "b"))
    wav2vec2(folder / "speech")
    texts, keys = {}, []
    for name in ("mallory", "alice"):
        texts[name], digest = make_key()
        keys.append(Key(name, digest, scopes=("infer",)))
    change_file(folder / "keys.json", lambda _: keys)
    config: dict[str, Any] = {
        "deployments": {
            "tiny": {
                "model": "lm:headwater.zoo:weights/tiny_lm",
                "options": {"tool_parser": "hermes"},
                "threads": 1,
                "max_crashes": 1_000,
            },
            "pictures": {"model": f"hf:{folder / 'pictures'}", "threads": 1},
            "speech": {"model": f"hf:{folder / 'speech'}", "threads": 1},
        },
        "security": {"keys_file": str(folder / "keys.json")},
    }
    with serve(config) as running:
        yield Target(running, texts["mallory"], texts["alice"])


def measure(target: Target, hostile: Hostile, size: int, *, attempts: int = 1) -> Harm:
    """Send a hostile request while a neighbour's stream runs.

    Args:
        target: the server, idle.
        hostile: the kind of request.
        size: its size.
        attempts: how often it is tried until the times are within bounds: a busy machine pauses anybody now and then,
            a harmful request does so each time. All other faults count in every attempt.
    """
    request = hostile.make(size)
    for attempt in range(attempts):
        wait_for(target.running.is_ready, 120, "all models to be ready")
        before = target.processes()
        memory = target.memory_bytes()
        harm = asyncio.run(_observe(target, request))
        if harm.status not in hostile.statuses:
            harm.faults.append(f"expected the status {sorted(hostile.statuses)}, got {harm.status}: {harm.said}")
        if lost := before.keys() - target.processes().keys():
            harm.faults.append(f"processes ended: {[before[pid] for pid in lost]}")
        harm.grown_bytes = grown = target.grown_bytes(memory)
        if grown > MEMORY_BYTES:
            harm.faults.append(f"the server grew by {grown / 1e6:.0f} MB, expected at most {MEMORY_BYTES / 1e6:.0f}")
        if harm.faults or max(harm.gap_s, harm.health_s) <= GAP_S or attempt + 1 == attempts:
            break
    for what, seconds in (("the neighbour's stream paused for", harm.gap_s), ("health took", harm.health_s)):
        if seconds > GAP_S:
            harm.faults.append(f"{what} {seconds:.2f} s, expected at most {GAP_S:g}")
    return harm


def send_all(target: Target, request: Request, count: int, *, missing: int = 0) -> set[int]:
    """Send the same request on many connections at once, and close them after the answers.

    Args:
        target: the server.
        request: what to send.
        count: how many.
        missing: bytes of each body that are never sent. If there are any, no answer is awaited.

    Returns:
        The answers' statuses; 0: the server ended the connection while the body was sent.
    """

    async def send() -> set[int]:
        address = target.running.url.removeprefix("http://").split(":")
        connections = [await asyncio.open_connection(*address) for _ in range(count)]
        try:
            await asyncio.gather(*(_write(writer, request, target.mallory, missing) for _, writer in connections))
            heads = (reader.readline() for reader, _ in connections if not missing)
            return {
                _status(head) if isinstance(head, bytes) else 0
                for head in await asyncio.gather(*heads, return_exceptions=True)
            }
        finally:
            for _, writer in connections:
                writer.transport.abort()

    return asyncio.run(asyncio.wait_for(send(), 4 * DEADLINE_S))


async def _observe(target: Target, request: Request) -> Harm:
    address = target.running.url.removeprefix("http://").split(":")
    times: list[float] = []
    faults: list[str] = []
    begun, ended = asyncio.Event(), asyncio.Event()
    stream = asyncio.create_task(_stream(address, target.alice, times, begun, ended, faults))
    await asyncio.wait((stream, asyncio.ensure_future(begun.wait())), return_when=asyncio.FIRST_COMPLETED)
    slowest: list[float] = [0.0]
    health = asyncio.create_task(_health(address, slowest, ended))
    await asyncio.sleep(CALM_S)
    began = time.monotonic()
    status, said = 0, ""
    try:
        status, said = await asyncio.wait_for(_post(address, request, target.mallory), DEADLINE_S)
    except asyncio.TimeoutError:
        faults.append(f"no answer in {DEADLINE_S:g} s")
    except OSError as error:
        said = f"{type(error).__name__}: {error}"
    took = time.monotonic() - began
    await asyncio.sleep(CALM_S)
    ended.set()
    await asyncio.gather(stream, health)
    gap = max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)
    return Harm(status, said, took, gap, slowest[0], 0, faults)


async def _post(address: list[str], request: Request, key: str) -> tuple[int, str]:
    """Send all at once, and read the answer as soon as there is one."""
    reader, writer = await asyncio.open_connection(*address)
    writing = asyncio.create_task(_write(writer, request, key))
    try:
        answer = await reader.read()
        return _status(answer), answer.partition(b"\r\n\r\n")[2][:400].decode(errors="replace")
    finally:
        writer.transport.abort()
        await writing


async def _write(writer: asyncio.StreamWriter, request: Request, key: str, missing: int = 0) -> None:
    """Send a request without the last bytes of its body, unless the server ends the connection."""
    headers = {**request.headers, "Host": "test", "X-API-Key": key, "Content-Length": str(len(request.body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    body = memoryview(request.body)[: len(request.body) - missing]
    with contextlib.suppress(ConnectionError):
        writer.write(f"POST {request.path} HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode())
        writer.write(body)
        await writer.drain()


def _status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


async def _stream(
    address: list[str], key: str, times: list[float], begun: asyncio.Event, ended: asyncio.Event, faults: list[str]
) -> None:
    """Note when each event of a neighbour's streams comes, one stream after the other."""
    body = json.dumps(
        {"model": "tiny", "prompt": "x = [", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
    )
    while not ended.is_set():
        reader, writer = await asyncio.open_connection(*address)
        try:
            writer.write(
                f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nX-API-Key: {key}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
            )
            status = int((await reader.readline()).split(b" ", 2)[1])
            if status != 200:
                faults.append(f"the neighbour's stream: expected 200, got {status}")
                return
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    times.append(time.monotonic())
                    begun.set()
                    if b'"error"' in line:
                        faults.append(f"the neighbour's stream ended with {line.decode()}")
                        return
                if ended.is_set():
                    return
        except (OSError, IndexError) as error:
            faults.append(f"the neighbour's stream broke: {type(error).__name__}: {error}")
            return
        finally:
            writer.transport.abort()


async def _health(address: list[str], slowest: list[float], ended: asyncio.Event) -> None:
    while not ended.is_set():
        began = time.monotonic()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n")
        await reader.read()
        slowest[0] = max(slowest[0], time.monotonic() - began)
        writer.transport.abort()
        await asyncio.sleep(HEALTH_EVERY_S)
