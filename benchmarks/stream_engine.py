"""An engine alone: what token streams over HTTP are compared with, in a process of its own.

``python -m benchmarks.stream_engine THREADS MAX_SEQUENCES [SIZE DEVICE DTYPE]`` reads jobs, JSON lines, and answers
each with one (`Run`, `Ran`). The engine is what a replica makes of the same options, stepped as a replica does, with
nothing around it. Its model is the shipped one, or of a size in `benchmarks.lm_engine`, with random weights.

Also the engines without the shipped model that benchmarks have replicas serve.
"""

from __future__ import annotations

import importlib.resources
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.stream_child import Child, give_back
from headwater.engine import Engine, EngineLimits, Sampling, SequenceRequest
from headwater.lm.null_engine import NullEngine

__all__ = ["MODEL", "VOCAB_SIZE", "EngineAlone", "Ran", "Run", "folder", "null", "random"]

MODEL = "lm:headwater.zoo:weights/tiny_lm"
VOCAB_SIZE = 4096
TOP = 2


class Run(msgspec.Struct, frozen=True):
    """Sequences to generate, greedily and to the last token."""

    prompts: list[list[int]]
    max_tokens: int
    one_by_one: bool = False
    with_leads: bool = False


class Ran(msgspec.Struct):
    """What came of them."""

    seconds: float
    """From the first submit to the last token."""
    first_s: list[float]
    """From each sequence's submit to its first token."""
    tokens: list[list[int]]
    leads: list[list[float]]
    """If asked for: how far the logarithm of each token's probability is above the second best's."""


class EngineAlone(Child):
    """The process.

    Args:
        threads: of torch.
        max_sequences: of the engine.
        model: size, device and dtype of a model with random weights; none: the shipped one.
    """

    def __init__(self, threads: int, max_sequences: int, model: Sequence[str] = ()) -> None:
        environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        super().__init__("benchmarks.stream_engine", [str(threads), str(max_sequences), *model], environment)

    def run(self, run: Run) -> Ran:
        """A job from its start to its end."""
        self.send(msgspec.json.encode(run))
        return msgspec.json.decode(self.receive(), type=Ran)


def folder() -> Path:
    """The shipped model's."""
    return Path(str(importlib.resources.files("headwater.zoo"))) / "weights" / "tiny_lm"


def null(folder: Path, *, device: str, on_broken: Any, step_s: float = 0, max_sequences: int = 64) -> Engine:
    """For ``options.engine``: computes nothing; the token of index i is i, modulo the vocabulary."""
    limits = EngineLimits(max_sequences, 1024, 1_000_000, 64_000_000, VOCAB_SIZE)
    return NullEngine(limits, step_s=step_s)


def random(folder: Path, *, device: str, on_broken: Any, size: str, dtype: str, max_sequences: int = 64) -> Engine:
    """For ``options.engine``: the built-in engine with a model of a size in `benchmarks.lm_engine`, of random
    weights."""
    from benchmarks.lm_engine import model_of
    from headwater.lm.slot_engine import SlotEngine

    return SlotEngine(model_of(size, device, dtype), max_sequences=max_sequences, on_broken=on_broken)


def main() -> None:
    """Do jobs until the input ends."""
    import torch
    from transformers.utils import logging

    from headwater.lm.causal_lm import load_causal_lm
    from headwater.lm.slot_engine import SlotEngine

    threads, max_sequences = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    messages: Any = logging
    messages.disable_progress_bar()
    engine: Engine
    if sys.argv[3:]:
        size, device, dtype = sys.argv[3:]
        engine = random(folder(), device=device, on_broken=print, size=size, dtype=dtype, max_sequences=max_sequences)
    else:
        loaded = load_causal_lm(folder(), dtype="float32")
        engine = SlotEngine(loaded.model, eos_ids=loaded.eos_ids, max_sequences=max_sequences)
    for line in sys.stdin.buffer:
        run = msgspec.json.decode(line, type=Run)
        if run.one_by_one:
            each = [_run(engine, [prompt], run) for prompt in run.prompts]
            ran = Ran(
                seconds=sum(one.seconds for one in each),
                first_s=[one.first_s[0] for one in each],
                tokens=[one.tokens[0] for one in each],
                leads=[one.leads[0] for one in each],
            )
        else:
            ran = _run(engine, run.prompts, run)
        give_back(msgspec.json.encode(ran))


def _run(engine: Engine, prompts: list[list[int]], run: Run) -> Ran:
    sampling = Sampling(temperature=0, logprobs=TOP if run.with_leads else None)
    tokens: list[list[int]] = [[] for _ in prompts]
    leads: list[list[float]] = [[] for _ in prompts]
    first_s = [0.0] * len(prompts)
    started = time.perf_counter()
    for row, prompt in enumerate(prompts):
        engine.submit(SequenceRequest(str(row), prompt, run.max_tokens, sampling, ignore_eos=True))
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if event.token is None:
                raise SystemExit(f"the engine alone: {event.finish}: {event.error}")
            row = int(event.id)
            if event.index == 0:
                first_s[row] = now - started
            tokens[row].append(event.token)
            if event.top:
                leads[row].append(event.top[0][1] - event.top[1][1])
    return Ran(time.perf_counter() - started, first_s, tokens, leads)


if __name__ == "__main__":
    main()
