"""Generates the load of a run, in this process or in several."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Final

import uvloop

from headwater_server.cli.bench.closed_loop import Stop, closed_loop
from headwater_server.cli.bench.job import Job
from headwater_server.cli.bench.open_loop import open_loop
from headwater_server.cli.bench.outcomes import Outcomes, merged
from headwater_server.errors import CommandError

__all__ = ["Generator", "generator"]

START_S: Final = 0.3
"""Time that several processes get to receive their jobs, before they begin together."""
_child_stop: Stop | None = None


async def _run(job: Job, stop: Stop | None) -> Outcomes:
    gc.collect()
    gc.disable()  # a collection would add to the measured latency
    try:
        return await (closed_loop if job.load.connections else open_loop)(job, stop)
    finally:
        gc.enable()


def _enter_child(stop: Stop) -> None:
    global _child_stop
    _child_stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent handles it


def _child(job: Job) -> Outcomes:
    return uvloop.run(_run(job, _child_stop))


class Generator:
    """Runs jobs, in this process or in several.

    Args:
        stop: ends the current run early when set; its answers so far count.
        processes: number of processes.
        pool: the processes; None: generate the load in this process.
    """

    def __init__(self, stop: Stop, processes: int = 1, pool: ProcessPoolExecutor | None = None) -> None:
        self.stop = stop
        self._processes = processes
        self._pool = pool

    async def run(self, job: Job) -> Outcomes:
        """Make one run, from its warm-up to its last answer.

        Raises:
            CommandError: a process was killed.
        """
        if self._pool is None:
            return await _run(job, self.stop)
        loop = asyncio.get_running_loop()
        parts = job.parts(self._processes, time.perf_counter() + START_S)
        try:
            return merged(await asyncio.gather(*(loop.run_in_executor(self._pool, _child, part) for part in parts)))
        except BrokenProcessPool as error:
            raise CommandError(
                "--processes: a generator process was killed; is there enough memory for all?"
            ) from error


@contextmanager
def generator(processes: int) -> Iterator[Generator]:
    """Make a generator. If it uses several processes, they end with the ``with`` block."""
    if processes == 1:
        yield Generator(threading.Event())
        return
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with ProcessPoolExecutor(processes, context, initializer=_enter_child, initargs=(stop,)) as pool:
        list(pool.map(abs, range(processes)))  # start the processes before the first run
        yield Generator(stop, processes, pool)
