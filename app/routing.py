"""The routing table: what the supervisor tells gateway workers, whole, whenever anything changes."""

from __future__ import annotations

import enum

import msgspec

from inference.pipeline import Plan
from inference.signature import Signature

__all__ = ["DeploymentRoute", "ReplicaRoute", "RoutingTable", "State"]


class State(str, enum.Enum):
    """State of a deployment."""

    LOADING = "LOADING"
    READY = "READY"
    UNAVAILABLE = "UNAVAILABLE"
    """No replica is ready, after one was; a new one is on its way."""
    FAILED = "FAILED"
    """Its replicas failed to start too often; no further try is made."""


class ReplicaRoute(msgspec.Struct, frozen=True):
    """Where a replica that is ready can be reached."""

    id: str
    """Unique among all replicas ever started by this supervisor."""
    http_socket: str
    """Path of its Triton's HTTP socket."""
    token: str
    grpc_socket: str = ""
    """Path of its Triton's gRPC socket, if it answers in frames: fused pipelines and models that stream."""


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
    max_queue_delay_ms: float = 0
    max_in_flight: int = 1
    """Calls per replica, this worker's share."""
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


class RoutingTable(msgspec.Struct, frozen=True):
    """Everything a gateway worker needs to know."""

    deployments: tuple[DeploymentRoute, ...] = ()
    draining: bool = False
    """Whether the server is about to stop: it answers what it has, and is no longer ready."""
