"""Places for replicas in a set: start replicas where there is capacity, follow them to their end, start the next."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from headwater.wire.handshake import OWN_SIDE
from headwater_server.config.schema import Deployment
from headwater_server.control.messages import Drained
from headwater_server.control.routing import CRASH_WINDOW_S
from headwater_server.errors import CallableFailed, HeadwaterError, MemoryBudgetExceeded, Unavailable
from headwater_server.process.proc import GroupUse
from headwater_server.supervisor.adapters import fit
from headwater_server.supervisor.child_processes import Backoff, ChildProcesses
from headwater_server.supervisor.crashes import Crashes
from headwater_server.supervisor.handle import ReplicaHandle
from headwater_server.supervisor.memory_budget import Place
from headwater_server.supervisor.preloaded import Preloads
from headwater_server.telemetry.recorder import recorder

__all__ = [
    "FAILED_STARTS_LIMIT",
    "FIRST_MEASURED_RETRY_S",
    "REPLICA_END_TIMEOUT_S",
    "EndedServing",
    "FailedStart",
    "Failure",
    "HasCapacity",
    "Lost",
    "NoCapacity",
    "ReplicaStarter",
    "Retired",
    "Serving",
    "Slot",
    "SlotEvent",
    "stop_or_kill",
]

logger = logging.getLogger("headwater")

REPLICA_END_TIMEOUT_S: Final = 20.0
"""Seconds that a replica and its guardian may take to end; then they are killed."""
REPLICA_KILL_TIMEOUT_S: Final = 10.0
"""Seconds that killed replicas may take to be gone; then they are no longer waited for."""
LONG_START_S: Final = 60.0
"""A start that takes longer than this many seconds waits for something other than a core, so other starts no longer
wait for it."""
FIRST_MEASURED_RETRY_S: Final = 0.2
"""Seconds between checks whether the first replica was measured, while further replicas wait for that."""
SLOW_FIRST_S: Final = 30.0
SLOW_LONGEST_S: Final = 480.0
"""Shortest and longest pause before a restart in a slot that `is_slow`, in seconds."""
UNSERVED_PAUSE_S: Final = 2.0
"""The longest pause before a replica that served is replaced while no other replica serves. Slow pauses are longer."""
FAILED_STARTS_LIMIT: Final = 5
"""Number of consecutive failed starts after which a slot is given up, unless it `is_slow`. Starts for which the machine
lacks a resource don't count; after a permanent failure no other start follows."""
PLACE_RETRY_S: Final = 2.0
"""Seconds until the next try to reserve memory for a replica after the memory budget refused it."""


@dataclass
class Retired:
    """The result of ending replicas."""

    drained: Drained = field(default_factory=Drained)
    before: GroupUse | None = field(default_factory=GroupUse)
    """Resources that the replicas' processes used before they were ended; None if they could not be measured."""
    after: GroupUse | None = field(default_factory=GroupUse)
    """Resources that they used afterwards, more than zero if processes remain; None if they could not be measured."""
    leftovers: list[str] = field(default_factory=list)
    """Descriptions of files and processes that remain of the replicas."""
    warnings: list[str] = field(default_factory=list)
    """Reasons of replicas that ended otherwise than in order, and other troubles for the operator."""

    def report(self) -> dict[str, Any]:
        """The fields of an operator's answer. Fields of ``freed`` are None if the use of memory is unknown."""
        host_bytes = gpu_bytes = None
        if self.before is not None and self.after is not None:
            host_bytes = self.before.resident_bytes - self.after.resident_bytes
            if self.before.gpu_bytes is not None and self.after.gpu_bytes is not None:
                gpu_bytes = self.before.gpu_bytes - self.after.gpu_bytes
        return {
            "drained": self.drained.drained,
            "ended": self.drained.ended,
            "freed": {"host_bytes": host_bytes, "gpu_bytes": gpu_bytes},
            "leftovers": self.leftovers,
            **({"warnings": self.warnings} if self.warnings else {}),
        }

    def __add__(self, other: Retired) -> Retired:
        """The sum of both."""
        return Retired(
            self.drained + other.drained,
            None if self.before is None or other.before is None else self.before + other.before,
            None if self.after is None or other.after is None else self.after + other.after,
            self.leftovers + other.leftovers,
            self.warnings + other.warnings,
        )


class ReplicaStarter:
    """Starts and ends the replicas of a deployment.

    Args:
        name: the deployment's name.
        children: owns the replicas' processes.
        preloads: the processes that fork replicas; None: replicas are started without forking.
    """

    def __init__(self, name: str, children: ChildProcesses, preloads: Preloads | None = None) -> None:
        self.failure = ""
        """Why the last failed start of `start_all` failed, in words for clients."""
        self.name = name
        self.children = children
        self._preloads = preloads or Preloads(children)

    @contextlib.asynccontextmanager
    async def turn(self, config: Deployment) -> AsyncGenerator[None, None]:
        """A context for starting a replica. It waits until the replica can be forked, if it is to be forked, and limits
        the number of simultaneous starts, except starts that take longer than `LONG_START_S`."""
        await self._preloads.wait(config)
        await self.children.start_slots.acquire()
        with contextlib.ExitStack() as held:
            held.callback(self.children.start_slots.release)
            held.callback(asyncio.get_running_loop().call_later(LONG_START_S, held.close).cancel)
            yield

    def launch(self, place: Place, config: Deployment, on_progress: Callable[[str], None]) -> ReplicaHandle:
        """Start a replica in reserved capacity.

        Raises:
            OSError: as `ChildProcesses.launch`; the capacity is then released.
        """
        try:
            on_device = config.on(place.device)
            fork = self._preloads.fork_of(on_device)
            replica = self.children.launch(self.name, on_device, on_progress, fork)
        except OSError:
            self.children.memory.release(place)
            raise
        self.children.memory.attach(place, replica)
        return replica

    async def await_ready(self, replica: ReplicaHandle, place: Place, config: Deployment) -> bool:
        """Wait until a replica is ready, and measure it. Returns whether it became ready. A replica that takes longer
        than ``load_timeout_s`` to be placed, or then to be ready, is killed."""
        await replica.wait_for_place(config.load_timeout_s)
        if not replica.has_place and not replica.ending.is_set():
            replica.reason = f"no place for it within load_timeout_s = {config.load_timeout_s:g} s"
            replica.kill()
            return False
        started = time.monotonic()
        # Not wait_for, which before Python 3.12 loses a cancellation that comes just when the replica becomes ready.
        if not (await asyncio.wait({replica.ready}, timeout=config.load_timeout_s))[0]:
            replica.reason = f"not ready within load_timeout_s = {config.load_timeout_s:g} s"
            replica.kill()
            return False
        if not replica.ready.result():
            return False
        took_s = time.monotonic() - started
        excess = await self.children.memory.settle(config, place)
        if excess is not None:
            text = "%s: all replicas together exceed the memory budget; this replica stays, and no more are started: %s"
            logger.warning(text, self.name, excess)
        logger.info(
            "%s: ready after %.1f s on %s%s", replica.id, took_s, replica.facts.get("device", "?"),
            _own_python(config, replica.facts),
        )  # fmt: skip
        return True

    async def start_all(
        self, config: Deployment, count: int, on_progress: Callable[[str], None] = lambda text: None
    ) -> list[ReplicaHandle]:
        """Start ``count`` replicas, with a single try for each. Afterwards all of them are ready; after an error all of
        them are gone.

        ``on_progress`` is called when there is capacity for replicas, and with each stage of a start.

        Raises:
            CallableFailed: a replica didn't start, or was lost before the last replica was ready.
            MemoryBudgetExceeded: the memory budget doesn't allow them.
            Unavailable: the server is stopping.
        """
        fresh: list[ReplicaHandle] = []
        try:
            while len(fresh) < count:
                places = await self.children.memory.reserve(self.name, config, count - len(fresh))
                if not places:
                    await self.children.wait_for_stop(FIRST_MEASURED_RETRY_S)
                else:
                    on_progress("loading, at an operator's request")
                starts = (self._start_one(place, config, on_progress) for place in places)
                outcomes = await asyncio.gather(*starts)
                fresh += [outcome for outcome in outcomes if not isinstance(outcome, str)]
                reasons = [outcome for outcome in outcomes if isinstance(outcome, str)]
                if self.children.is_stopping:
                    raise Unavailable("the server is stopping")
                if reasons:
                    raise CallableFailed(f"a replica of `{self.name}` did not start: {reasons[0]}")
            if (lost := self.lost(fresh)) is not None:
                raise lost
        except HeadwaterError:
            await stop_or_kill(fresh)
            raise
        return fresh

    def lost(self, fresh: Collection[ReplicaHandle]) -> CallableFailed | None:
        """The error if a replica that was started together with others can no longer be used; otherwise None."""
        for replica in fresh:
            if replica.ending.is_set():
                reason = replica.account() or "it ended"
                self.failure = replica.cause()
                return CallableFailed(f"a replica of `{self.name}` was lost before all others were ready: {reason}")
        return None

    async def _start_one(
        self, place: Place, config: Deployment, on_progress: Callable[[str], None]
    ) -> ReplicaHandle | str:
        """Start a replica. Returns the replica once it is ready, or the reason after a failed start has ended."""
        async with self.turn(config):
            if self.children.is_stopping:
                self.children.memory.release(place)
                return "the server is stopping"
            try:
                replica = self.launch(place, config, on_progress)
            except OSError as error:
                self.failure = f"it can't be started: {error.strerror}"
                return f"it can't be started: {error}"
            if await self.await_ready(replica, place, config) and not replica.ending.is_set():
                return replica
        await stop_or_kill([replica])
        recorder().count("headwater_replica_start_failures", self.name)
        self.failure = replica.cause()
        return replica.account() or "ended before it was ready"

    async def end(self, replicas: Collection[ReplicaHandle]) -> Retired:
        """End replicas, and check for leftovers. ``drained`` of the result is empty."""
        before = await _measure(replicas)
        await stop_or_kill(replicas)
        remains = await asyncio.gather(*(replica.remains() for replica in replicas))
        retired = Retired(before=before, after=await _measure(replicas), leftovers=[*chain(*remains)])
        for replica in replicas:
            if replica.reason not in ("", "stopped", "stopped before it was ready"):
                retired.warnings.append(f"replica {replica.id}: {replica.reason}")
        return retired


async def _measure(replicas: Collection[ReplicaHandle]) -> GroupUse | None:
    try:
        return sum(await asyncio.gather(*(replica.use() for replica in replicas)), GroupUse())
    except OSError as error:  # for example no file descriptors; the replicas are ended all the same
        logger.error("the memory of replicas that are ended can't be measured: %s", error)
        return None


async def stop_or_kill(replicas: Collection[ReplicaHandle]) -> None:
    """Stop replicas, and kill replicas that take longer than `REPLICA_END_TIMEOUT_S`. Returns when they have ended, or
    `REPLICA_KILL_TIMEOUT_S` after they were killed."""
    if not replicas:
        return
    for replica in replicas:
        replica.stop()
    _, late = await asyncio.wait({replica.exited for replica in replicas}, timeout=REPLICA_END_TIMEOUT_S)
    if late:
        for replica in replicas:
            replica.kill()
        await asyncio.wait(late, timeout=REPLICA_KILL_TIMEOUT_S)


def _own_python(deployment: Deployment, facts: Mapping[str, str]) -> str:
    """For the log: the Python that a replica runs under, and versions of that Python and its packages; empty for
    Headwater's Python."""
    if deployment.interpreter is None:
        return ""
    return f", under {deployment.interpreter}: " + ", ".join(
        f"{name} {version}" for name, version in facts.items() if name != "device" and not name.startswith(OWN_SIDE)
    )


@dataclass(frozen=True)
class NoCapacity:
    """There is no capacity for the slot's next replica. The slot tries again."""

    reason: str


@dataclass(frozen=True)
class HasCapacity:
    """Capacity for the next replica, which was refused before, is reserved."""


@dataclass(frozen=True)
class Serving:
    """A replica has begun to serve."""

    replica: ReplicaHandle


@dataclass(frozen=True)
class FailedStart:
    """A replica could not be started. The slot tries again."""

    reason: str
    """For operators."""
    cause: str
    """For clients."""


@dataclass(frozen=True)
class Lost:
    """A replica that served can no longer be used."""

    reason: str


@dataclass(frozen=True)
class EndedServing:
    """A replica that served has ended; another follows after a pause. The caller of `run` sets `Slot.is_missed`."""


@dataclass(frozen=True)
class Failure:
    """Another start would fail, too, perhaps after a long pause only (``is_permanent`` is False)."""

    is_permanent: bool
    reason: str
    """For operators."""
    cause: str
    """For clients."""


SlotEvent = NoCapacity | HasCapacity | Serving | FailedStart | Lost | EndedServing | Failure


class Slot:
    """Keeps a replica running until the slot is released or the server stops.

    Args:
        starter: starts the replicas.
        config: their configuration.
        crashes: the losses of all the deployment's serving replicas.
        on_progress: called with each stage of a start.
        replica: a serving replica to begin with.
        place: reserved capacity for the first replica.
    """

    def __init__(
        self,
        starter: ReplicaStarter,
        config: Deployment,
        crashes: Crashes,
        on_progress: Callable[[str], None],
        replica: ReplicaHandle | None = None,
        place: Place | None = None,
    ) -> None:
        self.config = config
        """The configuration of the next start; of a replica that runs only the adapters follow it."""
        self.replica = replica
        """The present replica, from its launch to its end; None in between."""
        self.serves = replica is not None
        """Whether requests go to the replica, or are still in flight there."""
        self.is_kept = True
        """Whether a replica that ends is replaced."""
        self.is_slow = False
        """Whether starts wait for long pauses, after too many losses of replicas; False once a replica serves."""
        self.is_missed = False
        """Whether no other replica serves, as of the last `EndedServing`."""
        self._starter = starter
        self._children = starter.children
        self._crashes = crashes
        self._on_progress = on_progress
        self._place = place
        self._failed_starts = 0
        self._pausing: asyncio.Future[None] | None = None

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
        return self.is_kept and not self._children.is_stopping

    async def run(self) -> AsyncGenerator[SlotEvent, None]:
        """Keep a replica running, and yield what happens. Before the caller asks for the next event, it may release the
        slot, and sets `is_slow` after a `Failure`."""
        backoff, slow = Backoff(), Backoff(SLOW_FIRST_S, SLOW_LONGEST_S)
        while True:
            has_served = False
            began_s = time.monotonic()
            if self.replica is None:
                async for event in self._reserve():
                    yield event
                if self._place is None:
                    return
                async with self._starter.turn(self.config):
                    began_s = time.monotonic()
                    outcome = await self._start()
                if outcome is not None:
                    yield outcome
            if (replica := self.replica) is not None:
                has_served = self.serves
                async for event in self._follow(replica):
                    yield event
                if has_served and replica.is_lost_with_node:
                    backoff = Backoff()  # elsewhere the replica would not have been lost
            if self._is_wanted:
                pause_s = (slow if self.is_slow else backoff).after(time.monotonic() - began_s)
                if has_served and not self.is_slow:
                    yield EndedServing()
                    pause_s = min(pause_s, UNSERVED_PAUSE_S) if self.is_missed else pause_s
                await self._pause(pause_s)

    async def _reserve(self) -> AsyncGenerator[SlotEvent, None]:
        """Wait until capacity for a replica is reserved, or the replica is no longer wanted."""
        was_refused = False
        while self._place is None and self._is_wanted:
            retry_s = FIRST_MEASURED_RETRY_S
            try:
                places = await self._children.memory.reserve(self._starter.name, self.config, 1)
                self._place = places[0] if places else None
            except MemoryBudgetExceeded as error:
                retry_s, was_refused = PLACE_RETRY_S, True
                if self.is_kept:
                    yield NoCapacity(error.message)
            if not self.is_kept:
                self._release_place()
            elif self._place is None:
                await self._pause(retry_s)
            elif was_refused:
                yield HasCapacity()

    async def _start(self) -> Serving | FailedStart | None:
        """Start a replica in the reserved capacity, unless the capacity was released. Returns when the replica serves,
        or when its start has failed; None: it is about to end, or was not started."""
        place, self._place = self._place, None
        if place is None or self._children.is_stopping:
            return None
        config = self.config
        try:
            replica = self.replica = self._starter.launch(place, config, self._on_progress)
        except OSError as error:  # no space, processes or descriptors: this may pass, and other replicas serve
            logger.error("%s: a replica can't be started: %s", self._starter.name, error)
            text = "a replica can't be started: "
            return FailedStart(f"{text}{error}", f"{text}{error.strerror}")
        if await self._starter.await_ready(replica, place, config) and await self._fit(replica) and self.is_kept:
            self._failed_starts = 0
            self.is_slow = False
            self.serves = True
            return Serving(replica)
        return None

    async def _fit(self, replica: ReplicaHandle) -> bool:
        """Give a replica the present adapters, which may have changed since its start. Returns whether it has them
        now."""
        try:
            while replica.adapters != self.config.adapters:
                await fit(replica, self.config.adapters, self._children.search, self.config.load_timeout_s)
        except CallableFailed as error:
            replica.reason = error.message
            replica.kill()
            return False
        return True

    async def _follow(self, replica: ReplicaHandle) -> AsyncGenerator[SlotEvent, None]:
        """Follow a replica to its end."""
        has_served = self.serves
        if has_served:
            await replica.ending.wait()
            was_listed, self.serves = self.serves, False
            if was_listed and not self._children.is_stopping:
                logger.error("%s: lost: %s", replica.id, replica.reason)
                yield Lost(replica.reason)
        await replica.exited
        self.replica = None
        if not self._is_wanted:
            return
        if has_served:
            if not replica.is_lost_with_node:
                lost = self._crashes.count(replica.id, self.config.max_crashes)
                if lost >= self.config.max_crashes:
                    yield _slow(f"{lost} replicas were lost within {CRASH_WINDOW_S:g} s, the last: ", replica)
        elif not replica.has_place:
            yield NoCapacity(replica.account())
            return
        else:
            recorder().count("headwater_replica_start_failures", self._starter.name)
            yield self._failed(replica)
        if self.is_kept:
            recorder().count("headwater_replica_restarts", self._starter.name)

    def _failed(self, replica: ReplicaHandle) -> FailedStart | Failure:
        """Decide what follows a replica that ended before it was ready."""
        self._failed_starts += not replica.is_shortage
        reason = replica.account() or "ended before it was ready"
        is_tried = self.is_slow and not replica.is_permanent
        tries = "not tried again" if replica.is_permanent else f"{self._failed_starts} of {FAILED_STARTS_LIMIT}"
        tries = "tried again slowly" if is_tried else "tried again" if replica.is_shortage else tries
        logger.error("%s: did not start (%s): %s", replica.id, tries, reason)
        if is_tried:
            return _slow("a replica did not start: ", replica)
        if replica.is_permanent or (self._failed_starts >= FAILED_STARTS_LIMIT and not replica.is_shortage):
            return Failure(True, reason, replica.cause())
        return FailedStart(reason, replica.cause())

    async def _pause(self, timeout_s: float) -> None:
        """Wait before the next try; `release` and `hurry` end the wait."""
        self._pausing = asyncio.ensure_future(self._children.wait_for_stop(timeout_s))
        await asyncio.wait({self._pausing})

    def _release_place(self) -> None:
        if self._place is not None:
            self._children.memory.release(self._place)
            self._place = None


def _slow(why: str, replica: ReplicaHandle) -> Failure:
    """A failure that is tried again after a long pause. ``why`` begins the reason, which ends with the replica's
    account."""
    reason = f"{why}{replica.account() or 'ended before it was ready'}"
    return Failure(False, reason, f"{why}{replica.reason or 'it ended'}")  # without the last lines of its log
