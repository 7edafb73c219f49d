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
from headwater_server.transport.address import ClientTls, is_local
from headwater_server.transport.replica_protocol import FrameReplicaClient, ReplicaClient
from headwater_server.transport.triton_http import TritonClient

__all__ = ["FEW", "Connect", "Replica", "ReplicaCalls", "ReplicaPool", "connect"]

logger = logging.getLogger("headwater.dispatch")

FEW: Final = 8
"""Up to this number of replicas, a choice compares them all; `ReplicaPool.candidates` returns at most this number."""

LOST_RETRY_S = 2.0
"""Seconds after which a lost replica that is still in the routing table is tried again. The supervisor should remove a
replica that ended within this time."""

Connect = Callable[[str, ReplicaRoute], ReplicaClient | FrameReplicaClient]
"""Makes the client of a replica, from the deployment's name and the replica's route."""


def connect(name: str, route: ReplicaRoute, tls: ClientTls | None = None) -> ReplicaClient | FrameReplicaClient:
    """The client for a replica's protocol: frames if the route has an address for gRPC, else whole answers over HTTP.

    Args:
        name: the deployment's name.
        route: the replica's route.
        tls: the cluster's TLS settings, for replicas on other machines.
    """
    if route.grpc_address:
        from headwater_server.transport.frames import FrameClient  # imported only when needed: gRPC takes memory

        return FrameClient(name, route.grpc_address, route.token, tls)
    return TritonClient(name, route.http_address, route.token, tls)


class Client(Protocol):
    """A connection to a replica."""

    def close(self) -> None:
        """Close the connection, which ends all calls."""
        ...


@dataclass(slots=True, eq=False)
class Replica:
    """A replica and the connection to it."""

    route: ReplicaRoute
    client: Client
    is_retiring: bool = False
    """Whether it gets no new calls and finishes the calls that it has: it was replaced, is no longer needed, or is out
    of reach for now."""
    is_lost: bool = False
    """Whether it failed as a whole, or its connection was closed: it gets no new calls. If it stays in the table, the
    pool tries it again."""
    losses: int = 0
    """Times that this worker lost it in a row, without an answer in between."""

    @property
    def is_eligible(self) -> bool:
        """Whether it may get new calls."""
        return not self.is_lost and not self.is_retiring

    def close(self, reason: str) -> None:
        """Close the connection, which ends all calls.

        Args:
            reason: the reason in words, for subclasses; it isn't used here.
        """
        self.client.close()


@dataclass(slots=True, eq=False)
class ReplicaCalls(Replica):
    """A replica and this worker's calls to it that are in flight."""

    client: ReplicaClient | FrameReplicaClient
    calls: int = 0
    """The number of calls in flight."""
    rows: int = 0
    """Rows of the calls in flight."""
    started_rows: int = 0
    """Rows of all calls that were ever started."""
    others: int = 0
    """Rows of other workers by the replica's last report, at least."""
    heard_s: float = 0.0
    """Loop time of that report; 0 if there was no report."""
    batches: dict[int, list[Part]] = field(default_factory=dict)
    """Batches of the calls in flight, by the identity of their lists."""
    is_sharing: bool = True
    """Whether it gets large tensors in memory segments of this worker or, if it is remote, of its port; False once it
    could not open a segment."""
    is_remote: bool = False
    """Whether it is on another machine and is reached through its port."""

    def __post_init__(self) -> None:
        self.is_remote = not is_local(self.route.http_address)


R = TypeVar("R", bound=Replica)


class ReplicaPool(Generic[R]):
    """Connections to the replicas that the routing table has for one deployment.

    Args:
        name: the deployment's name.
        open: connects to a replica.
        on_back: called when a lost replica becomes eligible again.
        on_change: called with each new replica and with each replica that became eligible or ineligible.
        chance: returns random numbers from 0 to below 1; tests replace it.
        on_lost: called with the report of each replica that was lost, or that left the table while it had requests.
        keys_of: returns the names of the API keys that sent a replica's requests; "" for a request without a key.
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
        """The last route's replicas by id, also lost and retiring replicas."""
        self._eligible: Bag[R] = Bag()
        self._table: tuple[tuple[ReplicaRoute, ...], tuple[ReplicaRoute, ...]] = (), ()
        """The replicas and the retiring replicas of the last route."""
        self._name = name
        self._open = open
        self._on_back = on_back
        self._on_change = on_change
        self._chance = chance
        self._on_lost = on_lost
        self._keys_of = keys_of
        self._loop = asyncio.get_running_loop()

    def update(self, route: DeploymentRoute) -> None:
        """Connect to a route's new replicas, close the connections to replicas that the route no longer has, and note
        which replicas are retiring."""
        table = route.replicas, route.retiring
        if table[0] is self._table[0] and table[1] is self._table[1]:  # most changes concern another deployment
            return
        self._table = table
        wanted = {replica_route.id: replica_route for replica_route in (*route.replicas, *route.retiring)}
        for id in [id for id in self.connected if id not in wanted]:
            self._close(self.connected.pop(id), "the replica ended while it had the request")
        for id, replica_route in wanted.items():
            if id not in self.connected:
                self._connect(replica_route)
        retiring = {replica_route.id for replica_route in route.retiring}
        for id, replica in self.connected.items():
            if replica.is_retiring != (id in retiring):
                replica.is_retiring = not replica.is_retiring
                self._note(replica)

    def close(self) -> None:
        """Close all connections."""
        # All are marked lost first: rows that never reached a closed replica must not go to a replica that closes next.
        gone = list(self.connected.values())
        self.connected.clear()
        for replica in gone:
            replica.is_lost = True
            self._note(replica)
        for replica in gone:
            replica.close("the server is stopping")

    def held(self, ids: Iterable[str]) -> list[R]:
        """The replicas with these ids that are connected."""
        return [self.connected[id] for id in ids if id in self.connected]

    def eligible(self) -> Collection[R]:
        """The replicas that may get new calls."""
        return self._eligible

    def candidates(self) -> list[R]:
        """Replicas that may get new calls: all if there are at most `FEW`, else `FEW` random replicas, of which some
        may be the same."""
        if len(self._eligible) <= FEW:
            return list(self._eligible)
        return [self._eligible.draw(self._chance) for _ in range(FEW)]

    def lose(self, replica: R, keys: set[str] | None = None) -> None:
        """Give a replica no new calls, and report it; if it is still in the table after `LOST_RETRY_S`, try it again.
        Nothing happens if it is lost already.

        Args:
            replica: the replica.
            keys: names of the API keys that sent its requests; None to ask ``keys_of``.
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
        """Update the bag of eligible replicas after a replica's state changed."""
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
        if replica.is_retiring:  # it may only be out of reach
            self._loop.call_later(LOST_RETRY_S, self._try_again, replica)
            return
        logger.warning("model %s: replica %s was lost, but is still there: trying it again", self._name, route.id)
        if route.grpc_address:  # all its calls shared the gRPC connection, which is broken
            replica.client.close()
            self._connect(route)
            self.connected[route.id].losses = replica.losses
        else:
            replica.is_lost = False
            self._note(replica)
        self._on_back()
