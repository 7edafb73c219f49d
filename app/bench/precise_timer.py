"""A timer that is exact to some ten microseconds: Linux's timerfd.

An event loop's own timers have steps of a millisecond, which is half of what a fast model takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from typing import Final

__all__ = ["PreciseTimer"]

_CLOCK_MONOTONIC: Final = 1  # which time.perf_counter reads, too
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
    """Calls something at a time; only the last time that was set counts.

    Args:
        on_time: what it calls, on the running event loop.

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
        """Ring at that time of `time.perf_counter`, or at once if it has passed."""
        ahead_ns = max(1, int((when_s - time.perf_counter()) * 1e9))
        value = _Itimerspec(0, 0, *divmod(ahead_ns, 1_000_000_000))
        if _libc.timerfd_settime(self._fd, 0, ctypes.byref(value), None) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def close(self) -> None:
        """Never ring again."""
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was set anew meanwhile
            os.read(self._fd, 8)
            self._on_time()
