"""How long functions and classes of the product may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LONGEST_FUNCTION = 80
LONGEST_CLASS = 350
"""Lines, from the first decorator to the last line, docstrings and comments included."""


def too_long(source: str) -> Iterator[str]:
    """The functions and classes of a module that are too long, each with its number of lines."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = min(part.lineno for part in (node, *node.decorator_list))
        assert node.end_lineno is not None
        lines = node.end_lineno - first + 1
        if lines > (LONGEST_CLASS if isinstance(node, ast.ClassDef) else LONGEST_FUNCTION):
            yield f"{node.name}: {lines}"


@pytest.mark.parametrize("root", ["app", "inference"])
def test_no_function_and_no_class_is_too_long(root: str) -> None:
    paths = sorted((ROOT / root).rglob("*.py"))
    assert len(paths) > 50
    assert [f"{path.relative_to(ROOT)}: {text}" for path in paths for text in too_long(path.read_text())] == []


def test_a_function_or_class_that_is_too_long_is_found() -> None:
    body = "    x = 1\n"
    assert list(too_long("def f():\n" + body * 79)) == []
    assert list(too_long("def f():\n" + body * 80)) == ["f: 81"]
    assert list(too_long("@cache\nasync def f():\n" + body * 79)) == ["f: 81"]
    assert list(too_long("class A:\n" + body * 349)) == []
    assert list(too_long("class A:\n    class B:\n" + "        x = 1\n" * 350)) == ["A: 352", "B: 351"]
