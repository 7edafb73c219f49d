"""What it costs to reach a replica over its port, as on another machine, rather than over its unix sockets.

``python -m benchmarks.node_port [--rounds N] [--calls N] [--requests N] [--tokens N] [--smoke]``: a gateway's own
dispatchers, without HTTP in front of them, call the same replicas over unix sockets with shared memory (`LOCAL`), over
their ports on loopback, and over their ports with TLS of both sides. One call after the other: 16 floats, an image of
602,112 bytes whose means come back, the image both ways, and the image into a fused pipeline; `scale` from 64 callers;
64 streams of an engine that computes nothing. The ways take turns, and a ratio is taken within a round. Every answer is
checked.

Everything is on one machine, so a network's own time and its bandwidth are not in the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop

from benchmarks.certificates import authority, issue
from benchmarks.large_tensors_model import IMAGE_SHAPE
from benchmarks.node_port_agent import LOCAL, PLAIN, SECURED, Served, serving
from benchmarks.smoke import parse_with_smoke
from benchmarks.stream_engine import MODEL, VOCAB_SIZE
from headwater_server.codecs.tensors import InferRequest, OutputWish, RawTensor
from headwater_server.dispatch.dispatcher import ModelDispatcher
from headwater_server.dispatch.pool import Connect, connect
from headwater_server.lm.language_model import LmDispatcher
from headwater_server.lm.sequence import SequenceSpec
from headwater_server.security.peer_tls import PeerTls

RESULTS = Path(__file__).parent / "results" / "node_port.json"
WAYS: Final = (LOCAL, PLAIN, SECURED)
CONCURRENT: Final = 64
CASES: Final = {
    "16 floats, p50": (1.6, 2.5),
    "600 KB in, p50": (1.6, 2.5),
    "600 KB both ways, p50": (1.6, 2.5),
    "600 KB into a fused pipeline, p50": (1.6, 2.5),
    "scale, requests/s": (0.9, 0.7),
    "streams, tokens/s": (0.95, 0.95),
}
"""With the goals for the ratios to `LOCAL`: without and with TLS."""


class Caller:
    """Calls a model in one way.

    Args:
        served: the model.
        way: how it is reached.
        connect: makes the replica's client.
        tensor: its only input.
        answer: what its only output must be.
    """

    def __init__(self, served: Served, way: str, connect: Connect, tensor: RawTensor, answer: bytes) -> None:
        self.dispatcher = ModelDispatcher(served.route(way), connect)
        self._input, self._output = served.signature.inputs[0].name, served.signature.outputs[0].name
        self._heads = tuple(head.name for head in served.signature.heads)
        self._tensor = tensor
        self._answer = answer

    async def call(self) -> float:
        """One call. Returns how long it took, in seconds."""
        request = InferRequest(
            "", {self._input: self._tensor}, 1, [OutputWish(self._output, True)], {}, {}, self._heads
        )
        began_s = time.perf_counter()
        answer = await self.dispatcher.infer(request)
        took_s = time.perf_counter() - began_s
        if answer.outputs[self._output].data != self._answer:
            raise SystemExit("a wrong answer")
        return took_s

    async def p50_ms(self, calls: int) -> float:
        """The median of calls one after the other."""
        return statistics.median([await self.call() for _ in range(calls)]) * 1000

    async def rate(self, requests: int) -> float:
        """Requests/s of many callers, each with one request at a time."""
        left = iter(range(requests))

        async def one_after_another() -> None:
            for _ in left:
                await self.call()

        began_s = time.perf_counter()
        await asyncio.gather(*(one_after_another() for _ in range(CONCURRENT)))
        return requests / (time.perf_counter() - began_s)


async def tokens_per_s(dispatcher: LmDispatcher, tokens: int) -> float:
    """Of as many streams at once as there are callers."""

    async def stream(number: int) -> None:
        run = dispatcher.open(f"r{number}", [SequenceSpec([1, 2, 3], tokens, ignore_eos=True)])
        try:
            found: list[int] = []
            while news := await run.news():
                for _, one in news:
                    found += one.tokens
        finally:
            run.close()
        if found != [index % VOCAB_SIZE for index in range(tokens)]:
            raise SystemExit(f"expected {tokens} tokens in order, got {len(found)}")

    began_s = time.perf_counter()
    await asyncio.gather(*map(stream, range(CONCURRENT)))
    return CONCURRENT * tokens / (time.perf_counter() - began_s)


async def measure(served: dict[str, Served], tls: PeerTls, options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """By case, for each round the figure of each way."""
    image = np.random.default_rng(7).standard_normal((1, *IMAGE_SHAPE)).astype(np.float32)
    small = np.arange(16, dtype=np.float32).reshape(1, 16)
    tensors = {
        "scale": (small, small * 2),
        "means": (image, image.mean(axis=(2, 3))),
        "echo": (image, image),
        "fused": (image, image.mean(axis=(2, 3))),
    }
    cases: dict[str, dict[str, Callable[[], Awaitable[float]]]] = {case: {} for case in CASES}
    with contextlib.ExitStack() as stack:
        for way in WAYS:
            callers = {}
            dial = functools.partial(connect, tls=tls if way == SECURED else None)
            for name, (array, answer) in tensors.items():
                tensor = RawTensor("FP32", array.shape, array.tobytes())
                callers[name] = Caller(served[name], way, dial, tensor, answer.tobytes())
                stack.callback(callers[name].dispatcher.close)
            streams = LmDispatcher(served["lm, too" if way == SECURED else "lm"].route(way), dial)
            stack.callback(streams.close)
            for case, name in zip(CASES, tensors, strict=False):
                cases[case][way] = functools.partial(callers[name].p50_ms, options.calls)
            cases["scale, requests/s"][way] = functools.partial(callers["scale"].rate, options.requests)
            cases["streams, tokens/s"][way] = functools.partial(tokens_per_s, streams, options.tokens)
        found: dict[str, list[list[float]]] = {case: [] for case in CASES}
        for round in range(-1, options.rounds):  # the first one warms up
            for case, by_way in cases.items():
                figures = dict.fromkeys(WAYS, 0.0)
                for way in WAYS if round % 2 else reversed(WAYS):
                    figures[way] = await by_way[way]()
                if round >= 0:
                    found[case].append([figures[way] for way in WAYS])
                print(f"\rround {round + 1}/{options.rounds}, {case} ", end="", flush=True)
    print("\r" + " " * 60 + "\r", end="")
    return found


def report(found: dict[str, list[list[float]]]) -> None:
    """Print medians, and the ratios to `LOCAL` with their ranges."""
    print(f"{'case':<34} {'way':<14} {'median':>10}   ratio to local (range), goal")
    for case, rounds in found.items():
        for place, way in enumerate(WAYS):
            median = statistics.median(figures[place] for figures in rounds)
            ratios = [figures[place] / figures[0] for figures in rounds]
            text = ""
            if place:
                goal = f"{'at least' if '/s' in case else 'at most'} {CASES[case][place - 1]:g}"
                text = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {goal}"
            print(f"{case:<34} {way:<14} {median:>10,.2f}   {text}")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=10000)
    options = parse_with_smoke(parser, rounds=1, calls=3, requests=200, tokens=20)
    engine = {"engine": "benchmarks.stream_engine:null", "max_sequences": CONCURRENT}
    models: dict[str, dict[str, Any]] = {
        "scale": {"model": "headwater.zoo.scale:Scale", "batching": {"max_batch_size": 64}},
        "means": {"model": "benchmarks.large_tensors_model:ChannelMeans", "batching": {"max_batch_size": 16}},
        "echo": {"model": "benchmarks.large_tensors_model:Echo", "batching": {"max_batch_size": 16}},
        "fused": {
            "pipeline": {
                "trunk": {"model": "benchmarks.large_tensors_model:ChannelMeans"},
                "heads": {"head": {"model": "benchmarks.large_tensors_model:Means"}},
            },
            "batching": {"max_batch_size": 16},
        },
        "lm": {"model": MODEL, "options": engine},
        "lm, too": {"model": MODEL, "options": engine},  # a process has one channel to a replica over ports
    }
    here = [str(Path(__file__).parents[1])]
    with tempfile.TemporaryDirectory(prefix="hw-") as place, contextlib.ExitStack() as stack:
        signer = authority(Path(place))
        folder = issue(signer, Path(place) / "peer")
        served = {}
        for model, config in models.items():
            name = model.partition(",")[0]
            served[model] = stack.enter_context(serving(name, config, folder, here))
        found = uvloop.run(measure(served, PeerTls(folder), options))
    report(found)
    if not options.smoke:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"ways": WAYS, "figures": found}, indent=1))
        print(f"raw figures: {RESULTS}")


if __name__ == "__main__":
    main()
