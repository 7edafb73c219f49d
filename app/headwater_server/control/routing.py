"""The routing table. A gateway worker gets the whole table when it connects, and then only changes (`table_change`)."""

from __future__ import annotations

import enum
import math
import time
from pathlib import Path
from typing import Final

import msgspec

from headwater.signature import Signature
from headwater_server.control.route_kinds import Kind, TensorKind, TrafficRoute
from headwater_server.errors import RETRY_AFTER_LOST_S, RateLimited, Unavailable

__all__ = [
    "CacheShare",
    "DeploymentRoute",
    "ReplicaRoute",
    "RoutingTable",
    "State",
    "check_key",
    "unavailable",
]


class State(str, enum.Enum):
    """State of a deployment."""

    LOADING = "LOADING"
    """Replicas are starting; no replica has been ready since the server's start, or since a load began."""
    READY = "READY"
    """The deployment accepts requests; see `VersionsState` and `GraphState` for deployments without replicas."""
    DRAINING = "DRAINING"
    """The deployment is being unloaded: new requests are refused, requests in flight are still answered."""
    UNLOADING = "UNLOADING"
    """Nothing is in flight; the replicas are ending."""
    UNAVAILABLE = "UNAVAILABLE"
    """No replica is ready: a new replica is starting or lacks capacity, all replicas are out of reach, or the
    deployment is unloaded. A graph: no head can be answered now."""
    FAILED = "FAILED"
    """The deployment could not be loaded, lost too many replicas, or left something behind when it was unloaded. An
    operator has to fix the cause; only a deployment that lost too many replicas is also tried again, after long
    pauses."""


class ReplicaRoute(msgspec.Struct, frozen=True):
    """How to reach a replica that is ready."""

    id: str
    """Unique among all replicas ever started by this supervisor."""
    http_address: str
    """Address of the HTTP server of its Triton or vLLM: ``unix:PATH``, or for a replica on another machine the
    ``HOST:PORT`` of its port (`headwater_server.cluster.port`)."""
    token: str
    """Triton's access token; for a replica on another machine also its port's."""
    grpc_address: str = ""
    """Address of its Triton's gRPC server, if it answers in frames (`Signature.is_framed`) or serves a model
    repository: ``unix:PATH``, or the ``HOST:PORT`` of its port. Otherwise empty."""
    facts: dict[str, str] = {}
    """The device that it computes on, and versions; see `headwater.wire.handshake.ReplicaStatus.facts`."""
    node: str = ""
    """The address of the cluster's machine that it runs on; empty: this machine, without a cluster."""

    @property
    def device(self) -> str:
        """The device that it computes on; empty if unknown."""
        return self.facts.get("device", "")

    @property
    def versions(self) -> dict[str, str]:
        """Versions of its Python and packages, and of Headwater's Python and packages under names that begin with
        `headwater.wire.handshake.OWN_SIDE`."""
        return {name: version for name, version in self.facts.items() if name != "device"}

    @property
    def http_path(self) -> Path | None:
        """The path of its HTTP socket; None if it is reached over TCP."""
        prefix, _, path = self.http_address.partition(":")
        return Path(path) if prefix == "unix" else None


class CacheShare(msgspec.Struct, frozen=True):
    """A gateway worker's share of the cache of a deployment's answers."""

    max_bytes: int
    """Bytes of answers that the worker may keep."""
    ttl_s: float = 0
    """Seconds for which an answer is used; 0: until a reload."""
    per_key: bool = False
    """Whether an answer is used only for the API key of the request that it was computed for."""


class DeploymentRoute(msgspec.Struct, frozen=True):
    """A deployment as a gateway worker sees it."""

    name: str
    state: State
    reason: str = ""
    """The reason for its state; while it loads, the stage of the start."""
    signature: Signature | None = None
    """The signature; None until a replica has been ready (a graph: while no plan can be made)."""
    replicas: tuple[ReplicaRoute, ...] = ()
    """Replicas that get new requests."""
    max_queue_size: int = 1024
    """Maximum number of queued rows; this worker's share."""
    priority_weights: dict[int, int] = {}
    """Weights of priority classes; empty: the default weights."""
    max_padding: float = 0
    """The fraction of a batch that may be padding; 0: any fraction."""
    max_queue_delay_ms: float = 0
    """Milliseconds that rows may wait for more rows while a replica is idle."""
    max_in_flight: int = 1
    """Calls that a replica may have at once; this worker's share."""
    instances: int = 1
    """Calls that a replica computes at once; this worker's share."""
    timeout_s: float = 30
    """A request's longest deadline in seconds, queueing included."""
    kind: Kind = TensorKind()
    """What the deployment serves; this is known before its signature."""
    part_of: str | None = None
    """The pipeline that defines it as a step, or the deployment that it is a version of; None: neither."""
    version: str = ""
    """The name of the version; empty if it is not a version."""
    retiring: tuple[ReplicaRoute, ...] = ()
    """Replicas that were replaced or are no longer needed, or are out of reach: they get no new requests, but finish
    their requests in flight."""
    since_s: float = 0
    """When it entered its state, in seconds of the Unix epoch."""
    total_instances: int = 1
    """Calls that a replica computes at once, for all workers together."""
    wanted: int = 1
    """The number of replicas that it should have now."""
    least: int = 1
    """The lower bound of ``wanted``."""
    most: int = 1
    """The upper bound of ``wanted``; between the bounds, load decides."""
    shortage: str = ""
    """Why it has fewer replicas than its configuration or its load requires; in a cluster's gateway also why no
    supervisor can be found. Empty if it has enough."""
    is_set_aside: bool = False
    """Whether a command unloads or unloaded the deployment: the server counts as ready without it."""
    quarantine_s: float = 600
    """Seconds for which a request that took two replicas down is refused; 0: it is never refused."""
    barred: dict[str, float] = {}
    """Names of API keys that are refused because their requests ended too many replicas, each with the time at which
    that ends, in seconds of the Unix epoch."""
    max_crashes: int = 10
    """Number of replicas lost within `CRASH_WINDOW_S` after which a key is refused."""
    generation: int = 0
    """Grows with each load and reload that replaces the replicas; a change of adapters or of traffic alone does not
    count. With a new generation workers lift the quarantine, and load a language model's tokenizer and chat template
    again."""
    cache: CacheShare | None = None
    """This worker's share of the answer cache; None: answers are not kept."""
    failure: str = ""
    """The reason in words for clients: why a start failed or replicas were lost, until a start succeeds; that an unload
    left something behind; for a deployment without replicas, which steps or versions are not READY. Otherwise empty."""

    @property
    def takes_text(self) -> bool:
        """Whether it, or each of its versions, is a language model."""
        return self.kind.takes_text

    @property
    def has_replicas(self) -> bool:
        """Whether it has replicas itself; if not, its versions or its steps have them."""
        return self.kind.has_replicas

    @property
    def traffic(self) -> TrafficRoute | None:
        """How requests are shared among its versions; None if it has no versions."""
        return self.kind.traffic

    @property
    def adapters(self) -> dict[str, int]:
        """The LoRA adapters that it serves, each with the number of times that it was loaded into serving replicas."""
        return self.kind.adapters

    @property
    def cause(self) -> str:
        """The reason, in words for clients."""
        return self.failure or self.reason

    @property
    def at_once(self) -> int:
        """The calls that a replica computes at once; this worker's share. If calls stream or are coroutines, only the
        calls in flight limit that number."""
        is_unbounded = self.signature is not None and (self.signature.streams or self.signature.overlaps)
        return self.max_in_flight if is_unbounded else self.instances

    @property
    def gives_embeddings(self) -> bool:
        """Whether it is known to answer ``/v1/embeddings``."""
        return self.signature is not None and self.signature.embedding is not None


class RoutingTable(msgspec.Struct, frozen=True, tag="table"):
    """Everything that a gateway worker needs to know."""

    deployments: tuple[DeploymentRoute, ...] = ()
    draining: bool = False
    """Whether the server is stopping: it is no longer ready, and answers only requests in flight."""
    leaving: bool = False
    """Whether the server is about to stop: it is no longer ready, but still answers all requests."""
    epoch: int = 0
    """Grows with each start of a supervisor."""
    version: int = 0
    """Grows with each publication within an epoch."""

    @property
    def age(self) -> tuple[int, int]:
        """Epoch and version: greater for a later table, from any supervisor."""
        return self.epoch, self.version


CRASH_WINDOW_S: Final = 300.0
"""Seconds within which losses of serving replicas count for ``max_crashes``."""
RETRY_AFTER_S: Final = {State.LOADING: 5, State.FAILED: 60}
"""``Retry-After`` in seconds, by the deployment's state."""
RETRY_AFTER_UNLOADED_S: Final = 60
"""``Retry-After`` in seconds for a deployment that an operator unloaded, in other states."""


def check_key(route: DeploymentRoute, key: str) -> None:
    """Check that a key's requests have not ended too many of a deployment's replicas.

    Args:
        route: the deployment.
        key: the key's name; empty: no key.

    Raises:
        RateLimited: the key's requests have ended too many replicas.
    """
    if key in route.barred:
        left_s = max(1, math.ceil(route.barred[key] - time.time()))
        raise RateLimited(
            f"API key: requests of `{key}` ended {route.max_crashes} replicas of model `{route.name}` within "
            f"{CRASH_WINDOW_S:g} s, and are refused there for another {left_s} s; to lift that, reload the model",
            retry_after_s=left_s,
        )


def unavailable(route: DeploymentRoute) -> Unavailable:
    """The error that says why a deployment can't accept requests."""
    wait_s = RETRY_AFTER_S.get(route.state, RETRY_AFTER_UNLOADED_S if route.is_set_aside else RETRY_AFTER_LOST_S)
    reason = route.cause or "no replica is ready"
    return Unavailable(f"model `{route.name}` is {route.state.value}: {reason}", retry_after_s=wait_s)
