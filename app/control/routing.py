"""The routing table: what the supervisor tells gateway workers, whole, whenever anything changes."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from app.errors import RETRY_AFTER_LOST_S, Unavailable
from inference.pipeline import Plan
from inference.signature import Signature

__all__ = ["LAST_LINES", "DeploymentRoute", "ReplicaRoute", "RoutingTable", "State", "unavailable"]


LAST_LINES: Final = "; the last lines of its log: "
"""Stands before these in a reason; what comes after is for operators and not for clients."""


class State(str, enum.Enum):
    """State of a deployment."""

    LOADING = "LOADING"
    READY = "READY"
    DRAINING = "DRAINING"
    """It is being unloaded: new requests are refused, those in flight still answered."""
    UNLOADING = "UNLOADING"
    """Nothing is in flight any more; its replicas are on their way out."""
    UNAVAILABLE = "UNAVAILABLE"
    """No replica is ready, after one was: a new one is on its way, or an operator unloaded it."""
    FAILED = "FAILED"
    """It could not be loaded, or not be unloaded without a rest; only an operator can mend that."""


class ReplicaRoute(msgspec.Struct, frozen=True):
    """Where a replica that is ready can be reached."""

    id: str
    """Unique among all replicas ever started by this supervisor."""
    http_socket: str
    """Path of its Triton's HTTP socket."""
    token: str
    grpc_socket: str = ""
    """Path of its Triton's gRPC socket, if it answers in frames: fused pipelines and models that stream."""
    device: str = ""
    """Where it computes."""


class DeploymentRoute(msgspec.Struct, frozen=True):
    """One deployment as a gateway worker sees it."""

    name: str
    state: State
    reason: str = ""
    """Why it is in that state; the stage while it loads."""
    signature: Signature | None = None
    """Known once a replica has been ready."""
    replicas: tuple[ReplicaRoute, ...] = ()
    """Those ready."""
    max_queue_size: int = 1024
    """Rows, this worker's share."""
    priority_weights: dict[int, int] = {}
    """Of priority classes; empty: the default."""
    max_padding: float = 0
    """What part of a batch may be padding; 0: no matter."""
    max_queue_delay_ms: float = 0
    max_in_flight: int = 1
    """Calls per replica, this worker's share."""
    instances: int = 1
    """Calls that a replica computes at once, this worker's share."""
    timeout_s: float = 30
    is_graph: bool = False
    """Whether it is a pipeline whose steps are deployments of their own."""
    plan: Plan | None = None
    """Of such a pipeline, once known."""
    is_open: bool = True
    """Of such a pipeline, whether enough of its steps can be reached to answer anything."""
    part_of: str | None = None
    """Of a deployment that is a step: its pipeline."""
    is_language_model: bool = False
    """Known before its signature is."""
    retiring: tuple[ReplicaRoute, ...] = ()
    """Those that others have replaced: they get nothing new, but finish what they have."""
    since_s: float = 0
    """When it came into that state, in seconds of the Unix epoch."""
    total_instances: int = 1
    """Of each replica, for all workers."""
    wanted: int = 1
    """How many replicas it should have now."""
    least: int = 1
    most: int = 1
    """Between which its load decides; where they are equal, it has no say."""
    shortage: str = ""
    """Why it has fewer replicas than its load takes, if it has."""
    is_set_aside: bool = False
    """Whether an operator unloaded it, and it isn't loaded again: the server is ready without it."""
    quarantine_s: float = 600
    """For how long a request that took two replicas down is refused."""
    generation: int = 0
    """Grows with each load and reload, which lift the quarantine and load a language model's tokenizer and chat
    template anew."""
    failure: str = ""
    """What clients are told instead of the reason, if a start has failed and none succeeded since."""

    @property
    def cause(self) -> str:
        """The reason, in the words for clients."""
        return self.failure or self.reason.partition(LAST_LINES)[0]


class RoutingTable(msgspec.Struct, frozen=True, tag="table"):
    """Everything a gateway worker needs to know."""

    deployments: tuple[DeploymentRoute, ...] = ()
    draining: bool = False
    """Whether the server is about to stop: it answers what it has, and is no longer ready."""


RETRY_AFTER_S: Final = {State.LOADING: 5, State.FAILED: 60}

RETRY_AFTER_UNLOADED_S: Final = 60


def unavailable(route: DeploymentRoute) -> Unavailable:
    """Says that a deployment can't take requests, and why."""
    wait_s = RETRY_AFTER_S.get(route.state, RETRY_AFTER_UNLOADED_S if route.is_set_aside else RETRY_AFTER_LOST_S)
    reason = route.cause or "no replica is ready"
    return Unavailable(f"model `{route.name}` is {route.state.value}: {reason}", retry_after_s=wait_s)
