"""A place for a replica in a set: starts a replica, follows it to its end, and starts the next replica."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Final, Protocol

from headwater_server.config.schema import Deployment
from headwater_server.errors import CallableFailed, MemoryBudgetExceeded
from headwater_server.supervisor.adapters import fit
from headwater_server.supervisor.handle import ReplicaHandle
from headwater_server.supervisor.host import Backoff, Host
from headwater_server.supervisor.replica_memory import Place
from headwater_server.supervisor.starter import FIRST_MEASURED_RETRY_S, ReplicaStarter
from headwater_server.telemetry.recorder import recorder

__all__ = ["Owner", "Slot"]

logger = logging.getLogger("headwater")

SLOW_FIRST_S: Final = 30.0
SLOW_LONGEST_S: Final = 480.0
"""Shortest and longest pause before a restart in a slot that `is_slow`, in seconds."""
UNSERVED_PAUSE_S: Final = 2.0
"""The longest pause before a replica that served is replaced while no other replica serves. Slow pauses are longer."""
PLACE_RETRY_S: Final = 2.0
"""Seconds until the next try to reserve memory for a replica after the memory budget refused it."""


class Owner(Protocol):
    """The replica set that has a slot. It is notified of events of the slot's replicas, and may then release the
    slot."""

    name: str
    config: Deployment
    host: Host
    starter: ReplicaStarter
    shortage: str
    """See `headwater_server.supervisor.replica_set.ReplicaSet`; a slot that has found capacity empties it."""

    @property
    def ready(self) -> Mapping[str, ReplicaHandle]: ...

    def note_no_capacity(self, slot: Slot, reason: str) -> None: ...
    def note_progress(self, text: str) -> None: ...
    def note_trouble(self, reason: str, cause: str) -> None: ...
    def note_ready(self, slot: Slot, replica: ReplicaHandle) -> None: ...
    def note_failed_start(self, slot: Slot, replica: ReplicaHandle, failed_starts: int) -> None: ...
    def note_lost(self, slot: Slot, replica: ReplicaHandle) -> None: ...
    def note_crash(self, slot: Slot, replica: ReplicaHandle) -> None: ...


class Slot:
    """Keeps a replica running until the slot is released or the server stops.

    It may begin with a serving replica, or with reserved capacity for the first replica.
    """

    def __init__(self, owner: Owner, replica: ReplicaHandle | None = None, place: Place | None = None) -> None:
        self.replica = replica
        """The present replica, from its launch to its end; None in between."""
        self.serves = replica is not None
        """Whether requests go to the replica, or are still in flight there."""
        self.is_kept = True
        """Whether a replica that ends is replaced."""
        self.is_slow = False
        """Whether each next start waits for a long pause, because too many replicas were lost; until a replica
        serves."""
        self._owner = owner
        self._place = place
        self._failed_starts = 0
        self._pausing: asyncio.Future[None] | None = None
        owner.host.spawn(self._run())

    def release(self) -> None:
        """Start no further replica. The present replica stays until it is ended."""
        self.is_kept = False
        self._release_place()
        if self._pausing is not None:
            self._pausing.cancel()

    def hurry(self) -> None:
        """End a pause, since no replica serves. Slow pauses stay."""
        if self._pausing is not None and not self.is_slow:
            self._pausing.cancel()

    @property
    def _is_wanted(self) -> bool:
        return self.is_kept and not self._owner.host.is_stopping

    async def _run(self) -> None:
        backoff, slow = Backoff(), Backoff(SLOW_FIRST_S, SLOW_LONGEST_S)
        while self.replica is not None or await self._reserve():
            has_served = False
            began_s = time.monotonic()
            if self.replica is None:
                async with self._owner.starter.turn(self._owner.config):
                    began_s = time.monotonic()
                    await self._start()
            if (replica := self.replica) is not None:
                has_served = self.serves
                await self._see_end(replica)
                if has_served and replica.is_lost_with_node:
                    backoff = Backoff()  # elsewhere the replica would not have been lost
            if self._is_wanted:
                pause_s = (slow if self.is_slow else backoff).after(time.monotonic() - began_s)
                is_missed = has_served and not self.is_slow and not self._owner.ready
                await self._pause(min(pause_s, UNSERVED_PAUSE_S) if is_missed else pause_s)

    async def _reserve(self) -> bool:
        """Wait until capacity for a replica is reserved. Returns False if the replica is no longer wanted."""
        while self._place is None and self._is_wanted:
            retry_s = FIRST_MEASURED_RETRY_S
            try:
                places = await self._owner.host.memory.reserve(self._owner.name, self._owner.config, 1)
                self._place = places[0] if places else None
            except MemoryBudgetExceeded as error:
                retry_s = PLACE_RETRY_S
                if self.is_kept:
                    self._owner.note_no_capacity(self, error.message)
            if not self.is_kept:
                self._release_place()
            elif self._place is None:
                await self._pause(retry_s)
            elif not self.is_slow:
                self._owner.shortage = ""
        return self._place is not None

    async def _start(self) -> None:
        """Start a replica in the reserved capacity, unless the capacity was released. Returns when the replica serves,
        or when its start has failed."""
        place, self._place = self._place, None
        owner = self._owner
        if place is None or owner.host.is_stopping:
            return
        config = owner.config
        try:
            replica = self.replica = owner.starter.launch(place, config, owner.note_progress)
        except OSError as error:  # no space, processes or descriptors: this may pass, and other replicas serve
            logger.error("%s: a replica can't be started: %s", owner.name, error)
            owner.note_trouble(f"a replica can't be started: {error}", f"a replica can't be started: {error.strerror}")
            return
        if await owner.starter.await_ready(replica, place, config) and await self._fit(replica) and self.is_kept:
            self._failed_starts = 0
            self.is_slow = False
            self.serves = True
            owner.note_ready(self, replica)

    async def _fit(self, replica: ReplicaHandle) -> bool:
        """Give a replica the present adapters, which may have changed since its start. Returns whether it has them
        now."""
        owner = self._owner
        try:
            while replica.adapters != owner.config.adapters:
                await fit(replica, owner.config.adapters, owner.host.search, owner.config.load_timeout_s)
        except CallableFailed as error:
            replica.reason = error.message
            replica.kill()
            return False
        return True

    async def _see_end(self, replica: ReplicaHandle) -> None:
        """Wait until a replica has ended, and notify the owner, unless no replica is wanted here any more."""
        has_served = self.serves
        if has_served:
            await replica.ending.wait()
            was_listed, self.serves = self.serves, False
            if was_listed and not self._owner.host.is_stopping:
                logger.error("%s: lost: %s", replica.id, replica.reason)
                self._owner.note_lost(self, replica)
        await replica.exited
        self.replica = None
        if not self._is_wanted:
            return
        if has_served:
            if not replica.is_lost_with_node:
                self._owner.note_crash(self, replica)
        elif not replica.has_place:
            self._owner.note_no_capacity(self, replica.account())
            return
        else:
            self._failed_starts += not replica.is_shortage
            recorder().count("headwater_replica_start_failures", self._owner.name)
            self._owner.note_failed_start(self, replica, self._failed_starts)
        if self.is_kept:
            recorder().count("headwater_replica_restarts", self._owner.name)

    async def _pause(self, timeout_s: float) -> None:
        """Wait before the next try; `release` and `hurry` end the wait."""
        self._pausing = asyncio.ensure_future(self._owner.host.wait_for_stop(timeout_s))
        await asyncio.wait({self._pausing})

    def _release_place(self) -> None:
        if self._place is not None:
            self._owner.host.memory.release(self._place)
            self._place = None
