"""The run: clients ask without pause while processes are killed and stopped, and then everything must be as it was."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from tests.chaos.asks import DEADLINE_S, PIECES, Ask, References, make_ask, reference_asks, reference_text
from tests.chaos.book import Scrape, compare
from tests.chaos.client import CLIENT_TIMEOUT_S, Manner, Result, choose_manner, send
from tests.chaos.faults import Fault, Harm, inflict
from tests.chaos.reply import Reply
from tests.running import Running, wait_for

__all__ = ["Findings", "chaos_config", "run_chaos"]

WORKERS: Final = 2
SMALL: Final = ("plain", "fused", "tiny")
"""The deployments of the small configuration."""
READY_S: Final = 180.0
"""Until all is ready again: up to 30 s of backoff before each start, and the starts, of all at once on a few cores."""
IDLE_S: Final = 30.0
"""Until nothing is in flight any more: what clients left is noticed at once, or when something is sent to them."""
PAUSE_S: Final = 0.2
"""Of a client that was told 503; it would ask for nothing else while one replica starts."""
LEAVES_WITHIN_S: Final = 0.05
"""For how long a client that leaves waits for its answer."""
LOST_WITHIN_S: Final = 6.0
"""Within this time after a worker was hit its connections have ended; a stopped one is noticed after 1.25 s."""
LEAST_OK: Final = 0.2
"""Of all requests: with less, it would be a run against a server that is away."""


@dataclass
class Findings:
    """What a run found."""

    results: list[Result] = field(default_factory=list)
    harm: Harm = field(default_factory=Harm)
    took_s: float = 0.0
    ready_s: float = 0.0
    """How long it took after the last request until all was ready."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """As the server counted them."""
    faults: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """The figures."""
        how = Counter(result.how for result in self.results)
        times_s = sorted(result.ended_s - result.began_s for result in self.results)
        yield f"{len(self.results):,} requests in {self.took_s:.0f} s; for the clients: {_counts(how)}"
        p99_s, median_s = times_s[int(len(times_s) * 0.99)], statistics.median(times_s)
        yield f"longest {times_s[-1]:.1f} s, p99 {p99_s:.2f} s, median {median_s:.3f} s"
        yield f"manners: {_counts(Counter(result.manner for result in self.results))}"
        yield f"asked: {_counts(Counter(result.ask.what for result in self.results))}"
        yield f"outcomes for the server: {_counts(self.outcomes)}; accepted {sum(self.outcomes.values()):,}"
        hit = Counter(one.split(" of ")[0] for one in self.harm.done)
        yield f"{len(self.harm.done)} faults, {self.harm.missed} had no process to hit: {_counts(hit)}"
        yield f"all ready {self.ready_s:.1f} s after the last request"


def chaos_config(*, small: bool = False) -> dict[str, Any]:
    """Two gateway workers; plain models, pipelines in both placements, one that streams, a language model.

    Args:
        small: whether there are only some of these, and the language model computes nothing, for a fast start.
    """
    common = {
        "timeout_s": DEADLINE_S,
        "max_crashes": 100_000,
        # Those that are killed here take whatever they have with them: no request is to blame for it.
        "quarantine_s": 0,
        "load_timeout_s": 120,
        "threads": 1,
        "device": "cpu",
        "warmup_batch_sizes": [1],
    }
    heads: dict[str, dict[str, Any]] = {
        "a": {"model": "light:Head", "options": {"output": "ya"}},
        "b": {"model": "light:Head", "options": {"output": "yb"}},
    }
    pipeline = {"trunk": {"model": "light:Trunk"}, "heads": heads}
    of_graph = {**pipeline, "heads": {**heads, "b": {**heads["b"], "on_error": "omit"}}}
    deployments: dict[str, dict[str, Any]] = {
        "plain": {"model": "chaotic:Doubler", "replicas": 2},
        "fused": {"pipeline": {**pipeline, "placement": "fused"}},
        "graph": {"pipeline": {**of_graph, "placement": "graph"}},
        "pieces": {"model": "chaotic:Pieces", "options": {"count": PIECES, "interval_s": 0.02}},
        "bytes": {"model": "chaotic:Bytes"},
        "tiny": {
            "model": "lm:headwater.zoo:weights/tiny_lm",
            "options": {"engine": "engines:null", "step_s": 0.01, "context_length": 1000}
            if small
            else {"dtype": "float32", "max_sequences": 32},
        },
    }
    if small:
        deployments = {name: deployments[name] for name in SMALL}
    return {
        "deployments": {name: {**common, **deployment} for name, deployment in deployments.items()},
        "server": {
            "workers": WORKERS,
            "client_timeout_s": CLIENT_TIMEOUT_S,
            "access_log": False,
        },
    }


def run_chaos(
    running: Running,
    *,
    requests: int,
    clients: int,
    seed: int,
    faults: Iterator[Fault],
    on_fault: Callable[[str], None] = lambda fault: None,
    least_s: float = 0.0,
) -> Findings:
    """Ask, do harm, and see that all is well in the end.

    Args:
        running: a server of `chaos_config`, ready.
        requests: how many, at least.
        clients: how many ask at once.
        seed: of what is asked, and how.
        faults: what is done to the server meanwhile.
        on_fault: is told what was done, and when.
        least_s: how long it lasts at least; more requests are sent until then.
    """
    findings = Findings()
    references = _references(running)
    deployments = {one["name"] for one in running.get("/v2/repository/index").json()}
    before = Scrape(running)
    began_s = time.monotonic()

    def tell(fault: str) -> None:
        on_fault(f"{time.monotonic() - began_s:7.1f} s  {len(findings.results):6,} requests  {fault}")

    def ask(number: int) -> tuple[Ask, Manner, float]:
        chance = random.Random(f"request {seed} {number}")
        ask = make_ask(chance, references, deployments)
        return ask, choose_manner(chance, ask), chance.uniform(0, LEAVES_WITHIN_S)

    async def run() -> None:
        harming = asyncio.create_task(inflict(running, faults, findings.harm, tell))
        await _ask(
            running,
            findings.results,
            ask,
            clients,
            lambda number: number < requests or time.monotonic() < began_s + least_s,
        )
        harming.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await harming

    asyncio.run(run())
    findings.took_s = time.monotonic() - began_s
    findings.faults += _faults_of(findings)
    _settle(running, findings, before)
    return findings


def _references(running: Running) -> References:
    def answered(ask: Ask) -> httpx.Response | None:
        answer = running.client.post(running.url + ask.path, content=ask.body)
        if answer.status_code == 503:  # this worker has yet to hear that the model is ready
            return None
        return answer.raise_for_status()

    found = {}
    for (route, prompt), ask in reference_asks().items():
        answer = wait_for(functools.partial(answered, ask))
        found[route, prompt] = reference_text(route, Reply(answer.status_code, {}, answer.content))
    return found


async def _ask(
    running: Running,
    results: list[Result],
    make: Callable[[int], tuple[Ask, Manner, float]],
    clients: int,
    goes_on: Callable[[int], bool],
) -> None:
    """Ask, each client one thing after the other, for as long as it goes on."""
    host, _, port = running.url.removeprefix("http://").rpartition(":")
    numbers = itertools.count()

    async def client() -> None:
        for number in numbers:
            if not goes_on(number):
                return
            ask, manner, wait_s = make(number)
            results.append(await send((host, int(port)), ask, manner, wait_s))
            if results[-1].outcome == "unavailable":
                await asyncio.sleep(PAUSE_S)

    await asyncio.gather(*(client() for _ in range(clients)))


def _faults_of(findings: Findings) -> list[str]:
    """What is wrong with single requests."""
    found = []
    for result in findings.results:
        fault = result.fault
        if result.how == "broken":
            is_excused = result.manner == "stuck reader" or any(
                0 <= result.ended_s - hit_s <= LOST_WITHIN_S for hit_s in findings.harm.worker_times_s
            )
            if is_excused and not fault.startswith("unreadable"):
                continue
        if fault:
            found.append(f"{result.ask.what} to {result.ask.deployment} ({result.manner}): {fault}")
    ok = sum(result.outcome == "ok" for result in findings.results)
    if ok < LEAST_OK * len(findings.results):
        found.append(f"only {ok} of {len(findings.results)} requests were ok: that shows little")
    return found


def _settle(running: Running, findings: Findings, before: Scrape) -> None:
    """Wait until all is ready and idle, then compare the books."""
    began_s = time.monotonic()
    try:
        wait_for(lambda: _ready(running), READY_S, "everything to be ready")
        findings.ready_s = time.monotonic() - began_s
        wait_for(lambda: not Scrape(running).busy(), IDLE_S, "nothing to be under way")
    except AssertionError as error:
        states = {one["name"]: (one["state"], one.get("reason")) for one in running.get("/v2/repository/index").json()}
        findings.faults.append(f"{error}: {Scrape(running).busy()}, {states}")
    scrape = Scrape(running)
    findings.outcomes = scrape.outcomes()
    findings.outcomes.subtract(before.outcomes())
    findings.outcomes = +findings.outcomes
    workers_hit = bool(findings.harm.worker_times_s)
    findings.faults += compare(findings.results, scrape, before, workers_hit=workers_hit)


def _ready(running: Running) -> bool:
    with contextlib.suppress(httpx.TransportError):
        index: Sequence[dict[str, Any]] = running.get("/v2/repository/index").json()
        replicas = [one["replicas"] for one in index if "replicas" in one]
        return (
            running.is_ready()
            and all(one["state"] == "READY" for one in index)
            and all(one["ready"] == one["wanted"] for one in replicas)
            and len(running.workers()) == WORKERS
        )
    return False


def _counts(counted: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counted.most_common())
