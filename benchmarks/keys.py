"""What requests with wrong keys cost those with right ones, and how soon a revoked key is refused.

``python -m benchmarks.keys [--rounds N] [--wrong N] [--requests N] [--seconds S] [--pairs N] [--rate N]
[--revocations N] [--json FILE] [--smoke]``. The server is Headwater with ``scale``, whose callable costs nothing, a
file of keys and one gateway worker. One client with a right key asks, one request at a time.

- **after**: its latency in a block after ``--wrong`` requests with wrong keys, against the block before them: what
  they leave behind. These come one after the other, as fast as they are refused, each with a key of its own. What the
  gateway's memory grew by is measured, too;
- **beside**: its latency in blocks of ``--seconds`` while a process beside it asks with wrong keys, ``--rate`` times a
  second, against blocks without, in pairs whose order is shuffled. The rate is low: on few cores all that computes
  slows all else, and what a server would do about that is what any proxy before it does by address;
- **revoked**: from the end of the change of the keys' file until the first request with that key is refused.

Every answer is verified: the values of those with the right key, the status 401 of those with a wrong one. The first
that is wrong ends the benchmark with status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.fanout_report import Ratio, Spread, ratio_line
from benchmarks.fanout_servers import Server, headwater, resident_bytes
from benchmarks.smoke import parse_with_smoke
from headwater_server.security.keys import Key, make_key
from headwater_server.security.keys_file import change_file

AT_MOST: Final = 1.1
REVOKED_AT_MOST_S: Final = 1.0
REFUSED_TIMEOUT_S: Final = 30.0
MODEL: Final = "scale"
VALUES: Final = [1.0, 2.0, 3.0, 4.0]
BODY: Final = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": VALUES}]}).encode()


class Client:
    """One connection that is kept.

    Args:
        url: the server's.
    """

    def __init__(self, url: str) -> None:
        self._http = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)

    def ask(self, key: str) -> tuple[int, bytes]:
        """One request: status and body."""
        headers = {"Content-Type": "application/json", "X-API-Key": key}
        self._http.request("POST", f"/v2/models/{MODEL}/infer", BODY, headers)
        answer = self._http.getresponse()
        return answer.status, answer.read()

    def ask_rightly(self, key: str) -> float:
        """One request with a right key. Returns the milliseconds until its answer, which is then verified."""
        began_s = time.perf_counter()
        status, body = self.ask(key)
        took_ms = (time.perf_counter() - began_s) * 1e3
        if status != 200 or json.loads(body)["outputs"][0]["data"] != [2 * value for value in VALUES]:
            raise SystemExit(f"right key: expected 200 and each value doubled, got {status}: {body[:300]!r}")
        return took_ms

    def ask_wrongly(self, number: int) -> None:
        """One request with a wrong key, another for each number."""
        status, body = self.ask(f"hw_wrong{number:034d}")
        if status != 401:
            raise SystemExit(f"wrong key: expected 401, got {status}: {body[:300]!r}")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="What wrong keys cost right ones; how soon a revoked one is refused.")
    parser.add_argument("--rounds", type=int, default=5, help="of wrong keys between two blocks")
    parser.add_argument("--wrong", type=int, default=10_000, help="keys in such a round")
    parser.add_argument("--requests", type=int, default=2000, help="with the right key in such a block")
    parser.add_argument("--pairs", type=int, default=10, help="of blocks with and without wrong keys beside")
    parser.add_argument("--seconds", type=float, default=5, help="of such a block")
    parser.add_argument("--rate", type=float, default=200, help="wrong keys a second beside")
    parser.add_argument("--revocations", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw figures there")
    options = parse_with_smoke(parser, rounds=1, wrong=200, requests=50, pairs=1, seconds=0.5, revocations=1)
    if min(options.rounds, options.wrong, options.requests, options.pairs, options.revocations) < 1:
        parser.error("--rounds, --wrong, --requests, --pairs and --revocations: expected at least 1")
    if options.seconds <= 0 or options.rate <= 0:
        parser.error("--seconds and --rate: expected more than 0")
    with tempfile.TemporaryDirectory(prefix="hw-keys-") as name:
        keys_file = Path(name) / "keys.json"
        key = add_key(keys_file, "right")
        deployment = {"model": "headwater.zoo.scale:Scale", "threads": 1, "device": "cpu"}
        try:
            with headwater({MODEL: deployment}, security={"keys_file": str(keys_file)}) as server:
                raw = _measure(server, key, keys_file, options)
        except RuntimeError as error:  # it didn't start
            raise SystemExit(str(error)) from None
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": _machine(), **raw}, indent=1))
        print(f"raw figures: {options.json}")


def add_key(keys_file: Path, name: str) -> str:
    """Add a key that may infer. Returns its text."""
    text, digest = make_key()
    change_file(keys_file, lambda keys: [*keys, Key(name, digest, ("infer",))])
    return text


def drop_key(keys_file: Path, name: str) -> None:
    """Revoke a key."""
    change_file(keys_file, lambda keys: [key for key in keys if key.name != name])


def _measure(server: Server, key: str, keys_file: Path, options: argparse.Namespace) -> dict[str, Any]:
    print(_machine())
    _block(server, key, options.requests)  # warm
    blocks, memory = _after(server, key, options)
    beside = _beside(server, key, options.pairs, options.seconds, options.rate)
    revoked = _revoked(server, keys_file, options.revocations)
    pairs = list(itertools.pairwise(blocks))
    both = list(zip(beside[True], beside[False], strict=True))
    ratios = []
    for percent, goal in ((50, AT_MOST), (99, None)):
        after = [_quantile(b, percent) / _quantile(a, percent) for a, b in pairs]
        ratios.append(Ratio(f"p{percent} after {options.wrong:,} wrong keys / before", after, goal))
        values = [_quantile(a, percent) / _quantile(b, percent) for a, b in both]
        ratios.append(Ratio(f"p{percent} beside {options.rate:g} wrong keys a second / alone", values, goal))
    if not options.smoke:
        _print(blocks, memory, ratios, revoked)
    return {
        "options": {name: str(value) for name, value in vars(options).items()},
        "blocks_ms": blocks,
        "gateway_bytes": memory,
        "beside_ms": beside[True],
        "alone_ms": beside[False],
        "revoked_s": revoked,
    }


def _block(server: Server, key: str, requests: int) -> list[float]:
    client = Client(server.url)
    return [client.ask_rightly(key) for _ in range(requests)]


def _after(server: Server, key: str, options: argparse.Namespace) -> tuple[list[list[float]], list[int]]:
    """Blocks with wrong keys between two of them, and what memory the gateway's workers had after each."""
    rounds, wrong = options.rounds, options.wrong
    blocks = [_block(server, key, options.requests)]
    memory = [resident_bytes(server)]
    for round in range(rounds):
        print(f"\rround {round + 1}/{rounds} ", end="", flush=True)
        client = Client(server.url)
        for number in range(wrong):
            client.ask_wrongly(round * wrong + number)
        blocks.append(_block(server, key, options.requests))
        memory.append(resident_bytes(server))
    print("\r" + " " * 20 + "\r", end="")
    return blocks, memory


def _beside(server: Server, key: str, pairs: int, seconds: float, rate: float) -> dict[bool, list[list[float]]]:
    """Latencies by block, with wrong keys beside and without."""
    order = random.Random(0)
    found: dict[bool, list[list[float]]] = {True: [], False: []}
    for pair in range(pairs):
        print(f"\rpair {pair + 1}/{pairs} ", end="", flush=True)
        kinds = [True, False]
        order.shuffle(kinds)
        for is_beside in kinds:
            with WrongKeys(server.url, rate) if is_beside else contextlib.nullcontext():
                client = Client(server.url)
                times_ms: list[float] = []
                ends_s = time.monotonic() + seconds
                while time.monotonic() < ends_s or not times_ms:
                    times_ms.append(client.ask_rightly(key))
            found[is_beside].append(times_ms)
    print("\r" + " " * 20 + "\r", end="")
    return found


class WrongKeys:
    """A process that asks with wrong keys, so many times a second, while the block runs.

    Args:
        url: the server's.
        rate: requests a second; each has its time, which doesn't move when one before it was slow.

    Raises:
        SystemExit: at the block's end: one was not refused, or they were fewer than half of what the rate says.
    """

    def __init__(self, url: str, rate: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_ask_wrongly, args=(url, rate, theirs), daemon=True)
        self._rate = rate

    def __enter__(self) -> None:
        self._process.start()
        self._pipe.recv()  # it has its first answer
        self._began_s = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        lasted_s = time.monotonic() - self._began_s
        self._pipe.send(None)
        try:
            sent = self._pipe.recv()
        except EOFError:
            sent = None
        self._process.join()
        if kind is not None:
            return
        if sent is None:
            raise SystemExit("the process with the wrong keys ended; it says above why")
        if sent < 0.5 * self._rate * lasted_s:
            raise SystemExit(f"expected {self._rate * lasted_s:.0f} wrong keys beside, got {sent}: a lower --rate")


def _ask_wrongly(url: str, rate: float, pipe: Pipe) -> None:
    client = Client(url)
    client.ask_wrongly(0)
    pipe.send(None)
    began_s = time.monotonic()
    sent = 0
    while not pipe.poll(max(0.0, began_s + sent / rate - time.monotonic())):
        sent += 1
        client.ask_wrongly(sent)
    pipe.send(sent)


def _revoked(server: Server, keys_file: Path, revocations: int) -> list[float]:
    """Seconds from the change of the file until the key is refused."""
    found = []
    client = Client(server.url)
    for number in range(revocations):
        name = f"revoked-{number}"
        text = add_key(keys_file, name)
        _wait_for(client, text, 200)
        drop_key(keys_file, name)
        found.append(_wait_for(client, text, 401))
    return found


def _wait_for(client: Client, key: str, status: int) -> float:
    """Ask until it is answered with a status. Returns for how long, in seconds."""
    began_s = time.monotonic()
    while (got := client.ask(key)[0]) != status:
        if got not in (200, 401) or time.monotonic() - began_s > REFUSED_TIMEOUT_S:
            raise SystemExit(f"a key of the file: expected {status} within {REFUSED_TIMEOUT_S:g} s, got {got}")
    return time.monotonic() - began_s


def _quantile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def _print(blocks: list[list[float]], memory: list[int], ratios: list[Ratio], revoked: list[float]) -> None:
    for ratio in ratios:
        print(ratio_line(ratio))
    p50 = Spread.of([_quantile(block, 50) for block in blocks])
    print(f"p50 of the blocks around the wrong keys: {p50.median:.2f} ms ({p50.least:.2f} to {p50.most:.2f})")
    sizes = ", ".join(f"{size / 2**20:.1f}" for size in memory)
    print(f"memory of the gateway worker, MiB, before and after each round: {sizes}")
    verdict = "pass" if max(revoked) <= REVOKED_AT_MOST_S else "MISS"
    print(
        f"a revoked key is refused after {statistics.median(revoked):.2f} s, at most {max(revoked):.2f} s; "
        f"goal <= {REVOKED_AT_MOST_S:g} s: {verdict}"
    )


def _machine() -> str:
    return f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}"


if __name__ == "__main__":
    main()
