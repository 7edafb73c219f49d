"""Finds capacity for replicas: picks a device for each replica, and keeps all replicas within the memory budget."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final

from headwater_server.config.schema import DEFAULT_MEMORY_PART, Deployment, Server
from headwater_server.errors import MemoryBudgetExceeded
from headwater_server.process.gpu import gpu_capacities, gpu_name, gpus_used
from headwater_server.process.machine import HOST, host_capacity, measure_groups_by_place
from headwater_server.supervisor.handle import ReplicaHandle
from headwater_server.supervisor.memory_budget import MemoryBudget, MemoryRefusal

__all__ = ["Place", "ReplicaMemory"]

logger = logging.getLogger("headwater")

Measure = Callable[[Collection[int]], Mapping[int, Mapping[str, int]]]

FRESH_S: Final = 0.2
"""A measurement is not repeated within this time."""


@dataclass(eq=False)
class Place:
    """Capacity for a replica, until it is released."""

    name: str
    """The deployment's name."""
    device: str
    """A device from the deployment's `placements`, perhaps ``auto``."""
    replica: ReplicaHandle | None = None
    is_ready: bool = False
    """Whether the replica is ready, so that its size is measured as the size of a ready replica."""


class ReplicaMemory:
    """The memory of all deployments' replicas. Everything happens in the supervisor's event loop.

    Args:
        budget: the limits; without limits nothing is measured or refused.
        measure: measures the bytes that process groups use, by place.
        used: measures the bytes of each GPU that all processes together use.
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
        self._places: set[Place] = set()
        self._devices: dict[str, str] = {}
        """The device that ``auto`` became, by deployment."""
        self._measuring = asyncio.Lock()
        self._measured_s = float("-inf")
        """When the last measurement began."""

    @classmethod
    def of(cls, server: Server) -> ReplicaMemory:
        """Make a `ReplicaMemory` with the limits of this machine and of the configuration. A ``memory_limit`` in bytes
        is for the machine's memory, and GPUs get the default fraction; a fraction is for the machine and each GPU."""
        host = host_capacity()
        limit = server.memory_limit
        part = limit if isinstance(limit, float) else DEFAULT_MEMORY_PART
        limits = {name: int(count * part) for name, count in gpu_capacities().items()}
        if isinstance(limit, int):
            limits[HOST] = limit
        elif host is not None:
            limits[HOST] = int(host * part)
        return cls(MemoryBudget(limits))

    async def reserve(self, name: str, config: Deployment, count: int) -> list[Place]:
        """Reserve capacity for ``count`` replicas of a deployment: for all or not at all; but for a single replica
        while their size is neither declared nor measured.

        Returns an empty list if this can't be decided yet, because their size is known only once an earlier replica has
        been measured.

        Args:
            name: the deployment's name.
            config: the configuration of the replicas.
            count: how many; each replica goes to the device that has the fewest of the deployment's replicas.

        Raises:
            MemoryBudgetExceeded: there is no capacity; the message has figures.
        """
        if self.budget.waits(name):
            return []
        await self._refresh(asyncio.get_running_loop().time() - FRESH_S)
        if self.budget.waits(name):
            return []
        if self.budget.limits and config.memory is None and not self.budget.knows(name):
            count = 1
        devices = dict.fromkeys(config.placements, 0)
        for place in self._places:
            if place.name == name and place.device in devices:
                devices[place.device] += 1
        places: list[Place] = []
        for _ in range(count):
            for device in sorted(devices, key=lambda candidate: devices[candidate]):
                place = Place(name, device)
                where = self._where(name, config, device)
                refusal = self.budget.take(place, name, where, config.memory, config.feature_bytes)
                if refusal is None:
                    devices[device] += 1
                    self._places.add(place)
                    places.append(place)
                    break
            else:
                for place in places:
                    self.release(place)
                addition = "another replica" if count == 1 else f"{count} more replicas"
                raise MemoryBudgetExceeded(f"no capacity for {addition} of `{name}`: {refusal}")
        return places

    def attach(self, place: Place, replica: ReplicaHandle) -> None:
        """Note that a replica was started in a place. When it has ended, the place is released."""
        place.replica = replica
        replica.exited.add_done_callback(lambda _: self.release(place))

    async def settle(self, name: str, config: Deployment, place: Place) -> MemoryRefusal | None:
        """Measure the replica in a place, which is ready. Returns the figures if all replicas together now exceed the
        budget at a place that it uses; otherwise None."""
        if place.replica is None:
            return None
        resolved = place.replica.facts.get("device", place.device)
        if place.device == "auto":
            self._devices[name] = resolved
        place.is_ready = True
        self.budget.move(place, self._where(name, config, resolved))
        await self._refresh(asyncio.get_running_loop().time())
        self.budget.settle(place)
        return self.budget.excess(place)

    def release(self, place: Place) -> None:
        """Release the capacity of a replica that is gone, or that won't be started."""
        self._places.discard(place)
        self.budget.release(place)

    def forget(self, name: str) -> None:
        """Forget a removed deployment: a new deployment may get its name."""
        self.budget.forget(name)
        self._devices.pop(name, None)

    def _where(self, name: str, config: Deployment, device: str) -> str:
        """The budget's place for a device: a GPU's name, or `HOST`. For ``auto`` the device that an earlier replica
        chose; before, the first GPU if there is a GPU."""
        if device == "auto":
            device = self._devices.get(name) or ("cuda:0" if self._has_gpu() else "cpu")
        visible = config.environment.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
        return gpu_name(device, visible) or HOST

    def _has_gpu(self) -> bool:
        return any(place != HOST for place in self.budget.limits)

    async def _refresh(self, after_s: float) -> None:
        """Measure all replicas, unless a measurement began after ``after_s`` (loop time). After an error the earlier
        sizes stay."""
        if not self.budget.limits:
            return
        loop = asyncio.get_running_loop()
        async with self._measuring:
            if self._measured_s > after_s:
                return
            began_s = loop.time()
            held = [(place, place.is_ready, place.replica) for place in self._places]
            try:
                usage, whole = await asyncio.to_thread(
                    self._look, [replica for _, _, replica in held if replica is not None]
                )
            except OSError as error:  # for example no file descriptors; the last measurement stays
                logger.error("the memory of replicas can't be measured: %s", error)
                return
            for place, was_ready, replica in held:
                if replica is not None and replica.id in usage:
                    self.budget.note(place, usage[replica.id], is_ready=was_ready)
            for name, used in whole.items():
                self.budget.note_whole(name, used)
            self._measured_s = began_s

    def _look(self, replicas: Collection[ReplicaHandle]) -> tuple[dict[str, Mapping[str, int]], Mapping[str, int]]:
        groups = {replica.id: group for replica in replicas if (group := replica.group)}
        measured = self._measure(set(groups.values()))
        usage = {id: measured[group] for id, group in groups.items() if group in measured}
        return usage, self._used() if self._has_gpu() else {}
