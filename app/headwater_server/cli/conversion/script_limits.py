"""What a ``model.py`` does that it can't do without a Triton, found in its source without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headwater_server.cli.conversion.converted import Unfit

__all__ = ["ScriptSource", "read_script"]

_INTERFACE = "triton_python_backend_utils"
_ASKS = ("exec", "async_exec", "is_model_ready", "load_model", "unload_model")
_REQUESTS = ("exec", "async_exec", "set_release_flags")
"""Methods of a request."""
_LIMITS = {
    **dict.fromkeys(_ASKS, "it asks other models, or loads them (BLS)"),
    "MetricFamily": "it has custom metrics (MetricFamily); a class of your own may have Model.metrics",
    "set_release_flags": "it has Triton call execute again (set_release_flags)",
}


class ScriptSource(NamedTuple):
    """What the Python files of a script's version show."""

    limit: str
    """Why the script can't run without a Triton, and what to do; empty: it can."""
    asks: bool
    """Whether it asks other models, or loads them."""
    completes: bool
    """Whether it has ``auto_complete_config``."""
    helpers: frozenset[str]
    """Names of the modules beside the script, which it may import."""
    texts: frozenset[str]
    """Constant texts in the files."""


def read_script(script: Path) -> ScriptSource:
    """Read a script and the files that it may import.

    Raises:
        Unfit: a file is not Python's.
    """
    folders = (script.parent, script.parent.parent)
    files = [*sorted(script.parent.rglob("*.py")), *sorted(script.parent.parent.glob("*.py"))]
    trees = [_tree(file, script.parent.parent) for file in files]
    names = {name for tree in trees for name in _of_interface(tree)}
    methods = {
        node.name: node
        for kind in trees[files.index(script)].body
        if isinstance(kind, ast.ClassDef) and kind.name == "TritonPythonModel"
        for node in kind.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    limits = [limit for name, limit in _LIMITS.items() if name in names]
    if isinstance(methods.get("execute"), ast.AsyncFunctionDef):
        limits.append("its execute is a coroutine function (async def); write it as a plain function")
    constants = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    helpers = {path.stem for folder in folders for path in folder.iterdir() if _is_module(path)} - {
        script.stem,
        "__init__",
    }
    return ScriptSource(
        limits[0] if limits else "",
        not names.isdisjoint(_ASKS),
        "auto_complete_config" in methods,
        frozenset(helpers),
        frozenset(value for value in constants if isinstance(value, str)),
    )


def _tree(file: Path, folder: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
        raise Unfit(f"{file.relative_to(folder)} can't be read: {error}", "correct the file") from None


def _is_module(path: Path) -> bool:
    return path.suffix == ".py" or (path.is_dir() and not path.name.isdigit() and any(path.glob("*.py")))


def _of_interface(tree: ast.Module) -> Iterator[str]:
    """Names of the interface that a file uses, and methods that may be a request's."""
    aliases = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == _INTERFACE
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == _INTERFACE:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            is_interface = isinstance(node.value, ast.Name) and node.value.id in aliases
            if is_interface or node.attr in _REQUESTS:
                yield node.attr
