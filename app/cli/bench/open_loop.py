"""Open loop: requests are sent on schedule, whether or not earlier ones have been answered.

Latency counts from the time at which a request should have been sent. A stalled server is charged for all requests that
fall due in the meantime; a generator that is late is charged too, and reports it. This rules out coordinated omission:
see Gil Tene, "How NOT to Measure Latency".
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

from app.cli.bench.closed_loop import Stop, until_gone
from app.cli.bench.connection import Connection, Dialler
from app.cli.bench.events import Sample, ask
from app.cli.bench.faults import AskFailed, Fault
from app.cli.bench.outcomes import NO_LIMITS, Limits, Outcomes
from app.cli.bench.target import Target

__all__ = ["ARRIVALS", "PreciseTimer", "arrival_times", "open_loop"]

ARRIVALS: Final = ("poisson", "constant")
IDLE_S: Final = 3.0
"""A connection that was idle for longer is not reused: servers close idle connections, some after five seconds, and a
request sent at that moment would fail through nobody's fault."""
_WAITED: Final = Fault("timeout", None, "no connection was free in time")
_CLOCK_MONOTONIC: Final = 1  # the clock of time.perf_counter
_TFD_NONBLOCK_CLOEXEC: Final = os.O_NONBLOCK | os.O_CLOEXEC


class _Itimerspec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


_libc = ctypes.CDLL(None, use_errno=True)


class PreciseTimer:
    """A timer that is exact to tens of microseconds: Linux's timerfd.

    An event loop's own timers have steps of a millisecond, half of a fast model's time. Only the last time set counts.

    Args:
        on_time: called on the running event loop.

    Raises:
        OSError: the system has no such timer.
    """

    def __init__(self, on_time: Callable[[], None]) -> None:
        self._on_time = on_time
        self._fd = _libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._ring)

    def set(self, when_s: float) -> None:
        """Fire at this time of `time.perf_counter`, or at once if it has passed."""
        ahead_ns = max(1, int((when_s - time.perf_counter()) * 1e9))
        value = _Itimerspec(0, 0, *divmod(ahead_ns, 1_000_000_000))
        if _libc.timerfd_settime(self._fd, 0, ctypes.byref(value), None) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def close(self) -> None:
        """Never fire again."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was set again in the meantime
            os.read(self._fd, 8)
            self._on_time()


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


async def open_loop(
    target: Target,
    rate_per_s: float,
    seconds: float,
    warmup_s: float = 1.0,
    *,
    arrivals: str = "poisson",
    max_connections: int = 1024,
    seed: int = 0,
    limits: Limits = NO_LIMITS,
    begin_s: float | None = None,
    stop: Stop | None = None,
) -> Outcomes:
    """Put load on a server.

    Requests due in the ``seconds`` after the warm-up count, and each is awaited for ``target.timeout_s`` from its due
    time. A rate is the number of answers divided by the time from the end of the warm-up to the last answer, but at
    least ``seconds``.

    Args:
        target: what to send, its bodies in turn.
        rate_per_s: above 0.
        seconds: how long to send requests that count.
        warmup_s: how long to send requests before those.
        arrivals: one of `ARRIVALS`.
        max_connections: when all are busy, a request waits for one; its latency still counts from its due time.
        seed: for the due times.
        limits: for `Outcomes.met`.
        begin_s: see `closed_loop`.
        stop: see `closed_loop`.
    """
    outcomes = Outcomes()
    now = time.perf_counter()
    if begin_s is not None and begin_s > now:
        await asyncio.sleep(begin_s - now)
    counts_from = time.perf_counter() + warmup_s
    arrival = arrival_times(rate_per_s, arrivals, seed)
    senders = _Senders(target, outcomes, limits, max_connections, counts_from)
    cpu_s, since_s = time.thread_time(), time.perf_counter()
    async with until_gone(senders.dialler, outcomes, stop) as tasks:
        tasks.append(asyncio.ensure_future(senders.run(arrival, since_s, counts_from + seconds)))
        await asyncio.wait(tasks)
    now = time.perf_counter()
    outcomes.cpu_share = (time.thread_time() - cpu_s) / (now - since_s)
    # For a run that ended early, the time it had.
    wanted_s = seconds if not outcomes.ended else max(min(seconds, now - counts_from), 1e-9)
    outcomes.elapsed_s = max(wanted_s, senders.last_s - counts_from)
    outcomes.requests_per_s = outcomes.answers / outcomes.elapsed_s
    outcomes.met_per_s = outcomes.met / outcomes.elapsed_s
    outcomes.tokens_per_s = outcomes.tokens / outcomes.elapsed_s
    return outcomes


class _Due(NamedTuple):
    """A request that is due."""

    at_s: float
    request: bytes


class _Senders:
    """The connections of one run, and the requests that wait for one."""

    def __init__(
        self, target: Target, outcomes: Outcomes, limits: Limits, max_connections: int, counts_from: float
    ) -> None:
        self.dialler = Dialler(target)
        self.last_s = counts_from
        """When the last answer that counts arrived."""
        self._target = target
        self._requests = itertools.cycle(target.requests())
        self._outcomes = outcomes
        self._limits = limits
        self._most = max_connections
        self._counts_from = counts_from
        self._waiting: deque[_Due] = deque()
        self._idle: list[Connection] = []
        self._busy: set[asyncio.Task[None]] = set()
        self._mistake: BaseException | None = None
        """A bug of the bench, raised in a task."""

    async def run(self, arrival: Iterator[float], since_s: float, until: float) -> None:
        """Send until this time, and wait for the answers."""
        over = asyncio.Event()
        following = since_s + next(arrival)

        def send_due() -> None:
            nonlocal following
            now = time.perf_counter()
            while following <= now:
                if following >= until:
                    break
                self._begin(_Due(following, next(self._requests)), now)
                following = since_s + next(arrival)
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
            tasks = list(self._busy)  # left only if the run is ended early; they don't count
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._mistake is not None:
            raise self._mistake

    def _begin(self, due: _Due, now: float) -> None:
        if due.at_s >= self._counts_from:
            self._outcomes.behind_s.append(now - due.at_s)
        if len(self._busy) >= self._most:
            if due.at_s >= self._counts_from:
                self._outcomes.waited += 1
            self._waiting.append(due)
            return
        task = asyncio.ensure_future(self._serve(due))
        self._busy.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._busy.discard(task)
        if not task.cancelled():
            self._mistake = self._mistake or task.exception()

    async def _serve(self, due: _Due) -> None:
        """Send a request and then, on the same connection, those that wait."""
        connection: Connection | None = None
        while True:
            connection = await self._send(due, connection)
            if not self._waiting:
                break
            due = self._waiting.popleft()
        if connection is not None and not connection.lost:
            self._idle.append(connection)

    async def _send(self, due: _Due, connection: Connection | None) -> Connection | None:
        """Send one request. Returns the connection, if it can be reused."""
        expires_s = due.at_s + self._target.timeout_s
        if time.perf_counter() > expires_s:
            self._note(due, Sample(_WAITED, due.at_s, due.at_s))
            return connection
        if connection is None or connection.lost:
            connection = self._take_idle()
        try:
            if connection is None:
                connection = await self.dialler.dial()
        except AskFailed as failed:
            self._note(due, Sample(failed.fault, due.at_s, due.at_s))
            return None
        sample = await ask(connection, due.request, self._target.kind, due.at_s, expires_s)
        self._note(due, sample)
        return None if connection.lost else connection

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.lost:
                continue
            if time.perf_counter() - connection.idle_since_s <= IDLE_S:
                return connection
            connection.close()
        return None

    def _note(self, due: _Due, sample: Sample) -> None:
        if due.at_s < self._counts_from:
            return
        self._outcomes.note(sample, due.at_s, self._limits)
        if sample.ended_s > due.at_s:  # otherwise it was not sent, or has no answer
            self._outcomes.lateness_s.append(max(0.0, sample.sent_s - due.at_s))
            self.last_s = max(self.last_s, sample.ended_s)
