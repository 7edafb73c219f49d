"""Finds room for replicas: picks each one's device, and keeps all of them within the memory budget."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from app.config.schema import DEFAULT_MEMORY_PART, Deployment, Server
from app.errors import MemoryBudgetExceeded
from app.process.gpu import gpu_capacities, gpu_name, gpus_used
from app.process.machine import HOST, host_capacity, measure_groups_by_place
from app.supervisor.memory_budget import MemoryBudget, Refusal
from app.supervisor.replica_process import ReplicaProcess

__all__ = ["Place", "ReplicaMemory"]

logger = logging.getLogger("headwater")

Measure = Callable[[Collection[int]], Mapping[int, Mapping[str, int]]]

FRESH_S: Final = 0.2
"""What was measured so short a time ago isn't measured again."""


@dataclass(eq=False)
class Place:
    """Room for one replica, until it is given back."""

    number: int
    device: str
    replica: ReplicaProcess | None = None
    is_ready: bool = False


class ReplicaMemory:
    """Of all deployments. Everything happens in the supervisor's event loop.

    Args:
        budget: the limits; without any nothing is measured or refused.
        measure: of process groups, what each has by place.
        used: what is used of each GPU by whomever.
    """

    def __init__(
        self,
        budget: MemoryBudget | None = None,
        measure: Measure = measure_groups_by_place,
        used: Callable[[], Mapping[str, int]] = gpus_used,
    ) -> None:
        self.budget = budget or MemoryBudget({})
        self._measure = measure
        self._used = used
        self._numbers = itertools.count()
        self._places: dict[int, Place] = {}
        self._devices: dict[str, str] = {}
        """By deployment: what `auto` was."""
        self._measuring = asyncio.Lock()
        self._measured_s = float("-inf")
        """When the last measurement began."""

    @classmethod
    def of(cls, server: Server) -> ReplicaMemory:
        """Of this machine."""
        host = host_capacity()
        limit = server.memory_limit
        part = limit if isinstance(limit, float) else DEFAULT_MEMORY_PART
        limits = {name: int(count * part) for name, count in gpu_capacities().items()}
        if isinstance(limit, int):
            limits[HOST] = limit
        elif host is not None:
            limits[HOST] = int(host * part)
        return cls(MemoryBudget(limits))

    def at_once(self, name: str, config: Deployment, count: int) -> int:
        """How many of these can be reserved together: one, as long as nothing is known of the deployment."""
        unknown = self.budget.limits and config.memory is None and not self.budget.knows(name)
        return min(count, 1) if unknown else count

    async def reserve(self, name: str, config: Deployment, count: int, beside: Iterable[str]) -> list[Place] | None:
        """Find room for some replicas of a deployment: for all of them, or none.

        Returns None if that can't be said yet: another replica of it starts, and shows what one takes.

        Args:
            name: the deployment's.
            config: what they are started with.
            count: how many.
            beside: the devices of the replicas that it has; new ones go where there are fewest.

        Raises:
            MemoryBudgetExceeded: there is none; with figures.
        """
        if self._waits(name):
            return None
        await self._refresh(asyncio.get_running_loop().time() - FRESH_S)
        if self._waits(name):
            return None
        devices = dict.fromkeys(config.placements, 0)
        for device in beside:
            if device in devices:
                devices[device] += 1
        found: list[Place] = []
        for _ in range(count):
            refusal: Refusal | None = None
            for device in sorted(devices, key=lambda one: devices[one]):
                number = next(self._numbers)
                where = self._where(name, config, device)
                refusal = self.budget.take(number, name, where, config.memory)
                if refusal is None:
                    devices[device] += 1
                    self._places[number] = place = Place(number, device)
                    found.append(place)
                    break
            if refusal is not None:
                for place in found:
                    self.give_back(place)
                what = "another replica" if count == 1 else f"{count} more replicas"
                raise MemoryBudgetExceeded(f"no room for {what} of `{name}`: {refusal}")
        return found

    def attach(self, place: Place, replica: ReplicaProcess) -> None:
        """A replica is on its way there; its end gives the room back."""
        place.replica = replica
        replica.exited.add_done_callback(lambda _: self.give_back(place))

    async def settle(self, name: str, config: Deployment, place: Place) -> Refusal | None:
        """Measure a replica that is ready: that much it takes. Returns whether that is more than there is room for."""
        if place.replica is None:
            return None
        resolved = place.replica.facts.get("device", place.device)
        if place.device == "auto":
            self._devices[name] = resolved
        place.is_ready = True
        if not self.budget.limits:
            return None
        self.budget.move(place.number, self._where(name, config, resolved))
        await self._refresh(asyncio.get_running_loop().time())
        self.budget.settle(place.number)
        return self.budget.excess(place.number)

    def give_back(self, place: Place) -> None:
        """The replica is gone, or won't come."""
        self._places.pop(place.number, None)
        self.budget.give_back(place.number)

    def forget(self, name: str) -> None:
        """There is no such deployment any more; another one may come to have its name."""
        self.budget.forget(name)
        self._devices.pop(name, None)

    def _waits(self, name: str) -> bool:
        return bool(self.budget.limits) and self.budget.waits(name)

    def _where(self, name: str, config: Deployment, device: str) -> str:
        """The place of the budget that a device's memory is."""
        if device == "auto":
            device = self._devices.get(name) or ("cuda:0" if len(self.budget.limits) > 1 else "cpu")
        visible = config.environment.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
        return gpu_name(device, visible) or HOST

    async def _refresh(self, after_s: float) -> None:
        """Measure what replicas have now, unless a measurement began after that time."""
        if not self.budget.limits:
            return
        loop = asyncio.get_running_loop()
        async with self._measuring:
            if self._measured_s > after_s:
                return
            began_s = loop.time()
            held = [(place, place.is_ready, place.replica) for place in self._places.values()]
            try:
                found, whole = await asyncio.to_thread(self._look, [one for _, _, one in held if one is not None])
            except OSError as error:  # no descriptors, for one: what was known before has to do
                logger.error("what replicas have of the memory can't be measured: %s", error)
                return
            for place, was_ready, replica in held:
                if replica is not None and replica.id in found:
                    self.budget.note(place.number, found[replica.id], is_ready=was_ready)
            for name, used in whole.items():
                self.budget.note_whole(name, used)
            self._measured_s = began_s

    def _look(self, replicas: Collection[ReplicaProcess]) -> tuple[dict[str, Mapping[str, int]], Mapping[str, int]]:
        groups = {one.id: group for one in replicas if (group := one.group)}
        measured = self._measure(set(groups.values()))
        found = {id: measured[group] for id, group in groups.items() if group in measured}
        return found, self._used() if len(self.budget.limits) > 1 else {}
