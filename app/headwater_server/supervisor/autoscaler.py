"""Scales deployments by load: a policy decides at each tick, and the autoscaler has the replica sets act on it.

A replica is added when, at every tick for ``up_after_s``, rows have waited longer than the target, or have waited while
the replicas computed nearly all the time. A replica is removed when the load of the last ``down_after_s`` would have
fit on the remaining replicas, in either of two ways:

- the remaining replicas would have computed for at most `LOW_UTILIZATION` of their time, and waits, assumed to grow
  in proportion as replicas get fewer, would have stayed below the target; or
- there were never more requests at once than the remaining replicas compute at once, so no request would have waited.
  For example, a client that sends requests in sequence keeps a replica busy all the time, but needs no second replica.

A load between the thresholds changes nothing. If both rules are wrong because waits grow faster than in proportion, the
step down is taken back, and is not repeated until the load is clearly lower (`CLEARLY_LESS`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from headwater_server.config.sections import ReplicaBounds, Scaling
from headwater_server.control.load import DeploymentLoad
from headwater_server.errors import MemoryBudgetExceeded
from headwater_server.supervisor.child_processes import ChildProcesses
from headwater_server.supervisor.replica_set import ReplicaSet
from headwater_server.supervisor.slot import Retired

__all__ = ["Autoscaler", "Demand", "ScalingPolicy"]

logger = logging.getLogger("headwater")

TICK_S: Final = 0.5
LOW_UTILIZATION: Final = 0.5
"""A replica may be removed if the remaining replicas would compute for at most this fraction of their time."""
HIGH_UTILIZATION: Final = 0.9
"""The load is too high while rows wait and the replicas compute for more than this fraction of their time."""
CLEARLY_LESS: Final = 0.7
"""A number of replicas that was too few after a step down is tried again only when the load is below this fraction of
the load that was too high for that number."""
REGRET_AFTER: Final = 2.0
"""A step up counts as taking back a step down if the load became too high within this many ``down_after_s`` of the step
down."""


@dataclass(frozen=True)
class Demand:
    """A deployment's load over all gateway workers, by their last reports."""

    waiting: int = 0
    """Rows (sequences for a language model) that wait."""
    wait_s: float = 0.0
    """Seconds of the longest observed wait of a row."""
    busy: float = 0.0
    """Average load, as a number of replicas that compute all they can at once."""
    peak: float = 0.0
    """Maximum of `Moment.requests`, divided by the calls that a replica computes at once; for a language model by 1."""


class ScalingPolicy:
    """Decides on the number of replicas of a deployment. The deployment's rows wait up to ``delay_s`` on purpose."""

    def __init__(self, scaling: Scaling, delay_s: float = 0.0) -> None:
        self._scaling = scaling
        self._target_s = scaling.queue_wait_ms / 1000 + delay_s
        self._up_since_s: float | None = None
        self._up_busy = 0.0
        """Maximum of `Demand.busy` since ``_up_since_s``."""
        self._quiet_since_s = 0.0
        self._busy_s = 0.0
        """Integral of `Demand.busy` since ``_quiet_since_s``."""
        self._wait_s = 0.0
        """Maximum of `Demand.wait_s` since ``_quiet_since_s``; ``_peak`` is the maximum of `Demand.peak` since then."""
        self._peak = 0.0
        self._last_s: float | None = None
        self._went_down: tuple[float, int] | None = None
        """Time of the last step, and the number of replicas after it; None: no step yet, or the last step was up."""
        self._too_few: tuple[int, float] | None = None
        """A number of replicas that was too few, and the maximum of `Demand.busy` meanwhile; None: no number is
        known as too few."""
        self.is_content = False
        """Whether the last call of `wanted` found that the load requires no more replicas; False unless all served."""

    def wanted(self, now_s: float, demand: Demand, count: int, *, ready: int, bounds: ReplicaBounds) -> int:
        """The number of replicas that there should be: ``count``, 1 more or 1 less, within the
        bounds; or the nearer bound, if ``count`` is outside.

        Args:
            now_s: seconds on any steady clock.
            demand: the present load.
            count: how many there should have been until now.
            ready: how many of these replicas serve. Unless all of them serve, the load says little, and ``count`` is
                only brought within the bounds.
            bounds: bounds of the returned number.
        """
        if self._last_s is None:
            self._last_s = self._quiet_since_s = now_s
        elapsed_s, self._last_s = max(0.0, now_s - self._last_s), now_s
        inside = min(max(count, bounds.min), bounds.max)
        self.is_content = False
        if inside != count or ready != count:
            self._forget(now_s)
            return inside
        if self._is_too_much(demand, count):
            self._forget_quiet(now_s)
            if self._up_since_s is None:
                self._up_since_s, self._up_busy = now_s, 0.0
            self._up_busy = max(self._up_busy, demand.busy)
            if now_s - self._up_since_s >= self._scaling.up_after_s and count < bounds.max:
                self._note_up(self._up_since_s, count)
                self._forget(now_s)
                return count + 1
            return count
        self.is_content = True
        self._up_since_s = None
        self._busy_s += demand.busy * elapsed_s
        self._wait_s = max(self._wait_s, demand.wait_s)
        self._peak = max(self._peak, demand.peak)
        seen_s = now_s - self._quiet_since_s
        if seen_s < self._scaling.down_after_s:
            return count
        fits = count > bounds.min and self._fits(self._busy_s / seen_s, count - 1, count)
        self._forget_quiet(now_s)
        if fits:
            self._went_down = now_s, count - 1
        return count - 1 if fits else count

    def _is_too_much(self, demand: Demand, count: int) -> bool:
        if demand.wait_s > self._target_s:
            return True
        return demand.waiting > 0 and demand.busy > HIGH_UTILIZATION * count

    def _fits(self, busy: float, fewer: int, count: int) -> bool:
        """Whether the observed load would fit on ``fewer`` replicas."""
        if self._too_few is not None and fewer <= self._too_few[0]:
            if busy >= CLEARLY_LESS * self._too_few[1]:
                return False
            self._too_few = None
        if self._peak <= fewer:
            return True
        return busy <= LOW_UTILIZATION * fewer and self._wait_s * count / fewer <= self._target_s

    def _note_up(self, since_s: float, count: int) -> None:
        """Note a step up from ``count`` replicas, because the load has been too high since ``since_s``."""
        if self._went_down is None:
            return
        when_s, to = self._went_down
        if to == count and since_s - when_s <= REGRET_AFTER * self._scaling.down_after_s:
            self._too_few = count, self._up_busy
        self._went_down = None

    def _forget(self, now_s: float) -> None:
        self._up_since_s = None
        self._forget_quiet(now_s)

    def _forget_quiet(self, now_s: float) -> None:
        self._quiet_since_s = now_s
        self._busy_s = self._wait_s = self._peak = 0.0


class Autoscaler:
    """Scales deployments with a range of replicas, and reports how busy each deployment is.

    Args:
        sets: every deployment that has replicas, by name; it may change.
        loads: gives each deployment's load over all gateway workers. If no worker has reported a deployment lately, its
            load is unknown, and it keeps its number of replicas.
        is_busy: whether a command is running on a deployment; such a deployment is not scaled.
        children: runs the steps up and down, and says when the server stops.
        on_utilization: called at every tick with the fraction of its replicas' capacity that each deployment uses, 0 to
            1; only deployments with a ready replica are included.
        clock: in seconds; tests replace it.
    """

    def __init__(
        self,
        sets: Mapping[str, ReplicaSet],
        loads: Callable[[], Mapping[str, DeploymentLoad]],
        is_busy: Callable[[str], bool],
        children: ChildProcesses,
        on_utilization: Callable[[Mapping[str, float]], None] = lambda shares: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sets = sets
        self._loads = loads
        self._is_busy = is_busy
        self._children = children
        self._on_utilization = on_utilization
        self._clock = clock
        self._policies: dict[str, tuple[object, ScalingPolicy]] = {}
        """Policies by deployment, each with the configuration that it was made for."""
        self._acting: dict[str, asyncio.Task[None]] = {}
        """Steps up and down that are under way, by deployment."""

    async def run(self) -> None:
        """Decide at every tick until the server stops."""
        while not self._children.is_stopping:
            await self._children.wait_for_stop(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Decide once for each deployment."""
        loads = self._loads()
        self._on_utilization(
            {
                name: _demand(replica_set, loads.get(name)).busy / len(replica_set.ready)
                for name, replica_set in self._sets.items()
                if replica_set.ready
            }
        )
        self._policies = {name: policy for name, policy in self._policies.items() if name in self._sets}
        self._acting = {name: task for name, task in self._acting.items() if not task.done()}
        for replica_set in list(self._sets.values()):
            load = loads.get(replica_set.name)
            if (
                replica_set.bounds.is_fixed
                or not replica_set.is_scalable
                or self._is_busy(replica_set.name)
                or load is None
            ):
                self._policies.pop(replica_set.name, None)  # the load so far says little about the load to come
            elif replica_set.name not in self._acting:
                self._decide(replica_set, load)

    def _decide(self, replica_set: ReplicaSet, load: DeploymentLoad) -> None:
        made_for, policy = self._policies.get(replica_set.name, (None, None))
        if policy is None or made_for is not replica_set.config:
            policy = ScalingPolicy(replica_set.config.scaling, replica_set.config.batching.max_queue_delay_ms / 1000)
            self._policies[replica_set.name] = replica_set.config, policy
        count, ready = replica_set.wanted, len(replica_set.ready)
        wanted = policy.wanted(self._clock(), _demand(replica_set, load), count, ready=ready, bounds=replica_set.bounds)
        if wanted > count:
            self._acting[replica_set.name] = self._children.spawn(self._grow(replica_set))
        elif wanted < count:
            self._acting[replica_set.name] = self._children.spawn(_shrink(replica_set))
        elif policy.is_content:
            replica_set.end_shortage()

    async def _grow(self, replica_set: ReplicaSet) -> None:
        """Add a replica to a set, if there is capacity."""
        if time.monotonic() < replica_set.no_growth_before_s:
            return
        memory = self._children.memory
        try:
            places = await memory.reserve(replica_set.name, replica_set.config, 1)
        except MemoryBudgetExceeded as error:
            if replica_set.is_scalable:
                replica_set.note_shortage(error.message)
            return
        if not places:
            return
        if not replica_set.is_scalable or replica_set.wanted >= replica_set.bounds.max:
            memory.release(places[0])  # a command has come meanwhile
            return
        replica_set.grow(places[0])


async def _shrink(replica_set: ReplicaSet) -> None:
    """Remove a replica from a set. The replica's requests in flight are finished first."""
    count = len(replica_set.slots)
    if not replica_set.is_scalable or count <= replica_set.bounds.min:
        return
    logger.info("%s: scaling down to %d replicas", replica_set.name, count - 1)
    retired = await replica_set.shed(1) or Retired()
    for text in (*retired.warnings, *retired.leftovers):
        logger.error("%s: scaled down, but: %s", replica_set.name, text)


def _demand(replica_set: ReplicaSet, load: DeploymentLoad | None) -> Demand:
    """A load as a `Demand`, which counts in replicas."""
    if load is None:
        return Demand()
    parallel = peak_parallel = replica_set.config.instances
    if replica_set.signature is not None and replica_set.signature.limits is not None:
        # An engine computes up to this many sequences at once, but each sequence slows the rest down.
        parallel, peak_parallel = replica_set.signature.limits.max_sequences, 1
    elif replica_set.signature is not None and (replica_set.signature.streams or replica_set.signature.overlaps):
        parallel = peak_parallel = replica_set.config.max_in_flight
    # Workers count calls separately, so the sum may exceed the number of calls that the replicas compute at once.
    busy = min(load.computing / parallel, float(len(replica_set.ready)))
    return Demand(load.waiting, load.wait_s, busy, load.requests / peak_parallel)
