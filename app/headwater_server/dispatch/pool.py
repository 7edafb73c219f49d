"""A gateway worker's connections to the replicas of one deployment."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from headwater_server.control.messages import ReplicaLoss
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute
from headwater_server.dispatch.bag import Bag
from headwater_server.dispatch.pending import Part
from headwater_server.transport.address import PeerTls, is_local
from headwater_server.transport.protocol import FrameReplicaClient, ReplicaClient
from headwater_server.transport.triton import TritonClient

__all__ = ["FEW", "Connect", "Replica", "ReplicaCalls", "ReplicaPool", "connect"]

logger = logging.getLogger("headwater.dispatch")

FEW: Final = 8
"""So many replicas are all looked at when one is chosen."""

LOST_RETRY_S = 2.0
"""Within this time a replica that ended is removed from the table."""

Connect = Callable[[str, ReplicaRoute], ReplicaClient | FrameReplicaClient]
"""Makes the client of a replica, for the name of its deployment."""


def connect(name: str, route: ReplicaRoute, tls: PeerTls | None = None) -> ReplicaClient | FrameReplicaClient:
    """The client for a replica's protocol.

    Args:
        name: the deployment's.
        route: the replica's.
        tls: the cluster's, for replicas on other machines.
    """
    if route.grpc_address:
        from headwater_server.transport.frames import FrameClient  # only if it is needed: gRPC takes memory

        return FrameClient(name, route.grpc_address, route.token, tls)
    return TritonClient(name, route.http_address, route.token, tls)


class Client(Protocol):
    """A connection to a replica."""

    def close(self) -> None:
        """End it, and with it all calls."""
        ...


@dataclass(slots=True, eq=False)
class Replica:
    """A replica and the connection to it."""

    route: ReplicaRoute
    client: Client
    is_retiring: bool = False
    """Whether it gets nothing new, and finishes what it has: others have replaced it, or it is out of reach for now."""
    is_lost: bool = False
    """Whether it failed as a whole: it gets nothing new, and the supervisor will remove it from the table."""
    losses: int = 0
    """How often it was lost in a row, without an answer in between."""

    @property
    def is_eligible(self) -> bool:
        """Whether it may get anything new."""
        return not self.is_lost and not self.is_retiring

    def close(self, reason: str) -> None:
        """End the connection, and with it all calls."""
        self.client.close()


@dataclass(slots=True, eq=False)
class ReplicaCalls(Replica):
    """A replica and its calls in flight."""

    client: ReplicaClient | FrameReplicaClient
    calls: int = 0
    rows: int = 0
    started_rows: int = 0
    """Those of all calls ever."""
    others: int = 0
    """Rows of other workers that it had, as it last reported,"""
    heard_s: float = 0.0
    """and when, by the loop's time; 0: it has reported nothing."""
    batches: dict[int, list[Part]] = field(default_factory=dict)
    """Those of the calls, by identity."""
    is_sharing: bool = True
    """Whether it can open the memory of this worker, or of its port."""
    is_remote: bool = False
    """Whether it is reached over its port."""

    def __post_init__(self) -> None:
        self.is_remote = not is_local(self.route.http_address)


R = TypeVar("R", bound=Replica)


class ReplicaPool(Generic[R]):
    """Connections to the replicas that the routing table has for one deployment.

    Args:
        name: the deployment's.
        open: connects to a replica.
        on_back: called when a lost replica becomes eligible again.
        on_change: called with a replica that is new, or whose eligibility has changed.
        chance: gives numbers from 0 to below 1; tests pass their own.
        on_lost: called with each replica that is lost.
        keys_of: the names of the API keys whose requests a replica has; "" for a request without a key.
    """

    def __init__(
        self,
        name: str,
        open: Callable[[ReplicaRoute], R],
        on_back: Callable[[], None] = lambda: None,
        on_change: Callable[[R], None] = lambda replica: None,
        chance: Callable[[], float] = random.random,
        on_lost: Callable[[ReplicaLoss], None] = lambda loss: None,
        keys_of: Callable[[R], set[str]] = lambda replica: set(),
    ) -> None:
        self.connected: dict[str, R] = {}
        """By id."""
        self._eligible: Bag[R] = Bag()
        self._table: tuple[tuple[ReplicaRoute, ...], tuple[ReplicaRoute, ...]] = (), ()
        """The replicas of the last route, and its retiring ones."""
        self._name = name
        self._open = open
        self._on_back = on_back
        self._on_change = on_change
        self._chance = chance
        self._on_lost = on_lost
        self._keys_of = keys_of
        self._loop = asyncio.get_running_loop()

    def update(self, route: DeploymentRoute) -> None:
        """Connect to a route's new replicas, and close the connections to those that it no longer has."""
        table = route.replicas, route.retiring
        if table[0] is self._table[0] and table[1] is self._table[1]:  # as in most changes of the routing table
            return
        self._table = table
        wanted = {one.id: one for one in (*route.replicas, *route.retiring)}
        for id in [id for id in self.connected if id not in wanted]:
            self._close(self.connected.pop(id), "the replica ended while it had the request")
        for id, one in wanted.items():
            if id not in self.connected:
                self._connect(one)
        retiring = {one.id for one in route.retiring}
        for id, replica in self.connected.items():
            if replica.is_retiring != (id in retiring):
                replica.is_retiring = not replica.is_retiring
                self._note(replica)

    def close(self) -> None:
        """Close all connections."""
        # All are removed first: what one of them never had must not go to another that is about to be closed.
        gone = list(self.connected.values())
        self.connected.clear()
        for replica in gone:
            replica.is_lost = True
            self._note(replica)
        for replica in gone:
            replica.close("the server is stopping")

    def held(self, ids: Iterable[str]) -> list[R]:
        """The connected ones among these replicas."""
        return [self.connected[id] for id in ids if id in self.connected]

    def eligible(self) -> Collection[R]:
        """The replicas that may get something new."""
        return self._eligible

    def candidates(self) -> list[R]:
        """Replicas that may get something new: all if they are few, otherwise some at random, perhaps one twice."""
        if len(self._eligible) <= FEW:
            return list(self._eligible)
        return [self._eligible.draw(self._chance) for _ in range(FEW)]

    def lose(self, replica: R, keys: set[str] | None = None) -> None:
        """Give a replica nothing new; if it is still in the table after `LOST_RETRY_S`, try it again.

        Args:
            replica: the replica.
            keys: the keys whose requests it had; None: as ``keys_of`` says.
        """
        if not replica.is_lost:
            replica.is_lost = True
            replica.losses += 1
            self._note(replica)
            self._loop.call_later(LOST_RETRY_S, self._try_again, replica)
            self._report(replica, self._keys_of(replica) if keys is None else keys)

    def _report(self, replica: R, keys: set[str]) -> None:
        self._on_lost(ReplicaLoss(self._name, replica.route.id, sorted(keys), replica.losses))

    def _connect(self, route: ReplicaRoute) -> None:
        replica = self.connected[route.id] = self._open(route)
        self._note(replica)

    def _note(self, replica: R) -> None:
        """Take in whether a replica is eligible."""
        if replica.is_eligible:
            self._eligible.add(replica)
        else:
            self._eligible.discard(replica)
        self._on_change(replica)

    def _close(self, replica: R, reason: str) -> None:
        if not replica.is_lost and (keys := self._keys_of(replica)):  # the supervisor noticed its end first
            replica.losses += 1
            self._report(replica, keys)
        replica.is_lost = True
        self._note(replica)
        replica.close(reason)

    def _try_again(self, replica: R) -> None:
        route = replica.route
        if self.connected.get(route.id) is not replica:
            return
        if replica.is_retiring:  # perhaps only out of reach
            self._loop.call_later(LOST_RETRY_S, self._try_again, replica)
            return
        logger.warning("model %s: replica %s was lost, but is still there: trying it again", self._name, route.id)
        if route.grpc_address:  # all its calls went over the connection that is gone
            replica.client.close()
            self._connect(route)
            self.connected[route.id].losses = replica.losses
        else:
            replica.is_lost = False
            self._note(replica)
        self._on_back()
