"""What one saturated deployment costs another beside it.

``python -m benchmarks.neighbours [--rounds N] [--seconds S] [--connections N] [--json FILE] [--smoke]``.

Two deployments of the same callable, which multiplies matrices on one thread, in batches of 8 at most; each replica is
bound to a core of its own, gateway and clients run wherever there is room. One client asks the quiet one, one request
at a time, in blocks: alone, and while wrk keeps the greedy one saturated over 64 connections. Blocks come in pairs, in
an order that is shuffled anew, and ratios are taken within a pair. Every answer of the quiet one is compared with what
it must be; of the greedy one the status of all, and the answer of one in each block. How long the quiet one's requests
waited in the queue, and computed, is what the server itself says of that block.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.fanout_client import Connection, RequestFailed, TensorBytes
from benchmarks.fanout_report import Ratio, ratio_line, times_line
from benchmarks.fanout_servers import Server, headwater, pin_replica
from benchmarks.load import Load, run_wrk
from benchmarks.smoke import parse_with_smoke
from headwater import Model, Tensor

__all__ = ["Products"]

GREEDY, QUIET = "greedy", "quiet"
ALONE, BESIDE = "alone", "saturated"
BATCH_SIZE = 8
START_TIMEOUT_S = 30.0
WRK_MARGIN_S = 2
QUEUE_AT_MOST = 1.0
Floats = np.ndarray[Any, np.dtype[np.float32]]


class Products(Model):
    """Doubles x, after some products of matrices.

    Args:
        count: how many products, of 256 x 256.
    """

    inputs = (Tensor("x", "FP32", [4]),)
    outputs = (Tensor("y", "FP32", [4]),)
    example: ClassVar[Mapping[str, Any]] = {"x": [1.0, 2.0, 3.0, 4.0]}

    def __init__(self, count: int) -> None:
        self._count = count
        self._left = np.full((256, 256), 1 / 256, np.float32)

    def __call__(self, x: Floats) -> dict[str, Floats]:
        product = self._left
        for _ in range(self._count):
            product = product @ self._left
        return {"y": x * (2 * product[0, 0] * 256)}


@dataclass
class Block:
    """What one block found of the quiet deployment."""

    times_ms: list[float] = field(default_factory=list)
    queue_ms: float = 0
    """Means, of the server."""
    compute_ms: float = 0
    load: Load | None = None
    """Of the greedy one."""

    def percentile(self, percent: float) -> float:
        """Of the times that the client saw."""
        return float(np.percentile(self.times_ms, percent))


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="What one saturated deployment costs another beside it.")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=6, help="of a block")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--products", type=int, default=20, help="what a batch computes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw figures there")
    options = parse_with_smoke(parser, rounds=1, seconds=1, connections=16)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("expected two cores at least, to bind the deployments to")
    deployment = {
        "model": "benchmarks.neighbours:Products",
        "options": {"count": options.products},
        "batching": {"max_batch_size": BATCH_SIZE},
        "threads": 1,
        "device": "cpu",
    }
    with headwater({GREEDY: deployment, QUIET: deployment}) as server:
        for name, core in ((QUIET, cores[0]), (GREEDY, cores[1])):
            pin_replica(server, name, core)
        blocks = _measure(server, options)
    _print(blocks, options)
    if options.json is not None:
        raw = {kind: [vars(block) | {"load": block.load and vars(block.load)} for block in found]
               for kind, found in blocks.items()}  # fmt: skip
        options.json.write_text(json.dumps({"machine": _machine(), "blocks": raw}, indent=1))


def _measure(server: Server, options: argparse.Namespace) -> dict[str, list[Block]]:
    order = random.Random(0)
    blocks: dict[str, list[Block]] = {ALONE: [], BESIDE: []}
    _block(server, BESIDE, options.connections, min(2, options.seconds))  # warm
    for number in range(options.rounds):
        kinds = [ALONE, BESIDE]
        order.shuffle(kinds)
        for kind in kinds:
            print(f"\rround {number + 1}/{options.rounds}, {kind:<10}", end="", flush=True)
            blocks[kind].append(_block(server, kind, options.connections, options.seconds))
    print("\r" + " " * 40 + "\r", end="")
    return blocks


def _block(server: Server, kind: str, connections: int, seconds: float) -> Block:
    with Connection(server.url) as connection:
        if kind == ALONE:
            return _ask(server, connection, seconds)
        _check(connection, GREEDY, 1.0)
        loads: list[Load] = []
        body = json.dumps(
            {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}]}
        ).encode()
        url = f"{server.url}/v2/models/{GREEDY}/infer"
        lasts_s = seconds + WRK_MARGIN_S
        wrk = threading.Thread(target=lambda: loads.append(run_wrk(url, body, connections, lasts_s)))
        before, _, _ = _statistics(server, GREEDY)
        wrk.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while _statistics(server, GREEDY)[0] - before < connections:
            if time.monotonic() > deadline:
                raise SystemExit(f"{GREEDY}: no load within {START_TIMEOUT_S:g} s")
            time.sleep(0.05)
        block = _ask(server, connection, seconds)
        is_loaded = wrk.is_alive()
        wrk.join()
        if not is_loaded or not loads:
            raise SystemExit(f"{GREEDY}: the load ended before the block did")
        (block.load,) = loads
        if block.load.status_errors or block.load.socket_errors:
            raise SystemExit(f"{GREEDY}: expected answers only, got {block.load}")
        return block


def _ask(server: Server, connection: Connection, seconds: float) -> Block:
    """Ask the quiet one, one request at a time."""
    block = Block()
    count, queue_ns, compute_ns = _statistics(server, QUIET)
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        started = time.perf_counter()
        _check(connection, QUIET, float(len(block.times_ms)))
        block.times_ms.append((time.perf_counter() - started) * 1e3)
    after = _statistics(server, QUIET)
    requests = after[0] - count
    if requests != len(block.times_ms):
        raise SystemExit(f"{QUIET}: asked {len(block.times_ms)} times, the server counted {requests}")
    block.queue_ms = (after[1] - queue_ns) / requests / 1e6
    block.compute_ms = (after[2] - compute_ns) / requests / 1e6
    return block


def _check(connection: Connection, model: str, value: float) -> None:
    x = np.array([[value, 1, 2, 3]], np.float32)
    try:
        found = connection.infer(model, {"x": TensorBytes("FP32", x.shape, x.tobytes())}, ["y"])["y"].floats()
    except RequestFailed as error:
        raise SystemExit(str(error)) from None
    if not np.allclose(found, 2 * x, rtol=1e-4):
        raise SystemExit(f"{model}: expected {(2 * x).tolist()}, got {found.tolist()}")


def _statistics(server: Server, model: str) -> tuple[int, int, int]:
    """Requests answered, nanoseconds that they waited and that they computed."""
    with urllib.request.urlopen(f"{server.url}/v2/models/{model}/stats", timeout=30) as answer:
        counts = json.load(answer)["model_stats"][0]["inference_stats"]
    return counts["success"]["count"], counts["queue"]["ns"], counts["compute_infer"]["ns"]


def _print(blocks: dict[str, list[Block]], options: argparse.Namespace) -> None:
    print(f"{_machine()}; {options.rounds} rounds of {options.seconds:g} s a block, {options.connections} connections")
    print(f"{'quiet deployment':<16} {'':<6} {'median':>8} {'quartiles':>18} {'least to most':>18}   (ms, by block)")
    for kind, found in blocks.items():
        for name, values in (
            ("p50", [block.percentile(50) for block in found]),
            ("p99", [block.percentile(99) for block in found]),
            ("queue", [block.queue_ms for block in found]),
            ("batch", [block.compute_ms for block in found]),
        ):
            print(times_line(kind, name, values))
    rates = [block.load.per_s for block in blocks[BESIDE] if block.load is not None]
    print(f"greedy deployment: {min(rates):,.0f} to {max(rates):,.0f} requests/s\n")
    pairs = list(zip(blocks[BESIDE], blocks[ALONE], strict=True))
    for ratio in (
        Ratio("p50, saturated / alone", [a.percentile(50) / b.percentile(50) for a, b in pairs]),
        Ratio("p99, saturated / alone", [a.percentile(99) / b.percentile(99) for a, b in pairs]),
        Ratio("queue wait / batch, saturated", [a.queue_ms / a.compute_ms for a, _ in pairs], QUEUE_AT_MOST),
    ):
        print(ratio_line(ratio))


def _machine() -> str:
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}"


if __name__ == "__main__":
    main()
