"""Every benchmark with tiny counts: does it run, are its answers right. No figure of such a run means anything.

``python -m benchmarks.smoke [--jobs N] [NAME ...]``: each in a process of its own, some at once, since they mostly
wait for servers that start; a line each. A benchmark that ends with another status than 0 has said on its standard
error, or at the end of its output, what was wrong: an answer, or a server that didn't start. The status is then 1.

A benchmark takes part by a flag ``--smoke``, which `parse_with_smoke` adds to its options: they get other defaults,
and nothing is written to benchmarks/results.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Final, NamedTuple

__all__ = ["BENCHMARKS", "parse_with_smoke"]

BENCHMARKS: Final[tuple[str, ...]] = (
    "gateway",
    "bookkeeping",
    "fanout",
    "triton_fanout",
    "stream",
    "neighbours",
    "tails",
    "scaling",
    "keys",
    "large_tensors",
    "node_port",
    "start",
    "idle",
    "memory",
    "peers",
    "lm_engine",
    "prefix_cache",
    "answer_cache",
    "vllm_affinity",
    "grammars",
    "zero_shot",
    "profiles",
    "path",
    "waterfall",
    "cluster_sim",
    "gpu",
)
JOBS: Final = 2
TIMEOUT_S: Final = 600.0
"""For one of them. Most take some seconds; machines may be slow, and a benchmark that hangs must end."""
END_TIMEOUT_S: Final = 60.0
"""For the servers of one that is interrupted."""


class Outcome(NamedTuple):
    """What came of a benchmark."""

    status: int | None
    """None: it had to be ended."""
    took_s: float
    output: str


def parse_with_smoke(parser: argparse.ArgumentParser, **tiny: Any) -> argparse.Namespace:
    """Read a benchmark's options, to which this adds ``--smoke``.

    Args:
        parser: with all of its options.
        tiny: by option, what it is with ``--smoke`` unless it is given too.
    """
    parser.add_argument("--smoke", action="store_true", help="tiny counts: does it run, are answers right; no figures")
    known = {action.dest for action in parser._actions}
    if unknown := tiny.keys() - known:
        raise ValueError(f"expected options of the parser, got {', '.join(sorted(unknown))}")
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(**tiny)
    return parser.parse_args()


def run(name: str, timeout_s: float = TIMEOUT_S) -> Outcome:
    """Run one benchmark to its end."""
    began_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{name}", "--smoke"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # So that all of it can be ended. Its servers are in sessions of their own, and end when it is interrupted.
        start_new_session=True,
    )
    status: int | None = None
    try:
        output, _ = process.communicate(timeout=timeout_s)
        status = process.returncode
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
    return Outcome(status, time.monotonic() - began_s, output)


def _outcomes(names: Sequence[str], jobs: int) -> Iterator[tuple[str, Outcome]]:
    """Run benchmarks, this many at once. Yields each as it ends; nothing more starts once this is interrupted."""
    with ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(run, name): name for name in names}
        try:
            for ended in as_completed(runs):
                yield runs[ended], ended.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description="Run benchmarks with tiny counts: do they run, are answers right.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--jobs", type=int, default=JOBS, help="how many at once; default: %(default)s")
    options = parser.parse_args()
    names = options.names or list(BENCHMARKS)
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"expected benchmarks of {', '.join(BENCHMARKS)}, got {', '.join(unknown)}")
    failed = []
    for name, outcome in _outcomes(names, options.jobs):
        is_right = outcome.status == 0
        said = "ok" if is_right else "FAILED: " + ("ended, it hung" if outcome.status is None else f"{outcome.status}")
        print(f"{name:<14} {outcome.took_s:>6.1f} s  {said}", flush=True)
        if not is_right:
            failed.append(name)
            print(outcome.output[-4000:], flush=True)
    if failed:
        sys.exit(f"{len(failed)} of {len(names)} benchmarks failed: {', '.join(failed)}")
    print(f"{len(names)} benchmarks ran, and their answers were right")


if __name__ == "__main__":
    main()
