"""Tokens a second at clients: against the engine alone, and with an engine that computes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.fanout_report import Ratio
from benchmarks.fanout_servers import Server, cpu_s, served
from benchmarks.servers import free_port
from benchmarks.stream_engine import EngineAlone, Run
from benchmarks.stream_load import Answer, Ask, Job, LoadGenerator, raw_body
from benchmarks.stream_texts import TIE, AnswerWrong, check, check_counting, prompts

__all__ = [
    "STEP_S",
    "STREAMS",
    "against_pytriton",
    "against_the_engine",
    "ask_pytriton",
    "bare_pytriton",
    "completion",
    "port_of",
]

STREAMS = 64
STEP_S = 0.002
"""32,000 tokens a second, if nothing else takes time."""
STEPPED_TOKENS = 1000
PYTRITON_TOKENS = 200
OF_THE_ENGINE_AT_LEAST = 0.85
NULL_AT_LEAST = 20_000


def against_the_engine(
    server: Server,
    load: LoadGenerator,
    engine: EngineAlone,
    tokens: int,
    repeats: int,
    *,
    streams: int = STREAMS,
    tie: float = TIE,
) -> tuple[dict[str, Any], list[Ratio]]:
    """Deployment ``tiny`` asked by so many clients, in turn with the engine alone doing the same."""
    of_prompts = prompts(streams)
    asks = [Ask(completion("tiny", ids, tokens)) for ids in of_prompts]
    right = engine.run(Run(of_prompts, tokens, with_leads=True))
    found: dict[str, Any] = {"engine tokens/s": [], "HTTP tokens/s": [], "server cores": [], "ties": 0}
    for number in range(-1, repeats):
        ran = engine.run(Run(of_prompts, tokens))
        before, started = cpu_s(server), time.perf_counter()
        answers = load.run(Job(port_of(server), asks))
        cores = (cpu_s(server) - before) / (time.perf_counter() - started)
        found["ties"] += check(answers, right, tokens, tie)
        if number >= 0:  # the first is to warm up
            found["engine tokens/s"].append(streams * tokens / ran.seconds)
            found["HTTP tokens/s"].append(_per_s(answers))
            found["server cores"].append(cores)
    pairs = zip(found["HTTP tokens/s"], found["engine tokens/s"], strict=True)
    return found, [Ratio("tokens/s, HTTP / engine alone", [a / b for a, b in pairs], at_least=OF_THE_ENGINE_AT_LEAST)]


def against_pytriton(
    server: Server, load: LoadGenerator, tokens: int, repeats: int
) -> tuple[dict[str, Any], list[Ratio]]:
    """Engines that compute nothing, asked by 64 clients, in turn with PyTriton giving one response a token to 64.

    The engine of ``null`` goes as fast as it can, so that tokens gather on their way; that of ``stepped`` takes
    `STEP_S`, which leaves time for an event a token.
    """
    lengths = {"null": tokens, "stepped": min(tokens, STEPPED_TOKENS)}
    asks = {name: [Ask(completion(name, [1, 2, 3], length))] * STREAMS for name, length in lengths.items()}
    found: dict[str, Any] = {
        f"{what}, {name}": [] for name in asks for what in ("tokens/s", "events/s", "tokens an event", "server cores")
    }
    found["tokens/s, PyTriton"] = []
    with bare_pytriton() as port:
        for number in range(-1, repeats):
            for name, length in lengths.items():
                before, started = cpu_s(server), time.perf_counter()
                answers = load.run(Job(port_of(server), asks[name]))
                cores = (cpu_s(server) - before) / (time.perf_counter() - started)
                check_counting(answers, length)
                if number >= 0:  # the first is to warm up
                    an_event = STREAMS * length / sum(answer.events for answer in answers)
                    found[f"tokens/s, {name}"].append(_per_s(answers))
                    found[f"events/s, {name}"].append(_per_s(answers) / an_event)
                    found[f"tokens an event, {name}"].append(an_event)
                    found[f"server cores, {name}"].append(cores)
            pytriton = ask_pytriton(port)
            if number >= 0:
                found["tokens/s, PyTriton"].append(pytriton)
    ratios = []
    for name in lengths:
        thousands = [one / 1000 for one in found[f"tokens/s, {name}"]]
        ratios.append(Ratio(f"thousand tokens/s, {name}", thousands, at_least=NULL_AT_LEAST / 1000))
    for name in lengths:
        pairs = zip(found[f"tokens/s, {name}"], found["tokens/s, PyTriton"], strict=True)
        ratios.append(Ratio(f"tokens/s, {name} / PyTriton", [a / b for a, b in pairs]))
    return found, ratios


def completion(model: str, prompt: str | list[int], tokens: int, **more: Any) -> Any:
    """A request's body: a stream of so many tokens."""
    return raw_body(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
    )


def port_of(server: Server) -> int:
    """Where it listens."""
    return int(server.url.rpartition(":")[2])


def _per_s(answers: Sequence[Answer]) -> float:
    seconds = max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
    return sum(answer.tokens for answer in answers) / seconds


@contextmanager
def bare_pytriton() -> Iterator[int]:
    """PyTriton alone; its gRPC port."""
    http_port, grpc_port = free_port(), free_port()
    command = [sys.executable, "-m", "benchmarks.stream_pytriton", "serve", str(http_port), str(grpc_port)]
    with (
        tempfile.TemporaryDirectory(prefix="hw-") as folder,
        served(command, http_port, Path(folder), "/v2/models/counter/ready"),
    ):
        yield grpc_port


def ask_pytriton(port: int, tokens: int = PYTRITON_TOKENS) -> float:
    """Tokens a second."""
    command = [sys.executable, "-m", "benchmarks.stream_pytriton", "ask", str(port), str(STREAMS), str(tokens)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    if found["errors"]:
        raise AnswerWrong(f"PyTriton: {'; '.join(found['errors'])}")
    return float(found["tokens"] / found["seconds"])
