"""A replica that Ray places on a node, from the supervisor's side."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from headwater.signature import Signature
from headwater_server.cluster.agent_link import AgentLink
from headwater_server.cluster.agent_messages import Adapters, AgentState, Beat, Order
from headwater_server.cluster.ray_client import ActorGone, RayClient
from headwater_server.control.routing import ReplicaRoute
from headwater_server.process.proc import GroupUse
from headwater_server.security.peer_tls import PeerTls

__all__ = ["Context", "RemoteReplica"]

logger = logging.getLogger("headwater")

OUT_OF_REACH_S: Final = 10.0
"""Seconds out of reach after which a replica counts as lost."""
RETRY_S: Final = 1.0
PLACE_LOOK_S: Final = 5.0
"""Seconds between checks whether a node can have a replica that is not placed yet."""
PLACE_AGAIN_S: Final = 60.0
"""Seconds that Ray may leave a replica unplaced although its chosen node, or another node, should have capacity. Then
the replica's actor is started anew."""


class Context:
    """State that all remote replicas of a supervisor share.

    Args:
        ray: the connection to Ray.
        epoch: the supervisor's epoch.
        tls: the cluster's TLS; None: plain text.
        on_reach: called when a replica that was ready gets out of reach, or in reach again.
        on_stale: called when an agent says that a later supervisor has replaced this supervisor.
    """

    def __init__(
        self,
        ray: RayClient,
        epoch: int,
        tls: PeerTls | None,
        on_reach: Callable[[], None],
        on_stale: Callable[[], None],
    ) -> None:
        self.ray = ray
        self.epoch = epoch
        self.tls = tls
        self.on_reach = on_reach
        self.on_stale = on_stale


class RemoteReplica:
    """Follows a replica to its end; see `headwater_server.supervisor.handle.ReplicaHandle`.

    Args:
        id: unique among all replicas, past replicas included.
        device: the device that it was placed on.
        adapters: the adapters that it is started with.
        takes: the resources that it reserves on its node, by Ray's names.
        context: see `Context`.
        on_progress: called with each stage of the start.
    """

    group = 0

    def __init__(
        self,
        id: str,
        device: str,
        adapters: dict[str, str],
        takes: Mapping[str, float],
        context: Context,
        on_progress: Callable[[str], None],
    ) -> None:
        self.id = id
        self.device = device
        self.takes = takes
        self.node = ""
        """Id of the node that the replica is on, or that was chosen for it; empty: no node yet."""
        self.has_hung = False
        """Whether the replica was given up because its node didn't answer."""
        self._adapters = adapters
        self.signature: Signature | None = None
        self.facts: dict[str, str] = {}
        self.batch_limit = 0
        self.reason = ""
        self.is_permanent = self.is_shortage = False
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.ending = asyncio.Event()
        self.exited: asyncio.Future[None]
        self.is_reachable = True
        self.is_cut_off = False  # the agent watches the folder
        self.state: AgentState | None = None
        """The agent's last state; None: it has sent no state."""
        self.heard = asyncio.Event()
        """Set once the agent has sent a state, or the replica is known to end."""
        self._context = context
        self._on_progress = on_progress
        self._actor: Any = None
        self._link: AgentLink | None = None
        self._use = GroupUse()
        self._ordered = ""
        """The last order: empty (no order), ``stop`` or ``kill``, which stays."""
        self._killed = asyncio.Event()
        self._placed = asyncio.Event()
        self._leftovers: list[str] = []
        self._missing = ""
        """Why no node can have the replica; empty: a node can."""

    async def follow(self, place: Callable[[bool], Any], look: Callable[[], Any]) -> None:
        """Wait until the replica is placed, follow it to its end, and then end its actor.

        Args:
            place: starts the actor and returns it. If its argument is true, it first chooses a node, and notes it in
                `node`.
            look: returns why no node can ever have the replica (empty: a node can), and whether a node has capacity for
                it now.
        """
        try:
            self._actor = await place(True)
            said = await self._said(place, look)
            if said:
                await self._listen(*said.split())
        except ActorGone as error:
            self.mark_ending(f"its actor has ended: {error}")
        except Exception as error:  # any error of Ray's; the replica set tries again
            self.mark_ending(f"Ray could not run it: {(str(error).strip() or repr(error)).splitlines()[0]}")
        # A cancellation skips this: the replica is left for the next supervisor.
        self.mark_ending("it was stopped" if self._ordered else "its node is gone")
        if self._actor is not None:
            await self._context.ray.kill(self._actor)

    @property
    def adapters(self) -> dict[str, str]:
        """See `ReplicaHandle.adapters`."""
        return self._adapters

    @adapters.setter
    def adapters(self, adapters: dict[str, str]) -> None:
        self._adapters = adapters
        if self._link is not None:
            self._link.tell(Adapters(adapters))

    async def wait_for_place(self, timeout_s: float) -> None:
        """See `ReplicaHandle.wait_for_place`."""
        ending = asyncio.create_task(self.ending.wait())
        placed = asyncio.create_task(self._placed.wait())
        try:
            await asyncio.wait({ending, placed}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            placed.cancel()

    @property
    def has_place(self) -> bool:
        """See `ReplicaHandle.has_place`."""
        return self._placed.is_set()

    @property
    def is_lost_with_node(self) -> bool:
        """See `ReplicaHandle.is_lost_with_node`."""
        state = self.state
        return state is None or state.is_let_go or not (state.is_ending or state.has_exited)

    def mark_ending(self, reason: str = "") -> None:
        """Note that the replica can no longer be used; a reason that is known already stays."""
        self.reason = self.reason or reason
        self.ending.set()
        self.heard.set()
        if not self.ready.done():
            self.ready.set_result(False)

    def stop(self) -> None:
        """See `ReplicaHandle.stop`."""
        self._order("stop")

    def kill(self) -> None:
        """See `ReplicaHandle.kill`."""
        self._order("kill")
        self._killed.set()

    def account(self) -> str:
        """See `ReplicaHandle.account`."""
        if self.state is not None and self.state.account:
            return self.state.account
        return f"{self.reason}: no node has room for it: {self._missing}" if self._missing else self.reason

    def cause(self) -> str:
        """See `ReplicaHandle.cause`."""
        cause = self.state.cause if self.state is not None and self.state.reason else ""
        return cause or self.reason or "it ended before it was ready"

    def route(self) -> ReplicaRoute:
        """See `ReplicaHandle.route`."""
        assert self.state is not None
        return self.state.route

    async def use(self) -> GroupUse:
        """See `ReplicaHandle.use`. Returns the agent's last report."""
        if not self.exited.done():
            return self._use
        return GroupUse(gpu_bytes=None if self._use.gpu_bytes is None else 0)

    async def remains(self) -> list[str]:
        """See `ReplicaHandle.remains`."""
        leftovers = list(self._leftovers)
        if not self.exited.done():
            leftovers.append(f"replica {self.id}: its node can't be reached, so perhaps all of it")
        return leftovers

    async def ask_vllm(self, url: str, body: str, timeout_s: float) -> tuple[int, bytes]:
        """See `ReplicaHandle.ask_vllm`."""
        if self._link is None:
            raise ConnectionError("it has no place yet")
        return await self._link.ask_vllm(url, body, timeout_s)

    async def _said(self, place: Callable[[bool], Any], look: Callable[[], Any]) -> str:
        """Wait until the agent has opened its port, and return its first line. Empty: the replica was stopped or killed
        before. A replica that Ray leaves unplaced for `PLACE_AGAIN_S` is placed again.

        Raises:
            ActorGone: the actor, or the agent, ended before.
        """
        ray, loop = self._context.ray, asyncio.get_running_loop()
        killed = asyncio.create_task(self._killed.wait())
        asking = asyncio.create_task(ray.said(self._actor))
        due_s: float | None = None
        """Time since which the replica should have been placed; None: no node is chosen, and no node
        has capacity."""
        try:
            while not killed.done():
                await asyncio.wait({asking, killed}, timeout=PLACE_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if asking.done() and isinstance(asking.exception(), TimeoutError):  # its node can't be reached now
                    await asyncio.sleep(RETRY_S)
                    asking = asyncio.create_task(ray.said(self._actor))
                elif asking.done():
                    self._placed.set()  # a later failure is no lack of capacity
                    self._missing = ""
                    if not (said := asking.result()):
                        raise ActorGone("its agent ended before it had opened its port; see Ray's log of the actor")
                    return said
                elif not killed.done():
                    self._missing, has_room = await look()
                    waits = f"no node has room for it: {self._missing}; waiting for a node with room"
                    self._on_progress(waits if self._missing else "waiting for a place in the cluster")
                    due_s = (due_s or loop.time()) if has_room or self.node else None
                    if due_s is not None and loop.time() - due_s >= PLACE_AGAIN_S:
                        text = "%s: Ray has not started it for %g s, although a node should have room; asking Ray anew"
                        logger.warning(text, self.id, PLACE_AGAIN_S)
                        asking.cancel()
                        await ray.kill(self._actor)
                        self.node = ""
                        # With no capacity anywhere no node is chosen: Ray's autoscaler acts only on actors without an
                        # affinity.
                        self._actor = await place(has_room)
                        asking, due_s = asyncio.create_task(ray.said(self._actor)), None
        finally:
            killed.cancel()
            asking.cancel()
        return ""

    async def _listen(self, address: str, token: str, order_token: str) -> None:
        """Follow the agent until the replica has exited or the agent has ended, or the replica counts as lost: out of
        reach for `OUT_OF_REACH_S`."""
        context = self._context
        link = self._link = AgentLink(
            address, token, context.epoch, context.tls, order_token=order_token,
            on_state=self._take, on_beat=self._take_beat, on_open=self._repeat, on_reach=self._note_reach,
        )  # fmt: skip
        running = asyncio.create_task(link.run())
        lost_s: float | None = None
        loop = asyncio.get_running_loop()
        try:
            while not running.done() and not (self.state is not None and self.state.has_exited):
                await asyncio.wait({running}, timeout=0.1)
                lost_s = None if self.is_reachable else (lost_s or loop.time())
                if lost_s is not None and loop.time() - lost_s > OUT_OF_REACH_S:
                    self.has_hung = True
                    self.mark_ending(f"its node could not be reached for {OUT_OF_REACH_S:g} s")
                    return
            if running.done() and not (self.state is not None and self.state.has_exited):
                self.mark_ending("its agent has ended")
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

    def _order(self, command: str) -> None:
        if self._ordered != "kill":
            self._ordered = command
        if self._link is None:  # it is not placed yet
            self._killed.set()
        else:
            self._link.tell(Order(self._ordered))

    def _repeat(self) -> None:
        """Repeat the last order, which may have been lost with the previous connection."""
        if self._ordered and self._link is not None:
            self._link.tell(Order(self._ordered))

    def _take(self, state: AgentState) -> None:
        if state.is_stale:
            self._context.on_stale()
            return
        before, self.state = self.state, state
        if before is None:  # later states only repeat the adapters set here
            self._adapters = state.adapters
        elif state.adapters != self._adapters and self._link is not None:  # the agent has missed the change
            self._link.tell(Adapters(self._adapters))
        self.node = state.node
        self.facts = state.facts
        self.batch_limit = state.batch_limit
        self.is_permanent = state.is_permanent
        self.is_shortage = state.is_shortage
        self.reason = self.reason if state.is_let_go else state.reason or self.reason
        self._leftovers = state.leftovers
        if state.signature is not None and self.signature is None:
            self.signature = msgspec.convert(state.signature, Signature)
        if state.stage and (before is None or before.stage != state.stage) and not state.is_ready:
            logger.info("%s: %s", self.id, state.stage)
            self._on_progress(state.stage)
        self.heard.set()
        if state.is_ending or state.has_exited:
            self.mark_ending("its actor has ended, or its raylet" if state.is_let_go else state.reason)
        elif state.is_ready and not self.ready.done():
            self.ready.set_result(True)

    def _take_beat(self, beat: Beat) -> None:
        self._use = GroupUse(beat.threads, beat.resident_bytes, beat.gpu_bytes, beat.gpu_utilization)

    def _note_reach(self, is_reachable: bool) -> None:
        self.is_reachable = is_reachable
        if self.ready.done() and not self.ending.is_set():
            logger.warning("%s: %s", self.id, "in reach again" if is_reachable else "out of reach")
            self._context.on_reach()
