"""Which packages import which others, and that no module imports itself through other modules."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
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
        "triton": "dispatch codecs control telemetry transport",
        "repository": "binder control process",
        "gateway": "config control codecs security telemetry dispatch lm vllm triton",
        "cluster": "config control process security supervisor telemetry transport",
        "supervisor": "config control process security telemetry",
        "cli": "supervisor cluster codecs config process repository security telemetry transport",
    },
    "headwater": {
        "wire": "",
        "hf": "wire",
        "runtime": "wire hf",
        "lm": "wire hf runtime",
        "replica": "wire runtime lm",
        "triton": "wire",
        "zoo": "",
    },
}
"""For each package of a distribution, the packages of the same distribution that it may import. Each package may also
import the modules at the top of its distribution; a package of `headwater_server` also the modules at the top of
`headwater`, and `headwater.wire`."""


def modules() -> dict[str, Path]:
    """Every module of the product by its name."""
    paths = {}
    for root in (ROOT / "app", ROOT / "inference"):
        for path in root.rglob("*.py"):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            paths[name.removesuffix(".__init__")] = path
    return paths


MODULES = modules()


def imported(path: Path) -> Iterator[str]:
    """The product's modules that a file imports, anywhere in the file, also for types only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@functools.cache
def graph() -> dict[str, set[str]]:
    """The modules that each module of the product imports."""
    return {name: {module for module in imported(path) if module in MODULES} for name, path in MODULES.items()}


def place(module: str) -> tuple[str, str]:
    """A module's distribution, by its top-level package, and package; empty: the module is at the top."""
    distribution, package = [*module.split("."), ""][:2]
    return distribution, package if package in MAY_IMPORT[distribution] else ""


def is_allowed(importer: str, module: str) -> bool:
    (distribution, package), (imported_distribution, imported_package) = place(importer), place(module)
    if distribution != imported_distribution:
        is_wire = package != "" and imported_package == "wire"
        return distribution == "headwater_server" and (imported_package == "" or is_wire)
    if package == imported_package or importer == "headwater_server.__main__":
        return True
    return package != "" and (not imported_package or imported_package in MAY_IMPORT[distribution][package].split())


def test_packages_import_only_the_packages_in_the_table() -> None:
    edges = [(name, module) for name, imports in graph().items() for module in imports]
    assert [edge for edge in edges if not is_allowed(*edge)] == []


def test_no_module_imports_itself_through_others() -> None:
    TopologicalSorter(graph()).prepare()  # CycleError names the modules


def test_few_modules_are_at_the_top_of_the_server() -> None:
    assert len([name for name in MODULES if place(name) == ("headwater_server", "")]) <= 5


def test_one_module_parses_the_answers_of_http() -> None:
    parsers = [name for name, path in MODULES.items() if "HttpResponseParser" in path.read_text()]
    assert parsers == ["headwater_server.transport.http_connection"]
