"""What a gateway worker's bookkeeping costs: counting, the look for a trace, the list of connections.

``python -m benchmarks.bookkeeping [--pairs N] [--seconds S] [--connections N] [--smoke]``. Two servers run side by
side, Headwater with ``scale`` as installed, access log on, and the same with its bookkeeping replaced by nothing
(`benchmarks/without_bookkeeping`). Each pair is one run of wrk against each of them, whose order alternates. Prints
two ratios, with bookkeeping to without: requests/s, and CPU time of the worker per request, which a noisy machine
distorts less. Each is the median over the pairs with a 95 % interval, by the bootstrap. That the one server counts
every request and the other none is seen from their metrics. Writes the raw figures to
benchmarks/results/bookkeeping.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import statistics
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.gateway import BODY, MODEL, PATH
from benchmarks.load import run_wrk
from benchmarks.servers import free_port, running
from benchmarks.smoke import parse_with_smoke

WITHOUT: Final = Path(__file__).parent / "without_bookkeeping"
RESULTS: Final = Path(__file__).parent / "results" / "bookkeeping.json"
SETTING: Final = "deployments.scale.batching.max_batch_size=64"
AT_MOST: Final = 0.05
"""The goal: what it may cost of the throughput, and of the CPU time."""
SAMPLES: Final = 10_000
"""Of the bootstrap."""


class Run(NamedTuple):
    """One run of wrk against one server."""

    per_s: float
    cpu_us: float
    """Of the gateway worker, per request."""


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--connections", type=int, default=64)
    options = parse_with_smoke(parser, pairs=2, seconds=1, connections=4)
    with contextlib.ExitStack() as stack:
        urls = {
            "with": stack.enter_context(_server({})),
            "without": stack.enter_context(_server({"PYTHONPATH": str(WITHOUT)})),
        }
        asked = dict.fromkeys(urls, 0)
        runs: dict[str, list[Run]] = {name: [] for name in urls}
        for pair in range(options.pairs + 1):  # the first warms up
            for name in ("with", "without") if pair % 2 else ("without", "with"):
                found, requests = _run(urls[name], options.connections, options.seconds)
                asked[name] += requests
                if pair:
                    runs[name].append(found)
        counted = {name: _value(url, "headwater_requests_total") for name, url in urls.items()}
    if counted["with"] < asked["with"]:
        raise SystemExit(f"expected all of {asked['with']} requests to be counted, got {counted['with']:.0f}")
    if counted["without"]:
        raise SystemExit(f"expected nothing to be counted without bookkeeping, got {counted['without']:.0f} requests")
    pairs = list(zip(runs["with"], runs["without"], strict=True))
    _print("requests/s", [one.per_s / other.per_s for one, other in pairs], 1 - AT_MOST)
    _print("CPU time per request", [one.cpu_us / other.cpu_us for one, other in pairs], 1 + AT_MOST)
    for name, measured in runs.items():
        per_s = statistics.median(run.per_s for run in measured)
        cpu_us = statistics.median(run.cpu_us for run in measured)
        print(f"{name} bookkeeping: {per_s:,.0f} requests/s, {cpu_us:.1f} us of the worker's CPU time per request")
    if options.smoke:
        return
    RESULTS.parent.mkdir(exist_ok=True)
    raw = {name: [run._asdict() for run in measured] for name, measured in runs.items()}
    RESULTS.write_text(json.dumps({"connections": options.connections, "runs": raw}, indent=1))
    print(f"raw figures: {RESULTS}")


@contextlib.contextmanager
def _server(environment: Mapping[str, str]) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "headwater_server", "serve", MODEL, "--port", str(port), "--set", SETTING]
    url = f"http://127.0.0.1:{port}"
    with running(command, f"{url}/v2/health/ready", environment=environment):
        yield url


def _run(url: str, connections: int, seconds: float) -> tuple[Run, int]:
    before_s = _cpu_s(url)
    load = run_wrk(url + PATH, BODY, connections, seconds)
    if load.status_errors or load.socket_errors or not load.requests:
        raise SystemExit(
            f"expected answers only, got {load.requests}, {load.status_errors} of them errors, and "
            f"{load.socket_errors} socket errors"
        )
    return Run(load.per_s, (_cpu_s(url) - before_s) / load.requests * 1e6), load.requests


def _cpu_s(url: str) -> float:
    return _value(url, "process_cpu_seconds_total", 'process="worker-0"')


def _value(url: str, series: str, label: str = "") -> float:
    """A series' sum over the labels that aren't given."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    lines = re.findall(rf"^{series}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for labels, value in lines if label in labels)


def _print(what: str, ratios: Sequence[float], goal: float) -> None:
    median = statistics.median(ratios)
    low, high = _interval(ratios)
    is_met = median >= goal if goal < 1 else median <= goal
    print(
        f"{what}, with bookkeeping / without: {median:.3f} (95 % interval {low:.3f} to {high:.3f}, {len(ratios)} "
        f"pairs); goal {'>=' if goal < 1 else '<='} {goal:g}: {'pass' if is_met else 'MISS'}"
    )


def _interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Of the median: 95 % of the medians of samples, drawn with replacement, lie in it."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(SAMPLES))
    return medians[round(0.025 * SAMPLES)], medians[round(0.975 * SAMPLES) - 1]


if __name__ == "__main__":
    main()
