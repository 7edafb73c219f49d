"""The gateway against Triton's own HTTP in front of the same callable, and against FastAPI alone.

``python -m benchmarks.gateway [--seconds S] [--repeats N] [--connections 1,16,64,256] [--workers 1,2,4,8] [--failing N]
[--smoke]``: prints requests/s and p50/p99, medians over repeats with their spread, servers interleaved; with several
counts of workers a gateway of each, and how throughput grows; then how throughput holds up over 5,000 requests whose
callable raises. wrk looks at the status of each answer; the values of some are verified before and after. Writes the
raw figures to benchmarks/results/gateway.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import urllib.request
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from benchmarks.load import Load, run_wrk
from benchmarks.servers import free_port, gateway, running
from benchmarks.smoke import parse_with_smoke

BODY = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": [float(value) for value in range(16)]}]}
).encode()
POISON = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [-1.0]}]}).encode()
MODEL = "headwater.zoo.scale:Scale"
PATH = "/v2/models/scale/infer"
RESULTS = Path(__file__).parent / "results" / "gateway.json"
TRITON, PLAIN = "Triton's own HTTP", "FastAPI alone"
POISON_CONNECTIONS = 16
VERIFIED = 20


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--connections", default="1,16,64,256")
    parser.add_argument("--failing", type=int, default=5000, help="requests whose callable raises, at least")
    parser.add_argument("--workers", default="1", help="of the gateway: one gateway for each count")
    options = parse_with_smoke(parser, seconds=1, repeats=1, connections="4", workers="1,2", failing=1)
    connections = [int(text) for text in options.connections.split(",")]
    gateways = {f"gateway, {count} worker{'s' * (count > 1)}": count for count in map(int, options.workers.split(","))}
    print(_machine())
    with contextlib.ExitStack() as stack:
        triton_port, plain_port = free_port(), free_port()
        batches = "deployments.scale.batching.max_batch_size=64"
        urls = {
            name: stack.enter_context(gateway(MODEL, batches, f"server.workers={count}")) + PATH
            for name, count in gateways.items()
        }
        urls |= {
            TRITON: f"http://127.0.0.1:{triton_port}{PATH}",
            PLAIN: f"http://127.0.0.1:{plain_port}{PATH}",
        }
        for module, port, url in (
            ("benchmarks.bare_pytriton", triton_port, urls[TRITON]),
            ("benchmarks.plain_fastapi", plain_port, urls[PLAIN]),
        ):
            stack.enter_context(running([sys.executable, "-m", module, str(port)], url, BODY))
        for url in urls.values():
            _verify(url)
            run_wrk(url, BODY, 16, min(2, options.seconds))  # warm
        loads = _measure(urls, connections, options.seconds, options.repeats)
        for url in urls.values():
            _verify(url)
    _print(loads, connections, gateways)
    poison = _poison(options.failing)
    if options.smoke:
        return
    RESULTS.parent.mkdir(exist_ok=True)
    raw = {
        name: {str(count): [asdict(load) for load in found] for count, found in by.items()}
        for name, by in loads.items()
    }
    RESULTS.write_text(json.dumps({"machine": _machine(), "loads": raw, "poison_per_s": poison}, indent=1))
    print(f"\nraw figures: {RESULTS}")


def _measure(
    urls: dict[str, str], connections: list[int], seconds: float, repeats: int
) -> dict[str, dict[int, list[Load]]]:
    loads: dict[str, dict[int, list[Load]]] = {name: {count: [] for count in connections} for name in urls}
    for repeat in range(repeats):
        for count in connections:
            for name, url in urls.items():
                print(f"\rrepeat {repeat + 1}/{repeats}, {count} connections, {name:<20}", end="", flush=True)
                load = run_wrk(url, BODY, count, seconds)
                if load.status_errors or load.socket_errors:
                    raise SystemExit(
                        f"\n{name}: {load.status_errors} error answers, {load.socket_errors} socket errors"
                    )
                loads[name][count].append(load)
    print("\r" + " " * 70)
    return loads


def _print(loads: dict[str, dict[int, list[Load]]], connections: list[int], gateways: dict[str, int]) -> None:
    least, fewest = min((count, name) for name, count in gateways.items())
    print(f"{'connections':>11}  {'server':<20} {'requests/s':>10} {'(spread)':>15} {'p50 ms':>8} {'p99 ms':>8}")
    for count in connections:
        for name in loads:
            found = loads[name][count]
            rates = sorted(load.per_s for load in found)
            print(
                f"{count:>11}  {name:<20} {statistics.median(rates):>10,.0f} "
                f"{f'({rates[0]:,.0f}-{rates[-1]:,.0f})':>15} "
                f"{statistics.median(load.p50_ms for load in found):>8.2f} "
                f"{statistics.median(load.p99_ms for load in found):>8.2f}"
            )
        for name, workers in gateways.items():
            rate = [a.per_s / b.per_s for a, b in zip(loads[name][count], loads[TRITON][count], strict=True)]
            p50 = [a.p50_ms / b.p50_ms for a, b in zip(loads[name][count], loads[TRITON][count], strict=True)]
            print(f"{'':>11}  {name} / Triton: requests/s {_ratio(rate)}, p50 {_ratio(p50)}")
            if name != fewest:
                pairs = zip(loads[name][count], loads[fewest][count], strict=True)
                share = [a.per_s / b.per_s * least / workers for a, b in pairs]
                print(f"{'':>11}  {name} / {fewest}: requests/s {_ratio(share)} of linear")
        print()


def _ratio(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def _poison(least: int) -> list[float]:
    """Throughput of so many requests whose callable raises, second by second."""
    services = Path(__file__).parents[1] / "tests" / "services"
    before = os.getcwd()
    os.chdir(services)
    rates = []
    try:
        with gateway("faulty:Faulty") as url:
            total = 0
            while total < least:
                load = run_wrk(f"{url}/v2/models/faulty/infer", POISON, POISON_CONNECTIONS, 1)
                if load.status_errors != load.requests:
                    raise SystemExit(f"expected every request to fail, {load.requests - load.status_errors} did not")
                total += load.requests
                rates.append(load.per_s)
    finally:
        os.chdir(before)
    print(
        f"requests whose callable raises, {POISON_CONNECTIONS} connections, second by second: "
        + ", ".join(f"{rate:,.0f}/s" for rate in rates)
        + f"; last / first: {rates[-1] / rates[0]:.2f}"
    )
    return rates


def _verify(url: str) -> None:
    for number in range(VERIFIED):
        values = [float(number + place) for place in range(16)]
        body = json.loads(BODY)
        body["inputs"][0]["data"] = values
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            got = json.load(answer)["outputs"][0]["data"]
        expected = [2 * value for value in values]
        if got != expected:
            raise SystemExit(f"{url}: expected {expected}, got {got}")


def _machine() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("nvidia-pytriton", "numpy", "fastapi", "uvicorn"))
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, {packages}"


if __name__ == "__main__":
    main()
