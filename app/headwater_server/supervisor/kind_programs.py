"""How each kind of deployment runs: the program of its replicas, or the state that follows from its parts.

`headwater_server.config.deployment_kinds` says what may be configured for each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from headwater_server.config.deployment_kinds import (
    FUSED,
    GRAPH,
    LANGUAGE,
    TENSORS,
    TRITON,
    VERSIONS,
    VLLM,
    DeploymentKind,
)
from headwater_server.config.schema import Deployment
from headwater_server.control.route_kinds import Kind, LanguageKind, TensorKind, TritonKind, VllmKind
from headwater_server.supervisor.states import Composite, GraphState, VersionsState

__all__ = ["KindProgram", "fixed_parts", "made_composite", "program_of"]


@dataclass(frozen=True)
class KindProgram:
    """How replicas of a kind run."""

    route_kind: Callable[[Deployment, Mapping[str, int]], Kind]
    """The kind in the routing table, given the configuration, and how often each adapter was loaded."""
    module: str = "headwater_server.process.launcher"
    """The program that a replica's guardian starts."""
    nice: int = 0
    """The nice value of a replica's session while it serves."""
    hidden_variables: tuple[str, ...] = ()
    """Beginnings of the names of the supervisor's environment variables that replicas don't inherit."""
    limits_threads: bool = True
    """Whether the CPUs of a container's quota limit the threads of math libraries through ``OMP_NUM_THREADS``."""
    socket_bytes: int = len("/r99999/c999")
    """The longest path of a replica's socket in the server's folder, as of `headwater.wire.bridge.socket_path`."""
    relayed: frozenset[tuple[str, str]] = frozenset()
    """Methods and paths of the requests that gateways on other machines send to a replica's HTTP server, through its
    port; empty: they send calls of its Triton."""
    preloads: bool = True
    """Whether replicas may be forked from a process that has imported their modules."""
    engine: tuple[str, ...] = ()
    """The slow modules that replicas import for Headwater's engine; empty: the model decides."""


_TENSORS: Final = KindProgram(lambda deployment, adapter_loads: TensorKind())
_PROGRAMS: Final[Mapping[DeploymentKind, KindProgram]] = {
    TENSORS: _TENSORS,
    FUSED: _TENSORS,
    LANGUAGE: KindProgram(
        lambda deployment, adapter_loads: LanguageKind(),
        engine=(
            "torch",
            "transformers",
            "headwater.lm.causal_lm",
            "headwater.lm.grammars",
            "headwater.lm.slot_engine",
        ),
    ),
    VLLM: KindProgram(
        lambda deployment, adapter_loads: VllmKind(
            {name: adapter_loads[name] for name in deployment.adapters},
            deployment.checked_options["prefix_affinity"],
            tuple(deployment.checked_options["media_hosts"]),
        ),
        module="headwater_server.process.vllm_host",
        # Its processes spin while they wait for each other, and at equal priority the kernel lets other processes on
        # the same cores stand still for seconds; see docs/design.md.
        nice=5,
        hidden_variables=("VLLM_",),  # they may be meant for another vLLM
        limits_threads=False,  # it takes fewer threads than this if the variable isn't set
        socket_bytes=len("/r99999/xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"),
        relayed=frozenset({
            ("GET", "/health"), ("GET", "/metrics"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"),
            ("POST", "/v1/embeddings"), ("POST", "/v1/responses"), ("POST", "/tokenize"),
        }),
        preloads=False,
    ),
    TRITON: KindProgram(
        lambda deployment, adapter_loads: TritonKind(
            deployment.checked_options["max_requests"],
            deployment.checked_options["header_pattern"],
            deployment.load_timeout_s,
        ),
        module="headwater_server.repository.triton_host",
        preloads=False,
    ),
}  # fmt: skip
_COMPOSITES: Final[Mapping[DeploymentKind, Callable[[str, Deployment], Composite]]] = {
    GRAPH: GraphState,
    VERSIONS: VersionsState,
}
_FIXED: Final[Mapping[DeploymentKind, Callable[[Deployment], object]]] = {
    GRAPH: lambda deployment: deployment.pipeline_spec,
    VERSIONS: lambda deployment: tuple(deployment.versions),
}


def program_of(kind: DeploymentKind) -> KindProgram:
    """How replicas of a kind run that has replicas."""
    return _PROGRAMS[kind]


def made_composite(name: str, deployment: Deployment) -> Composite | None:
    """Make the state of a deployment that has no replicas itself; None for other deployments."""
    make = _COMPOSITES.get(deployment.kind)
    return None if make is None else make(name, deployment)


def fixed_parts(deployment: Deployment) -> object:
    """What can't change while replicas run: the names of versions, a graph's steps, or the replicas' program."""
    fixed = _FIXED.get(deployment.kind)
    return program_of(deployment.kind) if fixed is None else fixed(deployment)
