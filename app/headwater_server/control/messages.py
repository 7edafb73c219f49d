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
    """An operator's command. The worker that received it sends it to the supervisor."""

    id: int
    action: str
    """``load``, ``unload``, ``reload``, ``scale``, ``promote`` or ``rollback``."""
    model: str
    arguments: dict[str, Any] = {}
    """Further arguments: for load and reload optionally ``config``, a deployment's section as JSON text; for scale the
    fields of `ReplicaBounds`; for promote ``version``; for rollback optionally ``undo``."""


class CommandAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """The answer to a command, for the operator."""

    id: int
    """The command's id."""
    status: int
    """HTTP status."""
    content: dict[str, Any]
    """The fields of the answer's JSON; ``error`` says why a command failed."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Asks a worker to answer once it has nothing of a deployment in flight. The routing table that stops new requests
    is sent before."""

    id: int
    model: str
    timeout_s: float
    """Seconds after which the worker ends the remaining requests."""
    replicas: list[str] | None = None
    """Wait only for requests in the replicas with these ids; None: for all requests."""
    adapters: list[str] = []
    """Wait only for requests for these adapters of a vLLM; empty: for all requests."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """Answers a `Drain`: nothing is in flight now."""

    drained: int = 0
    """Number of requests in flight that were done before the timeout."""
    ended: int = 0
    """Number of requests that took too long and were ended."""
    id: int = 0
    """The id of the `Drain`; 0 in a sum."""

    def __add__(self, other: Drained) -> Drained:
        """The sums of both counts."""
        return Drained(self.drained + other.drained, self.ended + other.ended)


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a cluster's gateway, which speaks for all its workers."""

    token: str
    """See `headwater_server.cluster.cluster_supervisor.Announcement`."""
    workers: int = 1
    """The number of the gateway's workers."""
    gateway: str = ""
    """Unique id of the gateway, the same in all its connections; empty: the gateway counts as gone as soon as the
    connection has ended."""


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The last message of a cluster's gateway: nothing is in flight there, and it will not reconnect."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks whether a worker's event loop is running."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answers a `Ping`."""


class TableWanted(msgspec.Struct, frozen=True, tag="table_wanted"):
    """Asks for the whole routing table: the worker got a change that doesn't follow its present table."""


class QuarantinedRequest(msgspec.Struct, frozen=True, tag="quarantined"):
    """A request took two replicas down; see `headwater_server.dispatch.losses`. The supervisor forwards the message to
    the other workers, which then refuse the request, too."""

    model: str
    fingerprint: str
    """The fingerprint in hexadecimal digits."""


class ReplicaLoss(msgspec.Struct, frozen=True, tag="replica_loss"):
    """A worker lost a replica: the connection broke, the replica reported that it can't go on, or it left the table
    with requests. With ``convicted`` this is a later report: a request of that key took two replicas down."""

    model: str
    replica: str
    """The lost replica's id."""
    keys: list[str] = []
    """Names of the API keys of the requests that the replica had; "" for a request without a key."""
    times: int = 1
    """How often the worker lost the replica in a row, without an answer in between."""
    convicted: str = ""
    """Name of the API key of a request with which first ``earlier`` was lost, and then ``replica``, which computed only
    that request. Empty: this is the report of a loss."""
    earlier: str = ""
    """With ``convicted``: the id of the first lost replica."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Asks to cancel everything that runs under a request's id. A worker sends it to the supervisor, which sends it
    (with another ``id``) to the other workers."""

    id: int
    request_id: str
    """The id in the form of `headwater_server.security.key_check.owned_id`."""


class CancelCount(msgspec.Struct, frozen=True, tag="cancel_count"):
    """Answers a `Cancel`, in either direction."""

    id: int
    """The id of the `Cancel`."""
    streams: int = 0
    """The number of streams, and of a language model's sequences, that were cancelled."""


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
    memory, since all users can read command lines."""

    control: str
    """The control socket's path."""
    server: dict[str, Any]
    """The configuration's `headwater_server.config.schema.Server`."""
    security: dict[str, Any] = {}
    """The configuration's `headwater_server.config.sections.SecuritySection`."""
    cluster_tls: str = ""
    """The folder with the cluster's certificates; empty: there is no cluster, or it is on this machine."""
    kept_tls: list[str] = []
    """Paths of copies of the server's certificate and key, for when the original files can't be used. Empty: the server
    has no TLS, or its files could not be used so far."""
    kept_cluster_tls: list[str] = []
    """Paths of copies of the cluster's certificates and key, for the same case."""
    index: int = 0
    """The worker's number among the server's workers, from 0."""
    metrics: str = ""
    """Path of the file for the worker's counts; empty: the worker counts in memory."""
