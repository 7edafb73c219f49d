"""The watchdog of an engine's steps, and timeouts that allow for a paused process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["MAX_STEP_S", "StepWatch", "Wait"]


class Wait:
    """A timeout that allows for its process having been stopped, swapped out or kept busy.

    Such a process finds the timeout long past, but has not yet read the data that arrived meanwhile. So when a call of
    `is_over` first finds that half of the timeout has passed, the timeout expires at the earliest another half later. A
    process that calls `is_over` at the times of `next_look` gets the exact timeout.

    Args:
        since: start, in monotonic seconds.
    """

    def __init__(self, since: float) -> None:
        self.since = since
        self._doubted_at: float | None = None

    def restart(self, now: float) -> None:
        """Start again."""
        self.since = now
        self._doubted_at = None

    def is_over(self, now: float, most_s: float) -> bool:
        """Whether a timeout of `most_s` has expired."""
        if now < self.since + most_s / 2:
            return False
        if self._doubted_at is None:
            self._doubted_at = now
        return now >= self._end(self._doubted_at, most_s)

    def next_look(self, most_s: float) -> float:
        """When to call `is_over` again, in monotonic seconds."""
        return self.since + most_s / 2 if self._doubted_at is None else self._end(self._doubted_at, most_s)

    def _end(self, doubted_at: float, most_s: float) -> float:
        return max(self.since + most_s, doubted_at + most_s / 2)


MAX_STEP_S: Final = 300.0
"""The longest that a step may take unless the option ``max_step_s`` says otherwise."""


class StepWatch:
    """A watchdog thread that checks the step twice in `most_s` while steps run, and sleeps otherwise.

    Args:
        most_s: the longest that a step may take, in seconds.
        on_stuck: called once, in the watchdog thread, if a step takes longer.
    """

    def __init__(self, most_s: float, on_stuck: Callable[[], None]) -> None:
        self._most_s = most_s
        self._on_stuck = on_stuck
        self._changed = threading.Condition(threading.Lock())
        self._since: float | None = None
        """When the running step began; None if no step runs."""
        self._sleeps = False
        """Whether the thread waits for a step to begin. The thread sets `_sleeps` before it reads `_since`, and `begin`
        sets `_since` before it reads `_sleeps`, so no wake-up is lost."""
        self._stopped = False
        threading.Thread(target=self._run, name="engine-watch", daemon=True).start()

    def begin(self, now: float) -> None:
        """Note that a step begins, and that the previous step has ended."""
        self._since = now
        if self._sleeps:
            with self._changed:
                self._changed.notify()

    def rest(self) -> None:
        """Note that no step runs."""
        self._since = None

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _run(self) -> None:
        wait = Wait(0)
        with self._changed:
            while True:
                if self._stopped:
                    return
                self._sleeps = True
                since = self._since
                if since is None:
                    self._changed.wait()
                    continue
                self._sleeps = False
                if since != wait.since:
                    wait = Wait(since)
                now = time.monotonic()
                if wait.is_over(now, self._most_s):
                    break
                self._changed.wait(max(wait.next_look(self._most_s) - now, 0.001))
        self._on_stuck()
