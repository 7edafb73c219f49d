"""Only the tables of kinds, and the packages of each kind, tell kinds of deployments apart."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater_server.config import deployment_kinds

ROOT = Path(__file__).parents[1]
APP = ROOT / "app" / "headwater_server"
TABLES = {
    "config/deployment_kinds.py",
    "config/schema.py",
    "control/route_kinds.py",
    "gateway/kind_dispatchers.py",
    "supervisor/kind_programs.py",
    "cli/kind_commands.py",
}
"""Modules that say what holds for each kind; and the schema, which gives a deployment its kind."""
REPLICA = "binder/"
"""Code in replicas, each of which knows what it serves."""
OWN = {
    "VllmKind": {"vllm/vllm_model.py"},
    "TritonKind": {"triton/repository_dispatcher.py"},
    "GraphKind": {"dispatch/graph.py", "supervisor/states.py"},
    "VersionsKind": {"dispatch/versions.py", "supervisor/states.py"},
    "TensorKind": {"control/routing.py"},
}
"""Other modules that may name a kind: the code that only this kind has, and the route of a deployment, which by default
has tensors."""
KINDS = {
    *("TensorKind", "LanguageKind", "VllmKind", "TritonKind", "GraphKind", "VersionsKind"),
    *(name for name in deployment_kinds.__all__ if name.isupper()),
}
QUESTIONS = {"is_vllm", "is_language_model", "is_graph", "is_composite"}
"""Questions which kind a deployment is, in place of a fact."""


def offences(text: str, place: str) -> Iterator[str]:
    """The kinds that a module names, and the questions which kind a deployment is."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
        else:
            names = {getattr(node, field, "") for field in ("id", "attr", "name", "arg")}
        found = [name for name in sorted(names & (KINDS | QUESTIONS)) if place not in OWN.get(name, ())]
        if isinstance(node, ast.Compare) and any(map(is_asked, (node.left, *node.comparators))):
            is_text = any(isinstance(side, ast.Constant) and side.value is not None for side in node.comparators)
            if not is_text and isinstance(node.ops[0], ast.Is | ast.IsNot | ast.Eq | ast.NotEq):
                found.append(ast.unparse(node))
        yield from (f"{place}:{node.lineno}: {name}" for name in found)  # type: ignore[attr-defined]


def is_asked(side: ast.expr) -> bool:
    return isinstance(side, ast.Attribute) and side.attr in ("kind", "pipeline")


def test_only_the_tables_of_kinds_tell_them_apart() -> None:
    modules = {str(path.relative_to(APP)): path for path in APP.rglob("*.py")}
    assert TABLES.union(*OWN.values()) <= modules.keys()
    found = [
        offence
        for place, path in modules.items()
        if place not in TABLES and not place.startswith(REPLICA)
        for offence in offences(path.read_text(), place)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "from headwater_server.control.route_kinds import VllmKind",
        "from headwater_server.config.deployment_kinds import VLLM",
        "if deployment.kind is other: pass",
        "if deployment.kind == deployment_kinds.FUSED: pass",
        "if isinstance(route.kind, GraphKind): pass",
        "if type(route.kind) is route_kinds.GraphKind: pass",
        "if deployment.is_vllm: pass",
        "if is_language_model(model): pass",
        "if config.pipeline is not None: pass",
        "def f(*, is_vllm: bool): pass",
        "def is_graph(): pass",
    ],
)
def test_a_question_which_kind_it_is_is_found(text: str) -> None:
    assert list(offences(text, "cli/check.py")) != []


@pytest.mark.parametrize(
    "text",
    [
        "if deployment.kind.takes_text: pass",
        "if deployment.kind in COMMANDS: pass",
        "program_of(deployment.kind).module",
        "if route.kind.traffic is not None: pass",
        "if type(before.kind) is type(after.kind): pass",
    ],
)
def test_a_fact_of_a_kind_may_be_asked_for(text: str) -> None:
    assert list(offences(text, "cli/check.py")) == []
