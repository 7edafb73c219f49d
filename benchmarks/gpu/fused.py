"""Part d: one trunk and two heads on one device, fused: both heads for less than two requests, and the trunk once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import httpx
import numpy as np
import torch

from benchmarks.fanout_client import Connection, TensorBytes
from benchmarks.fanout_layouts import Options, pipeline_config
from benchmarks.fanout_models import Head, Trunk
from benchmarks.fanout_servers import Server, headwater
from benchmarks.gpu.record import Recorder, Step
from benchmarks.gpu.target import Target

__all__ = ["measure"]

KINDS: Final[Mapping[str, Sequence[str]]] = {"A+B": ("b",), "A+C": ("c",), "A+B+C": ("b", "c")}
REPEATS: Final = {"a": 100, "b": 190, "c": 450}
"""Blocks of each model, in the proportion of `benchmarks.fanout`."""
TOLERANCE: Final = 1e-3
ROUNDS: Final = 40
BATCHES: Final = (1, 8, 32)


def measure(recorder: Recorder, target: Target) -> None:
    """Run the part."""
    recorder.step("fused in one replica", partial(_fused, target))
    recorder.step("heads after each other, and on streams of their own", partial(_heads_on_streams, target))


def _options(target: Target) -> Options:
    repeats = dict.fromkeys(REPEATS, 1) if target.is_tiny else REPEATS
    side = {"side": 32 if target.is_tiny else 224}
    heads: Options = {
        name: {"repeats": repeats[name], "output": f"y_{name}", "seed": seed, **side}
        for name, seed in (("b", 2), ("c", 3))
    }
    return {"a": {"repeats": repeats["a"], **side}, **heads}


class _Bare:
    """The three callables in this process."""

    def __init__(self, target: Target, options: Options) -> None:
        self._device = target.device
        self.trunk = Trunk(**options["a"])
        self.heads = {name: Head(**options[name]) for name in ("b", "c")}
        for model in (self.trunk, *self.heads.values()):
            model.load(target.device)

    def answers(self, image: Any, heads: Sequence[str]) -> dict[str, Any]:
        """Of these heads, in the machine's memory."""
        features = self.trunk(x=torch.from_numpy(image).to(self._device))["features"]
        return {name: self.heads[name](features=features)[f"y_{name}"].cpu().numpy() for name in heads}


def _fused(target: Target, step: Step) -> None:
    options = _options(target)
    rounds = 2 if target.is_tiny else ROUNDS
    image = np.random.default_rng(0).integers(0, 256, (1, 3, options["a"]["side"], options["a"]["side"]), np.uint8)
    bare = _Bare(target, options)
    right = bare.answers(image, ("b", "c"))
    times: dict[str, list[float]] = {}
    config = {**pipeline_config("fused", options), "device": target.device}
    with headwater({"abc": config}) as server, Connection(server.url) as connection:

        def ask(heads: Sequence[str]) -> dict[str, Any]:
            given = connection.infer(
                "abc", {"x": TensorBytes("UINT8", image.shape, image.tobytes())}, [f"y_{head}" for head in heads]
            )
            return {name.removeprefix("y_"): tensor.floats() for name, tensor in given.items()}

        asks: dict[str, Callable[[Sequence[str]], dict[str, Any]]] = {
            "bare": lambda heads: bare.answers(image, heads),
            "fused": ask,
        }
        before = None
        for number in range(-3, rounds):  # the first ones warm up
            if number == 0:
                before = _trunk_runs(server)
            for layout, call in asks.items():
                for kind, heads in KINDS.items():
                    began_s = time.perf_counter()
                    answers = call(heads)
                    took_ms = 1000 * (time.perf_counter() - began_s)
                    _compare(layout, answers, right, heads)
                    if number >= 0:
                        times.setdefault(f"{kind}, {layout}", []).append(took_ms)
        runs = _trunk_runs(server) - (before or 0)
    for name, values in times.items():
        step.figure(name, "ms", *values)
    step.notes.append(f"every answer was that of the bare callables within {TOLERANCE:g} of its largest element")
    asked = rounds * len(KINDS)
    step.check("the trunk ran once a request", runs == asked, f"{runs} runs for {asked} requests")
    rows = zip(times["A+B+C, fused"], times["A+B, fused"], times["A+C, fused"], strict=True)
    both = [abc / (ab + ac) for abc, ab, ac in rows]
    step.goal("A+B+C / (A+B and A+C after each other), fused", both, at_most=1.0)
    over = zip(times["A+B+C, fused"], times["A+B+C, bare"], strict=True)
    step.figure("A+B+C fused over HTTP, less the bare callables", "ms", *(a - b for a, b in over))
    step.profile = target.profile(lambda: bare.answers(image, ("b", "c")))


def _trunk_runs(server: Server) -> int:
    told = httpx.get(f"{server.url}/v2/models/abc/stats", timeout=30, trust_env=False).json()
    return int(told["model_stats"][0]["steps"]["trunk"]["execution_count"])


def _compare(layout: str, answers: Mapping[str, Any], right: Mapping[str, Any], heads: Sequence[str]) -> None:
    if set(answers) != set(heads):
        raise RuntimeError(f"{layout}: expected answers of {heads}, got {sorted(answers)}")
    for head in heads:
        off = float(np.abs(answers[head] - right[head]).max() / np.abs(right[head]).max())
        if not off <= TOLERANCE:
            raise RuntimeError(f"{layout}, head {head}: its answer is {off:.2g} of the largest element off")


@torch.no_grad()
def _heads_on_streams(target: Target, step: Step) -> None:
    """Whether the device computes two heads sooner side by side."""
    options = _options(target)
    bare = _Bare(target, options)
    calls = 2 if target.is_tiny else 20
    for rows in (1,) if target.is_tiny else BATCHES:
        side = options["a"]["side"]
        image = torch.zeros(rows, 3, side, side, dtype=torch.uint8, device=target.device).random_(256)
        features = bare.trunk(x=image)["features"]
        after_each_other = partial(_after_each_other, bare, features)
        one_s = target.seconds(after_each_other, calls)
        step.figure(f"after each other, {rows} rows", "ms", 1000 * one_s)
        if not target.is_gpu:
            step.notes.append("a CPU has no streams")
            return
        side_by_side = _SideBySide(target, bare, features)
        both_s = target.seconds(side_by_side, calls)
        step.figure(f"on streams of their own, {rows} rows", "ms", 1000 * both_s)
        step.figure(f"faster by, {rows} rows", "times", one_s / both_s)


def _after_each_other(bare: _Bare, features: torch.Tensor) -> None:
    for head in bare.heads.values():
        head(features=features)


class _SideBySide:
    """Calls both heads, each on a stream of its own that waits for the features, and is waited for."""

    def __init__(self, target: Target, bare: _Bare, features: torch.Tensor) -> None:
        self._device, self._bare, self._features = target.device, bare, features
        cuda: Any = torch.cuda  # its streams have no types
        self._streams = [cuda.Stream(target.device) for _ in bare.heads]

    def __call__(self) -> None:
        main = torch.cuda.current_stream(self._device)
        for stream, head in zip(self._streams, self._bare.heads.values(), strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                head(features=self._features)
        for stream in self._streams:
            main.wait_stream(stream)
