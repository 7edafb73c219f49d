"""The replicas of a deployment: starts them, replaces replicas that end, and loads, unloads and reloads them on
demand."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from headwater_server.config.schema import Deployment
from headwater_server.config.sections import ReplicaBounds
from headwater_server.control.messages import Drained, ReplicaLoss
from headwater_server.control.route_kinds import Kind, LanguageKind, TensorKind, VllmKind
from headwater_server.control.routing import CRASH_WINDOW_S, DeploymentRoute, State
from headwater_server.errors import CallableFailed, Conflict, MemoryBudgetExceeded
from headwater_server.security.key_losses import KeyLosses
from headwater_server.supervisor.child_processes import ChildProcesses
from headwater_server.supervisor.handle import ReplicaHandle
from headwater_server.supervisor.slot import SLOW_FIRST_S, SLOW_LONGEST_S, ReplicaStarter, Retired, Slot
from headwater_server.supervisor.states import Served

__all__ = ["ReplicaSet"]

logger = logging.getLogger("headwater")

FAILED_STARTS_LIMIT: Final = 5
"""Number of consecutive failed starts after which a slot is given up, unless it `is_slow`. When the last slot is given
up, the deployment has failed. Starts for which the machine lacks a resource don't count; after a permanent failure no
other start follows."""
GROW_RETRY_S: Final = 300.0
"""Seconds for which load adds no replica after a slot was given up."""


class ReplicaSet(Served):
    """A deployment with replicas, as the supervisor sees it."""

    def __init__(
        self, name: str, config: Deployment, children: ChildProcesses, part_of: str | None = None, version: str = ""
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
        self.starter = ReplicaStarter(name, children)
        self._slots: list[Slot] = []
        """Slots that serve are in the order in which they began to serve."""
        self._leaving: list[Slot] = []
        """Released slots with replicas that finish their requests in flight, or are being ended."""
        self._no_growth_before_s = float("-inf")
        self._crashes: dict[str, float] = {}
        """Recent losses of serving replicas that count against no API key: the time of each loss, by replica id."""
        self._key_losses = KeyLosses(CRASH_WINDOW_S)
        self.generation = children.first_generation
        """Counts loads and reloads that replace the replicas; see `DeploymentRoute.generation`."""
        self.adapter_loads: Counter[str] = Counter()
        """How many commands have loaded each adapter into the serving replicas."""

    @property
    def ready(self) -> dict[str, ReplicaHandle]:
        """The replicas that get new requests, by id."""
        return {id: replica for id, replica in _serving(self._slots).items() if replica.is_reachable}

    @property
    def is_loaded(self) -> bool:
        """Whether it has slots, which keep replicas running. False while `load` starts the first replicas."""
        return bool(self._slots)

    @property
    def is_failing(self) -> bool:
        """Whether it has no serving replica, and retries only after long pauses."""
        return bool(self._slots) and all(slot.is_slow for slot in self._slots)

    async def end_failing(self) -> None:
        """Stop retrying, if it `is_failing`."""
        if self.is_failing:
            await self._end(self._let_go(self._slots))

    def configure(self, config: Deployment) -> None:
        """Change the configuration, and the bounds with it (see `_bounds_of`). Running replicas keep the configuration
        that they were started with."""
        self.bounds = self._bounds_of(config)
        self.config = config

    def start(self, running: Collection[ReplicaHandle] = ()) -> None:
        """Start the wanted number of replicas and keep them running. The replicas in ``running`` serve already."""
        if running:
            self.wanted = min(max(self.wanted, len(running)), self.bounds.max)
            self._take(list(running))
        self._slots += [Slot(self) for _ in range(self.wanted - len(self._slots))]

    def stay_unloaded(self, bounds: ReplicaBounds) -> None:
        """Begin in the unloaded state that an earlier supervisor left."""
        self.bounds = bounds
        self.is_set_aside = True
        self.note_unloaded(())

    def route(self, workers: int) -> DeploymentRoute:
        """The route that each of ``workers`` gateway workers gets, with the worker's share of limited resources."""
        batching = self.config.batching
        ready = self.ready
        serving = _serving([*self._leaving, *self._slots])
        return msgspec.structs.replace(
            super().route(workers),
            replicas=tuple(replica.route() for replica in ready.values()),
            retiring=tuple(replica.route() for id, replica in serving.items() if id not in ready),
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
            kind=_route_kind(self.config, self.adapter_loads),
            quarantine_s=self.config.quarantine_s,
            generation=self.generation,
            barred=self._barred(),
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
        for slot in self._slots:
            slot.release()
        self.is_set_aside = True
        if not _serving([*self._slots, *self._leaving]):
            return Drained()
        self.set_state(State.DRAINING, "it is being unloaded; requests in flight are still answered")
        return await self.children.drain(self.name, timeout_s, None)

    async def end_unload(self) -> Retired:
        """End all replicas. Afterwards it is UNAVAILABLE, or FAILED if anything of them remains."""
        self._let_go(self._slots)
        self.shortage = self._trouble = self.failure = ""
        self.enter(State.UNLOADING, "its replicas are being ended")
        retired = await self._end(self._leaving)
        self.note_unloaded(retired.leftovers)
        self.children.on_change()
        return retired

    async def start_fresh(self, config: Deployment) -> list[ReplicaHandle]:
        """Start replicas with this configuration beside the serving replicas. Raises as `ReplicaStarter.start_all`."""
        try:
            with self.children.replacing(self.name):
                return await self.starter.start_all(config, self._within(self._bounds_of(config)))
        except MemoryBudgetExceeded as error:
            raise error.again(
                f"{error.message}; the new replicas would start beside the current replicas: expected `strategy: "
                "recreate`, which ends the current replicas first, or fewer users of memory"
            ) from error

    def switch(self, fresh: list[ReplicaHandle]) -> list[Slot]:
        """Replace the replicas; this takes effect with the next `on_change`. A new generation begins, in which
        earlier crashes don't count and no key is barred. Returns the slots of the old replicas, for `retire`."""
        old = self._let_go(self._slots)
        self._crashes.clear()
        self._key_losses.lift()
        self.generation += 1
        self._take(fresh)
        self.wanted = len(fresh)
        self.shortage = ""
        return old

    async def retire(self, old: list[Slot]) -> Retired:
        """Let replaced replicas finish their requests in flight, for at most ``drain_timeout_s``, and end them."""
        ids = list(_serving(old))
        drained = await self.children.drain(self.name, self.config.drain_timeout_s, ids) if ids else Drained()
        retired = await self._end(old)
        retired.drained = drained
        return retired

    async def _end(self, slots: Collection[Slot]) -> Retired:
        """End the replicas of released slots, and check for leftovers."""
        for slot in slots:
            slot.serves = False
        self.children.on_change()
        retired = await self.starter.end([slot.replica for slot in slots if slot.replica is not None])
        self._leaving = [slot for slot in self._leaving if slot not in slots]
        return retired

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
        missing = self._within(bounds) - len(self._slots)
        if missing > 0:
            self._take(await self.starter.start_all(self.config, missing))
        self.bounds = bounds
        self.shortage = ""
        return await self._shed(len(self._slots) - bounds.max)

    async def grow(self) -> None:
        """Add a slot for a replica because the load requires it, if there is capacity. The slot starts the replica."""
        if time.monotonic() < self._no_growth_before_s:
            return
        try:
            places = await self.children.memory.reserve(self.name, self.config, 1)
        except MemoryBudgetExceeded as error:
            if self.is_scalable:
                self._note_shortage(error.message)
            return
        if not places:
            return
        if not self.is_scalable or self.wanted >= self.bounds.max:  # a command has come meanwhile
            self.children.memory.release(places[0])
            return
        self.shortage = ""
        self.wanted += 1
        logger.info("%s: scaling up to %d replicas", self.name, self.wanted)
        self._slots.append(Slot(self, place=places[0]))
        self.children.on_change()

    async def shrink(self) -> None:
        """Remove a replica because the load doesn't require it. Its requests in flight are finished first."""
        if not self.is_scalable or len(self._slots) <= self.bounds.min:
            return
        logger.info("%s: scaling down to %d replicas", self.name, len(self._slots) - 1)
        retired = await self._shed(1) or Retired()
        for text in (*retired.warnings, *retired.leftovers):
            logger.error("%s: scaled down, but: %s", self.name, text)

    @property
    def is_scalable(self) -> bool:
        """Whether load may now change the number of replicas, as far as the bounds permit."""
        return self.state is State.READY and not self.is_set_aside and not self.children.is_stopping

    def end_shortage(self) -> None:
        """Note that its configuration or its load requires no more replicas than it has or starts. If no replica is
        missing, the shortage ends."""
        if self.shortage and len(self._slots) >= self.wanted and not any(slot.is_slow for slot in self._slots):
            self.shortage = ""
            self.children.on_change()

    def _bounds_of(self, config: Deployment) -> ReplicaBounds:
        """The bounds under a new configuration: bounds that an operator set stay, unless the configuration's bounds
        have changed."""
        return self.bounds if config.replicas == self.config.replicas else config.replicas

    def _within(self, bounds: ReplicaBounds) -> int:
        """``wanted``, raised or lowered to the nearer bound."""
        return min(max(self.wanted, bounds.min), bounds.max)

    async def _shed(self, count: int) -> Retired | None:
        """Retire the ``count`` least needed replicas; returns None if ``count`` is not more than 0."""
        released = self._let_go(_least_needed(self._slots, count))
        self.wanted = len(self._slots)
        self.children.on_change()
        return await self.retire(released) if released else None

    def _let_go(self, slots: list[Slot]) -> list[Slot]:
        """Release these slots, move them to `_leaving`, and return them."""
        for slot in slots:
            slot.release()
        self._slots = [slot for slot in self._slots if slot not in slots]
        self._leaving += slots
        return slots

    def _take(self, fresh: list[ReplicaHandle]) -> None:
        """Add serving replicas; they get requests from the next `on_change`."""
        self._slots += [Slot(self, replica) for replica in fresh]
        self.signature = fresh[-1].signature
        self.enter(State.READY, f"replica {fresh[-1].id} ready")

    def _note_shortage(self, reason: str) -> None:
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

    def note_no_capacity(self, slot: Slot, reason: str) -> None:
        """Note that a slot has found no capacity. The slot tries again; but if only load required it, and a replica
        serves, the slot is removed."""
        self._note_shortage(reason)
        if self.ready and len(self._slots) > self.bounds.min:  # only load required it, and may do so again
            self._slots.remove(slot)
            slot.release()
            self.wanted = len(self._slots)
            self.children.on_change()

    def note_loss(self, loss: ReplicaLoss) -> None:
        """Note which API keys' requests a lost replica had, or which key a later report convicts, for `note_crash`.
        The replica may have ended already."""
        if loss.convicted:
            self._key_losses.convict([loss.replica, loss.earlier], loss.convicted)
            if loss.earlier in self._crashes:  # the key was not known at that loss
                self._charge(loss.earlier, self._crashes.pop(loss.earlier))
        elif loss.times == 1:  # repeated reports only confirm the first
            self._key_losses.note(loss.replica, loss.keys)

    def _charge(self, replica: str, at_s: float) -> bool:
        """Count a lost replica against the API key of its requests. Returns False if its requests did not all have the
        same key, or it had no requests: it then counts against the model."""
        if not (key := self._key_losses.charge(replica, at_s)):
            return False
        if key in self._barred():
            text = "%s: requests of the API key `%s` ended %d replicas within %g s, and are refused for now"
            logger.error(text, self.name, key, self.config.max_crashes, CRASH_WINDOW_S)
            asyncio.get_running_loop().call_later(self._barred()[key] - time.time(), self.children.on_change)
        return True

    def _barred(self) -> dict[str, float]:
        """See `DeploymentRoute.barred`."""
        now_s, epoch_s = time.monotonic(), time.time()
        barred = self._key_losses.barred(self.config.max_crashes, now_s)
        return {key: epoch_s + until_s - now_s for key, until_s in barred.items()}

    def note_progress(self, text: str) -> None:
        """Note that a replica has reached a stage of its start; while LOADING, the stage becomes the state's reason."""
        if self.state is State.LOADING:
            after = f", trying again after: {self._trouble}" if self._trouble else ""
            self.set_state(State.LOADING, f"{text}{after}")

    def note_trouble(self, reason: str, cause: str) -> None:
        """Note that a replica could not be started. Its slot tries again. ``reason`` is for operators, ``cause`` for
        clients."""
        self.is_decided = True
        self._trouble, self.failure = reason, cause
        if not self.ready and self.state is not State.UNAVAILABLE:
            self.failure = f"trying again after: {cause}"
            self.set_state(State.LOADING, f"trying again after: {reason}")
        else:
            self.children.on_change()

    def note_ready(self, slot: Slot, replica: ReplicaHandle) -> None:
        """Note that a slot's replica serves."""
        self._slots.remove(slot)
        self._slots.append(slot)
        self.signature = replica.signature
        if self.bounds.is_fixed:
            self.end_shortage()
        self.set_state(State.READY, f"replica {replica.id} ready")

    def note_lost(self, slot: Slot, replica: ReplicaHandle) -> None:
        """Note that a replica that served can no longer be used; without a serving replica the state is UNAVAILABLE."""
        if not self.ready:
            for sibling in self._slots:
                sibling.hurry()
        if slot.is_kept and not self.ready:
            self.set_state(State.UNAVAILABLE, replica.reason)
        else:
            self.children.on_change()

    def note_failed_start(self, slot: Slot, replica: ReplicaHandle, failed_starts: int) -> None:
        """Note that a replica ended before it was ready; ``failed_starts`` is the number of consecutive failed starts
        in its slot."""
        reason = replica.account() or "ended before it was ready"
        is_tried = slot.is_slow and not replica.is_permanent
        tries = "not tried again" if replica.is_permanent else f"{failed_starts} of {FAILED_STARTS_LIMIT}"
        tries = "tried again slowly" if is_tried else "tried again" if replica.is_shortage else tries
        logger.error("%s: did not start (%s): %s", replica.id, tries, reason)
        if is_tried:
            self._try_slowly(slot, "a replica did not start: ", replica)
        elif replica.is_permanent or (failed_starts >= FAILED_STARTS_LIMIT and not replica.is_shortage):
            self.failure = replica.cause()
            self._give_up(slot, reason, f"another replica did not start: {reason}")
        else:
            self.note_trouble(reason, replica.cause())

    def note_crash(self, slot: Slot, replica: ReplicaHandle) -> None:
        """Note that a replica that served has ended. Its slot is about to start another replica; after ``max_crashes``
        losses within `CRASH_WINDOW_S` that count against no key, only slowly."""
        now_s = time.monotonic()
        if self._charge(replica.id, now_s):
            self.children.on_change()
            return
        recent = {id: at_s for id, at_s in self._crashes.items() if at_s >= now_s - CRASH_WINDOW_S}
        self._crashes = {**recent, replica.id: now_s}
        if len(self._crashes) >= self.config.max_crashes:
            lost = f"{len(self._crashes)} replicas were lost within {CRASH_WINDOW_S:g} s"
            self._try_slowly(slot, f"{lost}, the last: ", replica)

    def _try_slowly(self, slot: Slot, why: str, replica: ReplicaHandle) -> None:
        """Have a slot try again after a long pause. A slot that only load required is removed; load may require it
        again. ``why`` begins the reason, which ends with the account of the slot's last replica."""
        reason = f"{why}{replica.account() or 'ended before it was ready'}"
        self.failure = f"{why}{replica.reason or 'it ended'}"  # without the last lines of its log
        if len(self._slots) > self.bounds.min:
            self._give_up(slot, reason, f"one replica less: {reason}")
            return
        slot.is_slow = True
        if any(not sibling.is_slow for sibling in self._slots):
            self.shortage = f"one replica less, trying again slowly: {reason}"
            logger.error("%s: %s", self.name, self.shortage)
            self.children.on_change()
            return
        pauses = f"{SLOW_FIRST_S:g} to {SLOW_LONGEST_S:g} s"
        logger.error(
            "%s: FAILED; tried again after pauses of %s; fix it, then reload it: %s", self.name, pauses, reason
        )
        self.set_state(State.FAILED, reason)

    def _give_up(self, slot: Slot, reason: str, shortage: str) -> None:
        """Remove a slot. The remaining slots go on, with ``shortage`` noted; when the last slot is removed, the
        deployment has failed for ``reason``."""
        self._slots.remove(slot)
        slot.release()
        if self._slots:
            logger.error("%s: continues with %d replicas: %s", self.name, len(self._slots), shortage)
            if not self.bounds.is_fixed:  # load may require another replica later
                self.wanted = len(self._slots)
                self._no_growth_before_s = time.monotonic() + GROW_RETRY_S
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


def _route_kind(config: Deployment, adapter_loads: Mapping[str, int]) -> Kind:
    if config.is_vllm:
        adapters = {name: adapter_loads[name] for name in config.adapters}
        return VllmKind(adapters, config.checked_options["prefix_affinity"])
    return LanguageKind() if config.is_language_model else TensorKind()
