"""The rooms of the code: which may import which, and that no module imports itself on a detour."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = {
    "headwater_server": {
        "process": "",
        "binder": "",
        "config": "",
        "control": "",
        "codecs": "",
        "security": "config",
        "telemetry": "config control process",
        "transport": "codecs",
        "dispatch": "codecs control telemetry transport",
        "lm": "dispatch codecs control telemetry transport",
        "vllm": "lm dispatch codecs control telemetry transport",
        "gateway": "config control codecs security telemetry dispatch lm vllm",
        "cluster": "config control process security supervisor telemetry transport",
        "supervisor": "config control process security telemetry",
        "cli": "supervisor cluster codecs config process security telemetry",
    },
    "headwater": {
        "wire": "",
        "hf": "wire",
        "runtime": "wire hf",
        "lm": "wire runtime",
        "replica": "wire runtime lm",
        "zoo": "",
    },
}
"""The rooms of each package, and which other rooms of it each may import. Every room may also import the modules of
its package that are outside of rooms; a room of `headwater_server` also those of `headwater`, and `headwater.wire`."""
ALLOWED = set[tuple[str, str]]()
"""Imports against the table, importer and imported module: it may only shrink."""


def modules() -> dict[str, Path]:
    """Every module of the product by its name."""
    found = {}
    for root in (ROOT / "app", ROOT / "inference"):
        for path in root.rglob("*.py"):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
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


def place(module: str) -> tuple[str, str]:
    """The package of a module, and its room; empty: it is outside of rooms."""
    package, room = [*module.split("."), ""][:2]
    return package, room if room in ROOMS[package] else ""


def is_allowed(importer: str, module: str) -> bool:
    (package, room), (other_package, other) = place(importer), place(module)
    if package != other_package:
        return package == "headwater_server" and (not other or (room != "" and other == "wire"))
    if room == other or importer == "headwater_server.__main__":
        return True
    return room != "" and (not other or other in ROOMS[package][room].split())


def test_rooms_import_only_what_the_table_says() -> None:
    wrong = {(name, one) for name, others in graph().items() for one in others if not is_allowed(name, one)}
    assert wrong == ALLOWED


def test_no_module_imports_itself_on_a_detour() -> None:
    TopologicalSorter(graph()).prepare()  # CycleError names the modules


def test_few_modules_stand_outside_of_rooms() -> None:
    assert len([name for name in MODULES if place(name) == ("headwater_server", "")]) <= 5
