"""How urgent a replica's start is: less than what serves, where that can be undone once the replica serves itself.

A start is mostly imports, seconds of a core. On a machine whose cores are busy it would take them from requests.
Priorities are of a thread, inherited by those that it starts; and where the kernel groups sessions for scheduling
(``autogroup``), of the session besides, and then the threads' own count among each other only. Only who has
``CAP_SYS_NICE``, or a limit on ``nice`` that allows it, may raise a priority again; nobody else's is lowered.

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
"""On the scale of `nice`: about a third of the share that others have. A start on an idle machine loses nothing."""
CAP_SYS_NICE: Final = 23


def may_raise() -> bool:
    """Whether a priority that this process lowers can be raised to its own again."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        status = Path("/proc/self/status").read_text()
        effective = next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1]
        if int(effective, 16) >> CAP_SYS_NICE & 1:
            return True
    limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
    return limit == resource.RLIM_INFINITY or 20 - limit <= os.getpriority(os.PRIO_PROCESS, 0)


def lower(leader: int, members: Iterable[int], by: int) -> None:
    """Have every thread of some processes, and their session, come after this process's own by so much.

    Args:
        leader: the session's first process.
        members: the session's processes.
        by: on the scale of `nice`; 0 takes it back.
    """
    with contextlib.suppress(OSError):  # the kernel has no such groups, or the process has ended
        Path(f"/proc/{leader}/autogroup").write_text(str(by))
    nice = min(19, os.getpriority(os.PRIO_PROCESS, 0) + by)
    for _ in range(2):  # a thread that started meanwhile, from one that was still to come
        for pid in members:
            with contextlib.suppress(OSError):
                for thread in os.listdir(f"/proc/{pid}/task"):
                    with contextlib.suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, int(thread), nice)
