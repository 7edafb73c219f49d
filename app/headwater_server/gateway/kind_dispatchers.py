"""The dispatcher of each kind of deployment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from headwater.wire.open_requests import OpenRequests
from headwater_server.control.messages import ReplicaLoss
from headwater_server.control.model_commands import ModelCommands
from headwater_server.control.route_kinds import (
    GraphKind,
    Kind,
    LanguageKind,
    TensorKind,
    TritonKind,
    VersionsKind,
    VllmKind,
)
from headwater_server.control.routing import DeploymentRoute
from headwater_server.dispatch.admission import QueueBudget
from headwater_server.dispatch.deployment_protocol import Dispatcher
from headwater_server.dispatch.dispatcher import ModelDispatcher
from headwater_server.dispatch.graph import GraphDispatcher
from headwater_server.dispatch.pool import Connect
from headwater_server.dispatch.sequence_table import SEQUENCES, SequenceTable
from headwater_server.dispatch.versions import VersionsDispatcher
from headwater_server.lm.language_model import LmDispatcher
from headwater_server.security.peer_tls import PeerTls
from headwater_server.triton.repository_dispatcher import TritonDispatcher
from headwater_server.vllm.vllm_model import VllmDispatcher

__all__ = ["Parts", "make_dispatcher"]


class Parts(NamedTuple):
    """What dispatchers are made of."""

    connect: Connect
    """Makes the clients of replicas other than vLLM's."""
    budget: QueueBudget
    """Limits the requests that wait in this worker, in all deployments of tensors together."""
    tls: PeerTls | None
    """The cluster's TLS; None: there is no cluster with TLS."""
    find: Callable[[str], Dispatcher | None]
    """Finds the dispatcher of a version, or of a graph's step, by its name."""
    on_quarantined: Callable[[str, bytes], None]
    """See `headwater_server.gateway.models.Models.on_quarantined`."""
    on_lost: Callable[[ReplicaLoss], None]
    """See `headwater_server.gateway.models.Models.on_lost`."""
    folder: Path | None
    """The server's folder, for what all workers share of sequences and repositories; None: this worker is alone."""
    open_requests: OpenRequests
    """The requests to Triton's repositories that this worker has."""


def make_dispatcher(route: DeploymentRoute, parts: Parts) -> Dispatcher:
    """Make the dispatcher of a deployment."""
    return _MADE[type(route.kind)](route, parts)


def _tensors(route: DeploymentRoute, parts: Parts) -> Dispatcher:
    def on_quarantined(fingerprint: bytes) -> None:
        parts.on_quarantined(route.name, fingerprint)

    return ModelDispatcher(route, parts.connect, on_quarantined, parts.budget, parts.on_lost, parts.folder)


def _repository(route: DeploymentRoute, parts: Parts) -> Dispatcher:
    folder = parts.folder
    sequences = SequenceTable(None if folder is None else folder / SEQUENCES)
    commands = None if folder is None else ModelCommands(folder, route.name)
    return TritonDispatcher(route, parts.tls, parts.on_lost, sequences, commands, parts.open_requests)


_MADE: Final[Mapping[type[Kind], Callable[[DeploymentRoute, Parts], Dispatcher]]] = {
    TensorKind: _tensors,
    LanguageKind: lambda route, parts: LmDispatcher(route, parts.connect, on_lost=parts.on_lost),
    VllmKind: lambda route, parts: VllmDispatcher(route, parts.tls, parts.on_lost),
    TritonKind: _repository,
    GraphKind: lambda route, parts: GraphDispatcher(route, parts.find),
    VersionsKind: lambda route, parts: VersionsDispatcher(route, parts.find),
}
