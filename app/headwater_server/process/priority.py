"""Priorities: a replica that starts yields the CPU to processes that serve. Standard library only."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["START_NICE", "may_raise_priority", "set_priority", "set_session_priority"]

START_NICE: Final = 5
"""Priority of a starting replica and its guardian, as a value of `nice`: about a third of the normal share of the
CPU."""
CAP_SYS_NICE: Final = 23
SESSION_TRIES: Final = 5
SESSION_WAIT_S: Final = 0.1
"""Time for which the kernel, when it has set a session's priority, refuses to set another."""


def may_raise_priority() -> bool:
    """Whether this process may raise a lowered priority back to its present value; if not, starts keep their priority.

    A start is mostly imports, which take seconds of a core and would slow down requests on a busy machine. Raising a
    priority takes ``CAP_SYS_NICE`` or a sufficient limit on ``nice``.
    """
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text()
        effective = next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1]
        if int(effective, 16) >> CAP_SYS_NICE & 1:
            return True
    limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
    return limit == resource.RLIM_INFINITY or 20 - limit <= os.getpriority(os.PRIO_PROCESS, 0)


def set_priority(pids: Iterable[int], nice: int, *, is_idle: bool = False) -> None:
    """Set the priority and scheduling policy of all threads of these processes. Threads that have ended, or that this
    process may not change, are skipped.

    Args:
        nice: a value of `nice`.
        is_idle: whether the threads run only where no other thread of their session would (``SCHED_IDLE``); otherwise
            they get this process's policy. The kernel counts a CPU with only such threads as idle: a thread that
            wakes up is sent to such a CPU, and doesn't wait there.
    """
    policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
    if is_idle:
        policy, parameter = os.SCHED_IDLE, os.sched_param(0)
    members = list(pids)
    for _ in range(2):  # the second pass finds threads that were started during the first pass
        for pid in members:
            with contextlib.suppress(OSError):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    with contextlib.suppress(OSError):
                        os.sched_setscheduler(int(thread), policy, parameter)
                        os.setpriority(os.PRIO_PROCESS, int(thread), nice)


def set_session_priority(pid: int, nice: int, tries: int = SESSION_TRIES) -> None:
    """Set the priority of a process's session, as a value of `nice`.

    Where the kernel groups sessions for scheduling (``autogroup``), threads compete only with threads of their session.
    All users other than root together may set a session's priority once in 0.1 s: if the kernel refuses for that
    reason, this function waits between its tries, and gives up after the last.
    """
    for tries_left in reversed(range(tries)):
        try:
            Path(f"/proc/{pid}/autogroup").write_text(str(nice))
        except BlockingIOError:
            if tries_left:
                time.sleep(SESSION_WAIT_S)
        except OSError:  # the kernel has no autogroups, or the process has ended
            return
        else:
            return
