"""Reads answers in harmony, the format of gpt-oss: messages of several channels, each with a header.

Source: OpenAI's description of the harmony response format.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from headwater_server.lm.text.answer_parts import SPECIAL
from headwater_server.lm.text.call_reader import CallReader
from headwater_server.lm.text.call_source import CallSource, CutShort, NoCall, Reading
from headwater_server.lm.text.part_collector import PartCollector
from headwater_server.lm.text.tool_calls import spelled

__all__ = ["HarmonyReader"]

_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")
_CHANNEL: Final = re.compile(r"\w*", re.ASCII)
_MARK: Final = re.compile(r"\ud800<\|[a-z]{1,16}\|>")
_FUNCTIONS: Final = "functions."


class HarmonyReader:
    """Divides an answer into its messages' reasoning, content and calls.

    Args:
        source: the answer's text.
        parts: gets the parts.
        calls: reads the arguments of calls; `None` if calls are content.
        specials: the marks that are special tokens.
        count: called at the end of each part: whether the tokens up to there are reasoning.
    """

    def __init__(
        self,
        source: CallSource,
        parts: PartCollector,
        calls: CallReader | None,
        specials: frozenset[str],
        count: Callable[[bool], None],
    ) -> None:
        self._source = source
        self._parts = parts
        self._calls = calls
        self._count = count
        self._start, self._channel, self._constrain, self._message, end, call, stop = (
            spelled(f"<|{name}|>", specials)
            for name in ("start", "channel", "constrain", "message", "end", "call", "return")
        )
        self._ends = (end, call, stop)
        self._has_thought = False

    def read(self, *, is_open: bool) -> Reading[None]:
        """Read the answer.

        Args:
            is_open: whether the answer begins within reasoning.
        """
        if is_open:
            yield from self._body("analysis", "")
        elif not (yield from self._begins_with_header()):
            yield from self._body("final", "")
        while True:
            try:
                header, mark = yield from self._source.until(self._message, *self._ends)
            except NoCall as error:
                self._recover(error, self._source.taken())
                break
            if mark == self._message:
                _, _, channel = header.rpartition(self._channel)
                recipient = _RECIPIENT.search(header.replace(SPECIAL, ""))
                name = _CHANNEL.match(channel)
                assert name is not None  # the match may be empty
                yield from self._body(name[0], recipient[1] if recipient is not None else "")
            self._source.begin()
        self._parts.end()

    def _begins_with_header(self) -> Reading[bool]:
        """Whether the answer begins with a header, or the rest of the header that the prompt begins. A model that a
        grammar restricts writes no header."""
        for word in (self._start, self._channel, self._message, " to=", "to="):
            if (yield from self._source.follows(word)):
                return True
        return False

    def _recover(self, error: NoCall, header: str) -> None:
        """Text after a header that isn't whole is content, if the model stopped by itself."""
        if isinstance(error, CutShort) or _RECIPIENT.search(header):
            return
        text = header.rpartition(self._channel)[2] if self._channel in header else header
        if self._channel in header:
            text = _CHANNEL.sub("", text, 1)
        self._parts.content(_MARK.sub("", text.removeprefix(f"{self._start}assistant")))

    def _body(self, channel: str, recipient: str) -> Reading[None]:
        """Read a message's text, and the mark after it."""
        if recipient.startswith(_FUNCTIONS) and self._calls is not None:
            self._source.begin()
            try:
                yield from self._calls.read_arguments(recipient.removeprefix(_FUNCTIONS))
            except CutShort:
                return
            except NoCall:
                self._parts.content(self._source.taken())
                self._source.begin()
                recipient = ""
            channel = "final"
        is_thought = channel == "analysis" and not recipient
        is_content = not is_thought and (not recipient or recipient == "assistant" or self._calls is None)
        if is_thought:
            if self._has_thought:
                self._parts.thought("\n", "")
            self._has_thought = True
        else:
            self._count(False)
        yield from self._source.pass_until((*self._ends, self._start), self._add(is_thought, is_content))
        self._count(is_thought)

    def _add(self, is_thought: bool, is_content: bool) -> Callable[[str], None]:
        def add(text: str) -> None:
            if is_thought:
                self._parts.thought(text, "")
            elif is_content:
                self._parts.content(text)

        return add
