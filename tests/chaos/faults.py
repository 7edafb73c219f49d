"""What is done to the server's processes: one is killed or stopped every now and then, as a seed says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.running import Running, segments_of

__all__ = ["REPLICAS", "WORKER", "Fault", "Harm", "inflict", "planned"]

REPLICAS: Final = ("plain", "fused", "graph.trunk", "graph.a", "graph.b", "pieces", "bytes", "tiny")
"""What has replicas in the chaos run's configuration."""
WORKER: Final = "worker"
_ROLES: Final = ("host", "tritonserver", "stub", "guardian", WORKER)
_WEIGHTS: Final = (3, 2, 2, 1, 2)
_EVERY_S: Final = (2.0, 5.0)


@dataclass(frozen=True)
class Fault:
    """One."""

    after_s: float
    """Since the one before."""
    number: signal.Signals
    role: str
    replica: str
    """Whose process; of no meaning to a gateway worker."""
    choice: int
    """Which of several processes, modulo their number."""

    def __str__(self) -> str:
        whose = "gateway worker" if self.role == WORKER else f"{self.role} of {self.replica}"
        return f"{self.number.name} {whose}"


@dataclass
class Harm:
    """What was done."""

    done: list[str] = field(default_factory=list)
    missed: int = 0
    """Faults for which there was no process."""
    worker_times_s: list[float] = field(default_factory=list)
    """When a gateway worker was hit, by the monotonic clock."""
    segments: set[str] = field(default_factory=set)
    """Shared memory that was there at any of these times."""


def planned(seed: int) -> Iterator[Fault]:
    """Without end."""
    chance = random.Random(f"faults {seed}")
    while True:
        yield Fault(
            chance.uniform(*_EVERY_S),
            chance.choice((signal.SIGKILL, signal.SIGSTOP)),
            chance.choices(_ROLES, _WEIGHTS)[0],
            chance.choice(REPLICAS),
            chance.randrange(1000),
        )


async def inflict(running: Running, faults: Iterator[Fault], harm: Harm, on_fault: Callable[[str], None]) -> None:
    """Do them, each when it is due, until there are none or this is cancelled.

    Args:
        running: the server.
        faults: what to do.
        harm: is told what was done.
        on_fault: likewise.
    """
    for fault in faults:
        await asyncio.sleep(fault.after_s)
        pids = await asyncio.to_thread(_pids, running, fault)
        if not pids:
            harm.missed += 1
            on_fault(f"{fault}: there is none")
            continue
        harm.segments |= await asyncio.to_thread(segments_of, running.folder)
        pid = pids[fault.choice % len(pids)]
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, fault.number)
        if fault.role == WORKER:
            harm.worker_times_s.append(time.monotonic())
        harm.done.append(str(fault))
        on_fault(str(fault))


def _pids(running: Running, fault: Fault) -> Sequence[int]:
    if fault.role == WORKER:
        return sorted(running.workers())
    return sorted(running.processes(fault.replica, fault.role))
