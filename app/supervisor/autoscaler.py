"""Scales deployments by load: a policy decides once a tick, and the autoscaler has the replica sets carry it out.

Up by one when rows have waited longer than they should, or waited while the replicas computed nearly all the time, at
every tick for ``up_after_s``. Down by one when what there was to do for ``down_after_s`` would have fit on one replica
less, in one of two ways:

- the rest would have computed less than `LOW_UTILIZATION` of their time, and kept the wait below its target, if waits
  grow as replicas get fewer; or
- there were never more requests at once than the rest compute at once, so that none would have waited. That is a client
  which asks one thing after the other: it keeps a replica busy all the time, and needs no second one.

Between these lie loads that change nothing. What is left is a load for which both are wrong, because its waits grow
faster than that: a step down that had to be taken back is not taken again until there is clearly less to do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from app.config.sections import ReplicaBounds, Scaling
from app.control.load import DeploymentLoad
from app.supervisor.host import Host
from app.supervisor.replica_set import ReplicaSet

__all__ = ["Autoscaler", "Demand", "ScalingPolicy"]


LOW_UTILIZATION: Final = 0.5
"""One replica less, if the others then compute for less than this part of their time."""

HIGH_UTILIZATION: Final = 0.9
"""One more, if they compute for more than this and rows wait."""

CLEARLY_LESS: Final = 0.7
"""Of a load that a number of replicas was too few for: they are tried again below this part of it."""

REGRET_AFTER: Final = 2.0
"""A step up within this many ``down_after_s`` of a step down takes that back."""


@dataclass(frozen=True)
class Demand:
    """What a deployment had to do since the last tick, over all gateway workers."""

    waiting: int = 0
    """Rows, or of a language model sequences, that wait now."""
    wait_s: float = 0.0
    """The longest that one of them has been seen to wait."""
    busy: float = 0.0
    """How many replicas' worth of computing there was, on average; at most as many as there are."""
    peak: float = 0.0
    """Most requests that were under way at once, in what one replica computes at once."""


class ScalingPolicy:
    """Decides for one deployment.

    Args:
        scaling: when to act.
        delay_s: how long rows wait on purpose.
    """

    def __init__(self, scaling: Scaling, delay_s: float = 0.0) -> None:
        self._scaling = scaling
        self._target_s = scaling.queue_wait_ms / 1000 + delay_s
        self._up_since_s: float | None = None
        self._up_busy = 0.0
        """Most of `Demand.busy` since then."""
        self._quiet_since_s: float | None = None
        self._busy_s = 0.0
        """Integral of `Demand.busy` since then."""
        self._wait_s = 0.0
        self._peak = 0.0
        """Largest since then."""
        self._last_s: float | None = None
        self._went_down: tuple[float, int] | None = None
        """When a step down was taken last, and to how many."""
        self._too_few: tuple[int, float] | None = None
        """So many replicas were too few for such a load."""

    def wanted(self, now_s: float, demand: Demand, count: int, *, ready: int, bounds: ReplicaBounds) -> int:
        """How many replicas there should be: ``count``, or one more or less, and always within the bounds.

        Args:
            now_s: on any steady clock.
            demand: since the last call.
            count: how many there should be up to now.
            ready: how many of these serve; while they aren't all, load says little.
            bounds: of the answer.
        """
        elapsed_s = 0.0 if self._last_s is None else max(0.0, now_s - self._last_s)
        self._last_s = now_s
        inside = min(max(count, bounds.min), bounds.max)
        if inside != count or ready != count:
            self._forget(now_s)
            return inside
        if self._is_too_much(demand, count):
            self._forget_quiet(now_s)
            if self._up_since_s is None:
                self._up_since_s, self._up_busy = now_s, 0.0
            self._up_busy = max(self._up_busy, demand.busy)
            if now_s - self._up_since_s >= self._scaling.up_after_s and count < bounds.max:
                self._note_up(now_s, count)
                self._forget(now_s)
                return count + 1
            return count
        self._up_since_s = None
        if self._quiet_since_s is None:
            self._forget_quiet(now_s)
        self._busy_s += demand.busy * elapsed_s
        self._wait_s = max(self._wait_s, demand.wait_s)
        self._peak = max(self._peak, demand.peak)
        assert self._quiet_since_s is not None
        seen_s = now_s - self._quiet_since_s
        if seen_s < self._scaling.down_after_s or count <= bounds.min:
            if seen_s >= self._scaling.down_after_s:
                self._forget_quiet(now_s)
            return count
        busy = self._busy_s / seen_s
        if self._fits(busy, count - 1, count):
            self._went_down = now_s, count - 1
            self._forget(now_s)
            return count - 1
        self._forget_quiet(now_s)
        return count

    @property
    def is_content(self) -> bool:
        """Whether there was not too much to do when it was asked last."""
        return self._up_since_s is None

    def _is_too_much(self, demand: Demand, count: int) -> bool:
        if demand.wait_s > self._target_s:
            return True
        return demand.waiting > 0 and demand.busy > HIGH_UTILIZATION * count

    def _fits(self, busy: float, fewer: int, count: int) -> bool:
        """Whether what was seen would fit on so many."""
        if self._too_few is not None:
            least, load = self._too_few
            if fewer <= least and busy >= CLEARLY_LESS * load:
                return False
            if fewer <= least:
                self._too_few = None
        if self._peak <= fewer:
            return True
        return busy <= LOW_UTILIZATION * fewer and self._wait_s * count / fewer <= self._target_s

    def _note_up(self, now_s: float, count: int) -> None:
        if self._went_down is None:
            return
        when_s, to = self._went_down
        if to == count and now_s - when_s <= REGRET_AFTER * self._scaling.down_after_s:
            self._too_few = count, self._up_busy
        self._went_down = None

    def _forget(self, now_s: float) -> None:
        self._up_since_s = None
        self._forget_quiet(now_s)

    def _forget_quiet(self, now_s: float) -> None:
        self._quiet_since_s = now_s
        self._busy_s = self._wait_s = self._peak = 0.0


TICK_S: Final = 0.5


class Autoscaler:
    """Of all deployments whose ``replicas`` is a range.

    Args:
        sets: every deployment that has replicas, by name; it may change.
        loads: gives what each has to do now, over all gateway workers.
        is_busy: whether a command is under way with a deployment, which is then left alone.
        host: who has the replicas.
        clock: in seconds; tests put their own here.
    """

    def __init__(
        self,
        sets: Mapping[str, ReplicaSet],
        loads: Callable[[], Mapping[str, DeploymentLoad]],
        is_busy: Callable[[str], bool],
        host: Host,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sets = sets
        self._loads = loads
        self._is_busy = is_busy
        self._host = host
        self._clock = clock
        self._policies: dict[str, tuple[object, ScalingPolicy]] = {}
        """With the configuration that each was made for."""
        self._acting: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Decide again and again, until the server stops."""
        while not self._host.is_stopping:
            await self._host.wait_for_stop(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Decide once, for each deployment."""
        loads: Mapping[str, DeploymentLoad] | None = None
        for name in [name for name in self._policies if name not in self._sets]:
            del self._policies[name]
        self._acting = {name: task for name, task in self._acting.items() if not task.done()}
        for one in list(self._sets.values()):
            if one.bounds.is_fixed or not one.is_scalable or self._is_busy(one.name):
                self._policies.pop(one.name, None)  # what was seen before says little of what comes after
                continue
            if one.name in self._acting:
                continue
            if loads is None:
                loads = self._loads()
            self._decide(one, loads.get(one.name))

    def _decide(self, one: ReplicaSet, load: DeploymentLoad | None) -> None:
        made_for, policy = self._policies.get(one.name, (None, None))
        if policy is None or made_for is not one.config:
            policy = ScalingPolicy(one.config.scaling, one.config.batching.max_queue_delay_ms / 1000)
            self._policies[one.name] = one.config, policy
        count, ready = one.wanted, len(one.ready)
        wanted = policy.wanted(self._clock(), _demand(one, load), count, ready=ready, bounds=one.bounds)
        if wanted > count:
            self._acting[one.name] = self._host.spawn(one.grow())
        elif wanted < count:
            self._acting[one.name] = self._host.spawn(one.shrink())
        elif policy.is_content:
            one.end_shortage()


def _demand(one: ReplicaSet, load: DeploymentLoad | None) -> Demand:
    """A load in replicas' worth of work."""
    if load is None:
        return Demand()
    parallel, peak_parallel = one.config.instances, one.config.instances
    if one.signature is not None and one.signature.language_model is not None:
        # As many sequences as it computes at once; but each slows the others down.
        parallel, peak_parallel = one.signature.language_model.limits.max_sequences, 1
    elif one.signature is not None and one.signature.streams:
        parallel = peak_parallel = one.config.max_in_flight
    # Several workers each count the calls that they have at a replica, which computes them one after the other.
    busy = min(load.computing / parallel, float(len(one.ready)))
    return Demand(load.waiting, load.wait_s, busy, load.requests / peak_parallel)
