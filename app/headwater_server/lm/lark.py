"""Parts of grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import orjson

__all__ = ["marked", "quoted"]

_MARK: Final = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Z_]{1,32}\]|｜DSML｜")
"""A part of a format's text that may be an added token."""


def quoted(text: str) -> str:
    """A text as a literal."""
    return orjson.dumps(text).decode()


def marked(text: str, token_id: Callable[[str], int | None]) -> str:
    """A text of a model's format: its marks that are added tokens stand as these tokens, all other characters as
    literals.

    Args:
        text: the text. It must not contain a client's text.
        token_id: returns the id of an added token; `None` for any other text.
    """
    parts: list[str] = []
    begin = 0
    for match in _MARK.finditer(text):
        if (token := token_id(match[0])) is not None:
            parts += [quoted(text[begin : match.start()])] if begin < match.start() else []
            parts.append(f"<[{token}]>")
            begin = match.end()
    if begin < len(text):
        parts.append(quoted(text[begin:]))
    return " ".join(parts)
