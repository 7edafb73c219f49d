"""The replicas of a deployment: starts them, replaces replicas that end, and loads, unloads and reloads them on
demand."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Final

import msgspec

from headwater_server.config.schema import Deployment
from headwater_server.config.sections import ReplicaBounds
from headwater_server.control.messages import Drained
from headwater_server.control.routing import DeploymentRoute, State
from headwater_server.errors import CallableFailed, Conflict, MemoryBudgetExceeded
from headwater_server.supervisor.child_processes import ChildProcesses
from headwater_server.supervisor.crashes import Crashes
from headwater_server.supervisor.handle import ReplicaHandle
from headwater_server.supervisor.kind_programs import program_of
from headwater_server.supervisor.memory_budget import Place
from headwater_server.supervisor.preloaded import Preloads
from headwater_server.supervisor.slot import (
    SLOW_FIRST_S,
    SLOW_LONGEST_S,
    EndedServing,
    FailedStart,
    Failure,
    HasCapacity,
    Lost,
    NoCapacity,
    ReplicaStarter,
    Retired,
    Serving,
    Slot,
)
from headwater_server.supervisor.states import Served

__all__ = ["ReplicaSet"]

logger = logging.getLogger("headwater")

GROW_RETRY_S: Final = 300.0
"""Seconds for which load adds no replica after a slot was given up."""


class Slots:
    """The slots of a replica set, and released slots with replicas that have not ended yet.

    Args:
        starter: ends the replicas.
        children: publishes which replicas serve.
    """

    def __init__(self, starter: ReplicaStarter, children: ChildProcesses) -> None:
        self.leaving: list[Slot] = []
        """Released slots with replicas that finish their requests in flight, or are being ended."""
        self._kept: list[Slot] = []
        """Slots that serve are in the order in which they began to serve."""
        self._starter = starter
        self._children = children

    def __len__(self) -> int:
        """The number of slots that keep a replica running."""
        return len(self._kept)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._kept)

    @property
    def ready(self) -> dict[str, ReplicaHandle]:
        """The replicas that get new requests, by id."""
        return {id: replica for id, replica in _serving(self._kept).items() if replica.is_reachable}

    @property
    def serving(self) -> dict[str, ReplicaHandle]:
        """The replicas that get requests or have requests in flight, by id."""
        return _serving([*self.leaving, *self._kept])

    @property
    def has_slow(self) -> bool:
        """Whether a slot retries only after long pauses."""
        return any(slot.is_slow for slot in self._kept)

    @property
    def is_failing(self) -> bool:
        """Whether no replica serves, and all slots retry only after long pauses."""
        return bool(self._kept) and all(slot.is_slow for slot in self._kept)

    async def end_failing(self) -> None:
        """End all slots, if they are failing."""
        if self.is_failing:
            await self.end(self.let_go())

    def add(self, slot: Slot) -> None:
        """Add a slot, or have it follow the slots that began to serve earlier."""
        if slot in self._kept:
            self._kept.remove(slot)
        self._kept.append(slot)

    def give_up(self, slot: Slot) -> None:
        """Remove a slot without a replica."""
        self._kept.remove(slot)
        slot.release()

    def let_go(self, count: int | None = None) -> list[Slot]:
        """Release and return the ``count`` least needed slots; None: all slots. Their replicas serve until `end`."""
        slots = list(self._kept) if count is None else _least_needed(self._kept, count)
        for slot in slots:
            slot.release()
        self._kept = [slot for slot in self._kept if slot not in slots]
        self.leaving += slots
        return slots

    async def end(self, released: Collection[Slot] | None = None) -> Retired:
        """End the replicas of released slots, and check for leftovers. None: of all released slots."""
        slots = list(self.leaving) if released is None else released
        for slot in slots:
            slot.serves = False
        self._children.on_change()
        retired = await self._starter.end([slot.replica for slot in slots if slot.replica is not None])
        self.leaving = [slot for slot in self.leaving if slot not in slots]
        return retired

    async def retire(self, released: Collection[Slot], timeout_s: float) -> Retired:
        """Let the replicas of released slots finish their requests in flight, for at most ``timeout_s``, and end
        them."""
        ids = list(_serving(released))
        drained = await self._children.drain(self._starter.name, timeout_s, ids) if ids else Drained()
        retired = await self.end(released)
        retired.drained = drained
        return retired


def _serving(slots: Iterable[Slot]) -> dict[str, ReplicaHandle]:
    """The serving replicas by id, including replicas that are out of reach for now."""
    return {slot.replica.id: slot.replica for slot in slots if slot.serves and slot.replica is not None}


def _least_needed(slots: Iterable[Slot], count: int) -> list[Slot]:
    """The ``count`` slots to give up first: slots that don't serve, then the newest slot on the device with the most
    replicas."""
    rest, surplus = list(slots), []
    for _ in range(count):
        on = [slot.replica.device if slot.replica is not None else "" for slot in rest]
        surplus.append(rest.pop(max(range(len(rest)), key=lambda at: (not rest[at].serves, on.count(on[at]), at))))
    return surplus


class ReplicaSet(Served):
    """A deployment with replicas, as the supervisor sees it."""

    def __init__(
        self,
        name: str,
        config: Deployment,
        children: ChildProcesses,
        part_of: str | None = None,
        version: str = "",
        preloads: Preloads | None = None,
    ) -> None:
        super().__init__(name, config, "waiting to start")
        self.part_of = part_of
        """The pipeline that defines it as a step, or the deployment that it is a version of; None: neither."""
        self.version = version
        """The name of the version; empty: it is not a version."""
        self.is_decided = False
        """Whether its first start has succeeded or failed, or found no capacity, even if it is tried again."""
        self.has_given_up = False
        """Whether it has FAILED by itself, not by an operator's command, and is not tried again."""
        self.bounds = config.replicas
        """The bounds of ``wanted``; an operator may have changed them."""
        self.wanted = self.bounds.min
        """How many replicas it should have now."""
        self.shortage = ""
        """Why it has fewer replicas than its configuration or its load requires; empty if it has enough."""
        self._trouble = ""
        """Why the last start failed that a slot is about to try again, in words for operators; part of the state's
        reason while the deployment loads. Empty after a load, an unload, and once the deployment is READY."""
        self.children = children
        self.starter = ReplicaStarter(name, children, preloads)
        self.slots = Slots(self.starter, children)
        self.no_growth_before_s = float("-inf")
        """Time (`time.monotonic`) before which load adds no replica."""
        self.crashes = Crashes(name, children)
        self.generation = children.first_generation
        """Counts loads and reloads that replace the replicas; see `DeploymentRoute.generation`."""
        self.adapter_loads: Counter[str] = Counter()
        """How many commands have loaded each adapter into the serving replicas."""

    @property
    def ready(self) -> dict[str, ReplicaHandle]:
        """The replicas that get new requests, by id."""
        return self.slots.ready

    @property
    def is_loaded(self) -> bool:
        """Whether it has slots, which keep replicas running. False while `load` starts the first replicas."""
        return bool(self.slots)

    def configure(self, config: Deployment) -> None:
        """Change the configuration, and the bounds with it (see `_bounds_of`). Running replicas keep the configuration
        that they were started with."""
        self.bounds = self._bounds_of(config)
        self.config = config
        for slot in self.slots:
            slot.config = config

    def start(self, running: Collection[ReplicaHandle] = ()) -> None:
        """Start the wanted number of replicas and keep them running. The replicas in ``running`` serve already."""
        if running:
            self.wanted = min(max(self.wanted, len(running)), self.bounds.max)
            self._take(list(running))
        for _ in range(self.wanted - len(self.slots)):
            self._add_slot()

    def stay_unloaded(self, bounds: ReplicaBounds) -> None:
        """Begin in the unloaded state that an earlier supervisor left."""
        self.bounds = bounds
        self.is_set_aside = True
        self.note_unloaded(())

    def route(self, workers: int) -> DeploymentRoute:
        """The route that each of ``workers`` gateway workers gets, with the worker's share of limited resources."""
        batching = self.config.batching
        ready = self.ready
        return msgspec.structs.replace(
            super().route(workers),
            replicas=tuple(replica.route() for replica in ready.values()),
            retiring=tuple(replica.route() for id, replica in self.slots.serving.items() if id not in ready),
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
            part_of=self.part_of,
            version=self.version,
            kind=program_of(self.config.kind).route_kind(self.config, self.adapter_loads),
            quarantine_s=self.config.quarantine_s,
            generation=self.generation,
            barred=self.crashes.barred(self.config.max_crashes),
            max_crashes=self.config.max_crashes,
        )

    # Commands

    async def load(self) -> None:
        """Start its replicas, with a single try for each. Afterwards it is READY, or after `CallableFailed` FAILED. If
        the memory budget doesn't allow them, its state stays. Raises as `ReplicaStarter.start_all`."""
        before, failure = (self.state, self.reason, self.has_given_up), self.failure
        self.failure = self._trouble = ""
        try:
            fresh = await self.starter.start_all(
                self.config, self._within(self.bounds), lambda text: self.set_state(State.LOADING, text)
            )
        except MemoryBudgetExceeded:  # possibly only after the first replica was measured
            self.failure = failure
            self.set_state(*before)
            raise
        except CallableFailed as error:
            self.failure = self.starter.failure
            self.set_state(State.FAILED, error.message)
            raise
        self.switch(fresh)
        self.children.on_change()

    async def begin_unload(self, timeout_s: float) -> Drained:
        """Refuse new requests, stop replacing replicas, and wait until nothing is in flight; after ``timeout_s`` end
        the remaining requests."""
        for slot in self.slots:
            slot.release()
        self.is_set_aside = True
        if not self.slots.serving:
            return Drained()
        self.set_state(State.DRAINING, "it is being unloaded; requests in flight are still answered")
        return await self.children.drain(self.name, timeout_s, None)

    async def end_unload(self) -> Retired:
        """End all replicas. Afterwards it is UNAVAILABLE, or FAILED if anything of them remains."""
        self.slots.let_go()
        self.shortage = self._trouble = self.failure = ""
        self.enter(State.UNLOADING, "its replicas are being ended")
        retired = await self.slots.end()
        self.note_unloaded(retired.leftovers)
        self.children.on_change()
        return retired

    def switch(self, fresh: list[ReplicaHandle]) -> list[Slot]:
        """Replace the replicas; this takes effect with the next `on_change`. A new generation begins, in which
        earlier crashes don't count and no key is barred. Returns the slots of the old replicas, for
        `Slots.retire`."""
        old = self.slots.let_go()
        self.crashes.forget()
        self.generation += 1
        self._take(fresh)
        self.wanted = len(fresh)
        self.shortage = ""
        return old

    # Scaling

    async def scale(self, bounds: ReplicaBounds) -> Retired | None:
        """Change the bounds, and start or end replicas accordingly. Returns the result of ending replicas; None: no
        replica was ended.

        Raises:
            Conflict: the deployment isn't loaded. Also raises as `ReplicaStarter.start_all`. After an error nothing has
                changed.
        """
        if not self.is_loaded or self.is_set_aside:
            raise Conflict(f"model `{self.name}` is {self.state.value}: {self.reason}; expected it loaded")
        missing = self._within(bounds) - len(self.slots)
        if missing > 0:
            self._take(await self.starter.start_all(self.config, missing))
        self.bounds = bounds
        self.shortage = ""
        return await self.shed(len(self.slots) - bounds.max)

    def grow(self, place: Place) -> None:
        """Add a slot for a replica because the load requires it. The slot starts the replica in this capacity."""
        self.shortage = ""
        self.wanted += 1
        logger.info("%s: scaling up to %d replicas", self.name, self.wanted)
        self._add_slot(place=place)
        self.children.on_change()

    @property
    def is_scalable(self) -> bool:
        """Whether load may now change the number of replicas, as far as the bounds permit."""
        return self.state is State.READY and not self.is_set_aside and not self.children.is_stopping

    def end_shortage(self) -> None:
        """Note that no more replicas are required than serve or start. The shortage ends if none is missing."""
        if self.shortage and len(self.slots) >= self.wanted and not self.slots.has_slow:
            self.shortage = ""
            self.children.on_change()

    def _bounds_of(self, config: Deployment) -> ReplicaBounds:
        """The bounds under a new configuration: bounds that an operator set stay, unless the configuration's bounds
        have changed."""
        return self.bounds if config.replicas == self.config.replicas else config.replicas

    def wanted_under(self, config: Deployment) -> int:
        """How many replicas it should have under a new configuration."""
        return self._within(self._bounds_of(config))

    def _within(self, bounds: ReplicaBounds) -> int:
        """``wanted``, raised or lowered to the nearer bound."""
        return min(max(self.wanted, bounds.min), bounds.max)

    async def shed(self, count: int) -> Retired | None:
        """Retire the ``count`` least needed replicas; returns None if ``count`` is not more than 0."""
        released = self.slots.let_go(count)
        self.wanted = len(self.slots)
        self.children.on_change()
        return await self.slots.retire(released, self.config.drain_timeout_s) if released else None

    def _take(self, fresh: list[ReplicaHandle]) -> None:
        """Add serving replicas; they get requests from the next `on_change`."""
        for replica in fresh:
            self._add_slot(replica)
        self.signature = fresh[-1].signature
        self.enter(State.READY, f"replica {fresh[-1].id} ready")

    def note_shortage(self, reason: str) -> None:
        """Note that there is no capacity for another replica. This is logged once, until there is capacity again."""
        if not self.shortage:
            logger.warning("%s: %s", self.name, reason)
        before = self.shortage, self.reason
        self.shortage = reason
        self.is_decided = True
        if not self.ready and self.state in (State.LOADING, State.UNAVAILABLE):
            self.enter(self.state, reason)
        if (self.shortage, self.reason) != before:
            self.children.on_change()

    # Replicas

    def _add_slot(self, replica: ReplicaHandle | None = None, place: Place | None = None) -> None:
        """Add a slot, and follow it; see `Slot` for the arguments."""
        slot = Slot(self.starter, self.config, self.crashes, self._note_progress, replica, place)
        self.slots.add(slot)
        self.children.spawn(self._follow(slot))

    async def _follow(self, slot: Slot) -> None:
        async for event in slot.run():
            match event:
                case HasCapacity():
                    self.end_shortage()
                case NoCapacity():
                    self._note_no_capacity(slot, event.reason)
                case FailedStart():
                    self._note_trouble(event)
                case Serving():
                    self._note_serving(slot, event.replica)
                case Lost():
                    self._note_lost(slot, event.reason)
                case Failure():
                    self._note_failure(slot, event)
                case EndedServing():
                    slot.is_missed = not self.ready

    def _note_no_capacity(self, slot: Slot, reason: str) -> None:
        """Note that a slot has found no capacity. The slot tries again; but if only load required it, and a replica
        serves, the slot is removed."""
        self.note_shortage(reason)
        if self.ready and len(self.slots) > self.bounds.min:  # only load required it, and may do so again
            self.slots.give_up(slot)
            self.wanted = len(self.slots)
            self.children.on_change()

    def _note_progress(self, text: str) -> None:
        """Note that a replica has reached a stage of its start; while LOADING, the stage becomes the state's reason."""
        if self.state is State.LOADING:
            after = f", trying again after: {self._trouble}" if self._trouble else ""
            self.set_state(State.LOADING, f"{text}{after}")

    def _note_trouble(self, event: FailedStart) -> None:
        """Note that a replica could not be started. Its slot tries again."""
        self.is_decided = True
        self._trouble, self.failure = event.reason, event.cause
        if not self.ready and self.state is not State.UNAVAILABLE:
            self.failure = f"trying again after: {event.cause}"
            self.set_state(State.LOADING, f"trying again after: {event.reason}")
        else:
            self.children.on_change()

    def _note_serving(self, slot: Slot, replica: ReplicaHandle) -> None:
        """Note that a slot's replica serves."""
        self.slots.add(slot)
        self.signature = replica.signature
        if self.bounds.is_fixed:
            self.end_shortage()
        self.set_state(State.READY, f"replica {replica.id} ready")

    def _note_lost(self, slot: Slot, reason: str) -> None:
        """Note that a replica that served can no longer be used; without a serving replica the state is UNAVAILABLE."""
        if not self.ready:
            for sibling in self.slots:
                sibling.hurry()
        if slot.is_kept and not self.ready:
            self.set_state(State.UNAVAILABLE, reason)
        else:
            self.children.on_change()

    def _note_failure(self, slot: Slot, event: Failure) -> None:
        """Have a slot try again after a long pause; or remove it, if it would fail again. A slot that only load
        required is removed, too; load may require it again."""
        reason, self.failure = event.reason, event.cause
        if event.is_permanent:
            self._give_up(slot, reason, f"another replica did not start: {reason}")
            return
        if len(self.slots) > self.bounds.min:
            self._give_up(slot, reason, f"one replica less: {reason}")
            return
        slot.is_slow = True
        if any(not sibling.is_slow for sibling in self.slots):
            self.shortage = f"one replica less, trying again slowly: {reason}"
            logger.error("%s: %s", self.name, self.shortage)
            self.children.on_change()
            return
        text = "%s: FAILED; tried again after pauses of %g to %g s; fix it, then reload it: %s"
        logger.error(text, self.name, SLOW_FIRST_S, SLOW_LONGEST_S, reason)
        self.set_state(State.FAILED, reason)

    def _give_up(self, slot: Slot, reason: str, shortage: str) -> None:
        """Remove a slot. The remaining slots go on, with ``shortage`` noted; when the last slot is removed, the
        deployment has failed for ``reason``."""
        self.slots.give_up(slot)
        if self.slots:
            logger.error("%s: continues with %d replicas: %s", self.name, len(self.slots), shortage)
            if not self.bounds.is_fixed:  # load may require another replica later
                self.wanted = len(self.slots)
                self.no_growth_before_s = time.monotonic() + GROW_RETRY_S
            self.shortage = shortage
            self.children.on_change()
            return
        logger.error(
            "%s: FAILED and not tried again; fix it, then load it or restart the server: %s", self.name, reason
        )
        self.set_state(State.FAILED, reason, has_given_up=True)

    def set_state(self, state: State, reason: str, has_given_up: bool = False) -> None:
        """Enter a state, and have it published."""
        self.enter(state, reason, has_given_up)
        self.children.on_change()

    def enter(self, state: State, reason: str, has_given_up: bool = False) -> None:
        """Enter a state; the caller has it published."""
        super().enter(state, reason)
        if state is State.READY:
            self.failure = self._trouble = ""
        self.has_given_up = has_given_up
        self.is_decided |= state is not State.LOADING
