"""What an API makes of a request's texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from app.errors import HeadwaterError
from app.lm.text_generation import Usage
from app.lm.text_stream import TextPiece

__all__ = ["AnswerForm"]


class AnswerForm(Protocol):
    """The answer to one request, in its API's form: whole, or as the JSON texts of events."""

    def whole(self, texts: Sequence[TextPiece], usage: Usage) -> bytes:
        """All of it.

        Args:
            texts: of each sequence, in their order.
            usage: what it took.
        """
        ...

    def begin(self) -> Sequence[bytes]:
        """The events before the first piece."""
        ...

    def piece(self, place: int, piece: TextPiece) -> Sequence[bytes]:
        """The events of a piece of the sequence at that place; none, if nothing of it is to be told."""
        ...

    def end(self, usage: Usage, error: HeadwaterError | None) -> Sequence[bytes]:
        """The events that end it, after an error or without one."""
        ...
