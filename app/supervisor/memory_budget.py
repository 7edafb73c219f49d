"""What replicas may take of the machine's memory and of its GPUs', and what they have. No I/O.

A replica that starts has a reservation: of its deployment's declared ``memory``, or of the most that one of its
replicas was ever measured to have, whichever is more. It may start only if that fits beside everything else. Of a
deployment of which nothing is known the first replica starts with a reservation of nothing, and the next not before the
first was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.process.machine import HOST, size_text

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
    """Bytes taken and reserved already."""
    limit: int

    def __str__(self) -> str:
        """With figures, as an operator is told."""
        return (
            f"memory of {self.place}: it takes {size_text(self.needed)}, and of the {size_text(self.limit)} that "
            f"replicas may take {size_text(self.taken)} are taken"
        )


@dataclass
class _Holding:
    deployment: str
    reserved: dict[str, int]
    """Until it was measured when it had started; then what was declared."""
    declared: dict[str, int]
    measured: dict[str, int] = field(default_factory=dict)
    most: tuple[int, int] = (0, 0)
    """It was ever measured to have: of the machine, of a GPU."""
    is_settled: bool = False
    """Whether it was measured when it had started."""

    def takes(self, place: str) -> int:
        return max(self.reserved.get(place, 0), self.measured.get(place, 0))


class MemoryBudget:
    """Who has what.

    Args:
        limits: bytes that replicas may take, by place; a place that isn't named is not bounded.
    """

    def __init__(self, limits: Footprint) -> None:
        self.limits = dict(limits)
        self._holdings: dict[int, _Holding] = {}
        self._largest: dict[str, tuple[int, int]] = {}
        """The most that a replica was measured to have, by deployment: of the machine, of a GPU."""
        self._whole: dict[str, int] = {}
        """What is used of a GPU by whomever, as far as known."""

    def knows(self, deployment: str) -> bool:
        """Whether a replica of it was ever measured."""
        return deployment in self._largest

    def waits(self, deployment: str) -> bool:
        """Whether the next replica has to wait until another one, of which nothing is known either, was measured."""
        return not self.knows(deployment) and any(
            one.deployment == deployment and not one.is_settled and not one.declared for one in self._holdings.values()
        )

    def size(self, deployment: str, place: str, declared: int | None) -> dict[str, int]:
        """What another replica will take; nothing, if nothing is known.

        Args:
            deployment: whose it is.
            place: where it computes.
            declared: what the configuration says that it takes there.
        """
        host, gpu = self._largest.get(deployment, (0, 0))
        found = {HOST: host} if place == HOST else {HOST: host, place: gpu}
        if declared is not None:
            found[place] = max(found[place], declared)
        return {where: count for where, count in found.items() if count}

    def take(self, number: int, deployment: str, place: str, declared: int | None) -> Refusal | None:
        """Reserve for a replica, or say why there is no room for it."""
        size = self.size(deployment, place, declared)
        # What isn't known yet still takes something: nothing starts where all is taken.
        for where in (HOST, place):
            limit = self.limits.get(where)
            needed = size.get(where, 0)
            if limit is not None and (self.taken(where) + needed > limit or (not size and self.taken(where) >= limit)):
                return Refusal(where, needed, self.taken(where), limit)
        self._holdings[number] = _Holding(deployment, size, {} if declared is None else {place: declared})
        return None

    def note(self, number: int, measured: Footprint, *, is_ready: bool) -> None:
        """Take in what a replica has now; the first time when it is ready its reservation ends."""
        holding = self._holdings.get(number)
        if holding is None:
            return
        holding.measured = dict(measured)
        on_gpus = max((count for place, count in measured.items() if place != HOST), default=0)
        holding.most = _larger(holding.most, (measured.get(HOST, 0), on_gpus))
        if is_ready and not holding.is_settled:
            holding.is_settled = True
            holding.reserved = holding.declared
        if holding.is_settled or self.knows(holding.deployment):
            self._largest[holding.deployment] = _larger(self._largest.get(holding.deployment, (0, 0)), holding.most)

    def settle(self, number: int) -> None:
        """A replica has started. If it could not be measured, others don't wait for that any longer."""
        holding = self._holdings.get(number)
        if holding is not None and not holding.is_settled:
            self.note(number, holding.measured, is_ready=True)

    def move(self, number: int, place: str) -> None:
        """A replica computes elsewhere than it was reserved for."""
        holding = self._holdings.get(number)
        if holding is not None:
            declared = max(holding.declared.values(), default=0)
            holding.declared = {place: declared} if declared else {}

    def note_whole(self, place: str, used: int) -> None:
        """Take in what is used of a GPU by whomever: what can't be told apart there counts as ours."""
        self._whole[place] = used

    def give_back(self, number: int) -> None:
        """A replica is gone."""
        self._holdings.pop(number, None)

    def forget(self, deployment: str) -> None:
        """Know nothing of it any more."""
        self._largest.pop(deployment, None)

    def taken(self, place: str) -> int:
        """Bytes taken and reserved."""
        ours = sum(one.takes(place) for one in self._holdings.values())
        coming = sum(max(0, one.reserved.get(place, 0) - one.measured.get(place, 0)) for one in self._holdings.values())
        return max(ours, self._whole.get(place, 0) + coming)

    def excess(self, number: int) -> Refusal | None:
        """Whether all together take more than they may where this one is; then what it has there."""
        holding = self._holdings.get(number)
        for place in holding.measured if holding is not None else ():
            limit = self.limits.get(place)
            if holding is not None and limit is not None and self.taken(place) > limit:
                return Refusal(place, holding.takes(place), self.taken(place), limit)
        return None


def _larger(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), max(one[1], other[1])
