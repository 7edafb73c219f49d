"""Text of an answer that arrives in pieces, read by generators that wait for more."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Final, TypeAlias, TypeVar

__all__ = ["SPACE", "CallSource", "NoCall", "Reading"]

MAX_DEPTH: Final = 128
"""Objects and arrays within each other in a call; one that has more is content."""

SPACE: Final = " \t\r\n"
_SPACES: Final = re.compile(f"[{SPACE}]*")
_OUTSIDE: Final = re.compile(r'["{}\[\]]')
_INSIDE: Final = re.compile(r'["\\]')

_T = TypeVar("_T")
Reading: TypeAlias = Generator[None, None, _T]
"""Yields whenever it needs more text."""


class NoCall(Exception):
    """The text that has been read is no call."""


class CallSource:
    """Text of which more may come, and the place up to which it has been read."""

    def __init__(self) -> None:
        self.text = ""
        self.place = 0
        self.is_done = False

    def wait(self) -> Reading[None]:
        """Wait for more text.

        Raises:
            NoCall: there is none.
        """
        if self.is_done:
            raise NoCall
        yield

    def skip_space(self) -> Reading[bool]:
        """Whether anything follows the whitespace here."""
        while True:
            found = _SPACES.match(self.text, self.place)
            assert found is not None  # it may be empty
            self.place = found.end()
            if self.place < len(self.text):
                return True
            if self.is_done:
                return False
            yield

    def accept(self, word: str) -> Reading[bool]:
        """Whether this word is next, after whitespace; if so, it has been read."""
        yield from self.skip_space()
        while not (is_next := self.text.startswith(word, self.place)):
            if self.is_done or not word.startswith(self.text[self.place :]):
                break
            yield
        self.place += len(word) * is_next
        return is_next

    def expect(self, *words: str) -> Reading[None]:
        """Read one of these words.

        Raises:
            NoCall: none of them is next.
        """
        for word in words:
            if (yield from self.accept(word)):
                return
        raise NoCall

    def read_object(self, on_part: Callable[[str], None] | None = None) -> Reading[str]:
        """The text of a JSON object that is next, after whitespace: up to its last bracket, and not checked further.

        Args:
            on_part: called with each part of it.

        Raises:
            NoCall: there is none, or it has no end.
        """
        yield from self.expect("{")
        start = passed = self.place - 1
        depth, is_inside = 1, False
        while depth:
            found = (_INSIDE if is_inside else _OUTSIDE).search(self.text, self.place)
            if found is None:
                self.place = max(self.place, len(self.text))  # it may lie behind a backslash that is last
                if on_part is not None:
                    on_part(self.text[passed:])
                    passed = len(self.text)
                if self.is_done:
                    self.place = len(self.text)
                yield from self.wait()
                continue
            self.place = found.end()
            if is_inside:
                is_inside = found[0] != '"'
                self.place += is_inside
            elif found[0] == '"':
                is_inside = True
            else:
                depth += 1 if found[0] in "{[" else -1
                if depth > MAX_DEPTH:
                    raise NoCall
        if on_part is not None:
            on_part(self.text[passed : self.place])
        return self.text[start : self.place]
