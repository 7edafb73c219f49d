"""Finds code in a text of Markdown."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["CodeFinder"]

_TICKS: Final = re.compile(r"\n|`+|[^\s`]+")


class CodeFinder:
    """Finds out whether a place in a text of Markdown is code."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._is_fenced = self._is_inline = False
        self._is_line_start = True

    def add(self, text: str) -> None:
        """Add text."""
        self._parts.append(text)

    def is_code(self) -> bool:
        """Whether the text's end is in code."""
        for match in _TICKS.finditer("".join(self._parts)):
            mark = match[0]
            if mark == "\n":
                self._is_line_start, self._is_inline = True, False
            elif mark[0] == "`":
                if len(mark) >= 3 and self._is_line_start:
                    self._is_fenced = not self._is_fenced
                elif not self._is_fenced and len(mark) % 2:
                    self._is_inline = not self._is_inline
                self._is_line_start = False
            else:
                self._is_line_start = False
        self._parts.clear()
        return self._is_fenced or self._is_inline

    @property
    def is_line_start(self) -> bool:
        """Whether only whitespace precedes the end of the text in its line."""
        self.is_code()
        return self._is_line_start
