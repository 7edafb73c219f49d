"""One deployment's replicas: starts them, replaces those that end, and loads, unloads and reloads them on demand."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Collection
from typing import Any, Final

from app.config.schema import Deployment
from app.config.sections import ReplicaBounds
from app.control.messages import Drained
from app.control.routing import DeploymentRoute, State
from app.errors import CallableFailed, Conflict, NoRoom
from app.supervisor.host import Host, Launched, Retired
from app.supervisor.replica_process import ReplicaProcess
from app.supervisor.slot import FIRST_BACKOFF_S, LAST_BACKOFF_S, STEADY_AFTER_S, Slot
from app.supervisor.starter import FIRST_MEASURED_RETRY_S, ReplicaStarter
from app.telemetry.recorder import recorder
from inference.reference import is_language_model
from inference.signature import Signature

__all__ = ["ReplicaSet", "unloaded"]


logger = logging.getLogger("headwater")

FAILED_STARTS_LIMIT: Final = 5
"""Starts in a row that end before ready; then the deployment has failed."""

ROOM_RETRY_S: Final = 2.0
"""How often to look again for memory that a replica needs."""

GROW_RETRY_S: Final = 300.0
"""How long load calls for no other replica after one could not be started."""


class ReplicaSet:
    """One deployment that has replicas of its own, as the supervisor sees it.

    Args:
        name: the deployment's.
        config: its configuration.
        host: who has it.
        part_of: of a deployment that is a step only: its pipeline.
    """

    def __init__(self, name: str, config: Deployment, host: Host, part_of: str | None = None) -> None:
        self.name = name
        self.config = config
        self.part_of = part_of
        self.state = State.LOADING
        self.reason = "waiting to start"
        self.since_s = time.time()
        """When it came into its state, in seconds of the Unix epoch."""
        self.signature: Signature | None = None
        self.ready: dict[str, ReplicaProcess] = {}
        self.is_decided = False
        """Whether its first start has succeeded or failed."""
        self.is_set_aside = False
        """Whether an operator unloaded it, and it isn't loaded again."""
        self.has_given_up = False
        """Whether it has FAILED by itself: a failed command is for the operator who gave it."""
        self.bounds = config.replicas
        """Between which it scales; an operator may have changed them."""
        self.wanted = self.bounds.min
        """How many replicas it should have now."""
        self.shortage = ""
        """Why it has fewer than its load takes, if it has."""
        self._failure = ""
        """Why its last start failed, in the words for clients; until one succeeds."""
        self._trouble = ""
        """Likewise, in those for operators."""
        self._host = host
        self._starter = ReplicaStarter(name, host)
        self._slots: list[Slot] = []
        self._leaving: list[Slot] = []
        """Those given up, whose replicas are on their way out."""
        self._no_growth_before_s = float("-inf")
        self._crashes: deque[float] = deque()
        """When replicas that served were lost, of late."""
        self._generation = 0
        """Counts loads and reloads."""
        self._retiring: dict[str, ReplicaProcess] = {}

    @property
    def is_loaded(self) -> bool:
        """Whether it has replicas, or is trying to."""
        return bool(self._slots)

    @property
    def failure(self) -> str:
        """What clients are told instead of the reason, if a start has failed and none succeeded since."""
        again = "trying again after: " if self.state is State.LOADING else ""
        return self._failure and f"{again}{self._failure}"

    def configure(self, config: Deployment) -> None:
        """Have another configuration from now on; replicas that run keep what they were started with."""
        self.bounds = self._bounds_of(config)
        self.config = config

    def start(self) -> None:
        """Start its replicas, and keep them running."""
        for _ in range(self.wanted):
            self._keep(Slot())

    def route(self, workers: int) -> DeploymentRoute:
        """What gateway workers are told.

        Args:
            workers: how many; each has its share of what is bounded.
        """
        batching = self.config.batching
        return DeploymentRoute(
            name=self.name,
            state=self.state,
            reason=self.reason,
            failure=self.failure,
            since_s=self.since_s,
            is_set_aside=self.is_set_aside,
            signature=self.signature,
            replicas=tuple(replica.route() for replica in self.ready.values()),
            retiring=tuple(replica.route() for replica in self._retiring.values()),
            max_queue_size=-(-batching.max_queue_size // workers),
            priority_weights=batching.priority_weights or {},
            max_padding=batching.max_padding or 0,
            max_queue_delay_ms=batching.max_queue_delay_ms,
            max_in_flight=-(-self.config.max_in_flight // workers),
            instances=-(-self.config.instances // workers),
            total_instances=self.config.instances,
            wanted=self.wanted,
            least=self.bounds.min,
            most=self.bounds.max,
            shortage=self.shortage,
            timeout_s=self.config.timeout_s,
            part_of=self.part_of,
            is_language_model=is_language_model(self.config.model or ""),
            quarantine_s=self.config.quarantine_s,
            generation=self._generation,
        )

    # Commands

    async def load(self) -> None:
        """Start its replicas, each once; afterwards it is READY or has FAILED.

        Another configuration is set before.

        Raises:
            CallableFailed: one of them didn't start; those that did are gone again.
            NoRoom: the memory budget doesn't allow them.
            Unavailable: the server is stopping.
        """
        # Where there is no room, the state stays.
        count = self._within(self.bounds)
        first = await self._starter.reserve(self.config, count)
        before, failure = (self.state, self.reason), self._failure
        self._failure = self._trouble = ""
        self.set_state(State.LOADING, "loading, as an operator wants")
        try:
            fresh = await self._starter.start_all(
                self.config, count, lambda text: self.set_state(State.LOADING, text), places=first
            )
        except NoRoom:  # only the first has shown what one takes
            self._failure = failure
            self.set_state(*before)
            raise
        except CallableFailed as error:
            self.is_set_aside = self.has_given_up = False
            self._failure = self._starter.failure
            self.set_state(State.FAILED, error.message)
            raise
        self._switch(fresh)
        self._host.on_change()

    async def begin_unload(self, timeout_s: float) -> Drained:
        """Refuse new requests, replace nothing that ends, and wait until nothing is in flight, or the time is over."""
        for slot in self._slots:
            slot.release()
        self.is_set_aside = True
        if not self.ready and not self._retiring:
            return Drained()
        self.set_state(State.DRAINING, "it is being unloaded; requests in flight are still answered")
        return await self._host.drain(self.name, timeout_s, None)

    async def end_unload(self) -> Retired:
        """End all replicas. Afterwards it is UNAVAILABLE; or, if anything remains, it has FAILED."""
        slots, self._slots = [*self._slots, *self._leaving], []
        self.ready.clear()
        self._retiring.clear()
        self.shortage = self._failure = self._trouble = ""
        self.set_state(State.UNLOADING, "its replicas are being ended")
        retired = await self._end(slots)
        if retired.leftovers:
            self.is_set_aside = False
            self._failure = "it was unloaded, but something of it remains"
            self.set_state(State.FAILED, f"unloaded, but this remains: {'; '.join(retired.leftovers)}")
        else:
            self.set_state(State.UNAVAILABLE, unloaded(self.name))
        return retired

    async def start_fresh(self, config: Deployment) -> list[Launched]:
        """Start replicas beside those that serve.

        Args:
            config: what they are started with; the set's own, or what that becomes before `switch`.

        Raises:
            CallableFailed: one of them didn't start; the others are gone again.
            NoRoom: the memory budget doesn't allow them beside those that serve.
            Unavailable: the server is stopping.
        """
        try:
            return await self._starter.start_all(config, self._within(self._bounds_of(config)), lambda text: None)
        except NoRoom as error:
            raise error.again(
                f"{error.message}; they would start beside those that serve: expected `strategy: recreate`, which ends "
                "these first, or less that takes memory"
            ) from error

    def lost(self, fresh: list[Launched]) -> CallableFailed | None:
        """What is wrong with replicas that were started together, if one of them has ended since it was ready."""
        return self._starter.lost(fresh)

    def switch(self, fresh: list[Launched]) -> list[Slot]:
        """Have new requests go to these replicas, once the host is told. Returns what has the old ones, for `retire`.

        A pipeline's steps switch together, so that nobody sees new ones beside old ones.
        """
        old = self._slots
        for slot in old:
            slot.release()
        self._retiring.update(self.ready)
        self._switch(fresh)
        return old

    async def discard(self, fresh: list[Launched]) -> None:
        """End replicas that were started and never served."""
        await self._starter.discard(fresh)

    async def retire(self, old: list[Slot]) -> Retired:
        """Let replaced replicas finish what they have, and end them."""
        self._leaving += old
        drained = Drained()
        ids = [slot.launched.replica.id for slot in old if slot.launched is not None]
        ids = [id for id in ids if id in self._retiring]
        if ids:
            drained = await self._host.drain(self.name, self.config.drain_timeout_s, ids)
        for id in ids:
            self._retiring.pop(id, None)
        self._host.on_change()
        retired = await self._end(old)
        self._leaving = [slot for slot in self._leaving if slot not in old]
        retired.drained = drained
        return retired

    # Scaling

    async def scale(self, bounds: ReplicaBounds) -> Retired | None:
        """Have other bounds, and as many replicas as they ask for. Returns what came of those that ended, if any.

        Raises:
            Conflict: it isn't loaded.
            NoRoom: the memory budget doesn't allow as many; nothing has changed.
            CallableFailed: one of them didn't start; nothing has changed.
            Unavailable: the server is stopping.
        """
        if not self.is_loaded or self.is_set_aside:
            raise Conflict(f"model `{self.name}` is {self.state.value}: {self.reason}; expected it loaded")
        missing = self._within(bounds) - len(self._slots)
        if missing > 0:
            fresh = await self._starter.start_all(self.config, missing, lambda text: None)
            for launched in fresh:
                self.ready[launched.replica.id] = launched.replica
                self.signature = launched.replica.signature
                self._keep(Slot(launched))
            self.has_given_up = False
            if self.state is not State.READY:  # what it had, had ended
                self.set_state(State.READY, f"replica {fresh[-1].replica.id} ready")
        self.bounds = bounds
        self.shortage = ""
        surplus = len(self._slots) - bounds.max
        released = self._release(surplus) if surplus > 0 else []
        self.wanted = len(self._slots)
        self._host.on_change()
        return await self.retire(released) if released else None

    def told_replicas(self) -> dict[str, Any]:
        """How many it has, as an operator is told."""
        bounds = {"min": self.bounds.min, "max": self.bounds.max}
        return {"replicas": {"ready": len(self.ready), "wanted": self.wanted, **bounds}}

    async def grow(self) -> None:
        """Have one replica more, because its load takes it, if there is room."""
        if time.monotonic() < self._no_growth_before_s:
            return
        try:
            place = await self._starter.find_room(self.config)
        except NoRoom as error:
            if self.is_scalable:
                self._note_shortage(error.message)
            return
        if place is None:
            return
        if not self.is_scalable or self.wanted >= self.bounds.max:  # meanwhile a command has come
            self._host.memory.give_back(place)
            return
        self.shortage = ""
        self.wanted += 1
        logger.info("%s: scaling up to %d replicas", self.name, self.wanted)
        self._keep(Slot(place=place))
        self._host.on_change()

    async def shrink(self) -> None:
        """Have one replica less, because its load takes no more: it finishes what it has, and ends."""
        if not self.is_scalable or len(self._slots) <= self.bounds.min:
            return
        logger.info("%s: scaling down to %d replicas", self.name, len(self._slots) - 1)
        released = self._release(1)
        self.wanted = len(self._slots)
        self._host.on_change()
        retired = await self.retire(released)
        for text in (*retired.warnings, *retired.leftovers):
            logger.error("%s: scaled down, but: %s", self.name, text)

    @property
    def parallel(self) -> int:
        """Calls, or of a language model sequences, that one replica computes at once."""
        signature = self.signature
        if signature is not None and signature.language_model is not None:
            return signature.language_model.limits.max_sequences
        if signature is not None and signature.streams:
            return self.config.max_in_flight
        return self.config.instances

    @property
    def peak_parallel(self) -> int:
        """Of these, so many that none slows the others down."""
        return 1 if self.signature is not None and self.signature.language_model is not None else self.parallel

    @property
    def is_scalable(self) -> bool:
        """Whether its load may change how many replicas it has."""
        return self.state is State.READY and not self.is_set_aside and not self._host.is_stopping

    def no_shortage(self) -> None:
        """Its load takes no more than it has."""
        if self.shortage and len(self._slots) >= self.wanted:
            self.shortage = ""
            self._host.on_change()

    def _bounds_of(self, config: Deployment) -> ReplicaBounds:
        """What an operator set stays, unless the configuration has become another."""
        return self.bounds if config.replicas == self.config.replicas else config.replicas

    def _within(self, bounds: ReplicaBounds) -> int:
        return min(max(self.wanted, bounds.min), bounds.max)

    def _release(self, count: int) -> list[Slot]:
        """Let some slots go, their replicas once they have finished what they have; returned for `retire`.

        First those that don't serve, then the newest of those on the device that has most.
        """
        released = []
        for _ in range(count):
            ids = [slot.launched.replica.id if slot.launched is not None else "" for slot in self._slots]
            devices = [self._starter.devices.get(id, "") for id in ids]
            at = max(range(len(ids)), key=lambda at: (ids[at] not in self.ready, devices.count(devices[at]), at))
            slot = self._slots.pop(at)
            slot.release()
            if ids[at] in self.ready:
                self._retiring[ids[at]] = self.ready.pop(ids[at])
            released.append(slot)
        return released

    def _note_shortage(self, reason: str) -> None:
        """There is no room for another replica; logged once, until there is."""
        if not self.shortage:
            logger.warning("%s: %s", self.name, reason)
        before = self.shortage, self.reason
        self.shortage = reason
        self.is_decided = True
        if not self.ready and self.state in (State.LOADING, State.UNAVAILABLE):
            self._enter(self.state, reason)
        if (self.shortage, self.reason) != before:
            self._host.on_change()

    # Replicas

    def _switch(self, fresh: list[Launched]) -> None:
        self._slots = []
        self._crashes.clear()
        self._generation += 1
        self.has_given_up = False
        self.ready = {launched.replica.id: launched.replica for launched in fresh}
        self.signature = fresh[-1].replica.signature
        self.is_set_aside = False
        for launched in fresh:
            self._keep(Slot(launched))
        self.wanted = len(fresh)
        self.shortage = ""
        self._enter(State.READY, f"replica {fresh[-1].replica.id} ready")

    def _keep(self, slot: Slot) -> None:
        self._slots.append(slot)
        slot.task = self._host.spawn(self._keep_replica(slot))

    async def _keep_replica(self, slot: Slot) -> None:
        """Keep one replica running, for as long as the slot is kept."""
        backoff_s = FIRST_BACKOFF_S
        failed_starts = 0
        while not self._host.is_stopping and (slot.is_kept or slot.launched is not None):
            started = time.monotonic()
            is_ready = slot.launched is not None  # it is of those that were started together
            if slot.launched is None:
                if not await self._find_room(slot):
                    return
                async with self._starter.turn():
                    place, slot.place = slot.place, None
                    if place is None:  # it was taken back: another replica isn't wanted any more
                        return
                    if self._host.is_stopping or not slot.is_kept:
                        self._host.memory.give_back(place)
                        return
                    started = time.monotonic()
                    try:
                        slot.launched = self._starter.launch(place, self.config, self._on_progress)
                    except OSError as error:  # no space, processes or descriptors: it may pass; others go on serving
                        logger.error("%s: a replica can't be started: %s", self.name, error)
                        self._failure = f"a replica can't be started: {error.strerror}"
                        self._note_trouble(f"a replica can't be started: {error}")
                    else:
                        is_ready = await self._starter.await_ready(slot.launched.replica, place, self.config)
                if slot.launched is None:
                    backoff_s = await self._pause(slot, backoff_s)
                    continue
                if is_ready and slot.is_kept:
                    self.signature = slot.launched.replica.signature
                    self.ready[slot.launched.replica.id] = slot.launched.replica
                    self.set_state(State.READY, f"replica {slot.launched.replica.id} ready")
            replica, exited = slot.launched
            if is_ready:
                failed_starts = 0
                await replica.ending.wait()
                self._note_lost(slot, replica)
            await exited
            await replica.ended()
            slot.launched = None
            for leftover in replica.leftovers:
                logger.error("%s: could not be removed: %s", replica.id, leftover)
            if self._host.is_stopping or not slot.is_kept:
                return
            if is_ready and self._note_crash(slot, replica):
                return
            if not is_ready:
                failed_starts += 1
                recorder().count("headwater_replica_start_failures", self.name)
                if self._note_failed_start(slot, replica, failed_starts):
                    return
            if time.monotonic() - started > STEADY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            recorder().count("headwater_replica_restarts", self.name)
            backoff_s = await self._pause(slot, backoff_s)

    def _note_lost(self, slot: Slot, replica: ReplicaProcess) -> None:
        """A replica that served has ended, or is about to."""
        was_listed = self.ready.pop(replica.id, None) or self._retiring.pop(replica.id, None)
        if was_listed is None or self._host.is_stopping:
            return
        logger.error("%s: lost: %s", replica.id, replica.reason)
        if slot.is_kept and not self.ready:
            self.set_state(State.UNAVAILABLE, replica.reason)
        else:
            self._host.on_change()

    def _note_failed_start(self, slot: Slot, replica: ReplicaProcess, failed_starts: int) -> bool:
        """A replica ended before it was ready. Returns whether its slot gives up."""
        reason = replica.account() or "ended before it was ready"
        tries = "not tried again" if replica.is_permanent else f"{failed_starts} of {FAILED_STARTS_LIMIT}"
        logger.error("%s: did not start (%s): %s", replica.id, tries, reason)
        self._failure = replica.cause()
        if replica.is_permanent or failed_starts >= FAILED_STARTS_LIMIT:
            self._give_up(slot, reason, f"another replica did not start: {reason}")
            return True
        self._note_trouble(reason)
        return False

    def _note_trouble(self, reason: str) -> None:
        """A replica could not be started, and is tried again."""
        self.is_decided = True
        self._trouble = reason
        if not self.ready and self.state is not State.UNAVAILABLE:
            self.set_state(State.LOADING, f"trying again after: {reason}")
        else:
            self._host.on_change()

    def _note_crash(self, slot: Slot, replica: ReplicaProcess) -> bool:
        """A replica that served was lost. Returns whether its slot gives up, because that happens too often."""
        now_s = time.monotonic()
        self._crashes.append(now_s)
        while self._crashes[0] < now_s - self.config.crash_window_s:
            self._crashes.popleft()
        if len(self._crashes) < self.config.max_crashes:
            return False
        reason = (
            f"{len(self._crashes)} replicas were lost within crash_window_s = {self.config.crash_window_s:g} s, the "
            f"last: {replica.account()}"
        )
        self._give_up(slot, reason, f"one replica less: {reason}")
        return True

    def _give_up(self, slot: Slot, reason: str, shortage: str) -> None:
        """A slot starts no replica any more. The others go on; with the last slot the deployment has failed."""
        self._slots.remove(slot)
        if self._slots:
            logger.error("%s: goes on with %d replicas: %s", self.name, len(self._slots), shortage)
            if not self.bounds.is_fixed:  # load may call for another later
                self.wanted = len(self._slots)
                self._no_growth_before_s = time.monotonic() + GROW_RETRY_S
            self.shortage = shortage
            self._host.on_change()
            return
        logger.error(
            "%s: FAILED and not tried again; correct it, and then load it or restart the server: %s", self.name, reason
        )
        self.has_given_up = True
        self.set_state(State.FAILED, reason)

    async def _find_room(self, slot: Slot) -> bool:
        """Wait until there is room for a slot's replica. Returns whether there is: it may not be wanted any more."""
        while slot.place is None and not self._host.is_stopping and slot.is_kept:
            retry_s = FIRST_MEASURED_RETRY_S
            try:
                slot.place = await self._starter.find_room(self.config)
            except NoRoom as error:
                if not slot.is_kept:
                    return False
                retry_s = ROOM_RETRY_S
                self._note_shortage(error.message)
                if self.ready and len(self._slots) > self.bounds.min:  # only load called for it, and may call again
                    self._slots.remove(slot)
                    self.wanted = len(self._slots)
                    self._host.on_change()
                    return False
            if slot.place is None:
                await self._pause(slot, retry_s)
            else:
                self.shortage = ""
        return slot.place is not None

    async def _end(self, slots: Collection[Slot]) -> Retired:
        """End the replicas of slots that are released, and see what is left of them."""
        for slot in slots:
            if slot.place is not None:
                self._host.memory.give_back(slot.place)
                slot.place = None
        # Their slots' own tasks take them in. A slot without one starts none any more, whatever it waits for.
        held = [(slot.launched, slot.task) for slot in slots if slot.launched is not None]
        return await self._starter.end([launched for launched, _ in held], [task for _, task in held if task])

    async def _pause(self, slot: Slot, backoff_s: float) -> float:
        """Wait before another start, unless there won't be one. Returns how long to wait next time."""
        stop = asyncio.ensure_future(self._host.wait_for_stop(backoff_s))
        released = asyncio.ensure_future(slot.released.wait())
        try:
            await asyncio.wait({stop, released}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            released.cancel()
            for task in (stop, released):
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        return min(backoff_s * 2, LAST_BACKOFF_S)

    # State

    def _on_progress(self, text: str) -> None:
        if self.state is State.LOADING:
            after = f", trying again after: {self._trouble}" if self._trouble else ""
            self.set_state(State.LOADING, f"{text}{after}")

    def set_state(self, state: State, reason: str) -> None:
        """Come into a state, and tell."""
        self._enter(state, reason)
        self._host.on_change()

    def _enter(self, state: State, reason: str) -> None:
        """Come into a state; each change is logged once."""
        if state is not self.state:
            logger.info("%s: %s -> %s: %s", self.name, self.state.value, state.value, reason)
            self.since_s = time.time()
        self.state, self.reason = state, reason
        if state is State.READY:
            self._failure = self._trouble = ""
        if state is not State.LOADING:
            self.is_decided = True


def unloaded(name: str) -> str:
    """The reason of a deployment that was unloaded."""
    return f"it is unloaded: load it with POST /v2/repository/models/{name}/load"
