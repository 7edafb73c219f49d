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
    """Further arguments of the action; for load and reload optionally ``config``, the text as received."""


class CommandAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """The answer to a command, for the operator."""

    id: int
    status: int
    content: dict[str, Any]


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Asks a worker to answer once it has nothing of a deployment in flight. It follows the routing table that stops
    new requests."""

    id: int
    model: str
    timeout_s: float
    """Seconds after which the worker ends the remaining requests."""
    replicas: list[str] | None = None
    """Wait only for requests in these replicas; None: for all requests."""
    adapters: list[str] = []
    """Wait only for requests for these adapters; empty: for all requests."""


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
    """The first message of a gateway on another machine, which speaks for all its workers."""

    token: str
    workers: int = 1
    gateway: str = ""
    """Unique id of the gateway, the same in all its connections; empty: nobody waits for the gateway once the
    connection has ended."""


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The last message of a gateway on another machine: nothing is in flight there."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks whether a worker's event loop is running."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answers a `Ping`."""


class TableWanted(msgspec.Struct, frozen=True, tag="table_wanted"):
    """Asks for the whole routing table: the worker got a change that doesn't follow its present table."""


class QuarantinedRequest(msgspec.Struct, frozen=True, tag="quarantined"):
    """A request took two replicas down; see `headwater_server.dispatch.losses`."""

    model: str
    fingerprint: str
    """The fingerprint in hexadecimal digits."""


class ReplicaLoss(msgspec.Struct, frozen=True, tag="replica_loss"):
    """A worker lost a replica: the connection broke, or the replica reported that it can't go on."""

    model: str
    replica: str
    keys: list[str] = []
    """Names of the API keys of the requests that the replica had; "" for a request without a key."""
    times: int = 1
    """How often the worker lost the replica in a row, without an answer in between."""
    convicted: str = ""
    """The API key of a request that the replica computed alone; empty: there was no such request."""
    earlier: str = ""
    """The replica that was lost earlier with the same request."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Asks to cancel everything that runs under a request's id. A worker sends it to the supervisor, which sends it to
    the other workers."""

    id: int
    request_id: str
    """The id in the form of `headwater_server.security.key_check.owned_id`."""


class CancelCount(msgspec.Struct, frozen=True, tag="cancel_count"):
    """The number of streams that a `Cancel` ended."""

    id: int
    streams: int = 0


DOWNWARD: Final = msgspec.json.Decoder(
    RoutingTable | TableChange | Drain | CommandAnswer | Ping | QuarantinedRequest | Cancel | CancelCount
)
Upward = (
    Hello
    | Goodbye
    | Command
    | Drained
    | Pong
    | QuarantinedRequest
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
    """The settings that `headwater_server.gateway.worker` is started with. The supervisor writes them to a file in
    memory, since command lines are public."""

    control: str
    """The control socket's path."""
    server: dict[str, Any]
    """The configuration's `headwater_server.config.schema.Server`."""
    security: dict[str, Any] = {}
    """The configuration's `headwater_server.config.sections.SecuritySection`."""
    cluster_tls: str = ""
    """The folder with the cluster's certificates; empty: there is no cluster, or it is on this machine."""
    kept_tls: list[str] = []
    """Paths of copies of the server's certificate and key, for when the original files can't be used."""
    kept_cluster_tls: list[str] = []
    """Paths of copies of the cluster's certificates and key, for the same case."""
    index: int = 0
    """The worker's index."""
    metrics: str = ""
    """Path of the file for the worker's counts; empty: the worker counts in memory."""
