"""One 600 KB binary tensor a request: the gateway against bare PyTriton with Triton's own HTTP.

``python -m benchmarks.large_tensors [--rounds N] [--seconds S] [--connections 1,16] [--smoke]``: an FP32 image of
[1, 3, 224, 224], 602,112 bytes, whose channels' means come back (``means``), or the image itself (``echo``). Every
answer is compared byte by byte. The servers are up at the same time and take turns; a ratio is taken within a round.
Writes the raw figures to benchmarks/results/large_tensors.json. ``--smoke``: a moment of each, without a ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from pathlib import Path

import numpy as np

from benchmarks.binary_load import BinaryLoad, run_binary
from benchmarks.large_tensors_model import IMAGE_SHAPE, ChannelMeans, Echo
from benchmarks.servers import free_port, gateway, running

RESULTS = Path(__file__).parent / "results" / "large_tensors.json"
MODULE = "benchmarks.large_tensors_model"
OURS, BARE = "gateway", "bare PyTriton"
CASES = {"means": "ChannelMeans", "echo": "Echo"}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--connections", default="1,16")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    rounds, seconds = (1, 0.5) if options.smoke else (options.rounds, options.seconds)
    connections = [int(text) for text in options.connections.split(",")]
    image = np.random.default_rng(7).standard_normal((1, *IMAGE_SHAPE)).astype(np.float32)
    answers = {"means": ChannelMeans()(image)["means"].tobytes(), "echo": Echo()(image)["image"].tobytes()}
    bodies = {case: _text(output, image.nbytes) for case, output in (("means", "means"), ("echo", "image"))}
    tensor = image.tobytes()
    found: dict[str, dict[str, list[BinaryLoad]]] = {}
    with contextlib.ExitStack() as stack:
        bare_port = free_port()
        bare = [sys.executable, "-m", "benchmarks.large_tensors_pytriton", str(bare_port)]
        stack.enter_context(running(bare, f"http://127.0.0.1:{bare_port}/v2/models/echo/ready"))
        ports = {}
        for case, kind in CASES.items():
            url = gateway(f"{MODULE}:{kind}", f"deployments.{kind.lower()}.batching.max_batch_size=16")
            ports[case] = {OURS: _port(stack.enter_context(url)), BARE: bare_port}
        for round in range(-1, rounds):  # the first one warms up
            for case, kind in CASES.items():
                for count in connections:
                    # Who goes first changes from round to round.
                    for server in (OURS, BARE) if round % 2 else (BARE, OURS):
                        path = f"/v2/models/{kind.lower()}/infer"
                        length_s = min(seconds, 1) if round < 0 else seconds
                        load = run_binary(
                            ports[case][server], path, bodies[case], tensor, answers[case], count, length_s
                        )
                        if round >= 0:
                            found.setdefault(f"{case}, {count} connections", {}).setdefault(server, []).append(load)
                        print(f"\rround {round + 1}/{rounds}, {case}, {count} connections ", end="", flush=True)
    print("\r" + " " * 60 + "\r", end="")
    _print(found, is_smoke=options.smoke)
    if not options.smoke:
        RESULTS.parent.mkdir(exist_ok=True)
        raw = {
            case: {
                server: [
                    {"per_s": load.per_s, "p50_ms": load.quantile_ms(0.5), "p99_ms": load.quantile_ms(0.99)}
                    for load in loads
                ]
                for server, loads in by.items()
            }
            for case, by in found.items()
        }
        RESULTS.write_text(json.dumps(raw, indent=1))
        print(f"raw figures: {RESULTS}")


def _text(output: str, size_bytes: int) -> bytes:
    tensor = {
        "name": "image",
        "datatype": "FP32",
        "shape": [1, *IMAGE_SHAPE],
        "parameters": {"binary_data_size": size_bytes},
    }
    return json.dumps({"inputs": [tensor], "outputs": [{"name": output, "parameters": {"binary_data": True}}]}).encode()


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def _print(found: dict[str, dict[str, list[BinaryLoad]]], *, is_smoke: bool) -> None:
    print(f"{'case':<22} {'server':<14} {'requests/s':>10} {'p50 ms':>8} {'p99 ms':>8}")
    for case, by in found.items():
        for server, loads in by.items():
            rate = statistics.median(load.per_s for load in loads)
            p50, p99 = (statistics.median(load.quantile_ms(q) for load in loads) for q in (0.5, 0.99))
            print(f"{case:<22} {server:<14} {rate:>10,.0f} {p50:>8.2f} {p99:>8.2f}")
        if not is_smoke:
            ratios = [a.quantile_ms(0.5) / b.quantile_ms(0.5) for a, b in zip(by[OURS], by[BARE], strict=True)]
            print(
                f"{'':<22} p50 gateway / bare: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            )


if __name__ == "__main__":
    main()
