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
from benchmarks.peers import free_port
from benchmarks.stream_engine import EngineAlone, Run
from benchmarks.stream_load import Answer, Ask, Job, LoadGenerator, raw_body
from benchmarks.stream_texts import AnswerWrong, check, check_counting, prompts

__all__ = ["STREAMS", "against_pytriton", "against_the_engine", "completion", "port_of"]

STREAMS = 64
PYTRITON_TOKENS = 200
OF_THE_ENGINE_AT_LEAST = 0.85
NULL_AT_LEAST = 20_000


def against_the_engine(
    server: Server, load: LoadGenerator, engine: EngineAlone, tokens: int, repeats: int
) -> tuple[dict[str, Any], list[Ratio]]:
    """Deployment ``tiny`` asked by 64 clients, in turn with the engine alone doing the same."""
    of_prompts = prompts(STREAMS)
    asks = [Ask(completion("tiny", ids, tokens)) for ids in of_prompts]
    right = engine.run(Run(of_prompts, tokens, with_leads=True))
    found: dict[str, Any] = {"engine tokens/s": [], "HTTP tokens/s": [], "server cores": [], "ties": 0}
    for number in range(-1, repeats):
        ran = engine.run(Run(of_prompts, tokens))
        before, started = cpu_s(server), time.perf_counter()
        answers = load.run(Job(port_of(server), asks))
        cores = (cpu_s(server) - before) / (time.perf_counter() - started)
        found["ties"] += check(answers, right, tokens)
        if number >= 0:  # the first is to warm up
            found["engine tokens/s"].append(STREAMS * tokens / ran.seconds)
            found["HTTP tokens/s"].append(_per_s(answers))
            found["server cores"].append(cores)
    pairs = zip(found["HTTP tokens/s"], found["engine tokens/s"], strict=True)
    return found, [Ratio("tokens/s, HTTP / engine alone", [a / b for a, b in pairs], at_least=OF_THE_ENGINE_AT_LEAST)]


def against_pytriton(
    server: Server, load: LoadGenerator, tokens: int, repeats: int
) -> tuple[dict[str, Any], list[Ratio]]:
    """Deployment ``null`` asked by 64 clients, in turn with PyTriton giving one response a token to 64."""
    asks = [Ask(completion("null", [1, 2, 3], tokens))] * STREAMS
    found: dict[str, Any] = {"HTTP tokens/s": [], "tokens an event": [], "server cores": [], "PyTriton tokens/s": []}
    with _pytriton() as port:
        for number in range(-1, repeats):
            before, started = cpu_s(server), time.perf_counter()
            answers = load.run(Job(port_of(server), asks))
            cores = (cpu_s(server) - before) / (time.perf_counter() - started)
            check_counting(answers, tokens)
            pytriton = _ask_pytriton(port)
            if number >= 0:
                found["HTTP tokens/s"].append(_per_s(answers))
                found["tokens an event"].append(STREAMS * tokens / sum(answer.events for answer in answers))
                found["server cores"].append(cores)
                found["PyTriton tokens/s"].append(pytriton)
    pairs = zip(found["HTTP tokens/s"], found["PyTriton tokens/s"], strict=True)
    thousands = [one / 1000 for one in found["HTTP tokens/s"]]
    return found, [
        Ratio("thousand tokens/s, no model", thousands, at_least=NULL_AT_LEAST / 1000),
        Ratio("tokens/s, no model, HTTP / PyTriton", [a / b for a, b in pairs]),
    ]


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
def _pytriton() -> Iterator[int]:
    """PyTriton alone; its gRPC port."""
    http_port, grpc_port = free_port(), free_port()
    command = [sys.executable, "-m", "benchmarks.stream_pytriton", "serve", str(http_port), str(grpc_port)]
    with (
        tempfile.TemporaryDirectory(prefix="hw-") as folder,
        served(command, http_port, Path(folder), "/v2/models/counter/ready"),
    ):
        yield grpc_port


def _ask_pytriton(port: int) -> float:
    """Tokens a second."""
    command = [sys.executable, "-m", "benchmarks.stream_pytriton", "ask", str(port), str(STREAMS), str(PYTRITON_TOKENS)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    if found["errors"]:
        raise AnswerWrong(f"PyTriton: {'; '.join(found['errors'])}")
    return float(found["tokens"] / found["seconds"])
