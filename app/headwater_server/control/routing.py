"""The routing table. A gateway worker gets it whole when it connects, and then what changes (`table_change`)."""

from __future__ import annotations

import enum
import math
import time
from pathlib import Path
from typing import Final

import msgspec

from headwater.pipeline import Plan
from headwater.signature import Signature
from headwater_server.errors import RETRY_AFTER_LOST_S, RateLimited, Unavailable

__all__ = [
    "LAST_LINES",
    "CacheShare",
    "DeploymentRoute",
    "ReplicaRoute",
    "RoutingTable",
    "State",
    "TrafficRoute",
    "check_key",
    "unavailable",
]

LAST_LINES: Final = "; the last lines of its log: "
"""Precedes a replica's last log lines in a reason; they are for operators, not for clients."""


class State(str, enum.Enum):
    """State of a deployment."""

    LOADING = "LOADING"
    READY = "READY"
    DRAINING = "DRAINING"
    """The deployment is being unloaded: new requests are refused, those in flight are still answered."""
    UNLOADING = "UNLOADING"
    """Nothing is in flight; the replicas are ending."""
    UNAVAILABLE = "UNAVAILABLE"
    """No replica is ready: a new one is starting, or an operator unloaded the deployment."""
    FAILED = "FAILED"
    """The deployment could not be loaded, or unloading left something behind; only an operator can fix that."""


class ReplicaRoute(msgspec.Struct, frozen=True):
    """How to reach a replica that is ready."""

    id: str
    """Unique among all replicas ever started by this supervisor."""
    http_address: str
    """Of the HTTP of its Triton or its vLLM: ``unix:PATH``, or ``HOST:PORT`` of the port of a replica on another
    machine (`headwater_server.cluster.port`)."""
    token: str
    """Triton's access token."""
    grpc_address: str = ""
    """The same of its Triton's gRPC, if it answers in frames: fused pipelines and models that stream."""
    facts: dict[str, str] = {}
    """The device that it computes on, and versions; see `headwater.wire.handshake.ReplicaStatus.facts`."""
    node: str = ""
    """The address of its machine; empty: this one."""

    @property
    def device(self) -> str:
        """The device that it computes on; empty: not known."""
        return self.facts.get("device", "")

    @property
    def versions(self) -> dict[str, str]:
        """The versions of its Python and packages, and those of Headwater's own Python, whose names say so."""
        return {name: version for name, version in self.facts.items() if name != "device"}

    @property
    def http_path(self) -> Path | None:
        """The path of its HTTP socket; None if it is reached over TCP."""
        prefix, _, path = self.http_address.partition(":")
        return Path(path) if prefix == "unix" else None


class CacheShare(msgspec.Struct, frozen=True):
    """What a gateway worker may keep of a deployment's answers."""

    max_bytes: int
    ttl_s: float = 0
    """How long an answer is used; 0: until a reload."""
    per_key: bool = False
    """Whether only for the API key with whose request it was computed."""


class TrafficRoute(msgspec.Struct, frozen=True):
    """How the requests for a deployment are shared among its versions."""

    shares: dict[str, float]
    """By version, in the configuration's order."""
    default: str
    """The version that answers in place of one that isn't ready."""
    sticky: str = ""
    """The header whose value decides; empty: the request's id does."""
    is_watched: bool = False
    """Whether the supervisor compares the versions."""
    shadow: str = ""
    """The version that gets copies of the requests that others answered; empty: none."""
    before: dict[str, float] = {}
    """The shares before the last change, which a rollback would restore; empty: there was no change."""
    rolled_back: str = ""
    """What the last change took back, and why; empty: it was no rollback."""


class DeploymentRoute(msgspec.Struct, frozen=True):
    """One deployment as a gateway worker sees it."""

    name: str
    state: State
    reason: str = ""
    """The reason for its state; while it loads, the stage."""
    signature: Signature | None = None
    """Known once a replica has been ready."""
    replicas: tuple[ReplicaRoute, ...] = ()
    """Those that are ready."""
    max_queue_size: int = 1024
    """In rows; this worker's share."""
    priority_weights: dict[int, int] = {}
    """Weights of priority classes; empty: the default."""
    max_padding: float = 0
    """The fraction of a batch that may be padding; 0: any."""
    max_queue_delay_ms: float = 0
    max_in_flight: int = 1
    """Calls per replica, this worker's share."""
    instances: int = 1
    """Calls that a replica computes at once; this worker's share."""
    timeout_s: float = 30
    is_graph: bool = False
    """Whether it is a graph: a pipeline whose steps are deployments of their own."""
    plan: Plan | None = None
    """A graph's plan, once known."""
    is_open: bool = True
    """Whether enough of a graph's steps can be reached to answer anything."""
    part_of: str | None = None
    """The pipeline of a deployment that is a step, or the deployment that it is a version of."""
    version: str = ""
    """Which version of that it is."""
    traffic: TrafficRoute | None = None
    """How requests are shared among its versions, if it has some."""
    is_language_model: bool = False
    """Known before its signature."""
    is_vllm: bool = False
    """Whether it is a language model that vLLM computes."""
    adapters: dict[str, int] = {}
    """The LoRA adapters that it serves, each with how often it was loaded into replicas that served."""
    prefix_affinity: float = 0
    """See `headwater_server.config.vllm.VllmOptions`."""
    retiring: tuple[ReplicaRoute, ...] = ()
    """Replicas that were replaced or are out of reach: they get no new requests, but finish those that they have."""
    since_s: float = 0
    """Since when it is in its state, in seconds since the Unix epoch."""
    total_instances: int = 1
    """Calls that a replica computes at once, over all workers."""
    wanted: int = 1
    """The number of replicas that it should have now."""
    least: int = 1
    """The lower bound of ``wanted``."""
    most: int = 1
    """The upper bound of ``wanted``; load decides between the two."""
    shortage: str = ""
    """Why it has fewer replicas than its load requires; empty: it hasn't."""
    is_set_aside: bool = False
    """Whether an operator unloaded it: the server counts as ready without it."""
    quarantine_s: float = 600
    """For how long a request that took two replicas down is refused."""
    barred: dict[str, float] = {}
    """API keys, by name, whose requests ended too many replicas and are refused, each with the time at which that ends,
    in seconds since the Unix epoch."""
    max_crashes: int = 10
    """How many losses of replicas bar a key."""
    generation: int = 0
    """Grows with each load and reload, which lift the quarantine and load a language model's tokenizer and chat
    template anew."""
    cache: CacheShare | None = None
    """None: answers are not kept."""
    failure: str = ""
    """What clients see instead of the reason, if a start has failed and none succeeded since."""

    @property
    def is_composite(self) -> bool:
        """Whether it has no replicas itself: those that answer are of its versions, or of a graph's steps."""
        return self.is_graph or self.traffic is not None

    @property
    def cause(self) -> str:
        """The reason, in the words for clients."""
        return self.failure or self.reason.partition(LAST_LINES)[0]

    @property
    def at_once(self) -> int:
        """The calls that a replica computes at once; this worker's share. Of streams and coroutines it is any number,
        limited only by the calls in flight."""
        signature = self.signature
        return (
            self.max_in_flight
            if signature is not None and (signature.streams or signature.overlaps)
            else self.instances
        )

    @property
    def gives_embeddings(self) -> bool:
        """Whether it is known to answer ``/v1/embeddings``."""
        return self.signature is not None and self.signature.embedding is not None


class RoutingTable(msgspec.Struct, frozen=True, tag="table"):
    """Everything a gateway worker needs to know."""

    deployments: tuple[DeploymentRoute, ...] = ()
    draining: bool = False
    """Whether the server is stopping: it is no longer ready, and answers only the requests in flight."""
    leaving: bool = False
    """Whether it is no longer ready because it is about to stop: it still answers all requests."""
    epoch: int = 0
    """Grows with each start of a supervisor."""
    version: int = 0
    """Grows with each change within an epoch."""

    @property
    def age(self) -> tuple[int, int]:
        """Greater for a later table, whichever supervisor it is from."""
        return self.epoch, self.version


CRASH_WINDOW_S: Final = 300.0
"""The time in which losses of replicas that served count for ``max_crashes``."""
RETRY_AFTER_S: Final = {State.LOADING: 5, State.FAILED: 60}
RETRY_AFTER_UNLOADED_S: Final = 60


def check_key(route: DeploymentRoute, key: str) -> None:
    """Check that a key's requests have not ended too many of a deployment's replicas.

    Args:
        route: the deployment.
        key: the key's name; empty: no key.

    Raises:
        RateLimited: they have.
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
