"""Answers of ``POST /v1/completions``. Source: OpenAI's API reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from app.errors import HeadwaterError
from app.lm.openai_events import Chunks, shown_logprob
from app.lm.text_generation import Usage
from app.lm.text_stream import TextPiece, TokenLogprob
from app.text.logprob_tokens import logprob_token

if TYPE_CHECKING:  # tokenizers take memory: they are loaded where there is a language model
    from app.text.token_texts import TokenTexts

__all__ = ["CompletionAnswer"]


class CompletionAnswer:
    """One answer; see `app.lm.answer_form.AnswerForm`.

    Args:
        model: its name.
        choices: how many there are, over all prompts.
        texts: of the tokenizer.
        logprobs: whether they come with the tokens' logarithms.
        includes_usage: whether a stream ends with the number of tokens.
    """

    def __init__(
        self, model: str, choices: int, texts: TokenTexts, *, logprobs: bool, includes_usage: bool = False
    ) -> None:
        self._texts = texts
        self._has_logprobs = logprobs
        self._chunks = Chunks("cmpl", "text_completion", model, includes_usage=includes_usage)
        self._heads = [self._chunks.head(place) + b',"text":' for place in range(choices)]
        self._tail = b',"logprobs":null,"finish_reason":null' + self._chunks.tail

    def whole(self, texts: Sequence[TextPiece], usage: Usage) -> bytes:
        """See `AnswerForm`."""
        return orjson.dumps(
            {
                "id": self._chunks.id,
                "object": "text_completion",
                "created": self._chunks.created,
                "model": self._chunks.model,
                "choices": [
                    {
                        "index": place,
                        "text": text.text,
                        "logprobs": self._logprobs(text.logprobs) if self._has_logprobs else None,
                        "finish_reason": text.finish,
                    }
                    for place, text in enumerate(texts)
                ],
                "usage": usage.as_json(),
            }
        )

    def begin(self) -> list[bytes]:
        """See `AnswerForm`."""
        return []

    def piece(self, place: int, piece: TextPiece) -> list[bytes]:
        """See `AnswerForm`."""
        text = orjson.dumps(piece.text)
        if piece.finish is None and not piece.logprobs:
            return [b"%b%b%b" % (self._heads[place], text, self._tail)] if piece.text else []
        logprobs = orjson.dumps(self._logprobs(piece.logprobs) if piece.logprobs else None)
        finish = orjson.dumps(piece.finish)
        fields = b',"logprobs":%b,"finish_reason":%b' % (logprobs, finish)
        return [b"%b%b%b%b" % (self._heads[place], text, fields, self._chunks.tail)]

    def end(self, usage: Usage, error: HeadwaterError | None) -> list[bytes]:
        """See `AnswerForm`."""
        return self._chunks.end(usage, error)

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        return {
            "tokens": [self._token(entry.token) for entry in entries],
            "token_logprobs": [shown_logprob(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The most probable tokens, and always the one that was taken; of tokens that look alike, the likelier one."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(self._token(token), shown_logprob(logprob))
        return top

    def _token(self, token_id: int) -> str:
        return logprob_token(self._texts, token_id).token
