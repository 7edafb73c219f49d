"""How long something has been waited for, where the one that waits may have been paused itself.

Notices that an engine's step does not return.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["MAX_STEP_S", "StepWatch", "Wait"]


class Wait:
    """A wait that is over when its time has passed, the second half of it since somebody looked.

    A process that was stopped, swapped out or kept busy finds times long past at once, and what came meanwhile not yet
    read: it has half the time to read it. One that looks when `next_look` says loses nothing.

    Args:
        since: monotonic seconds.
    """

    __slots__ = ("_doubted_at", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self._doubted_at: float | None = None

    def restart(self, now: float) -> None:
        """What was waited for came; wait for the next."""
        self.since = now
        self._doubted_at = None

    def is_over(self, now: float, most_s: float) -> bool:
        """Look."""
        if now < self.since + most_s / 2:
            return False
        if self._doubted_at is None:
            self._doubted_at = now
        return now >= self._end(self._doubted_at, most_s)

    def next_look(self, most_s: float) -> float:
        """When to look again, monotonic seconds."""
        return self.since + most_s / 2 if self._doubted_at is None else self._end(self._doubted_at, most_s)

    def _end(self, doubted_at: float, most_s: float) -> float:
        return max(self.since + most_s, doubted_at + most_s / 2)


MAX_STEP_S: Final = 300.0


class StepWatch:
    """A thread that looks twice in `most_s` while there are steps, and sleeps while there are none.

    Args:
        most_s: that a step may take.
        on_stuck: called once, in that thread, if one takes longer.
    """

    def __init__(self, most_s: float, on_stuck: Callable[[], None]) -> None:
        self._most_s = most_s
        self._on_stuck = on_stuck
        self._changed = threading.Condition(threading.Lock())
        self._since: float | None = None
        """When the step under way began."""
        self._sleeps = False
        """Whether the thread waits for a step to begin. It says so before it looks at `_since`, and a step that begins
        sets that before it looks here: one of them sees the other."""
        self._stopped = False
        threading.Thread(target=self._run, name="engine-watch", daemon=True).start()

    def begin(self, now: float) -> None:
        """A step begins, and with that ends the one before."""
        self._since = now
        if self._sleeps:
            with self._changed:
                self._changed.notify()

    def rest(self) -> None:
        """There is no step under way."""
        self._since = None

    def stop(self) -> None:
        """There will be none any more."""
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
