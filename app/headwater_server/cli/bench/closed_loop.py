"""Closed loop: each of a number of connections sends its next request when the previous request is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final, Protocol

from headwater_server.cli.bench.job import Job
from headwater_server.cli.bench.outcomes import Outcomes, merged
from headwater_server.cli.bench.sample_connection import ConnectFailed, Connection, Dialler

__all__ = ["GONE_AFTER_S", "STOPPED", "Stop", "closed_loop", "until_gone"]

GONE_AFTER_S: Final = 2.0
"""Time without a successful connection after which the server counts as gone, and the run ends."""
STOPPED: Final = "stopped by hand"
"""The reason in `Outcomes.ended` of a run that a `Stop` ended."""
RETRY_S: Final = 0.05
"""Pause after a failed attempt to connect."""
WATCH_S: Final = 0.05
"""Interval at which late requests are expired, and at which a stop or the loss of the server is noticed."""


class Stop(Protocol):
    """Signals that a run should end: an event of asyncio, of threading or, across processes, of multiprocessing."""

    def is_set(self) -> bool:
        """Whether the run should end."""
        ...

    def set(self) -> None:
        """End the run."""
        ...


async def closed_loop(job: Job, stop: Stop | None = None) -> Outcomes:
    """Put closed-loop load on a server.

    Requests sent in the warm-up don't count. Requests sent in the ``job.seconds`` after it count, and are awaited
    unless the run ends early. A rate is the sum of the connections' rates, each measured from its first request to its
    last answer, so that answers pending at the end introduce no bias. Latency is measured on good answers, from writing
    the request to the answer's last byte; the time to connect doesn't count.

    The server's faults raise no exception: see `Outcomes.errors`, and `Outcomes.ended` for a server that is gone.

    Args:
        job: a job whose load has connections. Connection i begins with body i, so that the connections send different
            bodies at first.
        stop: ends the run early when set; pending requests then don't count.
    """
    target, requests = job.target, job.target.requests()
    dialler = Dialler(target.url)
    connections = await asyncio.gather(*(dialler.dial() for _ in range(job.load.connections)), return_exceptions=True)
    await asyncio.sleep(job.begin_s - time.perf_counter())
    counts_from = time.perf_counter() + job.warmup_s
    until = counts_from + job.seconds

    async def use(place: int, connection: Connection | None, outcomes: Outcomes) -> None:
        """Send the requests of a connection, each after the answer to the previous request."""
        first_s = last_s = 0.0
        try:
            while (now := time.perf_counter()) < until:
                counts = now >= counts_from
                try:
                    if connection is None or connection.is_lost:
                        connection = await dialler.dial()
                        continue  # connecting is not part of a request
                except ConnectFailed as failed:
                    if counts:
                        outcomes.note_fault(failed.fault)
                        first_s, last_s = first_s or now, time.perf_counter()
                    await asyncio.sleep(RETRY_S)
                    continue
                sample = await connection.ask(requests[place % len(requests)], target.mode, now + target.timeout_s)
                place += 1
                if counts:
                    outcomes.note(sample, sample.sent_s, job.limits)
                    first_s, last_s = first_s or sample.sent_s, time.perf_counter()
        finally:
            if last_s > first_s:
                outcomes.set_rates(last_s - first_s)

    parts = [Outcomes() for _ in connections]
    whole = Outcomes()
    uses = [
        asyncio.ensure_future(use(place, connection if isinstance(connection, Connection) else None, parts[place]))
        for place, connection in enumerate(connections)
    ]
    await until_gone(uses, dialler, whole, stop)
    return merged([whole, *parts])


async def until_gone(
    tasks: Sequence[asyncio.Future[None]], dialler: Dialler, outcomes: Outcomes, stop: Stop | None
) -> None:
    """Wait for a run's tasks, and expire late requests. Cancel the tasks when the run is stopped or the server is gone.

    Sets ``outcomes.ended`` and ``outcomes.cpu_share``, and closes the dialler. Raises the exception of a task
    that has failed.
    """
    cpu_s, since_s = time.thread_time(), time.perf_counter()
    whole = asyncio.gather(*tasks, return_exceptions=True)
    try:
        while not outcomes.ended and not (await asyncio.wait([whole], timeout=WATCH_S))[0]:
            dialler.expire()
            failing_s = dialler.failing_since_s
            if stop is not None and stop.is_set():
                outcomes.ended = STOPPED
            elif failing_s is not None and time.perf_counter() - failing_s > GONE_AFTER_S:
                outcomes.ended = f"no connection could be made for {GONE_AFTER_S:g} s: {dialler.last_reason}"
    finally:
        for task in tasks:
            task.cancel()
        results = await whole
        dialler.close()
    outcomes.cpu_share = (time.thread_time() - cpu_s) / (time.perf_counter() - since_s)
    for result in results:
        if isinstance(result, Exception):
            raise result  # a bug in the bench
