"""How a gateway worker's memory grows with the number of requests that it has answered.

``python -m benchmarks.memory [--requests N] [--every N] [--first N] [--smoke]``: one worker with `scale`, which answers
rounds of mixed requests: most JSON over connections that stay, some binary, some that are refused with 400, and some
each over a connection of its own. Prints what the worker has after the first round that reaches ``--first`` requests,
and every so many from there; the goal is to stay within 5 % of the first figure.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gateway import BODY, MODEL, PATH, POISON
from benchmarks.idle import Use, uses
from benchmarks.load import run_wrk
from benchmarks.servers import gateway
from benchmarks.smoke import parse_with_smoke

RESULTS = Path(__file__).parent / "results" / "memory.json"
VALUES = 16


class Kind(NamedTuple):
    """One kind of request."""

    name: str
    body: bytes
    headers: dict[str, str]
    connections: int
    seconds: int
    """Of each round."""
    is_refused: bool = False


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000_000)
    parser.add_argument("--every", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=100_000)
    options = parse_with_smoke(parser, requests=2_000, every=1_000, first=1_000)
    samples: list[dict[str, Any]] = []
    began_s = time.monotonic()
    with gateway(MODEL, "deployments.scale.batching.max_batch_size=64") as url:
        sent = dict.fromkeys((kind.name for kind in _kinds()), 0)
        next_at = options.first
        while sum(sent.values()) < options.requests:
            for kind in _kinds(1 if options.smoke else None):
                sent[kind.name] += _send(url + PATH, kind)
            if (total := sum(sent.values())) >= next_at:
                next_at = max(options.every, next_at + options.every) // options.every * options.every
                worker = _worker()
                samples.append({"requests": total, "s": time.monotonic() - began_s, **worker._asdict()})
                _print(samples)
    shares = ", ".join(f"{name} {100 * count / sum(sent.values()):.0f} %" for name, count in sent.items())
    print(f"of all: {shares}")
    if not options.smoke:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"sent": sent, "samples": samples}, indent=1))
        print(f"raw figures: {RESULTS}")


def _kinds(seconds: int | None = None) -> list[Kind]:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, VALUES], "parameters": {"binary_data_size": 4 * VALUES}}
    head = json.dumps({"inputs": [tensor], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}).encode()
    binary = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    as_json = {"Content-Type": "application/json"}
    wrong = json.loads(POISON)
    wrong["inputs"][0]["datatype"] = "INT64"
    return [
        Kind("JSON", BODY, as_json, 64, seconds or 9),
        Kind("binary", head + struct.pack(f"<{VALUES}f", *range(VALUES)), binary, 16, seconds or 1),
        Kind("refused", json.dumps(wrong).encode(), as_json, 16, seconds or 1, is_refused=True),
        Kind("own connections", BODY, {**as_json, "Connection": "close"}, 16, seconds or 1),
    ]


def _send(url: str, kind: Kind) -> int:
    load = run_wrk(url, kind.body, kind.connections, kind.seconds, kind.headers)
    refused = load.requests if kind.is_refused else 0
    if load.status_errors != refused or load.socket_errors:
        raise SystemExit(
            f"{kind.name}: expected {refused} answers of an error and none without an answer, got "
            f"{load.status_errors} and {load.socket_errors}"
        )
    return load.requests


def _worker() -> Use:
    return next(use for use in uses(os.getpid()).values() if use.role == "gateway worker")


def _print(samples: list[dict[str, Any]]) -> None:
    first, now = samples[0], samples[-1]
    if len(samples) == 1:
        print(f"{'requests':>12} {'min':>6} {'RSS MB':>8} {'/ first':>8} {'own MB':>8} {'/ first':>8}")
    row = f"{now['requests']:>12,} {now['s'] / 60:>6.1f}"
    for what in ("resident_bytes", "anonymous_bytes"):
        row += f" {now[what] / 1e6:>8.1f} {now[what] / first[what]:>8.3f}"
    print(row, flush=True)


if __name__ == "__main__":
    main()
