"""What a gateway worker is started with; in a file, because a command line can be read by everybody."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from app.control.load import LoadReport
from app.control.routing import RoutingTable
from app.errors import Unavailable

__all__ = ["Command", "CommandAnswer", "Drain", "Drained", "WorkerSettings"]


MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024

LOAD_FRESH_S: Final = 3.0
"""A worker that said nothing of its load for so long has none that is known."""

DRAIN_GRACE_S: Final = 5.0
"""How much longer than it should a worker may take to say that it has drained."""

CANCEL_TIMEOUT_S: Final = 3.0
"""How long a worker may take to say what it cancelled."""


class Command(msgspec.Struct, frozen=True, tag="command"):
    """What an operator wants, as a worker was asked."""

    id: int
    action: str
    model: str
    arguments: dict[str, Any] = {}
    """What the action takes besides; of load and reload perhaps a ``config``, as the text that came."""


class CommandAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """What came of it, as the operator is told."""

    id: int
    status: int
    content: dict[str, Any]


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Tells a worker to say when nothing of a deployment is in flight in it any more.

    It comes behind the table that keeps new requests away.
    """

    id: int
    model: str
    timeout_s: float
    """After which the worker ends what is left."""
    replicas: list[str] | None = None
    """Only what these have; None: everything."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """Nothing is in flight any more."""

    drained: int = 0
    """Requests that were answered meanwhile."""
    ended: int = 0
    """Those that took too long."""
    id: int = 0

    def __add__(self, other: Drained) -> Drained:
        """Both together."""
        return Drained(self.drained + other.drained, self.ended + other.ended)


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Asks a worker for a sign of life."""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """That sign: the worker's event loop goes round."""


class Quarantined(msgspec.Struct, frozen=True, tag="quarantined"):
    """A request took two replicas down; see `app.dispatch.losses`."""

    model: str
    fingerprint: str
    """In hexadecimal digits."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Asks for the end of what runs under a request's id: a worker the supervisor, and that the other workers."""

    id: int
    request_id: str
    """As `app.security.key_check.owned_id` has it."""


class CancelCount(msgspec.Struct, frozen=True, tag="cancel_count"):
    """What a `Cancel` ended."""

    id: int
    streams: int = 0


DOWNWARD: Final = msgspec.json.Decoder(RoutingTable | Drain | CommandAnswer | Ping | Quarantined | Cancel | CancelCount)

UPWARD: Final = msgspec.json.Decoder(Command | Drained | Pong | Quarantined | LoadReport | Cancel | CancelCount)


def encode_line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def supervisor_gone() -> Unavailable:
    return Unavailable("the supervisor is gone: the server is stopping")


class WorkerSettings(msgspec.Struct, frozen=True):
    """Written by the supervisor, read by `app.gateway.worker`."""

    control: str
    """Path of the control socket."""
    server: dict[str, Any]
    """The configuration's `app.config.schema.Server`."""
    security: dict[str, Any] = {}
    """The configuration's `app.config.sections.SecuritySection`."""
    index: int = 0
    """Which of the workers this is."""
    metrics: str = ""
    """Path of the file that it counts in; empty: in memory only."""
