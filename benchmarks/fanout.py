"""One trunk and two heads, in six layouts: what asking for both heads costs beside asking for one.

``python -m benchmarks.fanout [--rounds N] [--layouts process,client,router,fused,graph] [--faults] [--json FILE]
[--smoke]``.

The case is a report about Triton: a trunk A with heads B and C took 86 ms as A+B, 165 ms as A+C, and 262 ms as A+B+C
through a model that calls A and hands its features to B and C, which is more than two separate requests take. Models of
those times (A 30, B 56, C 135 ms on one thread) are made of real matrix products, whose number is calibrated first. An
image of UINT8 [3, 224, 224] (151 KB) goes in, features of FP32 [512, 14, 14] (401 KB) lie between, FP32 [16] come out
of each head. One client asks, one request at a time:

- **bare**: the callables called directly in the client's process, one after the other; no faster on one core;
- **process**: the same in a process of their own, behind a pipe: what another process costs on this machine;
- **client**: three plain deployments of Headwater; the client carries the features from A to B and to C;
- **router**: the report's layout, on PyTriton alone (`benchmarks.fanout_pytriton`);
- **fused**: a pipeline of Headwater in one callable;
- **graph**: a pipeline of Headwater whose steps are replicas of their own: A first, then B and C beside each other, on
  a core each, which their replicas are bound to; gateway, trunk and client run wherever there is room.

All servers are up at the same time, with one thread for each callable (``OMP_NUM_THREADS=1`` and the like); what they
use idle is measured and printed. In each round every layout is asked for A+B, A+C and A+B+C, in an order of layouts
that is shuffled anew, so that what disturbs the machine hits all alike; ratios are taken within a round. Every answer
is compared with torch's own, within 1e-4 of the largest element; the first wrong or failed one ends the benchmark.
Rounds to warm up don't count; the very first request after a server says that it is ready is reported by itself.

``--faults`` adds `benchmarks.fanout_faults`: what failures of one head do to requests that don't ask for it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import time
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.fanout_calibration import calibrate, loaded
from benchmarks.fanout_faults import measure_faults
from benchmarks.fanout_layouts import (
    Answers,
    Bare,
    Layout,
    Options,
    bare_process,
    client_calls,
    pipeline,
    router,
)
from benchmarks.fanout_models import Head, Trunk
from benchmarks.fanout_report import Ratio, Spread, ratio_line, times_line
from benchmarks.fanout_servers import cpu_s
from benchmarks.smoke import parse_with_smoke

KINDS = {"A+B": ("b",), "A+C": ("c",), "A+B+C": ("b", "c")}
BOTH = "A+B+C"
LAYOUTS = ("process", "client", "router", "fused", "graph")
WANTED_MS = {"a": 30.0, "b": 56.0, "c": 135.0}
TOLERANCE = 1e-4
IMAGES = 4
IDLE_S = 3.0
IDLE_CPU_AT_MOST = 0.05
"""Cores; more than that of a server that isn't asked would disturb the others."""
FUSED_AT_MOST = 1.05
GRAPH_AT_MOST = 1.15

Images = list[np.ndarray[Any, np.dtype[np.uint8]]]


@dataclass
class Figures:
    """What was measured: milliseconds, by layout and kind, a list entry a round."""

    times_ms: dict[str, dict[str, list[float]]]
    calls_ms: dict[str, list[float]] = field(default_factory=dict)
    """Of the bare callables, by ``a``, ``b`` and ``c``."""
    first_ms: dict[str, float] = field(default_factory=dict)
    """The first A+B+C of each layout after it was ready."""
    idle_cores: dict[str, float] = field(default_factory=dict)

    def add(self, layout: str, kind: str, took_ms: float) -> None:
        """Note one request."""
        self.times_ms[layout][kind].append(took_ms)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="One trunk and two heads, in six layouts.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warmup-rounds", type=int, default=3)
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="those to compare with the bare callables")
    parser.add_argument("--repeats", type=int, help="blocks of each model; default: as many as its time takes")
    parser.add_argument("--no-pin", action="store_true", help="let the graph's heads run on any core")
    parser.add_argument("--faults", action="store_true", help="measure what failures of a head do to other requests")
    parser.add_argument("--blocks", type=int, default=6, help="pairs of blocks for each fault")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw figures there")
    arguments = parse_with_smoke(parser, rounds=1, warmup_rounds=0, repeats=1, faults=True, blocks=1)
    names = [name for name in arguments.layouts.split(",") if name]
    if unknown := set(names) - set(LAYOUTS):
        parser.error(f"--layouts: expected some of {', '.join(LAYOUTS)}, got {', '.join(sorted(unknown))}")
    if min(arguments.rounds, arguments.blocks, arguments.repeats or 1) < 1:
        parser.error("--rounds, --blocks and --repeats: expected at least 1")
    try:
        _run(names, arguments)
    except RuntimeError as error:  # a server that didn't start, an answer that is an error
        raise SystemExit(f"\n{error}") from None


def _run(names: list[str], arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    print(_machine())
    options = _calibrated(arguments.repeats)
    print("models: " + ", ".join(f"{name.upper()} {chosen['repeats']} blocks" for name, chosen in options.items()))
    cores = [] if arguments.no_pin else sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        cores = []
    figures = Figures({name: {kind: [] for kind in KINDS} for name in ("bare", *names)})
    raw_faults = None
    _compare(figures, names, options, cores, arguments.rounds, arguments.warmup_rounds)
    _print(figures)
    if arguments.faults:
        raw_faults = (
            measure_faults(1, faults=("raise",), block_s=1) if arguments.smoke else measure_faults(arguments.blocks)
        )
    if arguments.json is not None:
        raw = {
            "machine": _machine(),
            "options": options,
            "graph_cores": cores,
            **vars(figures),
            "ratios": {ratio.name: ratio.values for ratio in _ratios(figures)},
            "faults": raw_faults,
        }
        arguments.json.write_text(json.dumps(raw, indent=1))
        print(f"\nraw figures: {arguments.json}")


def _calibrated(repeats: int | None) -> Options:
    """The models' options; ``repeats``: so many blocks for each, whatever time that takes."""
    image = torch.from_numpy(_images(1)[0])
    a = repeats or calibrate(lambda repeats: Trunk(repeats), {"x": image}, WANTED_MS["a"])
    features = loaded(Trunk(a))(x=image)["features"]
    options: Options = {"a": {"repeats": a, "seed": 1}}
    for seed, name in enumerate(("b", "c"), start=2):
        blocks = repeats or calibrate(lambda repeats: Head(repeats), {"features": features}, WANTED_MS[name])
        options[name] = {"repeats": blocks, "output": f"y_{name}", "seed": seed}
    return options


def _compare(
    figures: Figures, names: list[str], options: Options, cores: list[int], rounds: int, warmup_rounds: int
) -> None:
    starts = {
        "process": bare_process,
        "client": client_calls,
        "router": router,
        "fused": pipeline("fused"),
        "graph": pipeline("graph", cores),
    }
    images = _images(IMAGES)
    bare = Bare(options)
    times, _ = bare.times_ms(images[0])
    figures.first_ms["bare"] = sum(times.values())
    right = [bare.times_ms(image)[1] for image in images]
    with contextlib.ExitStack() as stack:
        layouts: dict[str, Layout] = {}
        for name in names:
            print(f"starting {name} ...", flush=True)
            layouts[name] = stack.enter_context(starts[name](options))
            figures.first_ms[name] = _ask(name, layouts[name], BOTH, images[0], right[0])
        figures.idle_cores = _idle_cores(layouts)
        order = random.Random(0)
        for number in range(-warmup_rounds, rounds):
            print(f"\r{f'round {number + 1}/{rounds}' if number >= 0 else 'warming up'} ", end="", flush=True)
            which = number % IMAGES
            turns = ["bare", *names]
            order.shuffle(turns)
            for name in turns:
                if name == "bare":
                    _ask_bare(figures, bare, images[which], right[which], counts=number >= 0)
                    continue
                for kind in KINDS:
                    took_ms = _ask(name, layouts[name], kind, images[which], right[which])
                    if number >= 0:
                        figures.add(name, kind, took_ms)
    print("\r" + " " * 30)


def _ask(
    name: str, layout: Layout, kind: str, image: np.ndarray[Any, np.dtype[np.uint8]], right: Answers
) -> float:  # fmt: skip
    """Milliseconds until the answer, which is then verified."""
    started = time.perf_counter()
    answers = layout.ask(image, KINDS[kind])
    took_ms = (time.perf_counter() - started) * 1e3
    _verify(f"{name}, {kind}", answers, {head: right[head] for head in KINDS[kind]})
    return took_ms


def _ask_bare(
    figures: Figures, bare: Bare, image: np.ndarray[Any, np.dtype[np.uint8]], right: Answers, *, counts: bool
) -> None:
    times, answers = bare.times_ms(image)
    _verify("bare", answers, right)
    if counts:
        for call, took_ms in times.items():
            figures.calls_ms.setdefault(call, []).append(took_ms)
        for kind, heads in KINDS.items():
            figures.add("bare", kind, times["a"] + sum(times[head] for head in heads))


def _verify(where: str, answers: Answers, right: Answers) -> None:
    if answers.keys() != right.keys():
        raise SystemExit(f"\n{where}: expected answers of heads {sorted(right)}, got {sorted(answers)}")
    for head, expected in right.items():
        got = answers[head]
        if got.shape != expected.shape or not np.abs(got - expected).max() <= TOLERANCE * np.abs(expected).max():
            raise SystemExit(f"\n{where}, head {head}: expected {expected.tolist()}, got {got.tolist()}")


def _idle_cores(layouts: dict[str, Layout]) -> dict[str, float]:
    before = {name: cpu_s(layout.server) for name, layout in layouts.items()}
    time.sleep(IDLE_S)
    return {name: (cpu_s(layout.server) - before[name]) / IDLE_S for name, layout in layouts.items()}


def _ratios(figures: Figures) -> list[Ratio]:
    """All that the layouts at hand allow."""
    times = figures.times_ms
    bare_longest = [max(pair) for pair in zip(times["bare"]["A+B"], times["bare"]["A+C"], strict=True)]
    found = []

    def add(name: str, above: list[float], below: list[float], at_most: float | None = None) -> None:
        found.append(Ratio(name, [a / b for a, b in zip(above, below, strict=True)], at_most))

    if "fused" in times:
        add("fused A+B+C / bare A+B+C", times["fused"][BOTH], times["bare"][BOTH], FUSED_AT_MOST)
    if "process" in times:
        add("process A+B+C / bare A+B+C", times["process"][BOTH], times["bare"][BOTH])
        if "fused" in times:
            add("fused A+B+C / process A+B+C", times["fused"][BOTH], times["process"][BOTH])
    if "graph" in times:
        graph = times["graph"]
        add("graph A+B+C / bare max(A+B, A+C)", graph[BOTH], bare_longest, GRAPH_AT_MOST)
        own = [max(pair) for pair in zip(graph["A+B"], graph["A+C"], strict=True)]
        add("graph A+B+C / graph max(A+B, A+C)", graph[BOTH], own)
    for name in ("client", "router"):
        if name in times:
            add(f"{name} A+B+C / bare A+B+C", times[name][BOTH], times["bare"][BOTH])
            for other in ("fused", "graph"):
                if other in times:
                    add(f"{name} A+B+C / {other} A+B+C", times[name][BOTH], times[other][BOTH])
    return found


def _print(figures: Figures) -> None:
    print(f"{'layout':<16} {'what':<6} {'median':>8} {'quartiles':>18} {'range, ms':>18}")
    for call, values in figures.calls_ms.items():
        print(times_line("bare", call.upper(), values))
    for layout, by_kind in figures.times_ms.items():
        for kind, values in by_kind.items():
            print(times_line(layout, kind, values))
    print(f"\n{'ratio, round by round':<46} {'median':>7} {'quartiles':>16} {'range':>16}")
    for ratio in _ratios(figures):
        print(ratio_line(ratio))
    print("\nfirst A+B+C after ready, ms:")
    for layout, first_ms in figures.first_ms.items():
        usual = Spread.of(figures.times_ms[layout][BOTH]).median
        print(f"  {layout:<14} {first_ms:>8.1f}, {first_ms / usual:.2f} times its median")
    print("idle servers, cores used:")
    for layout, cores in figures.idle_cores.items():
        verdict = "pass" if cores <= IDLE_CPU_AT_MOST else "MISS"
        print(f"  {layout:<14} {cores:>8.3f}  goal <= {IDLE_CPU_AT_MOST:g}: {verdict}")


def _images(count: int) -> Images:
    """Images of noise, each the same in every run."""
    random_numbers = np.random.default_rng(0)
    return [random_numbers.integers(0, 256, (1, 3, 224, 224), dtype=np.uint8) for _ in range(count)]


def _machine() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("nvidia-pytriton", "torch", "numpy"))
    return f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, {packages}"


if __name__ == "__main__":
    main()
