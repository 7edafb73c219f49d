"""Answers of Triton's generate extension by a language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from app.errors import HeadwaterError
from app.lm.text_generation import Usage
from app.lm.text_stream import TextPiece

__all__ = ["GenerateAnswer"]


class GenerateAnswer:
    """One answer; see `app.lm.answer_form.AnswerForm`.

    Args:
        model: its name.
        id: the client's own for the request; empty: it has none.
    """

    def __init__(self, model: str, id: str = "") -> None:
        about = {"model_name": model, "model_version": "1", **({"id": id} if id else {})}
        self._head = orjson.dumps(about)[:-1]
        self._text_head = self._head + b',"text_output":'
        self._finish: str | None = None

    def whole(self, texts: Sequence[TextPiece], usage: Usage) -> bytes:
        """See `AnswerForm`."""
        (text,) = texts
        parameters = orjson.dumps(_facts(text.finish, usage))
        return b'%b%b,"parameters":%b}' % (self._text_head, orjson.dumps(text.text), parameters)

    def begin(self) -> list[bytes]:
        """See `AnswerForm`."""
        return []

    def piece(self, place: int, piece: TextPiece) -> list[bytes]:
        """See `AnswerForm`."""
        self._finish = piece.finish
        return [b"%b%b}" % (self._text_head, orjson.dumps(piece.text))] if piece.text else []

    def end(self, usage: Usage, error: HeadwaterError | None) -> list[bytes]:
        """See `AnswerForm`."""
        failure = [] if error is None else [orjson.dumps({"error": error.message, "status": error.status})]
        facts = orjson.dumps(_facts(self._finish if error is None else "error", usage))
        return [*failure, b'%b,"final":true,%b' % (self._head, facts[1:])]


def _facts(finish: str | None, usage: Usage) -> dict[str, Any]:
    return {"finish_reason": finish, **usage._asdict()}
