"""Generates the load of a run, in one process or several."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import uvloop

from app.cli.bench.closed_loop import Stop, closed_loop
from app.cli.bench.open_loop import open_loop
from app.cli.bench.outcomes import NO_LIMITS, Limits, Outcomes, merged
from app.cli.bench.target import Target
from app.errors import CommandError

__all__ = ["Generator", "Job", "Load", "generator"]

START_S: Final = 0.3
"""How far ahead the common start of several processes is set."""


class Load(NamedTuple):
    """The amount of load; one of the fields is None."""

    connections: int | None = None
    """For a closed loop."""
    rate_per_s: float | None = None
    """For an open loop."""

    def __str__(self) -> str:
        if self.connections is not None:
            return f"{self.connections} connection{'s' if self.connections != 1 else ''}"
        return f"{self.rate_per_s:g} requests/s"


@dataclass(frozen=True)
class Job:
    """One run of one process."""

    target: Target
    load: Load
    seconds: float
    warmup_s: float
    arrivals: str = "poisson"
    max_connections: int = 1024
    seed: int = 0
    limits: Limits = NO_LIMITS
    begin_s: float | None = None
    """See `closed_loop`."""

    def parts(self, count: int) -> list[Job]:
        """The same load as jobs for this many processes, or for fewer if there aren't enough connections."""
        connections, rate = self.load
        most = connections if connections is not None else self.max_connections
        count = min(count, most)
        shares = [most // count + (place < most % count) for place in range(count)]
        return [
            replace(
                self,
                load=Load(share) if connections is not None else Load(None, (rate or 0.0) / count),
                max_connections=share,
                seed=self.seed + place,
            )
            for place, share in enumerate(shares)
        ]


async def _run(job: Job, stop: Stop) -> Outcomes:
    gc.collect()
    gc.disable()  # a collection would add to the measured latency
    try:
        if job.load.rate_per_s is not None:
            return await open_loop(
                job.target, job.load.rate_per_s, job.seconds, job.warmup_s, arrivals=job.arrivals,
                max_connections=job.max_connections, seed=job.seed, limits=job.limits, begin_s=job.begin_s, stop=stop,
            )  # fmt: skip
        assert job.load.connections is not None
        return await closed_loop(
            job.target, job.load.connections, job.seconds, job.warmup_s,
            limits=job.limits, begin_s=job.begin_s, stop=stop,
        )  # fmt: skip
    finally:
        gc.enable()


_child_stop: Stop | None = None


def _enter_child(stop: Stop) -> None:
    global _child_stop
    _child_stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent handles it


def _child(job: Job) -> Outcomes:
    assert _child_stop is not None
    return uvloop.run(_run(job, _child_stop))


class Generator:
    """Runs jobs, in this process or in several.

    Args:
        pool: the processes; None: this process only.
        processes: their number.
        stop: see `stop`.
    """

    def __init__(self, pool: ProcessPoolExecutor | None, processes: int, stop: _Stop) -> None:
        self._pool = pool
        self._processes = processes
        self._stop = stop

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    def stop(self) -> None:
        """End the present run early; what was measured counts."""
        self._stop.set()

    async def run(self, job: Job) -> Outcomes:
        """Make one run, from its warm-up to its last answer.

        Raises:
            CommandError: one of the processes was killed.
        """
        if self._pool is None:
            return await _run(job, self._stop)
        begin_s = time.perf_counter() + START_S
        loop = asyncio.get_running_loop()
        parts = [replace(part, begin_s=begin_s) for part in job.parts(self._processes)]
        try:
            runs = await asyncio.gather(*(loop.run_in_executor(self._pool, _child, part) for part in parts))
        except BrokenProcessPool as error:
            raise CommandError(
                "--processes: a generator process was killed; is there enough memory for all?"
            ) from error
        return merged(list(runs))


class _Stop(Stop):
    """A flag, optionally shared by several processes."""

    def __init__(self, shared: bool) -> None:
        self.event = multiprocessing.get_context("spawn").Event() if shared else None
        self._is_set = False

    def is_set(self) -> bool:
        """See `Stop`."""
        return self._is_set

    def set(self) -> None:
        """Set the flag."""
        self._is_set = True
        if self.event is not None:
            self.event.set()


@contextmanager
def generator(processes: int) -> Iterator[Generator]:
    """A generator with its processes, which end with the block."""
    if processes == 1:
        yield Generator(None, 1, _Stop(shared=False))
        return
    stop = _Stop(shared=True)
    assert stop.event is not None
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_enter_child, initargs=(stop.event,)) as pool:
        list(pool.map(abs, range(processes)))  # start the processes before the first run
        yield Generator(pool, processes, stop)
