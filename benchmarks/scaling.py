"""What a step in load does to a deployment with ``replicas: {min: 1, max: 3}``: 1 connection, 64, and 1 again.

Each connection asks again as soon as it is answered. The model takes 50 ms for a batch of up to four rows, without
using the processor, so that three replicas have room on any machine: what is measured is the policy, not the cores. The
table has a line a second: replicas that serve, answers, and what requests took beyond the model's 50 ms, which is
the wait for a place in a batch and the way there and back. Every answer is verified; one that is missing or wrong ends
the run with status 1, as does a deployment that doesn't reach three replicas, or doesn't come back to one.

    python -m benchmarks.scaling --before 5 --during 30 --after 40

With ``--smoke`` it is two replicas at most, the policy is in more of a hurry, and a phase ends as soon as its replicas
are there.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.fanout_client import Connection, TensorBytes
from benchmarks.fanout_servers import Server, headwater
from benchmarks.smoke import parse_with_smoke

COMPUTE_S = 0.05
ROWS = 4
CONNECTIONS = 64
MOST = 3
SCALING = {"queue_wait_ms": 100, "up_after_s": 3, "down_after_s": 8}
SMOKE_SCALING = {"queue_wait_ms": 100, "up_after_s": 1, "down_after_s": 1}
MODEL = "sleeper"


class Answer(NamedTuple):
    """When it came, and what it took beyond the model's own time."""

    at_s: float
    wait_s: float


class Load:
    """Connections that ask until told otherwise.

    Args:
        server: which.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._threads: list[tuple[threading.Event, threading.Thread]] = []
        self.answers: list[Answer] = []
        self.errors: list[str] = []

    def connections(self, count: int) -> None:
        """Have so many from now on; those that are over answer what they asked."""
        ending, self._threads = self._threads[count:], self._threads[:count]
        for over, _ in ending:
            over.set()
        for _, thread in ending:
            thread.join()
        while len(self._threads) < count:
            over = threading.Event()
            thread = threading.Thread(target=self._ask, args=(over, len(self._threads)))
            self._threads.append((over, thread))
            thread.start()

    def _ask(self, over: threading.Event, number: int) -> None:
        row = np.array([[number]], np.float32)
        inputs = {"x": TensorBytes("FP32", row.shape, row.tobytes())}
        try:
            with Connection(self._server.url) as connection:
                while not over.is_set():
                    began_s = time.monotonic()
                    y = connection.infer(MODEL, inputs, ["y"])["y"].floats()
                    if y.tolist() != row.tolist():
                        raise ValueError(f"expected {row.tolist()}, got {y.tolist()}")
                    now_s = time.monotonic()
                    self.answers.append(Answer(now_s, now_s - began_s - COMPUTE_S))
        except Exception as error:  # a thread's boundary; told at the end
            self.errors.append(f"{type(error).__name__}: {error}")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for phase, seconds in (("before", 5), ("during", 30), ("after", 40)):
        parser.add_argument(f"--{phase}", type=int, default=seconds, metavar="SECONDS")
    options = parse_with_smoke(parser, before=1, during=90, after=90)
    most, scaling = (2, SMOKE_SCALING) if options.smoke else (MOST, SCALING)
    deployment = {
        "model": "benchmarks.scaling_model:Sleeper",
        "options": {"seconds": COMPUTE_S},
        "batching": {"max_batch_size": ROWS},
        "replicas": {"min": 1, "max": most},
        "scaling": scaling,
        "warmup_batch_sizes": [1],
    }
    with headwater({MODEL: deployment}) as server:
        phases = ((options.before, 1, 1), (options.during, CONNECTIONS, most), (options.after, 1, 1))
        found, errors = _step(server, phases, may_end_early=options.smoke)
    counts = [line["replicas"] for line in found]
    print(f"\nerrors: {len(errors)}; replicas: at most {max(counts)}, {counts[-1]} at the end")
    for error in errors[:5]:
        print(error, file=sys.stderr)
    sys.exit(1 if errors or max(counts) < most or counts[-1] > 1 else 0)


def _step(
    server: Server, phases: Sequence[tuple[int, int, int]], *, may_end_early: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run phases of so many seconds with so many connections; prints a line a second, and returns them.

    A phase may end early once it has as many replicas as it says.
    """
    load = Load(server)
    lines: list[dict[str, Any]] = []
    began_s = time.monotonic()
    print(
        f"{'time s':>6} {'connections':>12} {'replicas':>9} {'wait p50 ms':>12} {'wait max ms':>12} {'answers/s':>10}"
    )
    try:
        for seconds, connections, wanted in phases:
            load.connections(connections)
            for _ in range(seconds):
                last_s, first = time.monotonic(), len(load.answers)
                time.sleep(1)
                line = _line(load.answers[first:], time.monotonic() - last_s)
                line |= {"time_s": time.monotonic() - began_s, "connections": connections, "replicas": _ready(server)}
                lines.append(line)
                print(
                    f"{line['time_s']:>6.0f} {connections:>12} {line['replicas']:>9} {line['p50_ms']:>12.1f} "
                    f"{line['max_ms']:>12.1f} {line['per_s']:>10.0f}",
                    flush=True,
                )
                if may_end_early and line["replicas"] == wanted:
                    break
    finally:
        load.connections(0)
    return lines, load.errors


def _line(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    waits_ms = [1000 * answer.wait_s for answer in answers] or [float("nan")]
    return {"per_s": len(answers) / seconds, "p50_ms": float(np.median(waits_ms)), "max_ms": max(waits_ms)}


def _ready(server: Server) -> int:
    with urllib.request.urlopen(f"{server.url}/v2/repository/index", timeout=10) as answer:
        return int(next(one for one in json.load(answer) if one["name"] == MODEL)["replicas"]["ready"])


if __name__ == "__main__":
    main()
