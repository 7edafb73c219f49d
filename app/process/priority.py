"""Lowers a replica's priority while it starts, where the priority can be raised again once the replica serves.

A start is mostly imports, which take seconds of a core; on a busy machine they would slow down requests. Each thread
has a priority, which the threads it starts inherit. Where the kernel groups sessions for scheduling (``autogroup``),
the session has one too, and threads then compete within it only. Raising a priority again takes ``CAP_SYS_NICE`` or a
sufficient limit on ``nice``; without these, no priority is lowered.

Imports the standard library only; see `app.process.guardian`.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["START_NICE", "lower", "may_raise"]

START_NICE: Final = 5
"""On the scale of `nice`: about a third of the normal share. A start on an idle machine loses nothing."""
CAP_SYS_NICE: Final = 23


def may_raise() -> bool:
    """Whether this process could raise a lowered priority to its own again."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text()
        effective = next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1]
        if int(effective, 16) >> CAP_SYS_NICE & 1:
            return True
    limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
    return limit == resource.RLIM_INFINITY or 20 - limit <= os.getpriority(os.PRIO_PROCESS, 0)


def lower(leader: int, members: Iterable[int], by: int) -> None:
    """Set the priority of every thread of some processes, and of their session, relative to this process's.

    Args:
        leader: the session's first process.
        members: the session's processes.
        by: how much lower, on the scale of `nice`; 0 restores the priority.
    """
    with contextlib.suppress(OSError):  # the kernel has no autogroups, or the process has ended
        Path(f"/proc/{leader}/autogroup").write_text(str(by))
    nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + by)
    for _ in range(2):  # the second pass finds threads that others started before their own turn
        for pid in members:
            with contextlib.suppress(OSError):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    with contextlib.suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, int(thread), nice)
