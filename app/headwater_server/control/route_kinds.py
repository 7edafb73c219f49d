"""The kinds of deployments in the routing table; `headwater_server.gateway.kind_dispatchers` has their dispatchers.

Their facts are class attributes; modules ask for facts, rather than for the kind.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from headwater.pipeline import Plan

__all__ = ["GraphKind", "Kind", "LanguageKind", "TensorKind", "TrafficRoute", "TritonKind", "VersionsKind", "VllmKind"]


class TrafficRoute(msgspec.Struct, frozen=True):
    """How the requests for a deployment are shared among its versions."""

    shares: dict[str, float]
    """Fractions of the requests by version, in the configuration's order."""
    default: str
    """The version that answers in place of a version that isn't ready."""
    sticky: str = ""
    """The header that decides by its value. Empty, or for a request without that header: the request's id decides."""
    is_watched: bool = False
    """Whether the supervisor compares the versions, to roll back automatically."""
    shadow: str = ""
    """The version that gets copies of the requests that other versions answered; empty: no copies are made."""
    before: dict[str, float] = {}
    """The shares before the last change, which a rollback would restore; empty: there was no change."""
    rolled_back: str = ""
    """Which rollback the last change was, and why; empty if it was no rollback."""


class _Facts(msgspec.Struct, frozen=True):
    is_pipeline: ClassVar[bool] = False
    """Whether it is known to be a pipeline before it has a signature."""
    has_replicas: ClassVar[bool] = True
    """Whether it has replicas itself; if not, its versions or its steps have them."""
    offers_tokenizer: ClassVar[bool] = False
    """Whether gateway workers load its tokenizer."""
    metrics_socket: ClassVar[str] = "m"
    """The socket beside a replica's HTTP socket that has its metrics; empty: the HTTP socket itself has them."""
    metric_prefixes: ClassVar[tuple[str, ...]] = ("nv_",)
    """Prefixes of the series of a replica that ``/metrics`` passes on."""
    relays_models: ClassVar[bool] = False
    """Whether its replicas have models of their own, under names that its signature has, whose requests are relayed as
    they are."""
    backend: ClassVar[str] = "python"
    """Name of Triton's backend in the model's metadata, or of the program in its place."""
    embedding_hint: ClassVar[str] = ""
    """What to do about a deployment that gives no embeddings, as an addition to a message."""


class TensorKind(_Facts, frozen=True, tag="tensors"):
    """A model, or a fused pipeline, that takes and gives tensors."""

    takes_text: ClassVar[bool] = False
    traffic: ClassVar[None] = None
    adapters: ClassVar[dict[str, int]] = {}


class LanguageKind(_Facts, frozen=True, tag="language"):
    """A language model that the built-in engine computes."""

    takes_text: ClassVar[bool] = True
    offers_tokenizer: ClassVar[bool] = True
    traffic: ClassVar[None] = None
    adapters: ClassVar[dict[str, int]] = {}


class VllmKind(_Facts, frozen=True, tag="vllm"):
    """A model that vLLM computes."""

    takes_text: ClassVar[bool] = True
    metrics_socket: ClassVar[str] = ""
    metric_prefixes: ClassVar[tuple[str, ...]] = ("vllm:",)
    backend: ClassVar[str] = "vllm"
    embedding_hint: ClassVar[str] = "; vLLM serves embeddings with `options.runner: pooling`"
    traffic: ClassVar[None] = None
    adapters: dict[str, int] = {}
    """The LoRA adapters that it serves, each with the number of times that it was loaded into serving replicas."""
    prefix_affinity: float = 0
    media_hosts: tuple[str, ...] = ()
    """See `headwater_server.config.vllm_options.VllmOptions`."""


class TritonKind(_Facts, frozen=True, tag="triton"):
    """The models of a Triton model repository."""

    relays_models: ClassVar[bool] = True
    metrics_socket: ClassVar[str] = "metrics"
    metric_prefixes: ClassVar[tuple[str, ...]] = ("",)
    takes_text: ClassVar[bool] = False
    traffic: ClassVar[None] = None
    adapters: ClassVar[dict[str, int]] = {}
    max_requests: int = 1024
    header_pattern: str = ""
    """See `headwater_server.config.triton_options.TritonOptions`."""
    load_timeout_s: float = 600
    """Seconds in which each replica must answer a load or unload of a model."""


class GraphKind(_Facts, frozen=True, tag="graph"):
    """A pipeline with deployments as steps."""

    takes_text: ClassVar[bool] = False
    is_pipeline: ClassVar[bool] = True
    has_replicas: ClassVar[bool] = False
    traffic: ClassVar[None] = None
    adapters: ClassVar[dict[str, int]] = {}
    plan: Plan | None = None
    """None until all its steps have been ready, and while their signatures don't fit together."""
    is_open: bool = True
    """Whether it can answer at least a single head now, since all steps that the head needs are READY."""


class VersionsKind(_Facts, frozen=True, tag="versions"):
    """A deployment whose requests are shared among versions."""

    has_replicas: ClassVar[bool] = False
    adapters: ClassVar[dict[str, int]] = {}
    traffic: TrafficRoute
    takes_text: bool = False
    """Whether the versions are language models."""


Kind = TensorKind | LanguageKind | VllmKind | TritonKind | GraphKind | VersionsKind
