"""Chooses the least loaded replica for the next call, in a time that doesn't depend on the number of replicas.

With up to `FEW` replicas all are compared. More replicas are kept in bags by expected load: of two replicas drawn at
random from a bag the less loaded is chosen, which is nearly as good as the least loaded of all (Mitzenmacher, "The
Power of Two Choices in Randomized Load Balancing", 2001). A worker sees only the calls that it made; a replica that
looks idle may be computing calls of other workers. So of replicas without calls, replicas that last reported no rows of
other workers come first (Lu et al., "Join-Idle-Queue", 2011).
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
"""Seconds for which a replica's report of other workers' rows counts in `Choice.weight`."""


class Choice:
    """Chooses among the replicas of one deployment.

    Args:
        replicas: the deployment's replicas, by id; the caller updates this mapping in place.
        chance: returns random numbers from 0 to below 1; tests replace it.
    """

    def __init__(self, replicas: Mapping[str, ReplicaCalls], chance: Callable[[], float] = random.random) -> None:
        self._replicas = replicas
        self._chance = chance
        self._loop = asyncio.get_running_loop()
        self._max_in_flight = self._instances = 1
        self._without: ReplicaCalls | None = None
        """The replica that is held out of the bags, because `best` must not choose it."""
        self._free = Bag[ReplicaCalls]()
        """Replicas without calls whose last answer reported no rows of other workers."""
        self._shared = Bag[ReplicaCalls]()
        """Replicas without calls that reported rows of other workers, or have reported nothing yet."""
        self._partly = Bag[ReplicaCalls]()
        """Replicas with calls and an idle instance."""
        self._busy = Bag[ReplicaCalls]()
        """Replicas that may have another call, although all instances are busy."""
        self._full = Bag[ReplicaCalls]()
        """Replicas that may have no further call."""
        self._bags: dict[ReplicaCalls, Bag[ReplicaCalls]] = {}
        """The bag of each replica that is in a bag."""
        self._is_sorted = False
        """Whether replicas are kept in bags; set for good once there are more than `FEW` replicas."""

    def bound(self, max_in_flight: int, instances: int) -> None:
        """Set how many calls of this worker a replica may have, and how many of these calls it computes at once."""
        if (max_in_flight, instances) != (self._max_in_flight, self._instances):
            self._max_in_flight, self._instances = max_in_flight, instances
            if self._is_sorted:
                self._sort(self._replicas.values())

    def note(self, replica: ReplicaCalls) -> None:
        """Update the bags after a change of a replica's calls, report or eligibility."""
        if self._is_sorted:
            self._sort((replica,))
        elif len(self._replicas) > FEW:
            self._is_sorted = True
            self._sort(self._replicas.values())

    def best(self, without: ReplicaCalls | None = None) -> ReplicaCalls | None:
        """The replica for the next call, with an idle instance if possible; None if no replica may have another call.

        Args:
            without: a replica that must not be chosen.
        """
        if len(self._replicas) > FEW:
            self._keep_out(without)
            return self._lighter(self._free, self._shared, self._partly, self._busy)
        best: ReplicaCalls | None = None
        best_weight = (True, 0)
        for replica in self._replicas.values():
            calls = replica.calls
            if calls < self._max_in_flight and replica is not without and not replica.is_lost:
                weight = self.weight(replica) if replica.others else (calls >= self._instances, replica.rows)
                if (best is None or weight < best_weight) and not replica.is_retiring:
                    best, best_weight = replica, weight
        return best

    def least(self) -> ReplicaCalls | None:
        """The least loaded replica, without calls if possible, even if it may have no further call; None if no replica
        is eligible."""
        if len(self._replicas) > FEW:
            self._keep_out(None)
            return self._lighter(self._free, self._shared, self._partly, self._busy, self._full)
        eligible = [replica for replica in self._replicas.values() if replica.is_eligible]
        return min(eligible, key=lambda replica: (replica.calls, replica.rows), default=None)

    def weight(self, replica: ReplicaCalls) -> tuple[bool, int]:
        """A replica's expected load: whether this worker's calls keep all instances busy, and the number of rows, with
        the rows of other workers if the report of them is fresh."""
        rows = replica.rows
        if replica.others and self._loop.time() < replica.heard_s + REPORT_FRESH_S:
            rows += replica.others
        return replica.calls >= self._instances, rows

    def _lighter(self, *bags: Bag[ReplicaCalls]) -> ReplicaCalls | None:
        """The less loaded of two random members of the first bag that isn't empty."""
        for bag in bags:
            if bag:
                first = bag.draw(self._chance)
                if bag is self._free or len(bag) == 1:  # all members of `_free` have no load
                    return first
                second = bag.draw(self._chance)
                return first if self.weight(first) <= self.weight(second) else second
        return None

    def _keep_out(self, without: ReplicaCalls | None) -> None:
        """Keep this replica out of the bags, and put the replica that was kept out before back into its bag."""
        before = self._without
        if without is not before:
            self._without = without
            self._sort(replica for replica in (before, without) if replica is not None)

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
