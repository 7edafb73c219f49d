"""Divides the text of a model's answer into reasoning, content and tool calls, as it arrives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from headwater_server.lm.text.answer_parts import SPECIAL, AnswerPart, ReasoningPart
from headwater_server.lm.text.call_source import SPACE
from headwater_server.lm.text.tool_calls import ToolUse

__all__ = ["AnswerReader", "AnswerReading", "ReasoningFormat", "reasoning_format"]


class ReasoningFormat(NamedTuple):
    """How a model writes its reasoning."""

    name: str
    opening: str
    """The mark before the reasoning."""
    closing: str
    """The mark after the reasoning."""


_FORMATS: Final = (ReasoningFormat("mistral", "[THINK]", "[/THINK]"), ReasoningFormat("think", "<think>", "</think>"))


def reasoning_format(template: str) -> ReasoningFormat | None:
    """The format in which a chat template writes reasoning; `None` if the template writes no known format."""
    return next((format for format in _FORMATS if format.opening in template), None)


class AnswerReading(NamedTuple):
    """How the answers to a request are read."""

    tools: ToolUse | None = None
    """How content is searched for calls; `None` if it has no calls."""
    reasoning: ReasoningFormat | None = None
    """`None` if the answers have no reasoning."""
    is_open: bool = False
    """Whether the answers begin within the reasoning."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that may be special tokens. A text that is read must have them, each after `SPECIAL`."""
        tools = () if self.tools is None else self.tools.format.call_marks
        return tools + (() if self.reasoning is None else self.reasoning[1:])

    def after(self, prompt: str) -> AnswerReading:
        """The reading of answers to this prompt. Some chat templates begin the model's reasoning at the end of the
        prompt."""
        is_open = self.reasoning is not None and prompt.rstrip(SPACE).endswith(self.reasoning.opening)
        return self._replace(is_open=is_open)

    def reader(self) -> AnswerReader:
        """A new reader for a single answer."""
        return AnswerReader(self)


class AnswerReader:
    """Divides a single answer. The division of the answer into pieces affects only the division into parts."""

    def __init__(self, reading: AnswerReading) -> None:
        self._reading = reading
        self._calls = None if reading.tools is None else reading.tools.finder()
        self._is_inside = reading.is_open
        self._text = ""
        self.reasoning_tokens = 0
        """Number of tokens of the reasoning so far, including its marks."""

    @property
    def has_calls(self) -> bool:
        """Whether the answer has had a call so far."""
        return self._calls is not None and self._calls.has_calls

    def read(self, text: str, finish: str | None, ends: Sequence[int] = ()) -> list[AnswerPart]:
        """Add text. Returns the parts that the text completes.

        Args:
            text: the next text.
            finish: why the answer ends with this text, ``stop`` or ``length``; `None` if it goes on.
            ends: for each token of this text, the number of the text's characters up to the token's end.
        """
        self._text += text.replace(SPECIAL, "")
        parts: list[AnswerPart] = []
        reasoning = self._reading.reasoning
        while reasoning is not None:
            mark = reasoning.closing if self._is_inside else reasoning.opening
            before, found, after = self._text.partition(mark)
            if not found:
                break
            self._add(before, parts)
            self._text, self._is_inside = after, not self._is_inside
        held = 0
        if reasoning is not None and finish is None:
            mark = reasoning.closing if self._is_inside else reasoning.opening
            held = max((n for n in range(1, len(mark)) if self._text.endswith(mark[:n])), default=0)
        self._add(self._text[: len(self._text) - held], parts)
        self._text = self._text[len(self._text) - held :]
        if self._calls is not None and finish is not None:
            parts += self._calls.finish()
        return parts

    def _add(self, text: str, parts: list[AnswerPart]) -> None:
        if self._is_inside:
            parts += [ReasoningPart(text)] if text else []
        elif self._calls is not None:
            parts += self._calls.push(text)
        elif text:
            parts.append(text)
