"""What replicas may take of the memory of the machine and of its GPUs, and what they have. No I/O.

A starting replica reserves its deployment's declared ``memory``, or the most that any of the deployment's replicas was
measured to have, or what these had when they were ready and what it will keep later, whichever is most. It may start
only if that fits beside everything else. While a deployment's size is unknown, its first replica reserves only what it
will keep later, and the next one waits until the first was measured.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from headwater_server.process.machine import HOST, size_text

__all__ = ["Footprint", "MemoryBudget", "Refusal"]

Footprint = Mapping[str, int]
"""Bytes by place: `HOST`, or a GPU's name."""


@dataclass(frozen=True)
class Refusal:
    """Why a replica may not start."""

    place: str
    needed: int
    """Bytes that it would take there."""
    taken: int
    """Bytes that are taken or reserved."""
    limit: int

    def __str__(self) -> str:
        """The figures, for operators."""
        return (
            f"memory of {self.place}: it takes {size_text(self.needed)}, and of the {size_text(self.limit)} that "
            f"replicas may take {size_text(self.taken)} are taken"
        )


@dataclass
class _Holding:
    deployment: str
    reserved: dict[str, int]
    """Once the replica is settled what was declared, or what it then had and will keep, whichever is more."""
    declared: dict[str, int]
    later: dict[str, int] = field(default_factory=dict)
    """What it will keep beside what it has when it is ready."""
    measured: dict[str, int] = field(default_factory=dict)
    most: tuple[int, int] = (0, 0)
    """The most that was measured: of the machine, of a GPU."""
    is_settled: bool = False
    """Whether it was measured when it was ready."""

    def takes(self, place: str) -> int:
        return max(self.reserved.get(place, 0), self.measured.get(place, 0))


class MemoryBudget:
    """What each replica has and reserves.

    Args:
        limits: bytes that replicas may take, by place; any other place is not bounded.
    """

    def __init__(self, limits: Footprint) -> None:
        self.limits = dict(limits)
        self._holdings: dict[Hashable, _Holding] = {}
        self._largest: dict[str, tuple[int, int]] = {}
        """The most that was measured of a replica, by deployment: of the machine, of a GPU."""
        self._ready: dict[str, tuple[int, int]] = {}
        """The same when it was ready."""
        self._whole: dict[str, int] = {}
        """What any process uses of a GPU, by place, as far as known."""

    def knows(self, deployment: str) -> bool:
        """Whether the size of its replicas is known."""
        return deployment in self._largest

    def waits(self, deployment: str) -> bool:
        """Whether the next replica has to wait until another one is measured, since their size is unknown."""
        if not self.limits or self.knows(deployment):
            return False
        starting = (one for one in self._holdings.values() if not one.is_settled and not one.declared)
        return any(one.deployment == deployment for one in starting)

    def size(self, deployment: str, place: str, declared: int | None, later: int = 0) -> dict[str, int]:
        """The size of another replica that computes at a place, by place; empty if it is unknown.

        ``declared`` are the bytes that the configuration declares for that place, ``later`` those that the replica will
        keep there beside what it has when it is ready.
        """
        host, gpu = self._ready.get(deployment, (0, 0))
        kept = (host + later, gpu) if place == HOST else (host, gpu + later)
        host, gpu = _larger(self._largest.get(deployment, (0, 0)), kept)
        found = {HOST: host} if place == HOST else {HOST: host, place: gpu}
        if declared is not None:
            found[place] = max(found[place], declared)
        return {where: count for where, count in found.items() if count}

    def take(
        self, holder: Hashable, deployment: str, place: str, declared: int | None, later: int = 0
    ) -> Refusal | None:
        """Reserve memory for a replica, which ``holder`` stands for; or return why there is not enough."""
        size = self.size(deployment, place, declared, later)
        # A replica of unknown size takes something, too: none starts where everything is taken.
        for where in (HOST, place):
            limit = self.limits.get(where)
            needed = size.get(where, 0)
            if limit is not None and (self.taken(where) + needed > limit or (not size and self.taken(where) >= limit)):
                return Refusal(where, needed, self.taken(where), limit)
        of_later = {place: later} if later else {}
        self._holdings[holder] = _Holding(deployment, size, {} if declared is None else {place: declared}, of_later)
        return None

    def note(self, holder: Hashable, measured: Footprint, *, is_ready: bool) -> None:
        """Take in what a replica has now. The first time after it is ready, its reservation ends."""
        holding = self._holdings.get(holder)
        if holding is None:
            return
        holding.measured = dict(measured)
        on_gpus = max((count for place, count in measured.items() if place != HOST), default=0)
        holding.most = _larger(holding.most, (measured.get(HOST, 0), on_gpus))
        if is_ready and not holding.is_settled:
            holding.is_settled = True
            holding.reserved = dict(holding.declared)
            for place, later in holding.later.items():
                holding.reserved[place] = max(holding.declared.get(place, 0), measured.get(place, 0) + later)
            self._ready[holding.deployment] = _larger(self._ready.get(holding.deployment, (0, 0)), holding.most)
        if holding.is_settled or self.knows(holding.deployment):
            self._largest[holding.deployment] = _larger(self._largest.get(holding.deployment, (0, 0)), holding.most)

    def settle(self, holder: Hashable) -> None:
        """Note that a replica has started. If it could not be measured, others no longer wait for that."""
        holding = self._holdings.get(holder)
        if holding is not None and not holding.is_settled:
            self.note(holder, holding.measured, is_ready=True)

    def move(self, holder: Hashable, place: str) -> None:
        """Note that a replica computes at another place than the one reserved."""
        holding = self._holdings.get(holder)
        if holding is not None:
            declared, later = (max(one.values(), default=0) for one in (holding.declared, holding.later))
            holding.declared = {place: declared} if declared else {}
            holding.later = {place: later} if later else {}

    def note_whole(self, place: str, used: int) -> None:
        """Take in how much of a GPU is used by any process; all of that counts as taken."""
        self._whole[place] = used

    def release(self, holder: Hashable) -> None:
        """Release what a replica had, which is gone."""
        self._holdings.pop(holder, None)

    def forget(self, deployment: str) -> None:
        """Forget the size of its replicas."""
        self._largest.pop(deployment, None)
        self._ready.pop(deployment, None)

    def taken(self, place: str) -> int:
        """Bytes taken or reserved."""
        ours = sum(one.takes(place) for one in self._holdings.values())
        coming = sum(max(0, one.reserved.get(place, 0) - one.measured.get(place, 0)) for one in self._holdings.values())
        return max(ours, self._whole.get(place, 0) + coming)

    def excess(self, holder: Hashable) -> Refusal | None:
        """Where all replicas together exceed the limit of a place that this one is at, and by how much."""
        holding = self._holdings.get(holder)
        if holding is not None:
            for place, limit in self.limits.items():
                if place in holding.measured and self.taken(place) > limit:
                    return Refusal(place, holding.takes(place), self.taken(place), limit)
        return None


def _larger(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), max(one[1], other[1])
