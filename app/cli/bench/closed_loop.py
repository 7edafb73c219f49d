"""Closed loop: a number of connections, each of which sends its next request once the last one is answered."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Final, Protocol

from app.cli.bench.connection import Connection, Dialler
from app.cli.bench.events import ask
from app.cli.bench.faults import AskFailed
from app.cli.bench.outcomes import NO_LIMITS, Limits, Outcomes
from app.cli.bench.target import Target

__all__ = ["GONE_AFTER_S", "STOPPED", "Stop", "closed_loop", "until_gone"]

GONE_AFTER_S: Final = 2.0
"""If no connection can be made for this long, the server is gone and the run ends."""
STOPPED: Final = "stopped by hand"
RETRY_S: Final = 0.05
WATCH_S: Final = 0.05


class Stop(Protocol):
    """Ends a run: an asyncio event or, across processes, a multiprocessing event."""

    def is_set(self) -> bool:
        """Whether the run should end."""
        ...


async def closed_loop(
    target: Target,
    connections: int,
    seconds: float,
    warmup_s: float = 1.0,
    *,
    limits: Limits = NO_LIMITS,
    begin_s: float | None = None,
    stop: Stop | None = None,
) -> Outcomes:
    """Put load on a server.

    Requests sent in the first ``warmup_s`` don't count. Those sent in the ``seconds`` after it do, and all of them are
    awaited. A rate is the sum of the connections' rates, each measured from its first request to its last answer, so
    that answers pending at the end introduce no bias. Latency is measured on good answers, from writing the request to
    the answer's last byte; connections are made before.

    The server's faults raise no exception: see `Outcomes.errors`, and `Outcomes.ended` for a server that is gone.

    Args:
        target: what to send; connection i begins with body i, so that not all send the same at once.
        connections: at least 1.
        seconds: how long to send requests that count.
        warmup_s: how long to send requests before those.
        limits: for `Outcomes.met`.
        begin_s: `time.perf_counter` at which the warm-up begins, for several processes to begin together; None: now.
        stop: when set, ends the run early; pending requests then don't count.
    """
    outcomes = Outcomes()
    users = _Users(target, outcomes, limits)
    await users.run(connections, seconds, warmup_s, begin_s, stop)
    return outcomes


class _Users:
    """The connections of one run."""

    def __init__(self, target: Target, outcomes: Outcomes, limits: Limits) -> None:
        self._target = target
        self._requests = target.requests()
        self._outcomes = outcomes
        self._limits = limits
        self._dialler = Dialler(target)

    async def run(
        self, connections: int, seconds: float, warmup_s: float, begin_s: float | None, stop: Stop | None
    ) -> None:
        made = await asyncio.gather(*(self._dial() for _ in range(connections)))
        now = time.perf_counter()
        if begin_s is not None and begin_s > now:
            await asyncio.sleep(begin_s - now)
        counts_from = time.perf_counter() + warmup_s
        cpu_s, since_s = time.thread_time(), time.perf_counter()
        async with until_gone(self._dialler, self._outcomes, stop) as tasks:
            tasks.extend(
                asyncio.ensure_future(self._use(place, one, counts_from, counts_from + seconds))
                for place, one in enumerate(made)
            )
            await asyncio.wait(tasks)
        wall_s = time.perf_counter() - since_s
        self._outcomes.cpu_share = (time.thread_time() - cpu_s) / wall_s if wall_s > 0 else 0.0

    async def _dial(self) -> Connection | None:
        with contextlib.suppress(AskFailed):
            return await self._dialler.dial()
        return None

    async def _use(self, place: int, connection: Connection | None, counts_from: float, until: float) -> None:
        """One connection's requests, one after the other."""
        target, outcomes, requests = self._target, self._outcomes, self._requests
        good = met = tokens = 0
        first_s = last_s = 0.0
        try:
            while (now := time.perf_counter()) < until:
                counts = now >= counts_from
                try:
                    if connection is None or connection.lost:
                        connection = await self._dialler.dial()
                        continue  # connecting is not part of a request
                except AskFailed as failed:
                    if counts:
                        outcomes.errors[failed.fault] += 1
                        first_s, last_s = first_s or now, time.perf_counter()
                    await asyncio.sleep(RETRY_S)
                    continue
                request = requests[place % len(requests)]
                place += 1
                sample = await ask(connection, request, target.kind, now, now + target.timeout_s)
                if not counts:
                    continue
                was_good, was_met, new_tokens = outcomes.note(sample, sample.sent_s, self._limits)
                good += was_good
                met += was_met
                tokens += new_tokens
                first_s, last_s = first_s or sample.sent_s, time.perf_counter()
        finally:
            if last_s > first_s:
                outcomes.requests_per_s += good / (last_s - first_s)
                outcomes.met_per_s += met / (last_s - first_s)
                outcomes.tokens_per_s += tokens / (last_s - first_s)
                outcomes.elapsed_s = max(outcomes.elapsed_s, last_s - first_s)


@contextlib.asynccontextmanager
async def until_gone(
    dialler: Dialler, outcomes: Outcomes, stop: Stop | None
) -> AsyncIterator[list[asyncio.Future[None]]]:
    """Expire late requests; cancel the tasks that the block puts into the list once it ends or the server is gone."""
    tasks: list[asyncio.Future[None]] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            dialler.expire()
            since_s = dialler.failing_since_s
            if stop is not None and stop.is_set():
                outcomes.ended = STOPPED
            elif since_s is not None and time.perf_counter() - since_s > GONE_AFTER_S:
                outcomes.ended = f"no connection could be made for {GONE_AFTER_S:g} s: {dialler.last_reason}"
            if outcomes.ended:
                for task in tasks:
                    task.cancel()
                return

    watcher = asyncio.ensure_future(watch())
    try:
        yield tasks
    finally:
        watcher.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(watcher, *tasks, return_exceptions=True)
        dialler.close()
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error  # a bug in the bench
