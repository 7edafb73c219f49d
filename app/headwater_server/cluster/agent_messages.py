"""Messages between an agent, a supervisor and gateways: one JSON object per line, on an agent's port."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from headwater_server.control.routing import ReplicaRoute

__all__ = [
    "AGENT",
    "BEAT_S",
    "LISTENER",
    "Adapters",
    "AgentHello",
    "AgentState",
    "Ask",
    "Beat",
    "Order",
    "Said",
    "encode",
]

BEAT_S: Final = 1.0
"""Seconds between an agent's signs of life."""


class AgentHello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message from a client that connects to an agent."""

    epoch: int = 0
    """The supervisor's epoch; 0: a gateway, which only listens. An agent obeys only the greatest epoch that it has
    seen."""
    token: str = ""
    """The secret that the replica's agent was started with. It proves that the client is a supervisor. Empty from
    gateways: with ``epoch`` 0 it isn't checked."""


class Order(msgspec.Struct, frozen=True, tag="order"):
    """The supervisor's order to a replica: ``stop`` or ``kill``; see `ReplicaHandle`."""

    what: str


class Adapters(msgspec.Struct, frozen=True, tag="adapters"):
    """The adapters that the supervisor has given the replica (folders by name). The agent stores them for a later
    supervisor."""

    adapters: dict[str, str]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """The supervisor's order to POST JSON to the replica's vLLM."""

    number: int
    """Number of the `Said` that answers it."""
    url: str
    """The path."""
    body: str
    timeout_s: float
    """Seconds that vLLM may take to answer."""


class Said(msgspec.Struct, frozen=True, tag="said"):
    """The answer to an `Ask`."""

    number: int
    status: int = 0
    """HTTP status; 0: there was no answer."""
    text: str = ""
    """The answer's body; with status 0 the error."""


class AgentState(msgspec.Struct, frozen=True, tag="state"):
    """Everything about a replica, sent on connecting and after a change, at the latest with the next beat. Fields with
    the names of `ReplicaHandle`'s attributes and methods have their meaning."""

    route: ReplicaRoute
    deployment: bytes = b""
    """Digest of the deployment that the replica was started with."""
    name: str = ""
    """The deployment's name."""
    node: str = ""
    """Ray's id of the replica's machine."""
    stage: str = ""
    """The last stage of the start."""
    is_ready: bool = False
    """Whether it is or has been ready."""
    is_ending: bool = False
    """Whether it can no longer be used."""
    has_exited: bool = False
    """Whether its `ReplicaHandle.exited` is done."""
    is_let_go: bool = False
    """Whether the replica ends because its actor did, with its raylet or by Ray's decision: no fault of the replica."""
    signature: dict[str, Any] | None = None
    facts: dict[str, str] = {}
    adapters: dict[str, str] = {}
    batch_limit: int = 0
    reason: str = ""
    is_permanent: bool = False
    is_shortage: bool = False
    account: str = ""
    cause: str = ""
    leftovers: list[str] = []
    """Parts of the replica that remain after it has exited."""
    is_stale: bool = False
    """Sent to a supervisor that a later supervisor has replaced: the agent does not obey it."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A sign of life, with the resources that the replica's processes use; see `GroupUse`."""

    threads: int = 0
    resident_bytes: int = 0
    gpu_bytes: int | None = None
    gpu_utilization: float = 0
    counts: bytes = b""
    """The used part of the file with the model's custom metrics (`headwater.metrics_file`), if it has changed; sent a
    last time before the state that says that the replica has exited."""


AGENT: Final = msgspec.json.Decoder(AgentState | Beat | Said)
LISTENER: Final = msgspec.json.Decoder(AgentHello | Order | Adapters | Ask)


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message as a line."""
    return msgspec.json.encode(message) + b"\n"
