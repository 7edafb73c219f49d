"""Open loop: requests are sent on schedule, whether or not earlier ones have been answered.

Latency counts from the time at which a request should have been sent. So if the server stalls, the latency of all
requests that fall due meanwhile includes the stall. A delay of the generator is included, too, and is reported. This
rules out coordinated omission: see Gil Tene, "How NOT to Measure Latency".
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from headwater_server.cli.bench.closed_loop import Stop, until_gone
from headwater_server.cli.bench.job import Job
from headwater_server.cli.bench.outcomes import Outcomes
from headwater_server.cli.bench.sample_connection import ConnectFailed, Connection, Dialler
from headwater_server.cli.bench.sample_reader import Fault, Sample

__all__ = ["PreciseTimer", "arrival_times", "open_loop"]

IDLE_S: Final = 3.0
"""Maximum time that a reused connection was idle. Servers close idle connections, some after five seconds, and a
request sent at that moment would fail although neither server nor bench is at fault."""
_WAITED: Final = Fault("timeout", None, "no connection was free in time")
_CLOCK_MONOTONIC: Final = 1  # the clock that time.perf_counter reads
_libc = ctypes.CDLL(None, use_errno=True)


class PreciseTimer:
    """A timer with a precision of tens of microseconds: Linux's timerfd.

    The timers of an event loop have steps of a millisecond, which is half of a fast model's latency. Each `set`
    replaces the time set before.

    Args:
        on_time: called on the running event loop at the set time.

    Raises:
        OSError: the system has no such timer.
    """

    def __init__(self, on_time: Callable[[], None]) -> None:
        self._on_time = on_time
        self._fd = _checked(_libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._ring)

    def set(self, when_s: float) -> None:
        """Fire at this time of `time.perf_counter`, or at once if the time has passed."""
        ahead_ns = max(1, int((when_s - time.perf_counter()) * 1e9))
        itimerspec = (ctypes.c_long * 4)(0, 0, *divmod(ahead_ns, 1_000_000_000))  # first the interval, then the time
        _checked(_libc.timerfd_settime(self._fd, 0, itimerspec, None))

    def close(self) -> None:
        """Close the timer; it never fires again."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the timer was set again in the meantime
            os.read(self._fd, 8)
            self._on_time()


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def arrival_times(rate_per_s: float, arrivals: str, seed: int) -> Iterator[float]:
    """The times at which requests are due, in seconds from the start, without end.

    Args:
        rate_per_s: requests per second on average.
        arrivals: ``constant``: at equal intervals; ``poisson``: at random, like many independent users.
        seed: for ``poisson``.
    """
    if arrivals == "constant":
        return (place / rate_per_s for place in itertools.count())
    draw = random.Random(seed).expovariate
    return itertools.accumulate(draw(rate_per_s) for _ in itertools.count())


async def open_loop(job: Job, stop: Stop | None = None) -> Outcomes:
    """Put open-loop load on a server.

    Requests due in ``job.seconds`` after the warm-up count, and each is awaited for ``job.target.timeout_s`` from its
    due time. A rate is the number of answers divided by the time from the end of the warm-up to the last answer, but at
    least ``job.seconds``.

    Args:
        job: a job whose load has a rate above 0.
        stop: see `closed_loop`.
    """
    await asyncio.sleep(job.begin_s - time.perf_counter())
    senders = _Senders(job)
    outcomes, counts_from = senders.outcomes, senders.counts_from
    await until_gone([asyncio.ensure_future(senders.run())], senders.dialler, outcomes, stop)
    # If the run ended early, rates refer to the time until its end.
    had_s = max(min(job.seconds, time.perf_counter() - counts_from), 1e-9) if outcomes.ended else job.seconds
    outcomes.set_rates(max(had_s, senders.last_s - counts_from))
    return outcomes


class _Due(NamedTuple):
    """A request that is due."""

    at_s: float
    request: bytes


class _Senders:
    """The connections of a run, and the requests that wait for a free connection."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._requests = itertools.cycle(job.target.requests())
        self._waiting: deque[_Due] = deque()
        self._idle: list[Connection] = []
        self._busy: set[asyncio.Task[None]] = set()
        self._bug: BaseException | None = None
        """An exception that a task raised."""
        self.dialler = Dialler(job.target.url)
        self.outcomes = Outcomes()
        self.last_s = 0.0
        """When the last answer that counts arrived."""
        self.counts_from = time.perf_counter() + job.warmup_s

    async def run(self) -> None:
        """Send requests until the run is over, and wait for their answers."""
        job = self._job
        since_s, until = self.counts_from - job.warmup_s, self.counts_from + job.seconds
        due_s = (since_s + after_s for after_s in arrival_times(job.load.rate_per_s, job.arrivals, job.seed))
        following = next(due_s)
        over = asyncio.Event()

        def send_due() -> None:
            nonlocal following
            now = time.perf_counter()
            while following <= now and following < until:
                self._begin(_Due(following, next(self._requests)), now)
                following = next(due_s)
            if following >= until:
                over.set()
            else:
                timer.set(following)

        timer = PreciseTimer(send_due)
        timer.set(following)
        try:
            await over.wait()
            while self._busy:
                await asyncio.wait(self._busy)
        finally:
            timer.close()
            tasks = list(self._busy)  # not empty only if the run ended early; these requests don't count
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._bug is not None:
            raise self._bug

    def _begin(self, due: _Due, now: float) -> None:
        is_full = len(self._busy) >= self._job.max_connections
        if due.at_s >= self.counts_from:
            self.outcomes.behind_s.append(now - due.at_s)
            self.outcomes.waited += is_full
        if is_full:
            self._waiting.append(due)
            return
        task = asyncio.ensure_future(self._serve(due))
        self._busy.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._busy.discard(task)
        if not task.cancelled():
            self._bug = self._bug or task.exception()

    async def _serve(self, due: _Due) -> None:
        """Send a request, and then requests that wait for a connection."""
        await self._send(due)
        while self._waiting:
            await self._send(self._waiting.popleft())

    async def _send(self, due: _Due) -> None:
        target = self._job.target
        expires_s = due.at_s + target.timeout_s
        if time.perf_counter() > expires_s:
            self._note(due, Sample(_WAITED))
            return
        try:
            connection = self._take_idle() or await self.dialler.dial()
        except ConnectFailed as failed:
            self._note(due, Sample(failed.fault))
            return
        self._note(due, await connection.ask(due.request, target.mode, expires_s))
        if not connection.is_lost:
            self._idle.append(connection)

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_lost:
                continue
            if time.perf_counter() - connection.idle_since_s <= IDLE_S:
                return connection
            connection.close()
        return None

    def _note(self, due: _Due, sample: Sample) -> None:
        if due.at_s < self.counts_from:
            return
        self.outcomes.note(sample, due.at_s, self._job.limits)
        if sample.ended_s:
            self.outcomes.lateness_s.append(max(0.0, sample.sent_s - due.at_s))
            self.last_s = max(self.last_s, sample.ended_s)
