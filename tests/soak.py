"""A server that is loaded, used and unloaded again and again, and reloaded under load: nothing may be left or lost.

``python -m tests.soak [--cycles 50] [--reloads 20] [--connections 64] [--kinds 50]`` prints a line for each cycle and
reload, then what it found; its exit status is 1 if anything was not as it should be. Afterwards another server loads,
uses and unloads a model of every kind; see `tests.soak_kinds`.

A cycle uses a language model and one that answers whole, and unloads and loads both at once. Before every other unload
streams are open and requests under way, some of which outlast the time to drain.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from tests.running import Running, leftovers, resident_bytes, segments_of, serve, wait_for
from tests.soak_kinds import differences, kinds_config, run_kinds_cycle, standing_of
from tests.token_streams import Stream, open_stream
from tests.traces import Traces

__all__ = ["Cycle", "Reloads", "growth", "reload_under_load", "run_cycle", "soak_config"]

LANGUAGE, WHOLE = MODELS = "tiny", "unary"
TOKENS: Final = {"text_input": "def", "max_tokens": 300, "ignore_eos": True}
DRAIN_S: Final = 0.5
"""What both models give their requests."""
BEYOND_DRAIN_S: Final = 2.0
"""How much longer than that an unload may take."""
OPEN_STREAMS: Final = 6
UNDER_WAY_S: Final = (10.0, 12.0)
"""How long the requests take that are under way at an unload: more than the time to drain, whenever that begins."""
FLAT_WITHIN: Final = 0.03
PAUSE_S: Final = 0.02
"""Of a connection, between two requests."""
SWITCH_TIMEOUT_S: Final = 30.0
MIB: Final = 1024 * 1024


def soak_config(folder: Path, *, small: bool = False) -> dict[str, Any]:
    """A server with two gateway workers, the language model ``tiny``, and ``unary``, which answers with its version.

    Args:
        folder: where the second has its version, and writes down its ends.
        small: whether the language model computes nothing, for a fast start.
    """
    (folder / "version").write_text("1")
    files = {"version": str(folder / "version"), "ends": str(folder / "ends")}
    return {
        "deployments": {
            LANGUAGE: {
                "model": "lm:headwater.zoo:weights/tiny_lm",
                "options": {"engine": "engines:null", "step_s": 0.01, "max_sequences": 32, "context_length": 1000}
                if small
                else {"dtype": "float32", "max_sequences": 32},
                "device": "cpu",
                "threads": 1,
                "drain_timeout_s": DRAIN_S,
            },
            WHOLE: {
                "drain_timeout_s": DRAIN_S,
                "warmup_batch_sizes": [1],
                "model": "versions:Versioned",
                "options": files,
            },
        },
        "server": {"workers": 2, "access_log": False},
    }


@dataclass
class Cycle:
    """What one cycle found."""

    unload_s: dict[str, float] = field(default_factory=dict)
    """By model."""
    load_s: dict[str, float] = field(default_factory=dict)
    finished: int = 0
    """Requests under way at the unloads that got their whole answers."""
    ended: int = 0
    """Those that were told that the time to drain was over."""
    resident: dict[str, int] = field(default_factory=dict)
    """Bytes of the supervisor and of the gateway workers together, at the cycle's end."""
    faults: list[str] = field(default_factory=list)

    def note_end(self, stream: Stream) -> None:
        """Take in how a stream ended that was open at an unload: whole, or with an event that says why not."""
        errors = [event for event in stream.events if "error" in event]
        if stream.status != 200 or not stream.events or not stream.events[-1].get("final") or len(errors) > 1:
            self.faults.append(f"a stream ended with {stream.status}: {stream.events[-2:]}")
        elif errors:
            self._note_told(errors[0]["status"], errors[0]["error"])
        else:
            self.finished += 1

    def note_answer(self, answer: httpx.Response) -> None:
        """Take in how a request was answered that was under way at an unload."""
        if answer.status_code == 200:
            self.finished += 1
        else:
            self._note_told(answer.status_code, answer.json()["error"])

    def _note_told(self, status: int, error: str) -> None:
        if status == 503 and "drain_timeout_s" in error:
            self.ended += 1
        else:
            self.faults.append(f"a request ended with {status}: {error}")


async def run_cycle(
    running: Running, folder: Path, *, is_busy: bool, unload_within_s: float = DRAIN_S + BEYOND_DRAIN_S
) -> Cycle:
    """Use both models, unload them and load them again.

    Args:
        running: a server of `soak_config`, ready.
        folder: what that was given.
        is_busy: whether streams are open and requests under way at the unloads.
        unload_within_s: how long an unload may take.
    """
    cycle = Cycle()
    async with httpx.AsyncClient(base_url=running.url, timeout=60, trust_env=False) as client:
        await _use(client, running, cycle)
        traces = {model: Traces(running, model) for model in MODELS}
        async with AsyncExitStack() as stack:
            streams: list[Stream] = []
            requests: list[asyncio.Task[httpx.Response]] = []
            if is_busy:
                begun = folder / "ends.begun"
                begun.unlink(missing_ok=True)
                requests = [asyncio.create_task(_ask(client, sleep_s)) for sleep_s in UNDER_WAY_S]
                while not begun.exists():  # noqa: ASYNC110 - the replica says so by a file
                    await asyncio.sleep(0.01)
                streams = [await stack.enter_async_context(_stream(running, TOKENS)) for _ in range(OPEN_STREAMS)]
            unloading = asyncio.gather(*(_command(client, "unload", model, cycle) for model in MODELS))
            for stream in streams:
                cycle.note_end(await stream.rest())
            for request in requests:
                cycle.note_answer(await request)
            cycle.unload_s = dict(zip(MODELS, await unloading, strict=True))
        for model, took_s in cycle.unload_s.items():
            if took_s > unload_within_s:
                cycle.faults.append(f"unload of {model} took {took_s:.1f} s")
            cycle.faults += [f"{model}: left: {one}" for one in traces[model].left()]
        loading = [_command(client, "load", model, cycle) for model in MODELS]
        cycle.load_s = dict(zip(MODELS, await asyncio.gather(*loading), strict=True))
    cycle.resident = {
        "supervisor": resident_bytes(running.pid),
        "gateway": sum(resident_bytes(pid) for pid in running.workers()),
    }
    return cycle


async def _use(client: httpx.AsyncClient, running: Running, cycle: Cycle) -> None:
    """Some requests and streams, all of which are answered whole."""
    for answer in await asyncio.gather(*(_ask(client, 0) for _ in range(8))):
        if answer.status_code != 200:
            cycle.faults.append(f"{WHOLE}: {answer.text}")
    for _ in range(2):
        async with _stream(running, {**TOKENS, "max_tokens": 20}) as stream:
            events = (await stream.rest()).events
        if len(events) < 2 or any("error" in event for event in events):
            cycle.faults.append(f"{LANGUAGE}: {stream.status}: {events[-2:]}")


def _stream(running: Running, body: dict[str, Any]) -> contextlib.AbstractAsyncContextManager[Stream]:
    return open_stream(running, f"/v2/models/{LANGUAGE}/generate_stream", body)


async def _ask(client: httpx.AsyncClient, sleep_s: float) -> httpx.Response:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [sleep_s]}
    return await client.post(f"/v2/models/{WHOLE}/infer", json={"inputs": [tensor]})


async def _command(client: httpx.AsyncClient, action: str, model: str, cycle: Cycle) -> float:
    """Give a command that must succeed. Returns how long it took."""
    began = time.monotonic()
    answer = await client.post(f"/v2/repository/models/{model}/{action}")
    if answer.status_code != 200:
        cycle.faults.append(f"{action} of {model}: {answer.status_code}: {answer.text[:500]}")
    return time.monotonic() - began


def growth(values: Sequence[float]) -> float:
    """By how much the median of the last fifth is above that of the second."""
    fifth = len(values) // 5
    return statistics.median(values[-fifth:]) / statistics.median(values[fifth : 2 * fifth]) - 1


# Reload under load


@dataclass
class Reloads:
    """What reloads under load found."""

    requests: int = 0
    reload_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


async def reload_under_load(
    running: Running, folder: Path, *, reloads: int, connections: int, on_reload: Callable[[float], None] | None = None
) -> Reloads:
    """Reload ``unary`` with a new version each time, while connections ask it without end, each one thing at a time.

    On each connection versions must never go back, and all connections must see the new one after each reload.

    Args:
        running: a server of `soak_config`, ready.
        folder: what that was given.
        reloads: how many.
        connections: how many.
        on_reload: called with how long each took.
    """
    found = Reloads()
    first = int((folder / "version").read_text())
    versions = [first] * connections
    is_over = asyncio.Event()

    async def connect(index: int) -> None:
        try:
            async with _Connection(running.url) as connection:
                while not is_over.is_set():
                    version = await connection.version()
                    if version < versions[index]:
                        found.faults.append(f"connection {index}: version {version} after {versions[index]}")
                    versions[index] = version
                    found.requests += 1
                    await asyncio.sleep(PAUSE_S)
        except Exception as error:  # a connection's boundary: whatever happens is a failed request
            found.faults.append(f"connection {index}: {type(error).__name__}: {error}")

    tasks = [asyncio.create_task(connect(index)) for index in range(connections)]
    async with httpx.AsyncClient(base_url=running.url, timeout=120, trust_env=False) as client:
        for version in range(first + 1, first + 1 + reloads):
            (folder / "version").write_text(str(version))
            began = time.monotonic()
            answer = await client.post(f"/v2/repository/models/{WHOLE}/reload")
            found.reload_s.append(time.monotonic() - began)
            if answer.status_code != 200 or answer.json()["ended"]:
                found.faults.append(f"reload to {version}: {answer.status_code}: {answer.text[:500]}")
            deadline_s = time.monotonic() + SWITCH_TIMEOUT_S
            while min(versions) < version and time.monotonic() < deadline_s and not found.faults:  # noqa: ASYNC110
                await asyncio.sleep(PAUSE_S)
            late = sum(one < version for one in versions)
            if late:
                found.faults.append(f"reload to {version}: {late} connections don't see it")
            if found.faults:
                break
            if on_reload is not None:
                on_reload(found.reload_s[-1])
    is_over.set()
    await asyncio.gather(*tasks)
    return found


class _Connection:
    """One connection that is kept, on which one request follows another."""

    def __init__(self, url: str) -> None:
        self._host, _, port = url.removeprefix("http://").rpartition(":")
        self._port = int(port)
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0.005]}
        body = json.dumps({"inputs": [tensor]}).encode()
        head = (
            f"POST /v2/models/{WHOLE}/infer HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body

    async def __aenter__(self) -> _Connection:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def version(self) -> int:
        """Ask. Returns the version that answers.

        Raises:
            RuntimeError: the answer is an error.
        """
        self._writer.write(self._request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        size = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length:"))
        body = await self._reader.readexactly(size)
        if " 200 " not in lines[0]:
            raise RuntimeError(f"{lines[0]}: {body[:300]!r}")
        return int(json.loads(body)["outputs"][0]["data"][0])


# The script


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="Load, use, unload and reload models of a server again and again.")
    parser.add_argument("--cycles", type=int, default=50, help="of load, use and unload; default: %(default)s")
    parser.add_argument("--reloads", type=int, default=20, help="under load; default: %(default)s")
    parser.add_argument("--connections", type=int, default=64, help="of that load; default: %(default)s")
    parser.add_argument("--kinds", type=int, default=50, help="cycles of every kind of model; default: %(default)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hw-soak-") as name:
        faults = _soak(Path(name), options.cycles, options.reloads, options.connections)
    if options.kinds:
        with tempfile.TemporaryDirectory(prefix="hw-soak-") as name:
            faults += _soak_kinds(Path(name), options.kinds)
    for fault in faults:
        print(f"FAILED: {fault}")
    print("nothing was left or lost" if not faults else f"{len(faults)} faults")
    sys.exit(1 if faults else 0)


def _soak(folder: Path, cycles: int, reloads: int, connections: int) -> list[str]:
    with serve(soak_config(folder)) as running:
        faults = _print_cycles(running, folder, cycles) if cycles else []
        if reloads:
            faults += _print_reloads(running, folder, reloads, connections)
        segments = segments_of(running.folder)
        status = running.stop()
        faults += [f"the server ended with status {status}"] if status else []
        return faults + [f"left by the server: {one}" for one in leftovers(running.folder, segments)]


def _print_cycles(running: Running, folder: Path, cycles: int) -> list[str]:
    print(
        f"{'cycle':>5} {'open':>5} {'unload tiny s':>14} {'unary s':>8} {'load tiny s':>12} {'unary s':>8} "
        f"{'finished':>9} {'ended':>6} {'supervisor MiB':>15} {'gateway MiB':>12} {'faults':>7}"
    )
    faults: list[str] = []
    resident: dict[str, list[float]] = {}
    for number in range(1, cycles + 1):
        is_busy = number % 2 == 0
        cycle = asyncio.run(run_cycle(running, folder, is_busy=is_busy))
        for name, size in cycle.resident.items():
            resident.setdefault(name, []).append(size)
        faults += [f"cycle {number}: {fault}" for fault in cycle.faults]
        under_way = OPEN_STREAMS + len(UNDER_WAY_S) if is_busy else 0
        print(
            f"{number:>5} {under_way:>5} {cycle.unload_s[LANGUAGE]:>14.2f} {cycle.unload_s[WHOLE]:>8.2f} "
            f"{cycle.load_s[LANGUAGE]:>12.2f} {cycle.load_s[WHOLE]:>8.2f} {cycle.finished:>9} {cycle.ended:>6} "
            f"{cycle.resident['supervisor'] / MIB:>15.1f} {cycle.resident['gateway'] / MIB:>12.1f} "
            f"{len(cycle.faults):>7}",
            flush=True,
        )
    return faults + _grown(resident)


def _grown(resident: dict[str, list[float]]) -> list[str]:
    """The processes whose memory grew from cycle to cycle."""
    faults = []
    for name, sizes in resident.items():
        if len(sizes) >= 10:
            grown = growth(sizes)
            print(f"memory of {name}: the last fifth of the cycles against the second: {grown:+.1%}")
            if grown > FLAT_WITHIN:
                faults.append(f"memory of {name} grew by {grown:.1%}")
    return faults


def _soak_kinds(folder: Path, cycles: int) -> list[str]:
    faults: list[str] = []
    resident: dict[str, list[float]] = {}
    with serve(kinds_config(folder)) as running:
        before = None
        for number in range(1, cycles + 1):
            cycle = asyncio.run(run_kinds_cycle(running))
            if before is None:  # what the first use makes stays
                before = standing_of(running)
            found = [*cycle.faults, *differences(running, before)]
            faults += [f"kinds, cycle {number}: {fault}" for fault in found]
            for name, size in cycle.resident.items():
                resident.setdefault(name, []).append(size)
            sizes = ", ".join(f"{name} {size / MIB:.1f} MiB" for name, size in cycle.resident.items())
            print(f"kinds, cycle {number}: {cycle.took_s:.1f} s, {sizes}, {len(found)} faults", flush=True)
    return faults + _grown(resident)


def _print_reloads(running: Running, folder: Path, reloads: int, connections: int) -> list[str]:
    wait_for(running.is_ready, 60, "the server to be ready")
    print(f"{reloads} reloads under {connections} connections", flush=True)
    found = asyncio.run(
        reload_under_load(
            running, folder, reloads=reloads, connections=connections,
            on_reload=lambda took_s: print(f"  {took_s:.2f} s", end="", flush=True),
        )
    )  # fmt: skip
    print(f"\n{found.requests:,} requests, {len(found.faults)} faults")
    return found.faults


if __name__ == "__main__":
    main()
