"""Two vLLMs with prefix affinity, and without it: what their prefix caches give, and the time to the first token.

    python -m benchmarks.vllm_affinity [--rounds 4] [--systems 16] [--users 2] [--turns 4] [--factor 2] [--smoke]

Chats begin with one of several long system prompts, new ones in each round. Their turns come together, and each brings
the chat so far. A vLLM's cache finds whole blocks of tokens (128 of them on the CPU). Each setting has a server of its
own, one after the other. Ends with status 1 if affinity doesn't raise the share of prompt tokens found in the caches.

``--smoke`` only checks what the choice of a replica promises, with random prompts and loads: it starts no vLLM.
"""

from __future__ import annotations

import argparse
import random
import re
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.fanout_report import Spread
from benchmarks.fanout_servers import Server, headwater
from benchmarks.servers import START_TIMEOUT_S
from benchmarks.smoke import parse_with_smoke
from benchmarks.stream_engine import VOCAB_SIZE
from benchmarks.stream_load import Ask, Job, LoadGenerator
from benchmarks.stream_rates import completion, port_of
from benchmarks.stream_texts import AnswerWrong
from benchmarks.stream_vllm import MODEL, socket_of, vllm_python
from headwater_server.vllm.affinity import BLOCK_BYTES, PrefixAffinity

__all__: list[str] = []

SYSTEM_TOKENS = 300
TURN_TOKENS = 32
ANSWER_TOKENS = 8
_CACHE = re.compile(rb"^vllm:prefix_cache_(queries|hits)_total\{[^}]*\} ([0-9.e+]+)$", re.MULTILINE)


class Round(NamedTuple):
    """What a round's chats met."""

    hit_share: float
    """Of the prompt tokens, those found in a cache."""
    first_s: float
    """To the first token, the median of the turns after the first."""
    shares: tuple[float, ...]
    """Of the prompt tokens, those that each replica got."""


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="Two vLLMs with prefix affinity and without.")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--systems", type=int, default=16, help="system prompts a round")
    parser.add_argument("--users", type=int, default=2, help="chats with each system prompt")
    parser.add_argument("--turns", type=int, default=4, help="of each chat")
    parser.add_argument("--factor", type=float, default=2, help="options.prefix_affinity where it is on")
    parser.add_argument("--python", type=Path, default=vllm_python(), help="the interpreter that has vLLM")
    options = parse_with_smoke(parser)
    _check_choices()
    if options.smoke or options.python is None:
        print("left out: " + ("a smoke run starts no vLLM" if options.smoke else "there is no vLLM; make vllm-env"))
        return
    found = {factor: _measure(factor, options) for factor in (options.factor, 0.0)}
    print(f"{'prefix_affinity':<18} {'found in cache':>24} {'TTFT ms, turns after the first':>32} {'of replica 1':>14}")
    for factor, rounds in found.items():
        hits = _shown([one.hit_share for one in rounds], "%")
        firsts = _shown([one.first_s for one in rounds], "ms")
        print(f"{factor:<18g} {hits:>24} {firsts:>32} {statistics.mean(one.shares[0] for one in rounds):>14.0%}")
    with_it, without = (statistics.median(one.hit_share for one in rounds) for rounds in found.values())
    if with_it <= without:
        sys.exit("affinity doesn't raise the share found in the caches")


def _measure(factor: float, options: argparse.Namespace) -> list[Round]:
    """The rounds of a server with this factor; all settings get the same prompts."""
    engine = {"model": MODEL, "python": str(options.python), "timeout_s": 300, "replicas": 2}
    with headwater({"tiny": {**engine, "options": {"prefix_affinity": factor}}}) as server, LoadGenerator() as load:
        _await_replicas(server)
        return [_round(server, load, options, seed) for seed in range(options.rounds + 1)][1:]  # the first warms up


def _await_replicas(server: Server) -> None:
    """Wait for both: a server is ready when it has one."""
    until_s = time.monotonic() + START_TIMEOUT_S
    while len(list((server.folder / "run").glob("headwater-*/r*/ready"))) < 2:
        if time.monotonic() > until_s:
            raise RuntimeError(f"expected two replicas within {START_TIMEOUT_S:g} s")
        time.sleep(0.2)


def _round(server: Server, load: LoadGenerator, options: argparse.Namespace, seed: int) -> Round:
    rng = random.Random(seed)
    chats = [
        system for system in (_ids(rng, SYSTEM_TOKENS) for _ in range(options.systems)) for _ in range(options.users)
    ]
    before = [_cache(server, number) for number in (0, 1)]
    firsts: list[float] = []
    for turn in range(options.turns):
        chats = [[*chat, *_ids(rng, TURN_TOKENS)] for chat in chats]
        rng.shuffle(chats)  # otherwise each chat would always find the same replica free
        asks = [Ask(completion("tiny", chat, ANSWER_TOKENS, skip_special_tokens=False)) for chat in chats]
        answers = load.run(Job(port_of(server), asks))
        if wrong := [one for one in answers if one.error or one.tokens != ANSWER_TOKENS]:
            raise AnswerWrong(f"expected {ANSWER_TOKENS} tokens, got {wrong[0]}")
        if turn:
            firsts += [one.first - one.sent for one in answers]
    after = [_cache(server, number) for number in (0, 1)]
    queries, hits = ([a[at] - b[at] for a, b in zip(after, before, strict=True)] for at in (0, 1))
    return Round(sum(hits) / sum(queries), statistics.median(firsts), tuple(one / sum(queries) for one in queries))


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE // 2, VOCAB_SIZE) for _ in range(count)]


def _cache(server: Server, number: int) -> tuple[float, float]:
    """The prompt tokens that a replica's cache was asked for so far, and those that it had."""
    with socket.socket(socket.AF_UNIX) as plug:
        plug.connect(socket_of(server, number))
        plug.sendall(b"GET /metrics HTTP/1.1\r\nHost: benchmark\r\nConnection: close\r\n\r\n")
        text = b"".join(iter(lambda: plug.recv(1 << 16), b""))
    counted = {name: float(value) for name, value in _CACHE.findall(text)}
    return counted[b"queries"], counted[b"hits"]


def _shown(values: Sequence[float], unit: str) -> str:
    spread = Spread.of(values)
    factor, places = (100, 1) if unit == "%" else (1e3, 1)
    median, least, most = (f"{one * factor:.{places}f}" for one in (spread.median, spread.least, spread.most))
    return f"{median} ({least} to {most}) {unit}"


def _check_choices() -> None:
    """Check with random prompts and loads what `PrefixAffinity` promises.

    Raises:
        AnswerWrong: it has chosen another replica.
    """
    rng = random.Random(0)
    beginnings = [rng.randbytes(rng.randrange(1, 6 * BLOCK_BYTES)) for _ in range(40)]
    for factor in (0.0, 1.0, 2.0):
        affinity, last = PrefixAffinity(), dict[bytes, str]()
        for _ in range(5000):
            beginning = rng.choice(beginnings)
            requests = {name: rng.randrange(12) for name in rng.sample("abcd", rng.randrange(1, 5))}
            idlest = min(requests, key=requests.__getitem__)
            chosen = affinity.choose(beginning + rng.randbytes(rng.randrange(40)), idlest, requests.get, factor)
            least = requests[idlest]
            known = last.get(beginning) if factor and len(beginning) >= BLOCK_BYTES else None
            is_free = known in requests and requests[known] <= factor * max(least, 1)
            if (chosen != known) if is_free else (requests[chosen] > least):
                about: dict[str, Any] = {"requests": requests, "known": known, "factor": factor}
                raise AnswerWrong(f"expected {known if is_free else 'the least busy one'}, got {chosen}: {about}")
            last[beginning] = chosen


if __name__ == "__main__":
    main()
