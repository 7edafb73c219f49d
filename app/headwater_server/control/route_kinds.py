"""The kinds of deployments in the routing table; `headwater_server.gateway.kind_dispatchers` has their dispatchers."""

from __future__ import annotations

import msgspec

from headwater.pipeline import Plan

__all__ = ["GraphKind", "Kind", "LanguageKind", "TensorKind", "TrafficRoute", "VersionsKind", "VllmKind"]


class TensorKind(msgspec.Struct, frozen=True, tag="tensors"):
    """A model, or a fused pipeline, that takes and gives tensors."""


class LanguageKind(msgspec.Struct, frozen=True, tag="language"):
    """A language model that the built-in engine computes."""


class VllmKind(msgspec.Struct, frozen=True, tag="vllm"):
    """A model that vLLM computes."""

    adapters: dict[str, int] = {}
    """The LoRA adapters that it serves, each with the number of times that it was loaded into serving replicas."""
    prefix_affinity: float = 0
    """See `headwater_server.config.vllm_options.VllmOptions`."""


class GraphKind(msgspec.Struct, frozen=True, tag="graph"):
    """A pipeline with deployments as steps."""

    plan: Plan | None = None
    """None until all its steps have been ready, and while their signatures don't fit together."""
    is_open: bool = True
    """Whether it can answer at least a single head now, since all steps that the head needs are READY."""


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


class VersionsKind(msgspec.Struct, frozen=True, tag="versions"):
    """A deployment whose requests are shared among versions."""

    traffic: TrafficRoute
    takes_text: bool = False
    """Whether the versions are language models."""


Kind = TensorKind | LanguageKind | VllmKind | GraphKind | VersionsKind
