"""The messages on the control socket, and the settings that a gateway worker is started with."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from headwater_server.control.load import LoadReport
from headwater_server.control.routing import RoutingTable
from headwater_server.control.table_change import TableChange

__all__ = ["Command", "CommandAnswer", "Drain", "Drained", "ReplicaLoss", "WorkerSettings"]

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024


class Command(msgspec.Struct, frozen=True, tag="command"):
    """An operator's command, as received by a worker."""

    id: int
    action: str
    model: str
    arguments: dict[str, Any] = {}
    """The action's other arguments; for load and reload optionally a ``config``, as the text received."""


class CommandAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """The answer to a command, for the operator."""

    id: int
    status: int
    content: dict[str, Any]


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Asks a worker to answer once nothing of a deployment is in flight in it; it follows the routing table that stops
    new requests."""

    id: int
    model: str
    timeout_s: float
    """After this, the worker ends the remaining requests."""
    replicas: list[str] | None = None
    """Only requests that these replicas have; None: all requests."""
    adapters: list[str] = []
    """Only requests for these adapters, if any are named."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """Answers a `Drain`: nothing is in flight now."""

    drained: int = 0
    """Requests answered in the meantime."""
    ended: int = 0
    """Requests that took too long and were ended."""
    id: int = 0

    def __add__(self, other: Drained) -> Drained:
        """The sum of both."""
        return Drained(self.drained + other.drained, self.ended + other.ended)


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a gateway on another machine, which stands for all its workers."""

    token: str
    workers: int = 1
    gateway: str = ""
    """The same in all its connections, and no other's; empty: nobody waits for it once the connection has ended."""


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The last message of such a gateway: nothing is in flight there."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks whether a worker's event loop is running."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answers a `Ping`."""


class TableWanted(msgspec.Struct, frozen=True, tag="table_wanted"):
    """Asks for the whole routing table: a worker got a change that doesn't follow the table that it has."""


class Quarantined(msgspec.Struct, frozen=True, tag="quarantined"):
    """A request took two replicas down; see `headwater_server.dispatch.losses`."""

    model: str
    fingerprint: str
    """In hexadecimal digits."""


class ReplicaLoss(msgspec.Struct, frozen=True, tag="replica_loss"):
    """A worker lost a replica: the connection to it broke, or it said that it can't go on."""

    model: str
    replica: str
    keys: list[str] = []
    """The API keys, by name, whose requests it had; "" for a request without a key."""
    times: int = 1
    """How often that has happened in a row, without an answer in between."""
    convicted: str = ""
    """The key of a request that the replica computed alone."""
    earlier: str = ""
    """The replica that was lost with that request before."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Asks for the end of what runs under a request's id: a worker the supervisor, and that the other workers."""

    id: int
    request_id: str
    """As `headwater_server.security.key_check.owned_id` has it."""


class CancelCount(msgspec.Struct, frozen=True, tag="cancel_count"):
    """What a `Cancel` ended."""

    id: int
    streams: int = 0


DOWNWARD: Final = msgspec.json.Decoder(
    RoutingTable | TableChange | Drain | CommandAnswer | Ping | Quarantined | Cancel | CancelCount
)
Upward = (
    Hello
    | Goodbye
    | Command
    | Drained
    | Pong
    | Quarantined
    | ReplicaLoss
    | LoadReport
    | Cancel
    | CancelCount
    | TableWanted
)
UPWARD: Final = msgspec.json.Decoder(Upward)
HELLO: Final = msgspec.json.Decoder(Hello)


def encode_line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"


class WorkerSettings(msgspec.Struct, frozen=True):
    """What `headwater_server.gateway.worker` is started with. The supervisor writes it to a file in memory, since
    command lines are public."""

    control: str
    """The control socket's path."""
    server: dict[str, Any]
    """The configuration's `headwater_server.config.schema.Server`."""
    security: dict[str, Any] = {}
    """The configuration's `headwater_server.config.sections.SecuritySection`."""
    cluster_tls: str = ""
    """The folder with the cluster's certificates; empty: there is no cluster, or it is on this machine."""
    kept_tls: list[str] = []
    """Paths of copies of the server's certificate and key, for when the files can't be used."""
    kept_cluster_tls: list[str] = []
    """The same of the cluster's."""
    index: int = 0
    """This worker's index."""
    metrics: str = ""
    """Path of the file for its counts; empty: it counts in memory."""
