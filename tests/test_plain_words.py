"""Docstrings, comments and names say what they are about: few are pronouns, and modules and classes have unique names.

The bar is above what admired projects have: 0.2 to 0.8 in a hundred. Whoever rewrites a text has read the code; another
pronoun in the place of a counted word is no improvement.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAND_IN = ROOT / "inference/headwater/runtime/pytriton_stand_in"
INTERFACE = ROOT / "inference/headwater/triton/backend_utils.py"
"""Has the names of Triton's interface."""
"""Has the names of PyTriton."""
LIMIT_PERCENT = 1.0
COUNTED = re.compile(r"\b(those|ones?|others|none|what|whose|whatever|whoever|own)\b", re.IGNORECASE)
PRONOUNS_AND_PARTICIPLES = {
    "one", "ones", "other", "others", "found", "those", "own", "told", "wish", "left", "asked", "what", "instead",
    "known", "given", "made", "seen", "came", "most", "least",
}  # fmt: skip
NAMED = re.compile(r"``[^`]*``|`[^`]*`|\[[^\]]*\]\([^)]*\)|https?://\S+")
"""Code and links, which count as a word each."""


def modules(root: str) -> list[Path]:
    """The modules of a root, without templates, which are a user's, and built files."""
    return [
        path for path in (ROOT / root).rglob("*.py") if not {"templates", "build"} & {*path.relative_to(ROOT).parts}
    ]


def texts(path: Path) -> Iterator[str]:
    """The docstrings, also those of attributes, and the comments of a module."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.string.lstrip("# ")


def counts(text: str) -> tuple[int, int]:
    """How many words a text has, and how many of them are counted."""
    plain = NAMED.sub("x", text)
    return len(plain.split()), len(COUNTED.findall(plain))


@pytest.mark.parametrize("root", ["app", "inference"])
def test_docstrings_and_comments_name_things(root: str) -> None:
    totals = {path: [counts(text) for text in texts(path)] for path in modules(root)}
    words, counted = (sum(pair[index] for pairs in totals.values() for pair in pairs) for index in (0, 1))
    assert words > 10_000
    worst = sorted(totals, key=lambda path: sum(count for _, count in totals[path]), reverse=True)[:10]
    places = ", ".join(str(path.relative_to(ROOT)) for path in worst)
    assert 100 * counted / words <= LIMIT_PERCENT, f"{counted} of {words} words; most are in {places}"


def variables(path: Path) -> Iterator[str]:
    """The names of a module's variables, parameters and fields, once for each place that binds the name."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


@pytest.mark.parametrize("root", ["app", "inference"])
def test_names_are_nouns(root: str) -> None:
    names = [(path, name) for path in modules(root) for name in variables(path)]
    vague = [f"{path.relative_to(ROOT)}: {name}" for path, name in names if name in PRONOUNS_AND_PARTICIPLES]
    assert len(names) > 5_000
    assert 100 * len(vague) / len(names) <= LIMIT_PERCENT, vague


@pytest.mark.parametrize("root", ["app", "inference"])
def test_modules_and_classes_of_a_root_have_unique_names(root: str) -> None:
    places: dict[str, list[str]] = {}
    for path in modules(root):
        if path.is_relative_to(STAND_IN) or path == INTERFACE:
            continue
        if path.name not in ("__init__.py", "__main__.py"):
            places.setdefault(path.name, []).append(str(path))
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(str(path))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_code_and_links_are_a_word_each() -> None:
    assert counts("What `one of those` is: [own](own.md), https://example.com/own") == (5, 1)


def test_the_glossary_is_short() -> None:
    text = (ROOT / "docs/design.md").read_text()
    rows = re.findall(r"^\| (?!word |---)", text.partition("## Glossary\n")[2].partition("\n## ")[0], re.MULTILINE)
    assert 10 < len(rows) <= 20
