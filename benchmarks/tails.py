"""How far the slowest requests of one loaded gateway are from the others, and what disturbs them.

``python -m benchmarks.tails [--only text,scale,events] [--repeats N] [--seconds S] [--anywhere] [--json FILE]
[--smoke]``. One server with `text` and `scale` of `benchmarks.peers.scenarios`; the load is `headwater bench`'s, in
this process. Generator, gateway and replicas share the machine's cores.

- **text**, **scale**: the capacity is what 64 connections get in a closed loop. Then requests come at 70 % of it
  (`text`) or 50 % (`scale`), at random times (Poisson) whatever became of earlier ones: p99 over p50 of the latency
  from the time at which each should have been sent. Then the capacity once more. All is measured anew in each repeat.
  The generator has one core, and the gateway's worker the others, while Triton and the replica may run on all: on the
  same core the worker would wait for the generator, which in use is on another machine. With ``--anywhere`` it may.
- **events**: `scale` is asked at equal intervals, at 20 % of its capacity. In each repeat there is one block without an
  event and one for each kind of event, in an order that is shuffled anew: a scrape of ``/metrics``, a full garbage
  collection in the gateway's worker, a reload of `text`, its unload and load. Each block has the highest latency, and
  those of events how long the events took and when, counted from the event's begin, the slowest request was due.

On each core a process of the highest priority (``SCHED_FIFO``, if that is allowed) wakes every 2 ms and notes how late:
what no process of this machine causes, such as pauses of a virtual machine. The longest of them stands beside each
figure.

An answer of each model is compared before and after with what it must be, and every answer under load must be a good
one; the first that is not ends the benchmark with status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import multiprocessing
import os
import platform
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import uvloop

from benchmarks.fanout_report import Ratio, ratio_line
from benchmarks.fanout_servers import Server, command_of, headwater, pin, tree
from benchmarks.peers.scenarios import check_json, deployment, scenario
from benchmarks.smoke import parse_with_smoke
from headwater_server.cli.bench.closed_loop import STOPPED
from headwater_server.cli.bench.generator import Generator
from headwater_server.cli.bench.job import Job, Load, RequestSet
from headwater_server.cli.bench.outcomes import Outcomes, percentile
from headwater_server.cli.bench.request_bodies import Body
from headwater_server.cli.bench.sample_reader import Sample
from headwater_server.cli.bench.slo import Limits

COLLECTS: Final = Path(__file__).parent / "collect_in_worker"
CONNECTIONS: Final = 64
"""Of the closed loop."""
SHARES: Final = {"text": 0.7, "scale": 0.5}
"""Of the capacity, by model."""
AT_MOST: Final = {"text": 3.0, "scale": 2.5}
"""p99 over p50, by model."""
EVENTS_SHARE: Final = 0.2
NONE: Final = "none"
LONGEST_MS: Final = 50.0
WARMUP_S: Final = 1.0
CAPACITY_PART: Final = 0.4
"""The part of a run's time that its closed loop has."""
PAUSE_S: Final = 0.5
"""Between two events, before the first and after the last."""
TICK_S: Final = 0.002


class Request(NamedTuple):
    """One request that was answered; times are `time.perf_counter`'s."""

    due_s: float
    sent_s: float
    ended_s: float

    @property
    def took_ms(self) -> float:
        """From the time at which it should have been sent."""
        return (self.ended_s - self.due_s) * 1e3


class Noted(Limits):
    """Limits that all requests meet, and that note each."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def are_met(self, sample: Sample, begin_s: float) -> bool:
        """Note a request."""
        self.requests.append(Request(begin_s, sample.sent_s, sample.ended_s))
        return True


class Slowest(NamedTuple):
    """The slowest request around an event."""

    took_ms: float
    after_ms: float
    """When it was due, from the event's begin."""


@dataclass
class Block:
    """One block of requests to `scale`, and the events in it."""

    times_ms: list[float]
    events_ms: list[float]
    """How long each lasted."""
    slowest: list[Slowest]
    """Around each event."""
    late_ms: float
    """How late the generator itself was at most."""
    machine_ms: float
    """The machine's longest pause."""


class Pauses:
    """Notes pauses of the machine while the block runs, by a process on each core; see the module's docstring."""

    def __enter__(self) -> Pauses:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Pipe] = []
        self._processes = []
        for core in os.sched_getaffinity(0):
            ours, theirs = context.Pipe()
            process = context.Process(target=_note_pauses, args=(core, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        self.longest_ms()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def longest_ms(self) -> float:
        """The longest since it was last asked for; NaN: the highest priority is not allowed."""
        for pipe in self._pipes:
            pipe.send(None)
        return max(float(pipe.recv()) for pipe in self._pipes) * 1e3


def _note_pauses(core: int, pipe: Pipe) -> None:
    """Answer each message with the longest pause since the one before, in seconds."""
    os.sched_setaffinity(0, {core})
    longest_s = 0.0
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        longest_s = math.nan
    due_s = time.perf_counter()
    while True:
        due_s += TICK_S
        if pipe.poll(max(0.0, due_s - time.perf_counter())):
            pipe.recv()
            pipe.send(longest_s)
            longest_s = min(longest_s, 0.0)
            due_s = time.perf_counter()
        else:
            longest_s = max(longest_s, time.perf_counter() - due_s)
            due_s = max(due_s, time.perf_counter() - TICK_S)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="Tails of one loaded gateway, and what disturbs it.")
    parser.add_argument("--only", default="text,scale,events", help="of text,scale,events; some of them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10, help="of an open loop")
    parser.add_argument("--events", type=int, default=2, help="of a kind in a block")
    parser.add_argument("--anywhere", action="store_true", help="let generator and worker share cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw figures there")
    options = parse_with_smoke(parser, repeats=1, seconds=4, events=1)
    parts = options.only.split(",")
    if unknown := set(parts) - {"text", "scale", "events"}:
        parser.error(f"--only: expected some of text, scale, events, got {', '.join(sorted(unknown))}")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(COLLECTS), os.environ.get("PYTHONPATH"))))
    raw: dict[str, Any] = {"machine": _machine(), "smoke": options.smoke}
    with Pauses() as pauses, headwater({name: deployment(name) for name in ("scale", "text")}) as server:
        _check(server)
        for part in parts:
            if part == "events":
                raw[part] = _print_events(_events(server, pauses, options))
            else:
                with contextlib.nullcontext() if options.anywhere else _apart(server):
                    found = [_tails(server, pauses, part, seed, options) for seed in range(options.repeats)]
                raw[part] = _print_tails(part, found)
        _check(server)
    if options.json is not None:
        options.json.write_text(json.dumps(raw, indent=1))


@contextlib.contextmanager
def _apart(server: Server) -> Iterator[None]:
    """Give this process a core, and the gateway's worker the others, until the block ends."""
    cores, workers = os.sched_getaffinity(0), _workers(server)
    ours, *others = cores
    pin([os.getpid()], {ours})
    pin(workers, set(others) or cores)
    try:
        yield
    finally:
        pin([os.getpid(), *workers], cores)


def _workers(server: Server) -> list[int]:
    return [pid for pid in tree(server.pid) if b"headwater_server.gateway.worker" in command_of(pid)]


def _check(server: Server) -> None:
    """Compare an answer of each model with what is right."""
    scale = json.loads(_ask(server, "/v2/models/scale/infer", scenario("scale").bodies[0]))
    check_json(json.dumps(scale).encode(), {"y": [2.0 * value for value in range(16)]})
    text = json.loads(_ask(server, "/v2/models/text/infer", scenario("text").bodies[0]))
    length = float(np.linalg.norm(text["outputs"][0]["data"]))
    if abs(length - 1) > 1e-4:
        raise SystemExit(f"text: expected an embedding of length 1, got {length:g}")


def _ask(server: Server, path: str, body: bytes | None = None) -> bytes:
    """One request on a connection of its own; GET without a body. Any other status than 200 ends the benchmark."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.request("GET" if body is None else "POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    if answer.status != 200:
        raise SystemExit(f"{path}: expected 200, got {answer.status}: {content[:300]!r}")
    return content


def _job(server: Server, model: str, load: Load, seconds: float, **others: Any) -> Job:
    bodies = tuple(Body(body) for body in scenario(model).bodies)
    return Job(RequestSet(server.url, model, bodies), load, seconds, WARMUP_S, **others)


def _load(server: Server, model: str, load: Load, seconds: float, seed: int = 0) -> Outcomes:
    job = _job(server, model, load, seconds, seed=seed)
    outcomes = uvloop.run(Generator(threading.Event()).run(job))
    if outcomes.ended or outcomes.failures or not outcomes.answers:
        raise SystemExit(f"{model}, {load}: expected answers only, got {dict(outcomes.errors)} {outcomes.ended}")
    return outcomes


def _capacity(server: Server, model: str, seconds: float) -> float:
    """Requests/s in a closed loop."""
    return _load(server, model, Load(CONNECTIONS), seconds).requests_per_s


def _tails(server: Server, pauses: Pauses, model: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    capacity = _capacity(server, model, options.seconds * CAPACITY_PART)
    pauses.longest_ms()
    found = _load(server, model, Load(rate_per_s=capacity * SHARES[model]), options.seconds, seed=seed)
    machine_ms = pauses.longest_ms()
    return {
        "capacity_per_s": capacity,
        "capacity_after_per_s": _capacity(server, model, options.seconds * CAPACITY_PART),
        "per_s": found.requests_per_s,
        **{f"p{percent:g}_ms": found.latency_ms(percent) for percent in (50, 90, 99, 99.9)},
        "generator_late_p99_ms": percentile(found.behind_s, 99) * 1e3,
        "generator_core": found.cpu_share,
        "machine_paused_ms": machine_ms,
    }


def _print_tails(model: str, repeats: list[dict[str, float]]) -> list[dict[str, float]]:
    print(f"{model} at {SHARES[model]:.0%} of its capacity, by repeat:")
    for name in repeats[0]:
        print(f"  {name:<22}" + "".join(f"{one[name]:>10,.2f}" for one in repeats))
    print(ratio_line(Ratio(f"{model}: p99 / p50", [one["p99_ms"] / one["p50_ms"] for one in repeats], AT_MOST[model])))
    return repeats


def _events(server: Server, pauses: Pauses, options: argparse.Namespace) -> dict[str, list[Block]]:
    workers = _workers(server)

    def collect() -> None:
        for pid in workers:
            os.kill(pid, signal.SIGUSR1)

    def unload_and_load() -> None:
        for action in ("unload", "load"):
            _ask(server, f"/v2/repository/models/text/{action}", b"")

    kinds: dict[str, Callable[[], object]] = {
        NONE: lambda: time.sleep(1),
        "scrape": lambda: _ask(server, "/metrics"),
        "collection": collect,
        "reload": lambda: _ask(server, "/v2/repository/models/text/reload", b""),
        "unload, load": unload_and_load,
    }
    _ask(server, "/metrics")  # the first imports what the others need
    rate = _capacity(server, "scale", options.seconds * CAPACITY_PART) * EVENTS_SHARE
    blocks: dict[str, list[Block]] = {kind: [] for kind in kinds}
    order = random.Random(0)
    for _ in range(options.repeats):
        shuffled = order.sample(list(kinds), len(kinds))
        for kind in shuffled:
            blocks[kind].append(_block(server, pauses, rate, kinds[kind], options.events))
    lines = (server.folder / "log").read_text(errors="replace").splitlines()
    took = [float(line.split()[2]) for line in lines if line.startswith("collected in ")]
    if len(took) != (expected := options.repeats * options.events * len(workers)):
        raise SystemExit(f"expected {expected} collections in the worker, got {len(took)}")
    print(f"scale at {rate:,.0f}/s; a collection took {statistics.median(took):.2f} ms, at most {max(took):.2f} ms")
    return blocks


def _block(server: Server, pauses: Pauses, rate: float, event: Callable[[], object], count: int) -> Block:
    """Requests to `scale`, and events meanwhile: the first one `PAUSE_S` after the warm-up, others as long after it."""
    noted, stop = Noted(), threading.Event()
    spans: list[tuple[float, float]] = []

    def disturb() -> None:
        try:
            time.sleep(WARMUP_S)
            for _ in range(count):
                time.sleep(PAUSE_S)
                began_s = time.perf_counter()
                event()
                spans.append((began_s, time.perf_counter()))
            time.sleep(PAUSE_S)
        finally:
            stop.set()

    thread = threading.Thread(target=disturb)
    pauses.longest_ms()
    thread.start()
    job = _job(server, "scale", Load(rate_per_s=rate), 60, arrivals="constant", limits=noted)
    outcomes = uvloop.run(Generator(stop).run(job))
    thread.join()
    if outcomes.ended != STOPPED or outcomes.failures or len(spans) < count:
        raise SystemExit(f"scale: expected answers only, and {count} events, got {dict(outcomes.errors)}, {len(spans)}")
    return Block(
        [one.took_ms for one in noted.requests],
        [(ended_s - began_s) * 1e3 for began_s, ended_s in spans],
        [_slowest(noted.requests, began_s, ended_s) for began_s, ended_s in spans],
        max(outcomes.behind_s) * 1e3,
        pauses.longest_ms(),
    )


def _slowest(requests: Sequence[Request], began_s: float, ended_s: float) -> Slowest:
    """Of those that were due while an event lasted, or `PAUSE_S` before or after it."""
    around = [one for one in requests if began_s - PAUSE_S < one.due_s < ended_s + PAUSE_S]
    slowest = max(around, key=lambda one: one.took_ms)
    return Slowest(slowest.took_ms, (slowest.due_s - began_s) * 1e3)


def _print_events(blocks: dict[str, list[Block]]) -> dict[str, list[dict[str, Any]]]:
    heads = f"{'lasts ms':>10} {'p50':>8} {'p99':>8} {'highest, median':>16} {'highest of all':>26}"
    print(f"{'event':<14} {heads} {'late':>6} {'machine':>8}")
    highest = {}
    for kind, found in blocks.items():
        times_ms = [value for block in found for value in block.times_ms]
        slowest = sorted(one for block in found for one in block.slowest)
        highest[kind] = [one.took_ms for one in slowest]
        at = f"{slowest[-1].took_ms:.1f} at {slowest[-1].after_ms:+.0f} ms"
        print(
            f"{kind:<14} {statistics.median(value for block in found for value in block.events_ms):>10.1f} "
            f"{percentile(times_ms, 50):>8.2f} {percentile(times_ms, 99):>8.2f} "
            f"{statistics.median(highest[kind]):>16.1f} {at:>26} {max(block.late_ms for block in found):>6.1f} "
            f"{max(block.machine_ms for block in found):>8.1f}"
        )
    for kind in blocks:
        if kind != NONE:
            print(ratio_line(Ratio(f"{kind}: highest, ms / {LONGEST_MS:g}", [max(highest[kind]) / LONGEST_MS], 1.0)))
    return {kind: [asdict(block) for block in found] for kind, found in blocks.items()}


def _machine() -> str:
    return f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"


if __name__ == "__main__":
    main()
