"""What failures of one head do to requests that don't ask for it.

A graph pipeline of light models (trunk and heads of about 2 ms), whose head C says ``on_error: omit, timeout_s: 1``.
Eight connections ask for A+B, each again as soon as it is answered. In every other block four more ask for A+B+C, each
twice a second at most, while C raises, hangs for ever, or has its replica killed at the block's start; a new one then
starts beside the requests and takes its share of the cores. With a healthy C, the same requests show what they cost by
themselves. The goal: p99 of A+B with failures beside within 1.2 times that without, median over pairs of blocks.

Every answer is verified: A+B always, and of A+B+C the answer of B, and C's if it isn't omitted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.fanout_calibration import calibrate, loaded
from benchmarks.fanout_client import Connection, TensorBytes
from benchmarks.fanout_layouts import Options, pipeline_config
from benchmarks.fanout_models import Head, Trunk
from benchmarks.fanout_report import Ratio, ratio_line
from benchmarks.fanout_servers import Server, headwater, kill_replica

__all__ = ["measure_faults"]

FAULTS = ("none", "raise", "hang", "killed")
SIDE = 64
WANTED_MS = 2.0
CONNECTIONS = 8
BESIDE_CONNECTIONS = 4
BESIDE_INTERVAL_S = 0.5
BLOCK_S = 5.0
WARMUP_S = 2.0
RESTART_TIMEOUT_S = 120.0
P99_AT_MOST = 1.2
# Rows that share a call may differ by rounding from those computed alone.
TOLERANCE = 1e-4


@dataclass
class Block:
    """What one block found."""

    latencies_ms: list[float] = field(default_factory=list)
    """Of A+B, in the order of the answers."""
    whole: int = 0
    """Answers to A+B+C with all heads."""
    omitted: int = 0
    """Answers to A+B+C without C."""

    def percentile_ms(self, percent: float) -> float:
        """Of A+B."""
        return float(np.percentile(self.latencies_ms, percent))


class _Case:
    """The image that is sent, and the right answers to it."""

    def __init__(self, options: Options) -> None:
        image = np.random.default_rng(0).integers(0, 256, (1, 3, SIDE, SIDE), dtype=np.uint8)
        self.inputs = {"x": TensorBytes("UINT8", image.shape, image.tobytes())}
        features = loaded(Trunk(**options["a"]))(x=torch.from_numpy(image))["features"]
        self._right = {
            output: loaded(Head(**options[name]))(features=features)[output].numpy()
            for name, output in (("b", "y_b"), ("c", "y_c"))
        }

    def ask(self, connection: Connection, outputs: list[str]) -> set[str]:
        """One request: the names of the outputs that came, all verified."""
        given = connection.infer("abc", self.inputs, outputs)
        for name, tensor in given.items():
            right = self._right[name]
            if not np.abs(tensor.floats() - right).max() <= TOLERANCE * np.abs(right).max():
                raise ValueError(f"{name}: expected {right.tolist()}, got {tensor.floats().tolist()}")
        if "y_b" not in given:
            raise ValueError(f"expected y_b in the answer, got {sorted(given)}")
        return set(given)


def measure_faults(blocks: int, *, faults: Sequence[str] = FAULTS, block_s: float = BLOCK_S) -> dict[str, Any]:
    """Measure and print; returns the raw figures.

    Args:
        blocks: pairs of blocks for each fault.
        faults: of `FAULTS`.
        block_s: how long a block takes.
    """
    options = _calibrated()
    case = _Case(options)
    print(f"\nA+B at {CONNECTIONS} connections, with and without A+B+C beside while C fails; {blocks} pairs of blocks")
    print(f"{'C':<8} {'beside':<7} {'p50 ms':>8} {'p99 ms':>8} {'A+B/s':>8} {'A+B+C whole':>12} {'C omitted':>10}")
    raw: dict[str, Any] = {}
    ratios = []
    for fault in faults:
        found = _measure(fault, options, case, blocks, block_s)
        raw[fault] = {name: [asdict(block) for block in of] for name, of in found.items()}
        for name, of in found.items():
            _print(fault, name, of, block_s)
        for percent, at_most in ((50, None), (99, P99_AT_MOST)):
            pairs = zip(found["yes"], found["no"], strict=True)
            values = [beside.percentile_ms(percent) / alone.percentile_ms(percent) for beside, alone in pairs]
            ratios.append(Ratio(f"C {fault}: p{percent} of A+B, with / without beside", values, at_most))
    print()
    for ratio in ratios:
        print(ratio_line(ratio))
    return raw


def _calibrated() -> Options:
    image = torch.zeros(1, 3, SIDE, SIDE, dtype=torch.uint8)
    a = calibrate(lambda repeats: Trunk(repeats, SIDE), {"x": image}, WANTED_MS)
    features = torch.ones_like(loaded(Trunk(a, SIDE))(x=image)["features"])
    head = calibrate(lambda repeats: Head(repeats, side=SIDE), {"features": features}, WANTED_MS)
    options: Options = {"a": {"repeats": a, "side": SIDE, "seed": 1}}
    for seed, name in enumerate(("b", "c"), start=2):
        options[name] = {"repeats": head, "output": f"y_{name}", "side": SIDE, "seed": seed}
    return options


def _measure(fault: str, options: Options, case: _Case, blocks: int, block_s: float) -> dict[str, list[Block]]:
    """Blocks without (``no``) and with (``yes``) A+B+C beside."""
    chosen = dict(options)
    if fault in ("raise", "hang"):
        chosen["c"] = {**options["c"], "fault": fault}
    found: dict[str, list[Block]] = {"no": [], "yes": []}
    deployments = {"abc": pipeline_config("graph", chosen, on_error="omit", timeout_s=1)}
    with headwater(deployments) as server:
        _run(server, case, min(WARMUP_S, block_s), beside=False)
        for number in range(blocks):
            for name in ("no", "yes") if number % 2 == 0 else ("yes", "no"):
                if fault == "killed" and name == "yes":
                    kill_replica(server, "abc.c")
                block = _run(server, case, block_s, beside=name == "yes")
                if (fault in ("raise", "hang") and block.whole) or (fault == "none" and block.omitted):
                    raise SystemExit(f"C {fault}: {block.whole} answers with C, {block.omitted} without")
                if fault == "killed":
                    _wait_for_c(server, case)
                found[name].append(block)
    return found


def _run(server: Server, case: _Case, seconds: float, *, beside: bool) -> Block:
    """One block.

    Raises:
        SystemExit: a request failed, or its answer was wrong.
    """
    block = Block()
    errors: list[Exception] = []
    end = time.monotonic() + seconds

    def ask_ab() -> None:
        with Connection(server.url) as connection:
            while time.monotonic() < end and not errors:
                started = time.perf_counter()
                case.ask(connection, ["y_b"])
                block.latencies_ms.append((time.perf_counter() - started) * 1e3)

    def ask_abc() -> None:
        with Connection(server.url) as connection:
            while time.monotonic() < end and not errors:
                next_at = time.monotonic() + BESIDE_INTERVAL_S
                if "y_c" in case.ask(connection, ["y_b", "y_c"]):
                    block.whole += 1
                else:
                    block.omitted += 1
                time.sleep(max(0.0, next_at - time.monotonic()))

    def guarded(ask: Callable[[], None]) -> None:
        try:
            ask()
        except Exception as error:  # a thread's boundary; raised below
            errors.append(error)

    asks = [ask_ab] * CONNECTIONS + [ask_abc] * (BESIDE_CONNECTIONS if beside else 0)
    threads = [threading.Thread(target=guarded, args=(ask,)) for ask in asks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise SystemExit(f"a request failed: {type(errors[0]).__name__}: {errors[0]}") from errors[0]
    return block


def _wait_for_c(server: Server, case: _Case) -> None:
    deadline = time.monotonic() + RESTART_TIMEOUT_S
    with Connection(server.url) as connection:
        while "y_c" not in case.ask(connection, ["y_b", "y_c"]):
            if time.monotonic() > deadline:
                raise SystemExit(f"C did not answer again within {RESTART_TIMEOUT_S:g} s of its replica's end")
            time.sleep(0.1)


def _print(fault: str, name: str, blocks: list[Block], block_s: float) -> None:
    latencies = [latency for block in blocks for latency in block.latencies_ms]
    p50, p99 = np.percentile(latencies, (50, 99))
    whole, omitted = sum(block.whole for block in blocks), sum(block.omitted for block in blocks)
    rate = len(latencies) / (block_s * len(blocks))
    print(f"{fault:<8} {name:<7} {p50:>8.2f} {p99:>8.2f} {rate:>8,.0f} {whole:>12} {omitted:>10}")
