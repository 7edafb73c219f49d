"""Replaces the replicas of a serving model: new replicas start beside the present replicas, then take their place."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import Any, Final

from headwater_server.config.schema import Deployment
from headwater_server.errors import HeadwaterError, MemoryBudgetExceeded
from headwater_server.supervisor.child_processes import ChildProcesses
from headwater_server.supervisor.deployments import Deployments, config_of
from headwater_server.supervisor.handle import ReplicaHandle
from headwater_server.supervisor.replica_set import ReplicaSet
from headwater_server.supervisor.slot import Retired, stop_or_kill

__all__ = ["Replacement", "raise_first"]

CHOSEN_S: Final = 0.5
"""Seconds for which a version that a reload removes still accepts requests: a worker may have chosen it for a request
that is still being received."""


class Replacement:
    """New replicas for some replica sets."""

    def __init__(self, deployments: Deployments, children: ChildProcesses) -> None:
        self._deployments = deployments
        self._children = children
        self._fresh: list[tuple[ReplicaSet, list[ReplicaHandle]]] = []
        """The sets, each with its ready new replicas."""

    async def start(self, sets: Collection[ReplicaSet], wanted: Deployment) -> None:
        """Start replicas beside the serving replicas. If a start fails, all the new replicas are ended, and its error
        is raised.

        ``wanted`` is the configuration of the whole deployment, from which each set takes its part.
        """
        outcomes = await asyncio.gather(
            *(self._start(replica_set, config_of(replica_set, wanted)) for replica_set in sets), return_exceptions=True
        )
        failures: list[BaseException] = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for replica_set, outcome in zip(sets, outcomes, strict=True):
            if isinstance(outcome, list):
                self._fresh.append((replica_set, outcome))
                if (lost := replica_set.starter.lost(outcome)) is not None:
                    failures.append(lost)
        if failures:
            await stop_or_kill([replica for _, started in self._fresh for replica in started])
            raise_first(failures, "; the previous configuration still serves")

    async def _start(self, replica_set: ReplicaSet, config: Deployment) -> list[ReplicaHandle]:
        """Start a set's replicas. Raises as `ReplicaStarter.start_all`."""
        try:
            with self._children.replacing(replica_set.name):
                return await replica_set.starter.start_all(config, replica_set.wanted_under(config))
        except MemoryBudgetExceeded as error:
            raise error.again(
                f"{error.message}; the new replicas would start beside the current replicas: expected `strategy: "
                "recreate`, which ends the current replicas first, or fewer users of memory"
            ) from error

    async def take_over(self, gone: Iterable[ReplicaSet] = ()) -> Retired:
        """Have the sets serve with their new replicas, retire the replicas before, and end the removed versions in
        ``gone``. All sets switch in the same routing table, since the steps of a pipeline must fit each other."""
        old = [(replica_set, replica_set.switch(started)) for replica_set, started in self._fresh]
        self._children.on_change()
        retiring = (
            replica_set.slots.retire(slots, replica_set.config.drain_timeout_s) for replica_set, slots in old if slots
        )
        return sum(await asyncio.gather(*retiring, *map(self._ended_version, gone)), Retired())

    async def _ended_version(self, replica_set: ReplicaSet) -> Retired:
        """Drain and end a removed version, and drop its replica set."""
        await asyncio.sleep(CHOSEN_S)
        drained = await replica_set.begin_unload(replica_set.config.drain_timeout_s)
        retired = await replica_set.end_unload()
        retired.drained = drained
        self._deployments.drop_set(replica_set)
        self._children.on_change()
        return retired


def raise_first(outcomes: Iterable[Any], addition: str = "") -> None:
    """Raise the first exception among gathered outcomes, with ``addition`` at the end of a `HeadwaterError`'s message.
    Returns if there is no exception."""
    for outcome in outcomes:
        if isinstance(outcome, HeadwaterError):
            raise outcome.again(outcome.message + addition)
        if isinstance(outcome, BaseException):
            raise outcome
