"""What an agent, a supervisor and gateways tell each other, one JSON message per line on an agent's port."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from headwater_server.control.routing import ReplicaRoute

__all__ = ["AGENT", "BEAT_S", "LISTENER", "Adapters", "Ask", "Beat", "Hello", "Order", "Said", "State", "encode"]

BEAT_S: Final = 1.0
"""How often an agent gives a sign of life."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of whoever connects to an agent."""

    epoch: int = 0
    """The supervisor's; 0: a gateway, which only listens. An agent obeys the greatest that it has seen."""
    token: str = ""
    """What an agent and its supervisors know; gateways have none."""


class Order(msgspec.Struct, frozen=True, tag="order"):
    """What the supervisor wants of a replica: ``stop`` or ``kill``."""

    what: str


class Adapters(msgspec.Struct, frozen=True, tag="adapters"):
    """The adapters that the supervisor has given the replica, for a later supervisor."""

    adapters: dict[str, str]


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """A POST to the replica's vLLM."""

    number: int
    url: str
    body: str
    timeout_s: float


class Said(msgspec.Struct, frozen=True, tag="said"):
    """The answer to an `Ask`."""

    number: int
    status: int = 0
    """0: there was none."""
    text: str = ""


class State(msgspec.Struct, frozen=True, tag="state"):
    """Everything about a replica, sent at first and whenever anything changes."""

    route: ReplicaRoute
    deployment: bytes = b""
    """A digest of what it was started with."""
    name: str = ""
    node: str = ""
    """The id of its machine in Ray."""
    stage: str = ""
    is_ready: bool = False
    is_ending: bool = False
    has_exited: bool = False
    """Nothing of it runs any more."""
    is_let_go: bool = False
    """Whether it ends because its actor did, with its raylet or by Ray: the replica itself did nothing wrong."""
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
    """What remains of it, once it has exited."""
    is_stale: bool = False
    """To a supervisor that another one has followed: it is not obeyed."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A sign of life, with what the replica's processes use."""

    threads: int = 0
    resident_bytes: int = 0
    gpu_bytes: int | None = None
    gpu_utilization: float = 0


AGENT: Final = msgspec.json.Decoder(State | Beat | Said)
LISTENER: Final = msgspec.json.Decoder(Hello | Order | Adapters | Ask)


def encode(message: msgspec.Struct) -> bytes:
    """A message as a line."""
    return msgspec.json.encode(message) + b"\n"
