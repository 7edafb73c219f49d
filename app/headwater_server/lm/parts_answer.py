"""The form of an answer of a single sequence, in APIs whose answers consist of items of reasoning, text and calls."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from headwater_server.lm.openai_answer import AnswerForm, Event
from headwater_server.lm.text.answer_parts import AnswerPart
from headwater_server.lm.text.answer_reader import AnswerReading
from headwater_server.lm.text_stream import TextPiece, TokenLogprob, Usage

__all__ = ["PartsAnswer"]


class PartsAnswer(AnswerForm):
    """An answer that is given as parts: by `piece`, which reads them from a model's text, or, where another server has
    divided the text, by `add` itself.

    Args:
        reading: how the text is divided into parts; `None` if the whole text is content, or if `piece` isn't called.
    """

    def __init__(self, reading: AnswerReading | None) -> None:
        self._reader = None if reading is None else reading.reader()

    def whole(self, texts: Sequence[TextPiece], usage: Usage) -> bytes:
        (text,) = texts
        self.piece(0, text)
        return self.body(usage)

    @abstractmethod
    def body(self, usage: Usage) -> bytes:
        """The whole answer, after all parts have been added."""

    def piece(self, place: int, piece: TextPiece) -> Sequence[Event]:
        if self._reader is None:
            parts: Sequence[AnswerPart] = [piece.text] if piece.text or piece.logprobs else []
        else:
            parts = self._reader.read(piece.text, piece.finish, piece.ends)
        return self.add(parts, piece.finish, piece.stop, piece.logprobs)

    @abstractmethod
    def add(
        self,
        parts: Sequence[AnswerPart],
        finish: str | None,
        stop: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> Sequence[Event]:
        """Add parts. Returns the events for them.

        Args:
            parts: the next parts.
            finish: why the answer ends with these parts, ``stop`` or ``length``; `None` if it goes on.
            stop: the stop string that ended the answer; `None` if no stop string did.
            logprobs: the tokens of the parts, which are then at most a single text.
        """

    def counted(self, usage: Usage) -> Usage:
        """The usage with the tokens of the reasoning that `piece` has read."""
        return usage if self._reader is None else usage._replace(reasoning_tokens=self._reader.reasoning_tokens)
