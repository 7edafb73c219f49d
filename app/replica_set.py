"""One deployment's replicas: starts them, replaces those that end, and loads, unloads and reloads them on demand."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from app.config import Deployment
from app.control import Drained
from app.errors import CallableFailed, Unavailable
from app.group_memory import group_members, measure_groups
from app.replica_host import Host, Launched
from app.replica_process import ReplicaProcess
from app.retired import Retired
from app.routing import DeploymentRoute, State
from inference.lm.reference import is_language_model
from inference.signature import Signature

__all__ = [
    "FIRST_BACKOFF_S",
    "LAST_BACKOFF_S",
    "REPLICA_END_TIMEOUT_S",
    "STEADY_AFTER_S",
    "ReplicaSet",
    "Slot",
    "unloaded",
]

logger = logging.getLogger("headwater")

FIRST_BACKOFF_S: Final = 0.5
LAST_BACKOFF_S: Final = 30.0
STEADY_AFTER_S: Final = 60.0
"""A process that lived this long is replaced at once, without the backoff of earlier crashes."""
FAILED_STARTS_LIMIT: Final = 5
"""Starts in a row that end before ready; then the deployment has failed."""
REPLICA_END_TIMEOUT_S: Final = 20.0
"""How long a replica may take from being told to end until its guardian has ended, too; then it is killed."""
REPLICA_KILL_TIMEOUT_S: Final = 10.0


@dataclass(eq=False)
class Slot:
    """A place that one replica after another has."""

    launched: Launched | None = None
    is_kept: bool = True
    """Whether a replica that ends is replaced."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def release(self) -> None:
        """Let no other replica follow."""
        self.is_kept = False
        self.released.set()


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
        self._host = host
        self._slots: list[Slot] = []
        self._gave_up = 0
        """Slots that did."""
        self._retiring: dict[str, ReplicaProcess] = {}

    @property
    def is_loaded(self) -> bool:
        """Whether it has replicas, or is trying to."""
        return any(slot.task is not None and not slot.task.done() for slot in self._slots)

    def start(self) -> None:
        """Start its replicas, and keep them running."""
        for _ in range(self.config.replicas):
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
            since_s=self.since_s,
            is_set_aside=self.is_set_aside,
            signature=self.signature,
            replicas=tuple(replica.route() for replica in self.ready.values()),
            retiring=tuple(replica.route() for replica in self._retiring.values()),
            max_queue_size=-(-batching.max_queue_size // workers),
            max_queue_delay_ms=batching.max_queue_delay_ms,
            max_in_flight=-(-batching.max_in_flight // workers),
            timeout_s=self.config.timeout_s,
            part_of=self.part_of,
            is_language_model=is_language_model(self.config.model or ""),
        )

    # Commands

    async def load(self) -> None:
        """Start its replicas, each once; afterwards it is READY or has FAILED.

        Raises:
            CallableFailed: one of them didn't start; those that did are gone again.
            Unavailable: the server is stopping.
        """
        self.set_state(State.LOADING, "loading, as an operator wants")
        try:
            fresh = await self._start_all(lambda text: self.set_state(State.LOADING, text))
        except CallableFailed as error:
            self.is_set_aside = False
            self.set_state(State.FAILED, error.message)
            raise
        self._switch(fresh)

    async def begin_unload(self, timeout_s: float) -> Drained:
        """Refuse new requests, replace nothing that ends, and wait until nothing is in flight, or the time is over."""
        for slot in self._slots:
            slot.release()
        self.is_set_aside = True
        if not self.ready:
            return Drained()
        self.set_state(State.DRAINING, "it is being unloaded; requests in flight are still answered")
        return await self._host.drain(self.name, timeout_s, None)

    async def end_unload(self) -> Retired:
        """End all replicas. Afterwards it is UNAVAILABLE; or, if anything remains, it has FAILED."""
        slots, self._slots = self._slots, []
        self.ready.clear()
        self.set_state(State.UNLOADING, "its replicas are being ended")
        retired = await self._end(slots)
        if retired.leftovers:
            self.is_set_aside = False
            self.set_state(State.FAILED, f"unloaded, but this remains: {'; '.join(retired.leftovers)}")
        else:
            self.set_state(State.UNAVAILABLE, unloaded(self.name))
        return retired

    async def start_fresh(self) -> list[Launched]:
        """Start as many replicas as it has beside those that serve.

        Raises:
            CallableFailed: one of them didn't start; the others are gone again.
            Unavailable: the server is stopping.
        """
        return await self._start_all(lambda text: None)

    def switch(self, fresh: list[Launched]) -> list[Slot]:
        """Have new requests go to these replicas. Returns what has the old ones, for `retire`."""
        old = self._slots
        for slot in old:
            slot.release()
        self._retiring.update(self.ready)
        self._switch(fresh)
        return old

    async def discard(self, fresh: list[Launched]) -> None:
        """End replicas that were started and never served."""
        await asyncio.gather(*(self._end_one(launched) for launched in fresh))

    async def retire(self, old: list[Slot]) -> Retired:
        """Let replaced replicas finish what they have, and end them."""
        drained = Drained()
        if self._retiring:
            drained = await self._host.drain(self.name, self.config.drain_timeout_s, list(self._retiring))
        self._retiring.clear()
        self._host.on_change()
        retired = await self._end(old)
        retired.drained = drained
        return retired

    # Replicas

    def _switch(self, fresh: list[Launched]) -> None:
        self._slots = []
        self._gave_up = 0
        self.has_given_up = False
        self.ready = {launched.replica.id: launched.replica for launched in fresh}
        self.signature = fresh[-1].replica.signature
        self.is_set_aside = False
        for launched in fresh:
            self._keep(Slot(launched))
        self.set_state(State.READY, f"replica {fresh[-1].replica.id} ready")

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
                async with self._host.start_slots:
                    if self._host.is_stopping or not slot.is_kept:
                        return
                    started = time.monotonic()
                    try:
                        slot.launched = self._host.launch(self, self._on_progress)
                    except OSError as error:  # no space, processes or descriptors: it may pass; others go on serving
                        logger.error("%s: a replica can't be started: %s", self.name, error)
                        backoff_s = await self._pause(slot, backoff_s)
                        continue
                    is_ready = await self._await_ready(slot.launched.replica)
                if is_ready and slot.is_kept:
                    self.signature = slot.launched.replica.signature
                    self.ready[slot.launched.replica.id] = slot.launched.replica
                    self._tell_ready(slot.launched.replica, started)
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
            if not is_ready:
                failed_starts += 1
                if self._note_failed_start(replica, failed_starts):
                    return
            if time.monotonic() - started > STEADY_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
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

    def _note_failed_start(self, replica: ReplicaProcess, failed_starts: int) -> bool:
        """A replica ended before it was ready. Returns whether its slot gives up."""
        reason = replica.reason or "ended before it was ready"
        logger.error("%s: did not start (%d of %d): %s", replica.id, failed_starts, FAILED_STARTS_LIMIT, reason)
        if failed_starts >= FAILED_STARTS_LIMIT:
            self._gave_up += 1
            if self._gave_up == self.config.replicas:
                logger.error(
                    "%s: FAILED and not tried again; correct it, and then load it or restart the server: %s",
                    self.name, reason,
                )  # fmt: skip
                self.has_given_up = True
                self.set_state(State.FAILED, reason)
            return True
        self.is_decided = True
        if not self.ready and self.state is not State.UNAVAILABLE:
            self.set_state(State.LOADING, f"trying again after: {reason}")
        else:
            self._host.on_change()
        return False

    async def _start_all(self, on_progress: Callable[[str], None]) -> list[Launched]:
        """Start as many replicas as it has, each once. All of them are ready then, or gone."""
        outcomes = await asyncio.gather(*(self._start_one(on_progress) for _ in range(self.config.replicas)))
        fresh = [outcome for outcome in outcomes if isinstance(outcome, Launched)]
        reasons = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if reasons or self._host.is_stopping:
            await self.discard(fresh)
        if self._host.is_stopping:
            raise Unavailable("the server is stopping")
        if reasons:
            raise CallableFailed(f"a replica of `{self.name}` did not start: {reasons[0]}")
        return fresh

    async def _start_one(self, on_progress: Callable[[str], None]) -> Launched | str:
        """Start a replica. Returns it when it is ready, or why it isn't, once it is gone."""
        async with self._host.start_slots:
            if self._host.is_stopping:
                return "the server is stopping"
            started = time.monotonic()
            try:
                launched = self._host.launch(self, on_progress)
            except OSError as error:
                return f"it can't be started: {error}"
            if await self._await_ready(launched.replica) and not launched.replica.ending.is_set():
                self._tell_ready(launched.replica, started)
                return launched
        await self._end_one(launched)
        return launched.replica.reason or "ended before it was ready"

    async def _await_ready(self, replica: ReplicaProcess) -> bool:
        try:
            return await asyncio.wait_for(asyncio.shield(replica.ready), self.config.load_timeout_s)
        except asyncio.TimeoutError:
            replica.reason = f"not ready within load_timeout_s = {self.config.load_timeout_s:g} s"
            replica.kill()
            return False

    def _tell_ready(self, replica: ReplicaProcess, started: float) -> None:
        logger.info(
            "%s: ready after %.1f s on %s%s", replica.id, time.monotonic() - started,
            replica.facts.get("device", "?"), _own_python(self.config, replica.facts),
        )  # fmt: skip

    async def _end(self, slots: Collection[Slot]) -> Retired:
        """End the replicas of slots that are released, and see what is left of them."""
        launched = [slot.launched for slot in slots if slot.launched is not None]
        groups = {group for one in launched if (group := one.replica.group)}
        before = await asyncio.to_thread(measure_groups, groups)
        for one in launched:
            one.replica.stop()
        # Their slots' own tasks take them in.
        await self._wait_or_kill([one.replica for one in launched], [slot.task for slot in slots if slot.task])
        after = await asyncio.to_thread(measure_groups, groups)
        retired = Retired(before=before, after=after)
        for one in launched:
            if not one.exited.done():
                retired.leftovers.append(f"replica {one.replica.id}: its guardian has not ended")
            retired.leftovers += one.replica.leftovers
            if one.replica.directory.exists():
                retired.leftovers.append(f"folder {one.replica.directory}")
            if one.replica.reason not in ("", "stopped", "stopped before it was ready"):
                retired.warnings.append(f"replica {one.replica.id}: {one.replica.reason}")
        for pid in await asyncio.to_thread(group_members, groups):
            retired.leftovers.append(f"process {pid}")
        return retired

    async def _end_one(self, launched: Launched) -> None:
        """End a replica that no slot has."""
        launched.replica.stop()

        async def ended() -> None:
            await launched.exited
            await launched.replica.ended()

        await self._wait_or_kill([launched.replica], [asyncio.create_task(ended())])
        for leftover in launched.replica.leftovers:
            logger.error("%s: could not be removed: %s", launched.replica.id, leftover)

    async def _wait_or_kill(self, replicas: Collection[ReplicaProcess], tasks: Collection[asyncio.Task[None]]) -> None:
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=REPLICA_END_TIMEOUT_S)
        if late:
            for replica in replicas:
                replica.kill()
            await asyncio.wait(late, timeout=REPLICA_KILL_TIMEOUT_S)

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
            self.set_state(State.LOADING, text)

    def set_state(self, state: State, reason: str) -> None:
        """Come into a state, and tell; each change is logged once."""
        if state is not self.state:
            logger.info("%s: %s -> %s: %s", self.name, self.state.value, state.value, reason)
            self.since_s = time.time()
        self.state, self.reason = state, reason
        if state is not State.LOADING:
            self.is_decided = True
        self._host.on_change()


def unloaded(name: str) -> str:
    """The reason of a deployment that was unloaded."""
    return f"it is unloaded: load it with POST /v2/repository/models/{name}/load"


def _own_python(deployment: Deployment, facts: Mapping[str, str]) -> str:
    """Which Python a replica runs under, and what it has there; empty if it is the one that we run under."""
    if deployment.python is None:
        return ""
    return f", under {deployment.python}: " + ", ".join(
        f"{name} {version}" for name, version in facts.items() if name != "device"
    )
