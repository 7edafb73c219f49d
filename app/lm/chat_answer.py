"""Answers of ``POST /v1/chat/completions``. Source: OpenAI's API reference."""

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

__all__ = ["ChatAnswer"]


class ChatAnswer:
    """One answer; see `app.lm.answer_form.AnswerForm`.

    Args:
        model: its name.
        choices: how many there are.
        texts: of the tokenizer.
        logprobs: whether they come with the tokens' logarithms.
        includes_usage: whether a stream ends with the number of tokens.
    """

    def __init__(
        self, model: str, choices: int, texts: TokenTexts, *, logprobs: bool, includes_usage: bool = False
    ) -> None:
        self._texts = texts
        self._has_logprobs = logprobs
        self._chunks = Chunks("chatcmpl", "chat.completion.chunk", model, includes_usage=includes_usage)
        self._heads = [self._chunks.head(place) + b',"delta":{' for place in range(choices)]
        self._text_heads = [head + b'"content":' for head in self._heads]
        self._text_tail = b'},"logprobs":null,"finish_reason":null' + self._chunks.tail

    def whole(self, texts: Sequence[TextPiece], usage: Usage) -> bytes:
        """See `AnswerForm`."""
        return orjson.dumps(
            {
                "id": self._chunks.id,
                "object": "chat.completion",
                "created": self._chunks.created,
                "model": self._chunks.model,
                "choices": [
                    {
                        "index": place,
                        "message": {"role": "assistant", "content": text.text, "refusal": None},
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
        return [b'%b"role":"assistant","content":""%b' % (head, self._text_tail) for head in self._heads]

    def piece(self, place: int, piece: TextPiece) -> list[bytes]:
        """See `AnswerForm`."""
        events = []
        if piece.logprobs:
            text, logprobs = orjson.dumps(piece.text), orjson.dumps(self._logprobs(piece.logprobs))
            end = b',"finish_reason":null' + self._chunks.tail
            events.append(b'%b%b},"logprobs":%b%b' % (self._text_heads[place], text, logprobs, end))
        elif piece.text:
            events.append(b"%b%b%b" % (self._text_heads[place], orjson.dumps(piece.text), self._text_tail))
        if piece.finish is not None:
            finish = orjson.dumps(piece.finish)
            events.append(b'%b},"logprobs":null,"finish_reason":%b%b' % (self._heads[place], finish, self._chunks.tail))
        return events

    def end(self, usage: Usage, error: HeadwaterError | None) -> list[bytes]:
        """See `AnswerForm`."""
        return self._chunks.end(usage, error)

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._token(entry.token, entry.logprob),
                    "top_logprobs": [self._token(token, logprob) for token, logprob in entry.top],
                }
                for entry in entries
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = logprob_token(self._texts, token_id)
        return {"token": token.token, "logprob": shown_logprob(logprob), "bytes": token.bytes}
