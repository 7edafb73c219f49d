"""Tests use what is public. A test that needs a private attribute says why."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REASON = "# private: "
"""A comment with this and a reason, on the line or on the line before, allows the line's private attributes."""
PUBLIC = {"_asdict", "_exit", "_fields", "_replace"}
"""Names of the standard library with an underscore that are documented."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def own_names(tree: ast.Module) -> set[str]:
    """The private names that the module itself defines: methods, class attributes, and attributes of ``self``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_attribute_of_self(node):
            names.add(node.attr)
    return names


def is_attribute_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_uses(source: str) -> Iterator[str]:
    """Every use of another module's private attribute or name without a reason, as ``line: name``."""
    tree = ast.parse(source)
    lines = ["", *source.splitlines()]
    own = own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_attribute_of_self(node):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            names = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        else:
            continue
        near = lines[node.lineno - 1].strip(), lines[node.end_lineno or node.lineno]
        has_reason = near[0].startswith(REASON) or REASON in near[1]
        for name in names:
            if is_private(name) and name not in own and not has_reason:
                yield f"{node.lineno}: {name}"


@pytest.mark.parametrize("folder", [*sorted(path.name for path in (ROOT / "tests").iterdir() if path.is_dir()), ""])
def test_no_test_uses_a_private_attribute_without_a_reason(folder: str) -> None:
    root = ROOT / "tests" / folder
    paths = sorted(root.rglob("*.py") if folder else root.glob("*.py"))
    uses = [f"{path.relative_to(ROOT)}:{use}" for path in paths for use in private_uses(path.read_text())]
    assert uses == []


def test_private_attributes_are_found() -> None:
    for source in ("x._a", "x.y._a()", "from m import _a", "monkeypatch.setattr(m, '_a', 1)", "f(x)[0]._a = 1"):
        assert list(private_uses(source)) == ["1: _a"], source
    for source in ("self._a", "cls._a", "x._asdict()", "x.__class__", "def _a(): ...\nm._a()", "self._a = 1\nx._a"):
        assert list(private_uses(source)) == [], source


def test_a_reason_allows_a_private_attribute() -> None:
    lines = "x._a  # private: a reason", "# private: a reason\nx._a"
    assert list(itertools.chain.from_iterable(map(private_uses, lines))) == []
    assert list(private_uses("# private: a reason\n\nx._a")) == ["3: _a"]
