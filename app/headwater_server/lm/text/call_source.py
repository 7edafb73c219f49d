"""An answer's text that arrives in pieces, and generators that read it and wait for more text."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Final, TypeAlias, TypeVar

__all__ = ["SPACE", "CallSource", "NoCall", "Reading"]

MAX_DEPTH: Final = 128
"""Maximum nesting depth of objects and arrays in a call. A deeper call is treated as content."""

SPACE: Final = " \t\r\n"
_SPACES: Final = re.compile(f"[{SPACE}]*")
_OUTSIDE: Final = re.compile(r'["{}\[\]]')
_INSIDE: Final = re.compile(r'["\\]')

_T = TypeVar("_T")
Reading: TypeAlias = Generator[None, None, _T]
"""A generator that yields whenever it needs more text."""


class NoCall(Exception):
    """The text that has been read is not a call."""


class CallSource:
    """Text that may still grow, and the index up to which it has been read. The owner adds text, and may drop text that
    has been read."""

    def __init__(self) -> None:
        self.text = ""
        self.place = 0
        """The index up to which the text has been read."""
        self.is_done = False
        """Whether the text is complete."""

    def wait(self) -> Reading[None]:
        """Wait for more text.

        Raises:
            NoCall: the text is complete.
        """
        if self.is_done:
            raise NoCall
        yield

    def skip_space(self) -> Reading[bool]:
        """Skip whitespace. Returns True once other text follows, and False if the text ends."""
        while True:
            match = _SPACES.match(self.text, self.place)
            assert match is not None  # the match may be empty
            self.place = match.end()
            if self.place < len(self.text):
                return True
            if self.is_done:
                return False
            yield

    def accept(self, word: str) -> Reading[bool]:
        """Skip whitespace, and read this word if it follows. Returns whether it followed."""
        yield from self.skip_space()
        while not (is_next := self.text.startswith(word, self.place)):
            if self.is_done or not word.startswith(self.text[self.place :]):
                break
            yield
        self.place += len(word) * is_next
        return is_next

    def expect(self, *words: str) -> Reading[None]:
        """Skip whitespace, and read the first of these words that follows.

        Raises:
            NoCall: no such word follows.
        """
        for word in words:
            if (yield from self.accept(word)):
                return
        raise NoCall

    def read_object(self, on_part: Callable[[str], None] | None = None) -> Reading[str]:
        """Skip whitespace, read a JSON object, and return its text, including both brackets. Only the brackets and
        quotes are counted: the text may be no valid JSON.

        Args:
            on_part: called with each part of the object's text as it arrives.

        Raises:
            NoCall: no object follows, or the object has no end or is nested too deeply.
        """
        yield from self.expect("{")
        start = passed = self.place - 1
        depth, is_inside = 1, False
        while depth:
            match = (_INSIDE if is_inside else _OUTSIDE).search(self.text, self.place)
            if match is None:
                self.place = max(self.place, len(self.text))  # an escape may end behind the text
                if on_part is not None:
                    on_part(self.text[passed:])
                    passed = len(self.text)
                if self.is_done:
                    self.place = len(self.text)
                yield from self.wait()
                continue
            self.place = match.end()
            if is_inside:
                is_inside = match[0] != '"'
                self.place += is_inside
            elif match[0] == '"':
                is_inside = True
            else:
                depth += 1 if match[0] in "{[" else -1
                if depth > MAX_DEPTH:
                    raise NoCall
        if on_part is not None:
            on_part(self.text[passed : self.place])
        return self.text[start : self.place]
