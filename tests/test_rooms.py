"""The rooms of the code: which may import which, and that no module imports itself on a detour."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
GROUND = {"app.errors", "app", "inference", "inference.wire"}
"""What every room of `app` may import; ``app`` and ``inference`` are the modules outside of their rooms."""
ROOMS = {
    "app.process": set[str](),
    "app.config": set[str](),
    "app.control": set[str](),
    "app.codecs": set[str](),
    "app.security": {"app.config"},
    "app.telemetry": {"app.config", "app.control", "app.process"},
    "app.transport": {"app.codecs"},
    "app.dispatch": {"app.codecs", "app.control", "app.telemetry", "app.transport"},
    "app.lm": {"app.dispatch", "app.codecs", "app.control", "app.telemetry", "app.transport"},
    "app.vllm": {"app.lm", "app.dispatch", "app.codecs", "app.control", "app.telemetry", "app.transport"},
    "app.gateway": {
        "app.config", "app.control", "app.codecs", "app.security", "app.telemetry", "app.dispatch", "app.lm",
        "app.vllm",
    },
    "app.cluster": {
        "app.config", "app.control", "app.process", "app.security", "app.supervisor", "app.telemetry", "app.transport",
    },
    "app.supervisor": {"app.config", "app.control", "app.process", "app.security", "app.telemetry"},
    "app.cli": {
        "app.supervisor", "app.cluster", "app.codecs", "app.config", "app.process", "app.security", "app.telemetry",
    },
    "inference.wire": {"inference"},
    "inference.hf": {"inference", "inference.wire"},
    "inference.runtime": {"inference", "inference.wire", "inference.hf"},
    "inference.lm": {"inference", "inference.wire", "inference.runtime"},
    "inference.replica": {"inference", "inference.wire", "inference.runtime", "inference.lm"},
    "inference.zoo": {"inference"},
}  # fmt: skip
OUTSIDE = {"app": {"inference"}, "inference": set[str]()}
"""What the modules outside of rooms may import; ``python -m app`` is the commands'."""
ALLOWED = set[tuple[str, str]]()
"""Imports against the table, importer and imported module: it may only shrink."""


def modules() -> dict[str, Path]:
    """Every module of the product by its name."""
    found = {}
    for folder in ("app", "inference"):
        for path in (ROOT / folder).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imported(path: Path) -> Iterator[str]:
    """Our modules that a file imports, wherever in the file, for types only too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@functools.cache
def graph() -> dict[str, set[str]]:
    """Which of our modules each of our modules imports."""
    return {name: {one for one in imported(path) if one in MODULES} for name, path in MODULES.items()}


def room(module: str) -> str:
    """The room that a module is in, or its package."""
    place = ".".join(module.split(".")[:2])
    return place if place in ROOMS else module.partition(".")[0]


def is_allowed(importer: str, module: str) -> bool:
    home, other = room(importer), room(module)
    if home == other or importer == "app.__main__":
        return True
    if home in OUTSIDE:
        return other in OUTSIDE[home]
    return other in ROOMS[home] or (home.startswith("app.") and other in GROUND)


def test_rooms_import_only_what_the_table_says() -> None:
    wrong = {(name, one) for name, others in graph().items() for one in others if not is_allowed(name, one)}
    assert wrong == ALLOWED


def test_no_module_imports_itself_on_a_detour() -> None:
    TopologicalSorter(graph()).prepare()  # CycleError names the modules


def test_few_modules_stand_outside_of_rooms() -> None:
    assert len([name for name in MODULES if name.startswith("app") and room(name) == "app"]) <= 5
