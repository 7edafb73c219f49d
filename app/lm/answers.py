"""What the answers of OpenAI's two text APIs have in common: their form, chunks, and the end of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Final, Protocol

import orjson

from app.errors import HeadwaterError, openai_error
from app.lm.text_stream import TextPiece, Usage

__all__ = ["LEAST_LOGPROB", "AnswerForm", "Chunks", "shown_logprob"]


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


LEAST_LOGPROB: Final = -9999.0
"""What OpenAI gives for minus infinity, which JSON lacks."""


class Chunks:
    """The chunks of one answer. All of a chunk but what is new in it is encoded once.

    Args:
        prefix: of the id: ``chatcmpl`` or ``cmpl``.
        kind: a chunk's ``object``.
        model: its name.
        includes_usage: whether the last chunk says how many tokens it took, and the others null.
    """

    def __init__(self, prefix: str, kind: str, model: str, *, includes_usage: bool) -> None:
        self.id = f"{prefix}-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.model = model
        about = {"id": self.id, "object": kind, "created": self.created, "model": model}
        self._head = orjson.dumps(about)[:-1]
        self._includes_usage = includes_usage
        self.tail = b'}],"usage":null}' if includes_usage else b"}]}"
        """Ends a chunk behind its one choice's last field."""

    def head(self, place: int) -> bytes:
        """Begins a chunk of the choice at that place, up to its other fields."""
        return b'%b,"choices":[{"index":%d' % (self._head, place)

    def end(self, usage: Usage, error: HeadwaterError | None) -> list[bytes]:
        """The events that end the stream."""
        if error is not None:
            return [orjson.dumps(openai_error(error)), b"[DONE]"]
        if self._includes_usage:
            return [b'%b,"choices":[],"usage":%b}' % (self._head, orjson.dumps(usage.as_json())), b"[DONE]"]
        return [b"[DONE]"]


def shown_logprob(logprob: float) -> float:
    """A logarithm that JSON can hold."""
    return max(logprob, LEAST_LOGPROB)
