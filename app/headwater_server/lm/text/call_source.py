"""An answer's text that arrives in pieces, and generators that read it and wait for more text.

Each character is looked at a bounded number of times, however the text is divided into pieces: text that was read is
moved away from the text that pieces are added to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias, TypeVar

__all__ = ["JSON", "PYTHON", "SPACE", "Brackets", "CallSource", "CutShort", "NoCall", "Reading", "overlap", "quoting"]

MAX_DEPTH: Final = 128
"""Maximum nesting depth of objects and arrays in a call. A deeper call is treated as content."""

SPACE: Final = " \t\r\n"
_SPACES: Final = re.compile(f"[{SPACE}]*")

_T = TypeVar("_T")
Reading: TypeAlias = Generator[None, None, _T]
"""A generator that yields whenever it needs more text."""


class NoCall(Exception):
    """The text that has been read is not a call."""


class CutShort(NoCall):
    """The limit of the answer's length has cut a call."""


class Brackets(NamedTuple):
    """How values in brackets are written."""

    outside: re.Pattern[str]
    """Matches the next bracket or the next mark that begins a string."""
    inside: Mapping[str, re.Pattern[str]]
    """By the mark that begins a string: matches the mark that ends it, or a backslash."""
    marks: tuple[str, ...] = ()
    """Marks of several characters among these."""


JSON: Final = Brackets(re.compile(r'["{}\[\]]'), {'"': re.compile(r'["\\]')})
PYTHON: Final = Brackets(
    re.compile(r"""["'{}\[\]()]"""), {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
)  # fmt: skip


@lru_cache(maxsize=64)
def quoting(mark: str) -> Brackets:
    """Values whose strings are raw text between two of these marks."""
    inside = re.compile("|".join(map(re.escape, (mark,))))
    return Brackets(re.compile("|".join(map(re.escape, (mark, *"{}[]")))), {mark: inside}, (mark,))


class CallSource:
    """Text that may still grow, and the index up to which it has been read."""

    def __init__(self) -> None:
        self.text = ""
        self.place = 0
        """The index up to which the text has been read."""
        self.limit = 0
        """The index up to which the text may be read: that of the barrier."""
        self.offset = 0
        """The number of characters before `text`."""
        self.is_ended = False
        """Whether the answer has ended."""
        self.is_cut = False
        """Whether the limit of the answer's length has ended it."""
        self.at_barrier = False
        """Whether the text up to the barrier is there."""
        self._start = 0
        self._kept: list[str] = []
        self._barrier = ""
        self._is_word = False

    @property
    def is_done(self) -> bool:
        """Whether no more text can be read after `limit`."""
        return self.at_barrier or self.is_ended

    def push(self, text: str) -> None:
        """Add text."""
        if self.place > self._start:
            self._kept.append(self.text[self._start : self.place])
        kept = self.place - 1 if self.place > 0 and self._is_word else self.place  # the character before a barrier
        self.offset += kept
        self.text = self.text[kept:] + text
        self.limit -= kept
        self.place -= kept
        self._start = self.place
        self._find_barrier()

    def end(self, *, is_cut: bool) -> None:
        """The answer ends."""
        self.is_ended, self.is_cut = True, is_cut
        self._find_barrier()

    def set_barrier(self, mark: str, *, is_word: bool = False) -> None:
        """Only text up to the next of these marks may be read. With ``is_word``, a mark after a backtick is text."""
        self._barrier, self._is_word = mark, is_word
        self.at_barrier, self.limit = False, self.place
        self._find_barrier()

    def pass_barrier(self) -> None:
        """Read the barrier. All text after it may be read."""
        self.place = self.limit + len(self._barrier)
        self._barrier, self._is_word, self.at_barrier = "", False, False
        self.limit = len(self.text)
        self.begin()

    def _find_barrier(self) -> None:
        if self.at_barrier:
            return
        if not self._barrier:
            self.limit = len(self.text)
            return
        place = self.text.find(self._barrier, self.limit)
        while self._is_word and place > 0 and self.text[place - 1] == "`":
            place = self.text.find(self._barrier, place + 1)
        self.at_barrier = place >= 0
        held = 0 if self.is_ended else overlap(self.text, self._barrier, self.limit)
        self.limit = place if self.at_barrier else len(self.text) - held

    def begin(self) -> None:
        """The text from here on is kept until the next `begin`."""
        self._kept.clear()
        self._start = self.place

    def taken(self) -> str:
        """The text that was read since `begin`."""
        return "".join([*self._kept, self.text[self._start : self.place]])

    def wait(self) -> Reading[None]:
        """Wait for more text.

        Raises:
            NoCall: the text is complete.
        """
        if self.is_done:
            self.place = self.limit
            raise CutShort if self.is_cut and not self.at_barrier else NoCall
        yield

    def skip_space(self) -> Reading[bool]:
        """Skip whitespace. Returns True once other text follows, and False if the text ends."""
        yield from self.read_space()
        return self.place < self.limit

    def read_space(self) -> Reading[str]:
        """Read whitespace. Returns it."""
        parts = []
        while True:
            match = _SPACES.match(self.text, self.place, self.limit)
            assert match is not None  # the match may be empty
            parts.append(match[0])
            self.place = match.end()
            if self.place < self.limit or self.is_done:
                return "".join(parts)
            yield

    def follows(self, word: str) -> Reading[bool]:
        """Whether this word follows directly. Nothing is read."""
        while not self.text.startswith(word, self.place, self.limit):
            if self.is_done or not word.startswith(self.text[self.place : min(self.limit, self.place + len(word))]):
                return False
            yield
        return True

    def accept(self, word: str) -> Reading[bool]:
        """Skip whitespace, and read this word if it follows. Returns whether it followed."""
        yield from self.skip_space()
        is_next = yield from self.follows(word)
        self.place += len(word) * is_next
        return is_next

    def expect(self, *words: str) -> Reading[str]:
        """Skip whitespace, and read the first of these words that follows. Returns it.

        Raises:
            NoCall: no such word follows.
        """
        for word in words:
            if (yield from self.accept(word)):
                return word
        if self.is_done and any(word.startswith(self.text[self.place : self.limit]) for word in words):
            yield from self.wait()
        raise NoCall

    def until(
        self, *marks: str, most: int | None = None, allowed: re.Pattern[str] | None = None
    ) -> Reading[tuple[str, str]]:
        """Read up to the first of these marks, and read the mark. Returns the text before it, and the mark.

        Args:
            marks: the marks.
            most: the most characters before the mark.
            allowed: matches the characters that may stand before the mark.

        Raises:
            NoCall: no such mark follows.
        """
        parts = list[str]()
        while True:
            end, mark = self._next(marks, most)
            # What is read before a failure must not depend on the pieces.
            match = None if allowed is None else allowed.match(self.text, self.place, end)
            stop = end if match is None else match.end()
            if most is not None:
                stop = min(stop, self.place + most)
                most -= stop - self.place
            parts.append(self.text[self.place : stop])
            self.place = stop
            if stop < end:
                raise NoCall
            self.place += len(mark)
            if mark:
                return "".join(parts), mark
            yield from self.wait()

    def pass_until(self, marks: tuple[str, ...], on_part: Callable[[str], None]) -> Reading[str]:
        """Read up to the first of these marks, and read the mark. The text from the mark on is kept.

        Args:
            marks: the marks.
            on_part: called with each part of the text before the mark as it arrives.

        Returns: the mark; an empty string if the text ends.
        """
        while True:
            end, mark = self._next(marks)
            on_part(self.text[self.place : end])
            self.place = end
            self.begin()
            self.place += len(mark)
            if mark or self.is_done:
                return mark
            yield

    def _next(self, marks: tuple[str, ...], most: int | None = None) -> tuple[int, str]:
        """Where the first of these marks begins, and the mark; an empty mark if no mark has surely begun: then up to
        where the text has no mark. If `most` is set, hardly more characters are looked at."""
        limit = self.limit if most is None else min(self.limit, self.place + most + 1 + max(map(len, marks)))
        match = _pattern(marks).search(self.text, self.place, limit)
        end = limit if limit < self.limit else limit - (0 if self.is_done else self.held(marks))
        if match is None or (end <= match.start() and not self.is_done):  # a longer mark may have begun
            return end, ""
        return match.start(), match[0]

    def held(self, marks: tuple[str, ...]) -> int:
        """The length of the longest end of the unread text that is the beginning of one of these marks."""
        return max((overlap(self.text, mark, self.place, self.limit) for mark in marks), default=0)

    def read_value(
        self, opening: str = "{", brackets: Brackets = JSON, on_part: Callable[[str], None] | None = None
    ) -> Reading[str]:
        """Skip whitespace, read a value in brackets, and return its text, including both brackets. Only the brackets
        and the strings' marks are looked at: the text may be no valid value.

        Args:
            opening: the first bracket.
            brackets: how the value is written.
            on_part: called with each part of the value's text as it arrives.

        Raises:
            NoCall: no such value follows, or the value has no end or is nested too deeply.
        """
        yield from self.expect(opening)
        passed, parts = self.place - len(opening), list[str]()
        add = parts.append if on_part is None else on_part
        depth, quote = 1, ""
        while depth:
            match = (brackets.inside[quote] if quote else brackets.outside).search(self.text, self.place, self.limit)
            if match is not None:
                self.place = match.end()
                if match[0] == "\\":
                    while self.place == self.limit:
                        add(self.text[passed : self.place])
                        yield from self.wait()
                        passed = self.place
                    self.place += 1
                elif quote:
                    quote = ""
                elif match[0] in brackets.inside:
                    quote = match[0]
                else:
                    depth += 1 if match[0] in "{[(" else -1
                    if depth > MAX_DEPTH:
                        raise NoCall
                continue
            self.place = max(self.limit - (0 if self.is_done else self.held(brackets.marks)), self.place)
            if self.place > passed:
                add(self.text[passed : self.place])
            yield from self.wait()
            passed = self.place
        add(self.text[passed : self.place])
        return "".join(parts)


def overlap(text: str, word: str, start: int = 0, end: int | None = None) -> int:
    """Length of the longest end of ``text[start:end]`` that is a beginning of `word`, but not the whole word."""
    stop = len(text) if end is None else end
    place = text.find(word[0], max(start, stop - len(word) + 1), stop)
    while place >= 0 and not word.startswith(text[place:stop]):
        place = text.find(word[0], place + 1, stop)
    return stop - place if place >= 0 else 0


@lru_cache(maxsize=256)
def _pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")
