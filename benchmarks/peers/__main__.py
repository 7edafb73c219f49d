"""Headwater beside its peers: the same models, requests and load generator, every peer in an environment of its own.

``python -m benchmarks.peers [--scenarios ...] [--peers ...] [--seconds S] [--rounds N] [--connections N,N] [--smoke]``;
``make -C benchmarks bench-peers`` makes the environments first. In each scenario all contenders are up; in each round
each is measured once, alone: the others idle, and those that bear it are stopped. Answers are compared with the model's
own before the first round and after the last, every token of a stream in every round. A contender that fails or answers
wrongly is left out with all its figures, says so, and makes the status 1. ``--smoke`` asks and compares only, without
load. Writes the raw figures to benchmarks/results/peers.json.

- ``scale``: twice 16 numbers, JSON: what the way costs; in the scenarios that begin so 4 or 4,096 numbers, also as
  binary tensors, or a model that waits in each call;
- ``text``: embeddings of sentences of 20 tokens; ``bare`` is the model in a process of its own, full batches;
- ``mixed``: the same of texts of 5 to 200 tokens, in random order;
- ``embeddings``: a sentence-transformers folder behind OpenAI's route, the same texts; ``bare`` is the library;
- ``rerank``: a cross-encoder's folder behind Cohere's route, four documents of those lengths a request;
- ``fanout``: a trunk and three heads;
- ``image``: an image of 602,112 bytes, binary, whose channels' means come back;
- ``streams``: tokens that nothing computes, 64 streams at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.contenders import GRPC, PEERS, Peer
from benchmarks.peers.cross_encoder import cross_encoder
from benchmarks.peers.environments import PEER_ENVIRONMENTS
from benchmarks.peers.report import Figure, print_scenario
from benchmarks.peers.rounds import Streams, Unary
from benchmarks.peers.scenarios import UNARY
from benchmarks.peers.work import FOLDER_SCENARIOS

RESULTS = Path(__file__).parents[1] / "results" / "peers.json"
SCENARIOS = (*UNARY, *FOLDER_SCENARIOS, "streams")
USUAL_SCENARIOS = ("scale", "text", "mixed", "fanout", "image", *FOLDER_SCENARIOS, "streams")
SMOKE_SCENARIOS = (
    "scale",
    "scale-4096-binary",
    "scale-200us",
    "mixed",
    "fanout",
    "image",
    *FOLDER_SCENARIOS,
    "streams",
)
"""``text`` is ``mixed`` with other texts."""
UNITS = {"text": "sentences/s", "mixed": "texts/s", "embeddings": "texts/s", "streams": "tokens/s"}


def main() -> None:
    """Run it."""
    names = [peer.name for peer in PEERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", help=f"default: {','.join(USUAL_SCENARIOS)}")
    parser.add_argument("--peers", default=",".join([*names, GRPC]), help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=3, help="a contender, in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", help="for all scenarios, such as 1,64; default: as each scenario says")
    parser.add_argument("--tokens", type=int, default=300, help="of a stream")
    parser.add_argument("--smoke", action="store_true", help="no load: only whether all answer rightly")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the servers are ended
    usual = SMOKE_SCENARIOS if options.smoke else USUAL_SCENARIOS
    scenarios = options.scenarios.split(",") if options.scenarios else usual
    wanted = options.peers.split(",") if options.peers else []
    for option, given, known in (("--scenarios", scenarios, SCENARIOS), ("--peers", wanted, (*names, GRPC))):
        if unknown := set(given) - set(known):
            parser.error(f"{option}: expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    if options.rounds < 1 or options.seconds < 1:
        parser.error("expected at least one round of one second")
    peers = _made([peer for peer in PEERS if peer.name in wanted or (peer.is_kserve and GRPC in wanted)])
    made = dict.fromkeys(peer.environment for peer in peers)
    versions = {PEER_ENVIRONMENTS.packages[name]: PEER_ENVIRONMENTS.version_of(name) for name in made}
    raw: dict[str, Any] = {"machine": _machine(), "versions": versions, "options": vars(options)}
    print(f"{raw['machine']}\n" + ", ".join(f"{name} {version}" for name, version in versions.items()))
    figures: list[Figure] = []
    failed: list[str] = []
    for scenario in scenarios:
        print(f"\n== {scenario}", flush=True)
        found, wrong = _measure(scenario, [peer for peer in peers if scenario in peer.scenarios], wanted, options)
        failed += wrong
        figures += found
        if found:
            print_scenario(found, UNITS.get(scenario, "requests/s"))
        if not options.smoke:  # after each, so that what was measured is kept, whatever comes
            RESULTS.parent.mkdir(exist_ok=True)
            raw.update(figures=[asdict(figure) for figure in figures], failed=failed)
            RESULTS.write_text(json.dumps(raw, indent=1))
    if not options.smoke:
        print(f"\nraw figures: {RESULTS}")
    if failed:
        sys.exit("\nFAILED, left out: " + "; ".join(failed))


def _measure(
    scenario: str, peers: Sequence[Peer], wanted: Sequence[str], options: argparse.Namespace
) -> tuple[list[Figure], list[str]]:
    """All rounds of a scenario: the figures, and who failed, and how."""
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        if scenario == "rerank":
            stack.enter_context(cross_encoder())
        kind = Streams if scenario == "streams" else Unary
        rounds = stack.enter_context(kind(scenario, peers, wanted, options))
        print(f"up after {time.monotonic() - started:.0f} s: {', '.join(rounds.names)}", flush=True)
        if not options.smoke:
            rounds.warm()
            for name, percent in rounds.idle_percent().items():
                print(f"idle: {name} takes {percent:.1f} % of a core")
            for number in range(options.rounds):
                print(f"\rround {number + 1}/{options.rounds} ", end="", flush=True)
                rounds.run(number)
            print("\r" + " " * 20 + "\r", end="")
        rounds.verify()
        figures = [figure for figure in rounds.figures if figure.contender not in rounds.failed]
        return figures, [f"{scenario}: {name}: {why}" for name, why in rounds.failed.items()]


def _made(peers: Sequence[Peer]) -> list[Peer]:
    """Those whose environments are there."""
    for peer in peers:
        if not PEER_ENVIRONMENTS.is_made(peer.environment):
            print(f"left out: {peer.name}: its environment isn't there; `make -C benchmarks bench-peers` makes it")
    return [peer for peer in peers if PEER_ENVIRONMENTS.is_made(peer.environment)]


def _machine() -> str:
    return f"{os.cpu_count()} cores, Python {platform.python_version()}"


if __name__ == "__main__":
    main()
