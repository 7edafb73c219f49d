"""Which dispatcher each kind of deployment gets."""

from __future__ import annotations

from typing import get_args

import pytest

from headwater.wire.open_requests import OpenRequests
from headwater_server.control.route_kinds import (
    GraphKind,
    Kind,
    LanguageKind,
    TensorKind,
    TrafficRoute,
    TritonKind,
    VersionsKind,
    VllmKind,
)
from headwater_server.control.routing import DeploymentRoute, State
from headwater_server.dispatch.admission import QueueBudget
from headwater_server.dispatch.dispatcher import ModelDispatcher
from headwater_server.dispatch.graph import GraphDispatcher
from headwater_server.dispatch.versions import VersionsDispatcher
from headwater_server.gateway.kind_dispatchers import Parts, make_dispatcher
from headwater_server.lm.language_model import LmDispatcher
from headwater_server.triton.repository_dispatcher import TritonDispatcher
from headwater_server.vllm.vllm_model import VllmDispatcher

DISPATCHERS: list[tuple[Kind, type]] = [
    (TensorKind(), ModelDispatcher),
    (LanguageKind(), LmDispatcher),
    (VllmKind(), VllmDispatcher),
    (TritonKind(), TritonDispatcher),
    (GraphKind(), GraphDispatcher),
    (VersionsKind(TrafficRoute({"1": 1.0}, "1")), VersionsDispatcher),
]


def unreachable(*arguments: object) -> None:
    raise AssertionError(arguments)


@pytest.mark.parametrize(("kind", "dispatcher"), DISPATCHERS, ids=[type(kind).__name__ for kind, _ in DISPATCHERS])
async def test_a_kind_has_a_dispatcher(kind: Kind, dispatcher: type) -> None:
    parts = Parts(unreachable, QueueBudget(), None, unreachable, unreachable, unreachable, None, OpenRequests())  # type: ignore[arg-type]
    made = make_dispatcher(DeploymentRoute("m", State.LOADING, kind=kind), parts)
    assert type(made) is dispatcher
    made.close()


def test_all_kinds_are_here() -> None:
    assert {type(kind) for kind, _ in DISPATCHERS} == set(get_args(Kind))
