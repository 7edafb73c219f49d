"""Finds capacity for replicas: picks a device for each replica, and keeps all replicas within the memory budget.

A starting replica reserves the largest of three sizes: the ``memory`` that its deployment declares; the largest size
measured for any of the deployment's replicas; and the size of these replicas when they became ready, plus the bytes
that the new replica allocates later. The replica may start only if its reservation fits beside everything else. While a
deployment's size is neither declared nor measured, its first replica reserves only the bytes that it allocates later,
and the next replica waits until the first has been measured.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final

from headwater_server.config.schema import DEFAULT_MEMORY_PART, Deployment, Server
from headwater_server.errors import MemoryBudgetExceeded
from headwater_server.process.gpu import gpu_capacities, gpu_name, gpus_used
from headwater_server.process.machine import HOST, host_capacity, measure_groups_by_place, size_text
from headwater_server.supervisor.handle import ReplicaHandle

__all__ = ["Footprint", "MemoryBudget", "MemoryRefusal", "Place", "ReplicaMemory"]

logger = logging.getLogger("headwater")

Footprint = Mapping[str, int]
"""Bytes by place: `HOST`, or a GPU's name."""
Measure = Callable[[Collection[int]], Mapping[int, Mapping[str, int]]]

FRESH_S: Final = 0.2
"""A measurement is not repeated within this time."""


@dataclass(frozen=True)
class MemoryRefusal:
    """Why a replica may not start."""

    place: str
    needed: int
    """Bytes that the replica would take there."""
    taken: int
    """Bytes that replicas, and on a GPU all processes, have taken or reserved there."""
    limit: int
    """Bytes that may be taken there."""

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
    """Bytes by place. Once the replica is settled: the declared bytes; where it allocates `later`, its size at that
    time plus `later`, if that is larger."""
    declared: dict[str, int]
    """Bytes by place that the configuration declares; empty: it declares nothing."""
    later: dict[str, int] = field(default_factory=dict)
    """Bytes by place that the replica allocates after it is ready (its feature caches)."""
    measured: dict[str, int] = field(default_factory=dict)
    """Bytes by place at the last measurement; empty: it has not been measured."""
    largest: tuple[int, int] = (0, 0)
    """Largest measured sizes: bytes of the machine, bytes of a GPU."""
    is_settled: bool = False
    """Whether its start is over: it was measured when it was ready, if measuring was possible."""

    def takes(self, place: str) -> int:
        return max(self.reserved.get(place, 0), self.measured.get(place, 0))


class MemoryBudget:
    """The memory that each replica has and reserves, and the limits. Measures nothing itself.

    Args:
        limits: bytes that replicas may take, by place. A place that is not listed has no limit.
    """

    def __init__(self, limits: Footprint) -> None:
        self.limits = dict(limits)
        self._holdings: dict[Hashable, _Holding] = {}
        self._largest: dict[str, tuple[int, int]] = {}
        """Largest measured sizes of a replica, by deployment: bytes of the machine, bytes of a GPU. Only deployments
        that have had a settled replica have an entry."""
        self._ready: dict[str, tuple[int, int]] = {}
        """Largest sizes of a replica until it was ready, in the same form."""
        self._whole: dict[str, int] = {}
        """Bytes of a GPU that all processes together use, by place, as far as known."""

    def knows(self, deployment: str) -> bool:
        """Whether the size of a deployment's replicas is known."""
        return deployment in self._largest

    def waits(self, deployment: str) -> bool:
        """Whether the next replica has to wait until an earlier replica is measured, since their size is unknown."""
        if not self.limits or self.knows(deployment):
            return False
        starting = (holding for holding in self._holdings.values() if not holding.is_settled and not holding.declared)
        return any(holding.deployment == deployment for holding in starting)

    def size(self, deployment: str, place: str, declared: int | None, later: int = 0) -> dict[str, int]:
        """The expected bytes of a further replica that computes at ``place``, by place; empty if its size is neither
        known nor declared, and it allocates nothing later.

        ``declared`` is the number of bytes that the configuration declares for that place, ``later`` the number that
        the replica allocates there after it is ready.
        """
        host, gpu = self._ready.get(deployment, (0, 0))
        kept = (host + later, gpu) if place == HOST else (host, gpu + later)
        host, gpu = _larger(self._largest.get(deployment, (0, 0)), kept)
        sizes = {HOST: host} if place == HOST else {HOST: host, place: gpu}
        if declared is not None:
            sizes[place] = max(sizes[place], declared)
        return {where: count for where, count in sizes.items() if count}

    def take(
        self, holder: Hashable, deployment: str, place: str, declared: int | None, later: int = 0
    ) -> MemoryRefusal | None:
        """Reserve memory for the replica that ``holder`` stands for; see `size` for the arguments. Returns None, or why
        there is not enough memory; then nothing is reserved."""
        size = self.size(deployment, place, declared, later)
        # A replica of unknown size takes memory too, so it is not started where everything is taken.
        for where in (HOST, place):
            limit = self.limits.get(where)
            needed = size.get(where, 0)
            if limit is not None and (self.taken(where) + needed > limit or (not size and self.taken(where) >= limit)):
                return MemoryRefusal(where, needed, self.taken(where), limit)
        of_later = {place: later} if later else {}
        self._holdings[holder] = _Holding(deployment, size, {} if declared is None else {place: declared}, of_later)
        return None

    def note(self, holder: Hashable, measured: Footprint, *, is_ready: bool) -> None:
        """Note the measured size of a replica. The first measurement after it is ready settles the replica: see
        `_Holding.reserved`. An unknown ``holder`` is ignored."""
        holding = self._holdings.get(holder)
        if holding is None:
            return
        holding.measured = dict(measured)
        on_gpus = max((count for place, count in measured.items() if place != HOST), default=0)
        holding.largest = _larger(holding.largest, (measured.get(HOST, 0), on_gpus))
        if is_ready and not holding.is_settled:
            holding.is_settled = True
            holding.reserved = dict(holding.declared)
            for place, later in holding.later.items():
                holding.reserved[place] = max(holding.declared.get(place, 0), measured.get(place, 0) + later)
            self._ready[holding.deployment] = _larger(self._ready.get(holding.deployment, (0, 0)), holding.largest)
        if holding.is_settled or self.knows(holding.deployment):
            self._largest[holding.deployment] = _larger(self._largest.get(holding.deployment, (0, 0)), holding.largest)

    def settle(self, holder: Hashable) -> None:
        """Note that a replica has started. If it could not be measured, it counts with its last measured size, perhaps
        0, and the deployment's next replicas no longer wait for its size."""
        holding = self._holdings.get(holder)
        if holding is not None and not holding.is_settled:
            self.note(holder, holding.measured, is_ready=True)

    def move(self, holder: Hashable, place: str) -> None:
        """Note the place where a replica computes, perhaps not the reserved place: declared and later bytes count
        there."""
        holding = self._holdings.get(holder)
        if holding is not None:
            declared, later = (max(sizes.values(), default=0) for sizes in (holding.declared, holding.later))
            holding.declared = {place: declared} if declared else {}
            holding.later = {place: later} if later else {}

    def note_whole(self, place: str, used: int) -> None:
        """Note the bytes of a GPU that all processes together use. All of them count as taken."""
        self._whole[place] = used

    def release(self, holder: Hashable) -> None:
        """Release the memory of a replica that is gone."""
        self._holdings.pop(holder, None)

    def forget(self, deployment: str) -> None:
        """Forget the size of a deployment's replicas."""
        self._largest.pop(deployment, None)
        self._ready.pop(deployment, None)

    def taken(self, place: str) -> int:
        """Bytes taken or reserved at a place, on a GPU by other processes, too."""
        ours = sum(holding.takes(place) for holding in self._holdings.values())
        coming = sum(
            max(0, holding.reserved.get(place, 0) - holding.measured.get(place, 0))
            for holding in self._holdings.values()
        )
        return max(ours, self._whole.get(place, 0) + coming)

    def excess(self, holder: Hashable) -> MemoryRefusal | None:
        """The figures, if all replicas together exceed the limit of a place that this replica uses; otherwise None."""
        holding = self._holdings.get(holder)
        if holding is not None:
            for place, limit in self.limits.items():
                if place in holding.measured and self.taken(place) > limit:
                    return MemoryRefusal(place, holding.takes(place), self.taken(place), limit)
        return None


def _larger(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int]:
    return max(first[0], second[0]), max(first[1], second[1])


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
    """The memory of all deployments' replicas. Only measuring happens outside the supervisor's event loop.

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
            count: how many; each goes to the device with capacity that has the fewest of the deployment's replicas.

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

    async def settle(self, config: Deployment, place: Place) -> MemoryRefusal | None:
        """Measure the ready replica in a place. Returns the figures if all replicas together now exceed the budget at a
        place that it uses; otherwise None."""
        if place.replica is None:
            return None
        resolved = place.replica.facts.get("device", place.device)
        if place.device == "auto":
            self._devices[place.name] = resolved
        place.is_ready = True
        self.budget.move(place, self._where(place.name, config, resolved))
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
