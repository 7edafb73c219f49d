"""Gives deployments more replicas or fewer, as their load takes: asks the policy, and has the sets do it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

from app.control.load import DeploymentLoad
from app.replica_host import Host
from app.replica_set import ReplicaSet
from app.scaling import Demand, ScalingPolicy

__all__ = ["Autoscaler"]

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
            one.no_shortage()


def _demand(one: ReplicaSet, load: DeploymentLoad | None) -> Demand:
    """A load in replicas' worth of work."""
    if load is None:
        return Demand()
    # Several workers each count the calls that they have at a replica, which computes them one after the other.
    busy = min(load.computing / one.parallel, float(len(one.ready)))
    return Demand(load.waiting, load.wait_s, busy, load.requests / one.peak_parallel)
