"""Reads answers without their reasoning, for clients that don't want it."""

from __future__ import annotations

from collections.abc import Sequence

from headwater_server.lm.text.answer_parts import AnswerPart, ReasoningPart
from headwater_server.lm.text.answer_reader import AnswerReader, AnswerReading

__all__ = ["HiddenReasoning"]


class HiddenReasoning(AnswerReading):
    """A reading whose readers return no reasoning. They count its tokens."""

    __slots__ = ()

    def reader(self) -> AnswerReader:
        return _SilentReader(self)


class _SilentReader(AnswerReader):
    def read(self, text: str, finish: str | None, ends: Sequence[int] = ()) -> list[AnswerPart]:
        return [part for part in super().read(text, finish, ends) if not isinstance(part, ReasoningPart)]
