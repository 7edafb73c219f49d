"""When tokens arrive: the first one of an idle server, and everybody's while one client doesn't read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.fanout_report import Ratio
from benchmarks.fanout_servers import Server, resident_bytes
from benchmarks.stream_engine import EngineAlone, Run
from benchmarks.stream_load import Answer, Ask, Job, LoadGenerator
from benchmarks.stream_rates import completion, port_of
from benchmarks.stream_texts import AnswerWrong, check, check_counting, encoded, prompts, text_of

__all__ = ["PACE_S", "first_token", "stalled_reader"]

FIRST_TOKENS = 8
FIRST_AT_MOST_MS = 10.0
PACE_S = 0.005
"""Of the engine of deployment ``paced``."""
NEIGHBOURS = 16
CHOICES = 16
"""Of the one that stops reading: so much that no buffer of the system's takes it all in."""
RECEIVE_BYTES = 128 * 1024
GAP_AT_MOST = 1.2
GROWTH_AT_MOST_MB = 8.0
"""What that client would get in the meantime is several times as much."""
SAMPLE_S = 0.25
WARMUP_S = 3.0


def first_token(
    server: Server, load: LoadGenerator, engine: EngineAlone, pairs: int
) -> tuple[dict[str, Any], list[Ratio]]:
    """Time to the first token of deployment ``tiny`` and of the engine alone, in turn, nothing else going on."""
    texts = [text_of(ids) for ids in prompts(pairs + 5, 32, 64)]
    found: dict[str, Any] = {"HTTP TTFT ms": [], "engine TTFT ms": [], "ties": 0}
    for number, text in enumerate(texts, start=-5):  # the first five are to warm up
        run = Run([encoded(text)], FIRST_TOKENS)
        (answer,) = load.run(Job(port_of(server), [Ask(completion("tiny", text, FIRST_TOKENS))]))
        ran = engine.run(run)
        found["ties"] += check([answer], engine.run(Run(run.prompts, FIRST_TOKENS, with_leads=True)), FIRST_TOKENS)
        if number >= 0:
            found["HTTP TTFT ms"].append((answer.first - answer.sent) * 1e3)
            found["engine TTFT ms"].append(ran.first_s[0] * 1e3)
    differences = [a - b for a, b in zip(found["HTTP TTFT ms"], found["engine TTFT ms"], strict=True)]
    return found, [Ratio("ms to the first token, HTTP - engine", differences, FIRST_AT_MOST_MS)]


def stalled_reader(
    server: Server, load: LoadGenerator, stall_s: float, pairs: int
) -> tuple[dict[str, Any], list[Ratio]]:
    """Deployment ``paced``: what neighbours get while a client stops reading, and while the same one reads on."""
    found: dict[str, Any] = {
        f"{what} {how}": [] for how in ("reading", "stalled") for what in ("p50 gap ms", "p99 gap ms", "worker grew MB")
    }
    found["reader got MB reading"] = []
    found["reader's end"] = []
    order = random.Random(0)
    _block(server, load, WARMUP_S, 0)
    for _ in range(pairs):
        hows = ["reading", "stalled"]
        order.shuffle(hows)
        for how in hows:
            neighbours, reader, growth = _block(server, load, stall_s, stall_s * (how == "stalled"))
            check_counting(neighbours, _tokens(stall_s, 0.9))
            found["reader's end"].append(_end_of(reader, _tokens(stall_s, 1.1), how))
            gaps_ms = [gap * 1e3 for answer in neighbours for gap in answer.gaps_s]
            found[f"p50 gap ms {how}"].append(float(np.percentile(gaps_ms, 50)))
            found[f"p99 gap ms {how}"].append(float(np.percentile(gaps_ms, 99)))
            found[f"worker grew MB {how}"].append(growth / 1e6)
            if how == "reading":
                found["reader got MB reading"].append(reader.size_bytes / 1e6)
    rates = zip(found["p99 gap ms stalled"], found["p99 gap ms reading"], strict=True)
    return found, [
        Ratio("p99 between neighbours' tokens, stalled / not", [a / b for a, b in rates], GAP_AT_MOST),
        Ratio("MB by which the worker grew, stalled", found["worker grew MB stalled"], GROWTH_AT_MOST_MB),
    ]


def _tokens(stall_s: float, share: float) -> int:
    """What comes of a sequence in a share of the time."""
    return round(share * stall_s / PACE_S)


def _block(
    server: Server, load: LoadGenerator, lasts_s: float, stall_s: float
) -> tuple[Sequence[Answer], Answer, int]:  # fmt: skip
    """The neighbours' answers, the reader's, and by how many bytes the worker grew at most.

    The neighbours end a little before the one that stops reads again.
    """
    body = completion("paced", [1, 2, 3], _tokens(lasts_s, 1.1), n=CHOICES)
    reader = Ask(body, stall_s=stall_s, receive_bytes=RECEIVE_BYTES)
    asks = [reader, *[Ask(completion("paced", [1, 2, 3], _tokens(lasts_s, 0.9)))] * NEIGHBOURS]
    before = most = resident_bytes(server)
    load.begin(Job(port_of(server), asks, with_gaps=True))
    while not load.has_answers(SAMPLE_S):
        most = max(most, resident_bytes(server))
    read, *neighbours = load.answers()
    return neighbours, read, most - before


def _end_of(reader: Answer, tokens: int, how: str) -> str:
    """How the one that may have stopped reading ended: with all its tokens, or cut off because it did."""
    if how == "stalled" and reader.status == 200 and "without its last chunk" in reader.error:
        return "cut off"
    try:
        check_counting([reader], tokens, CHOICES)
    except AnswerWrong as wrong:
        raise AnswerWrong(f"the one that {'stopped reading' if how == 'stalled' else 'read'}: {wrong}") from None
    return "whole"
