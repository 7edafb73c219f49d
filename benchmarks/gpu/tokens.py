"""Part e: a language model of a billion parameters. The bare batched decode, the engine with and without CUDA graphs,
and clients."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from benchmarks.fanout_servers import headwater
from benchmarks.gpu.record import Recorder, Step
from benchmarks.gpu.target import Target
from benchmarks.lm_engine import BARE, BY_KERNEL, ENGINE, GREEDY, TIES, VOCAB_SIZE, contenders_on, model_of, quiet
from benchmarks.lm_engine import measure as measure_steps
from benchmarks.stream_engine import MODEL, EngineAlone
from benchmarks.stream_load import LoadGenerator
from benchmarks.stream_rates import against_the_engine
from headwater.engine import SequenceRequest
from headwater.lm.slot_engine import SlotEngine

__all__ = ["measure"]

SEQUENCES: Final = (32, 8, 64, 1)
"""That with a goal first."""
AT_SEQUENCES: Final = 32
OF_THE_BARE_AT_LEAST: Final = 0.85
OF_THE_ENGINE_AT_LEAST: Final = 0.95
CLIENTS_NEED_S: Final = 90.0
PROMPT: Final = 64
LONGEST: Final = 256
"""Tokens of the answers that are profiled."""
COPIED_BYTES: Final = 1 << 30


def measure(recorder: Recorder, target: Target) -> None:
    """Run the part."""
    quiet()
    size, dtype = ("0", "float32") if target.is_tiny else ("1100", "bfloat16")

    @functools.cache
    def model() -> Any:
        return model_of(size, target.device, dtype)

    first, *others = (2,) if target.is_tiny else SEQUENCES
    recorder.step(f"decode, {first} sequences", partial(_decode, target, model, first))
    needs_s = 0 if target.is_tiny else CLIENTS_NEED_S
    recorder.step("clients against the engine", partial(_clients, target, size, dtype), needs_s)
    for count in others:
        recorder.step(f"decode, {count} sequences", partial(_decode, target, model, count))


def _decode(target: Target, model: Callable[[], Any], count: int, step: Step) -> None:
    """The engine's step, the bare decode's, and how soon the device could have read the weights."""
    tokens, repeats = (4, 1) if target.is_tiny else (64, 5)
    known = contenders_on(target.device)
    contenders = {name: run for name, run in known.items() if name in (BARE, ENGINE, BY_KERNEL)}
    seconds = measure_steps(model(), count, PROMPT, tokens, repeats, contenders)
    for name, values in seconds.items():
        step.figure(f"{name}, a step", "ms", *(1000 * one for one in values))
        step.figure(name, "tokens/s", *(count / one for one in values))
    weights = sum(one.numel() * one.element_size() for one in model().parameters())
    floor_s = weights / _bytes_per_s(target)
    step.figure("weights", "GB", weights / 1e9)
    step.figure("floor of a step: weights / bandwidth measured", "ms", 1000 * floor_s)
    step.figure("engine's step / floor", "times", *(one / floor_s for one in seconds[ENGINE]))
    ratios = [bare / one for bare, one in zip(seconds[BARE], seconds[ENGINE], strict=True)]
    if count == AT_SEQUENCES or target.is_tiny:
        step.goal(f"engine / bare decode, {count} sequences", ratios, at_least=OF_THE_BARE_AT_LEAST)
        step.profile = f"the engine:\n{_profile_engine(target, model(), count)}"
    else:
        step.figure("engine / bare decode", "", *ratios)
    if BY_KERNEL in seconds:
        gains = [one / ours for one, ours in zip(seconds[BY_KERNEL], seconds[ENGINE], strict=True)]
        step.figure("faster by CUDA graphs", "times", *gains)


def _bytes_per_s(target: Target) -> float:
    """What a copy on the device reads and writes a second."""
    size_bytes = COPIED_BYTES >> 6 if target.is_tiny else COPIED_BYTES
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=target.device)
    copied = torch.empty_like(source)
    return 2 * size_bytes / target.seconds(lambda: copied.copy_(source), 20)


def _profile_engine(target: Target, model: Any, count: int) -> str:
    engine = SlotEngine(model, max_sequences=count)
    try:
        for row in range(count):
            prompt = [(7 * row + 11 * place) % VOCAB_SIZE for place in range(PROMPT)]
            engine.submit(SequenceRequest(str(row), prompt, LONGEST, GREEDY))
        begun: set[str] = set()
        while len(begun) < count:
            begun.update(event.id for event in engine.step())
        return target.profile(engine.step)
    finally:
        engine.close()


def _clients(target: Target, size: str, dtype: str, step: Step) -> None:
    """Tokens a second of HTTP clients, against the same engine alone in a process of its own."""
    streams, tokens, repeats = (4, 8, 1) if target.is_tiny else (32, 256, 3)
    options = {"engine": "benchmarks.stream_engine:random", "size": size, "dtype": dtype, "max_sequences": streams}
    deployment = {"model": MODEL, "device": target.device, "timeout_s": 300, "threads": 1, "options": options}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(headwater({"tiny": deployment}))
        load = stack.enter_context(LoadGenerator())
        engine = stack.enter_context(EngineAlone(1, streams, (size, target.device, dtype)))
        tie = TIES[getattr(torch, dtype)]
        found, (ratio,) = against_the_engine(server, load, engine, tokens, repeats, streams=streams, tie=tie)
    step.figure(f"the engine alone, {streams} sequences", "tokens/s", *found["engine tokens/s"])
    step.figure(f"{streams} HTTP clients", "tokens/s", *found["HTTP tokens/s"])
    step.figure("processor that the server used", "cores", *found["server cores"])
    step.notes.append(f"texts that differ from the engine's at a tie: {found['ties']}")
    step.goal("tokens/s, clients / engine alone", ratio.values, at_least=OF_THE_ENGINE_AT_LEAST)
    steps = [1000 * streams / one for one in found["engine tokens/s"]]
    loss = [1000 * streams / one for one in found["HTTP tokens/s"]]
    step.profile = (
        f"a step of the engine alone takes {statistics.median(steps):.2f} ms, prompts included, and with clients "
        f"{statistics.median(loss):.2f} ms; the server's processes use {statistics.median(found['server cores']):.2f} "
        "cores, and one at 1.00 would be the limit"
    )
