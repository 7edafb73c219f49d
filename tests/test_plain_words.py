"""Docstrings and comments name what they are about: few words stand where a noun would say the thing.

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
MOST_IN_A_HUNDRED = 1.0
COUNTED = re.compile(r"\b(those|ones?|others|none|what|whose|whatever|whoever|own)\b", re.IGNORECASE)
NAMED = re.compile(r"``[^`]*``|`[^`]*`|\[[^\]]*\]\([^)]*\)|https?://\S+")
"""Code and links, which count as a word each."""


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
    modules = [path for path in (ROOT / root).rglob("*.py") if not {"templates", "build"} & {*path.parts}]
    found = {path: [counts(text) for text in texts(path)] for path in modules}
    words, counted = (sum(pair[index] for pairs in found.values() for pair in pairs) for index in (0, 1))
    assert words > 10_000
    worst = sorted(found, key=lambda path: sum(count for _, count in found[path]), reverse=True)[:10]
    told = ", ".join(str(path.relative_to(ROOT)) for path in worst)
    assert 100 * counted / words <= MOST_IN_A_HUNDRED, f"{counted} of {words} words; most are in {told}"


def test_code_and_links_are_a_word_each() -> None:
    assert counts("What `one of those` is: [own](own.md), https://example.com/own") == (5, 1)
