"""Token streams: what the engine, the way to the client, and the clients' manners cost.

``python -m benchmarks.stream [--only a,b,c,d,e,f,g] [--repeats N] [--json FILE] [--smoke] ...``

- **a**: the engine's step against the bare batched forward of the same model, at 1, 8 and 32 sequences; beside them
  transformers' ``generate`` on a static batch and its continuous batching (`benchmarks.lm_engine`; random weights);
- **b**: tokens a second at 64 HTTP clients, against the same engine alone in a process of its own with the same 64
  prompts and answers; the shipped model, as many threads both times;
- **c**: the same with engines that compute nothing, through one gateway worker: ``null`` as fast as it can, so that
  tokens gather on their way and an event has many, ``stepped`` at 2 ms a step, which leaves time for an event a token;
  against PyTriton alone giving 64 clients one decoupled response a token (`benchmarks.stream_pytriton`);
- **d**: time to the first token at an HTTP client of an idle server, less that of the engine alone;
- **e**: a client of 16 sequences that stops reading, from an engine that takes 5 ms a step and computes nothing: what
  its 16 neighbours get in the meantime, and by how much the gateway worker grows; against the same client reading on;
- **f**: what relaying vLLM's streams costs: the gateway worker's CPU a token and the delay added, at 1, 16 and 64
  streams of a stand-in that sends 50 events a second to each (`benchmarks.vllm_stand_in`);
- **g**: the same streams of a vLLM: tokens a second through the gateway and on its own socket. Left out where no
  interpreter has one (`make vllm-env`, or HEADWATER_VLLM_PYTHON).

Server, load generator (`benchmarks.stream_load`) and engine are processes on this machine; contenders take turns, and
ratios are taken within a turn. Every answer is verified: its number of tokens, and its text, which must be the
engine's (with other neighbours, rounding may turn a tie: those are counted). One that fails or is wrong fails its
part, of which no figures are printed then, and the benchmark's status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.fanout_report import Ratio, Spread, ratio_line
from benchmarks.fanout_servers import Server, headwater
from benchmarks.lm_engine import BARE, CONTENDERS, ENGINE, machine, measure, model_of, print_table, quiet, title_of
from benchmarks.smoke import parse_with_smoke
from benchmarks.stream_engine import MODEL, EngineAlone
from benchmarks.stream_latency import PACE_S, first_token, stalled_reader
from benchmarks.stream_load import LoadGenerator
from benchmarks.stream_rates import STEP_S, STREAMS, against_pytriton, against_the_engine
from benchmarks.stream_vllm import against_vllm, relay_cost, vllm_python

PARTS = ("a", "b", "c", "d", "e", "f", "g")
SEQUENCES = (1, 8, 32)
OF_THE_BARE_AT_LEAST = 0.85

Figures: TypeAlias = tuple[dict[str, Any], list[Ratio]]
"""What was measured, by name, an entry a repeat; and what follows from it."""


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="Token streams: engine, way to the client, clients.")
    parser.add_argument("--only", default=",".join(PARTS), help="the parts to run, such as b,c")
    parser.add_argument("--repeats", type=int, default=5, help="of a, b, c, f and g")
    parser.add_argument("--size", default="12", help="of a's model: millions of parameters (5, 12 or 1100)")
    parser.add_argument("--sequences", default=",".join(map(str, SEQUENCES)), help="in a; default: %(default)s")
    parser.add_argument("--decoded", type=int, default=64, help="tokens a sequence in a")
    parser.add_argument("--tokens", type=int, default=256, help="a stream in b")
    parser.add_argument("--null-tokens", type=int, default=2000, help="a stream in c")
    parser.add_argument("--pairs", type=int, default=40, help="of d")
    parser.add_argument("--stall-s", type=float, default=30, help="for how long e's client doesn't read")
    parser.add_argument("--stalls", type=int, default=3, help="of e")
    parser.add_argument(
        "--threads",
        type=int,
        default=max(1, (os.cpu_count() or 2) - 1),
        help="of the shipped model's engine, alone and served; default: a core is left for the way to the client",
    )
    parser.add_argument("--relay-s", type=float, default=6, help="how long f's streams last")
    parser.add_argument("--vllm-tokens", type=int, default=256, help="a stream in g")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw figures there")
    options = parse_with_smoke(
        parser, repeats=1, size="5", sequences="2", decoded=4, tokens=16, null_tokens=100, pairs=1, stall_s=1, stalls=1,
        relay_s=0.2, vllm_tokens=8,
    )  # fmt: skip
    wanted = [part for part in options.only.split(",") if part]
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--only: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    print(machine())
    raw: dict[str, Any] = {"machine": machine(), "options": {**vars(options), "json": str(options.json)}}
    failed = _run(wanted, options, raw)
    if options.json is not None:
        options.json.write_text(json.dumps(raw, indent=1))
        print(f"\nraw figures: {options.json}")
    if failed:
        sys.exit(f"\nFAILED, no figures: {', '.join(failed)}")


def _run(wanted: list[str], options: argparse.Namespace, raw: dict[str, Any]) -> list[str]:
    """Run the parts; the names of those that failed."""
    failed: list[str] = []

    def part(name: str, title: str, figures: Callable[[], Figures]) -> None:
        if name not in wanted:
            return
        print(f"\n({name}) {title}", flush=True)
        try:
            measured, ratios = figures()
        except RuntimeError as error:  # a server that didn't start, an answer that is wrong
            print(f"FAILED: {error}")
            raw[name] = {"error": str(error)}
            failed.append(name)
            return
        _print(measured, ratios)
        raw[name] = {**measured, "ratios": {ratio.name: list(ratio.values) for ratio in ratios}}

    part("a", f"the engine alone, {options.decoded} tokens a sequence, {options.repeats} repeats", lambda: _a(options))
    if "f" in wanted or "g" in wanted:
        with LoadGenerator() as load:
            told = f"vLLM's streams, {options.repeats} repeats"
            part("f", f"{told} of {options.relay_s:g} s", lambda: relay_cost(load, options.relay_s, options.repeats))
            python = vllm_python()
            if python is None or options.smoke:
                print(
                    "\n(g) left out: " + ("a smoke run starts no vLLM" if options.smoke else "no vLLM; make vllm-env")
                )
            else:
                title = f"{told} of {options.vllm_tokens} tokens"
                part("g", title, lambda: against_vllm(load, python, options.vllm_tokens, options.repeats))
    if not set(wanted) - {"a", "f", "g"}:
        return failed
    with contextlib.ExitStack() as stack:
        try:
            print("\nstarting the server ...", flush=True)
            server = stack.enter_context(_server(wanted, options.threads))
            load = stack.enter_context(LoadGenerator())
            engine = stack.enter_context(EngineAlone(options.threads, STREAMS))
        except RuntimeError as error:
            print(f"FAILED: {error}")
            return failed + [name for name in wanted if name not in "afg"]
        told = f"{STREAMS} streams, {options.repeats} repeats"
        part(
            "b",
            f"{told} of {options.tokens} tokens, {options.threads} threads",
            lambda: against_the_engine(server, load, engine, options.tokens, options.repeats),
        )
        part(
            "c",
            f"{told} of {options.null_tokens} tokens, engines that compute nothing",
            lambda: against_pytriton(server, load, options.null_tokens, options.repeats),
        )
        part(
            "d",
            f"the first token, {options.pairs} pairs, {options.threads} threads",
            lambda: first_token(server, load, engine, options.pairs),
        )
        part(
            "e",
            f"one that doesn't read for {options.stall_s:g} s, {options.stalls} pairs",
            lambda: stalled_reader(server, load, options.stall_s, options.stalls),
        )
    return failed


def _a(options: argparse.Namespace) -> Figures:
    quiet()
    model = model_of(options.size, "cpu", "float32")
    ratios = []
    measured: dict[str, Any] = {}
    counts = [int(text) for text in options.sequences.split(",")]
    for count in counts:
        seconds = measure(model, count, 64, options.decoded, options.repeats, CONTENDERS)
        print_table(f"{title_of(model)}, {count} sequences", seconds, count)
        measured[f"seconds a step, {count} sequences"] = seconds
        values = [bare / one for bare, one in zip(seconds[BARE], seconds[ENGINE], strict=True)]
        goal = OF_THE_BARE_AT_LEAST if count == max(counts) else None
        ratios.append(Ratio(f"engine / bare forward, {count} sequences", values, at_least=goal))
    return measured, ratios


def _server(wanted: list[str], threads: int) -> contextlib.AbstractContextManager[Server]:
    """The server with what the parts need."""
    nothing = {"model": MODEL, "timeout_s": 300}
    engine = "benchmarks.stream_engine:null"
    deployments: dict[str, Any] = {}
    if {"b", "d"} & set(wanted):
        deployments["tiny"] = {
            "model": MODEL,
            "threads": threads,
            "device": "cpu",
            "timeout_s": 300,
            "options": {"dtype": "float32", "max_sequences": STREAMS},
        }
    if "c" in wanted:
        deployments["null"] = {**nothing, "options": {"engine": engine}}
        deployments["stepped"] = {**nothing, "options": {"engine": engine, "step_s": STEP_S}}
    if "e" in wanted:
        deployments["paced"] = {**nothing, "options": {"engine": engine, "step_s": PACE_S}}
    return headwater(deployments)


def _print(measured: dict[str, Any], ratios: list[Ratio]) -> None:
    lists = {name: values for name, values in measured.items() if isinstance(values, list) and values}
    if lists:
        print(f"{'':<46} {'median':>10} {'range':>20}")
    for name, values in lists.items():
        if isinstance(values[0], str):
            print(f"{name:<46} {', '.join(values)}")
            continue
        found = Spread.of(values)
        print(f"{name:<46} {found.median:>10,.2f} {f'{found.least:,.2f} to {found.most:,.2f}':>20}")
    if measured.get("ties"):
        print(f"texts that differ from the engine's at a tie: {measured['ties']}")
    print(f"\n{'':<46} {'median':>7} {'quartiles':>16} {'range':>16}")
    for ratio in ratios:
        print(ratio_line(ratio))


if __name__ == "__main__":
    main()
