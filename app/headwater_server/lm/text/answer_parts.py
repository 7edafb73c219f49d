"""The parts of a model's answer: content, which is plain text, reasoning, and tool calls."""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

__all__ = ["SPECIAL", "AnswerPart", "CallPart", "ReasoningPart"]

SPECIAL: Final = "\ud800"
"""The character before the text of a special token, in a text that is searched for marks: a lone surrogate, which no
decoded text contains."""


class ReasoningPart(NamedTuple):
    """The next characters of the model's reasoning."""

    text: str


class CallPart(NamedTuple):
    """A part of a call."""

    number: int
    """The call's index among the calls of its answer."""
    name: str
    """The function's name in the first part of a call; empty in later parts."""
    arguments: str
    """The next characters of the arguments' JSON; empty in the first part."""
    id: str = ""
    """The call's id in the first part of a call; empty in later parts."""


AnswerPart: TypeAlias = str | ReasoningPart | CallPart
"""A part of an answer; a string is content."""
