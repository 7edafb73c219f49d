"""Which replica gets the next call: the one that has least to do, found in constant time whatever their number.

Few replicas are all looked at. Many are kept in bags by how much they are expected to have to do, and a bag's lighter
one of two drawn at random is chosen: nearly as good as the lightest of all (Mitzenmacher, "The Power of Two Choices in
Randomized Load Balancing", 2001). A worker sees only its own calls; replicas that are idle for it may have those of
other workers. So those whose last answer reported no rows of others come first (Lu et al., "Join-Idle-Queue", 2011).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from headwater_server.dispatch.bag import Bag
from headwater_server.dispatch.pool import FEW, ReplicaCalls

__all__ = ["Choice"]

REPORT_FRESH_S: Final = 1.0
"""How long the rows of other workers that a replica reported count."""


class Choice:
    """Chooses among the replicas of one deployment.

    Args:
        replicas: the connected ones, by id; the same object throughout.
        chance: gives numbers from 0 to below 1; tests pass their own.
    """

    def __init__(self, replicas: Mapping[str, ReplicaCalls], chance: Callable[[], float] = random.random) -> None:
        self._replicas = replicas
        self._chance = chance
        self._loop = asyncio.get_running_loop()
        self._max_in_flight = self._instances = 1
        self._without: ReplicaCalls | None = None
        """The one that is in no bag although it is eligible."""
        self._free = Bag[ReplicaCalls]()
        """Those without calls, whose last answer reported no rows of other workers."""
        self._shared = Bag[ReplicaCalls]()
        """Those without calls that reported others' rows, or nothing yet."""
        self._partly = Bag[ReplicaCalls]()
        """Those with calls and an idle instance."""
        self._busy = Bag[ReplicaCalls]()
        """Those that may have another call, but no instance is idle."""
        self._full = Bag[ReplicaCalls]()
        """Those that may have no other call."""
        self._bags: dict[ReplicaCalls, Bag[ReplicaCalls]] = {}
        """The bag of each replica that is in one."""
        self._is_sorted = False
        """Whether replicas are kept in bags: not before there were more than a few."""

    def bound(self, max_in_flight: int, instances: int) -> None:
        """Set how many calls a replica may have, and how many of these it computes at once."""
        if (max_in_flight, instances) != (self._max_in_flight, self._instances):
            self._max_in_flight, self._instances = max_in_flight, instances
            if self._is_sorted:
                self._sort(self._replicas.values())

    def note(self, replica: ReplicaCalls) -> None:
        """Take in that a replica's calls, its report or its eligibility has changed."""
        if self._is_sorted:
            self._sort((replica,))
        elif len(self._replicas) > FEW:
            self._is_sorted = True
            self._sort(self._replicas.values())

    def best(self, without: ReplicaCalls | None = None) -> ReplicaCalls | None:
        """The replica for another call, if any may have one: one with an idle instance if there is any.

        Args:
            without: not this one.
        """
        if len(self._replicas) > FEW:
            self._keep_out(without)
            return self._lighter(self._free, self._shared, self._partly, self._busy)
        best: ReplicaCalls | None = None
        least = (True, 0)
        for replica in self._replicas.values():
            calls = replica.calls
            if calls < self._max_in_flight and replica is not without and not replica.is_lost:
                weight = self.weight(replica) if replica.others else (calls >= self._instances, replica.rows)
                if (best is None or weight < least) and not replica.is_retiring:
                    best, least = replica, weight
        return best

    def least(self) -> ReplicaCalls | None:
        """The replica that has least to do, even if it may have no other call; one without calls if there is any."""
        if len(self._replicas) > FEW:
            self._keep_out(None)
            return self._lighter(self._free, self._shared, self._partly, self._busy, self._full)
        eligible = [one for one in self._replicas.values() if one.is_eligible]
        return min(eligible, key=lambda one: (one.calls, one.rows), default=None)

    def weight(self, replica: ReplicaCalls) -> tuple[bool, int]:
        """What a replica is expected to have to do: whether no instance is idle, and rows."""
        rows = replica.rows
        if replica.others and self._loop.time() < replica.heard_s + REPORT_FRESH_S:
            rows += replica.others
        return replica.calls >= self._instances, rows

    def _lighter(self, *bags: Bag[ReplicaCalls]) -> ReplicaCalls | None:
        """The lighter one of two members of the first bag that has any."""
        for bag in bags:
            if bag:
                one = bag.draw(self._chance)
                if bag is self._free or len(bag) == 1:  # all of them have nothing
                    return one
                other = bag.draw(self._chance)
                return one if self.weight(one) <= self.weight(other) else other
        return None

    def _keep_out(self, without: ReplicaCalls | None) -> None:
        """Keep one replica out of the bags, and put the one back that was."""
        before = self._without
        if without is not before:
            self._without = without
            self._sort(one for one in (before, without) if one is not None)

    def _sort(self, replicas: Iterable[ReplicaCalls]) -> None:
        for replica in replicas:
            before, bag = self._bags.get(replica), self._bag(replica)
            if bag is before:
                continue
            if before is not None:
                before.discard(replica)
            if bag is not None:
                bag.add(replica)
                self._bags[replica] = bag
            else:
                del self._bags[replica]

    def _bag(self, replica: ReplicaCalls) -> Bag[ReplicaCalls] | None:
        if not replica.is_eligible or replica is self._without:
            return None
        if not replica.calls:
            return self._free if replica.heard_s and not replica.others else self._shared
        if replica.calls >= self._max_in_flight:
            return self._full
        return self._partly if replica.calls < self._instances else self._busy
