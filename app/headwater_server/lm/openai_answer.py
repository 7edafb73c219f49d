"""The form of an answer, and the common base of the answers of OpenAI's chat and completions APIs."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

import orjson

from headwater_server.errors import HeadwaterError, openai_error
from headwater_server.lm.text_stream import TextPiece, TokenLogprob, Usage

if TYPE_CHECKING:  # importing tokenizers takes memory: only workers with a language model import it
    from headwater_server.lm.text.token_texts import TokenTexts

__all__ = ["LEAST_LOGPROB", "AnswerForm", "Event", "OpenAIAnswer", "shown_logprob", "shown_tokens"]

Event: TypeAlias = bytes | tuple[bytes, bytes]
"""An event of a stream: its JSON text, or its name and its JSON text."""


class AnswerForm(ABC):
    """The answer to a request in the form of an API: whole, or as the events of a stream. Each answer has an instance
    of its form: `whole` is called once, or `begin`, `piece` and `end` are called in this order."""

    counts_usage = False
    """Whether `count` must be called before `begin` and before each `piece`."""

    @abstractmethod
    def whole(self, texts: Sequence[TextPiece], usage: Usage) -> bytes:
        """The whole answer. ``texts`` has an entry for each sequence, in order."""

    def begin(self) -> Sequence[Event]:
        """The events before the first piece."""
        return ()

    def count(self, usage: Usage) -> None:
        """Have the next events contain these numbers of tokens. Called only if `counts_usage` is set."""
        raise NotImplementedError

    @abstractmethod
    def piece(self, place: int, piece: TextPiece) -> Sequence[Event]:
        """The events for a piece of the sequence with index `place`. Empty if the client needs no event."""

    @abstractmethod
    def end(self, usage: Usage, error: HeadwaterError | None) -> Sequence[Event]:
        """The events that end the stream.

        Args:
            usage: the final numbers of tokens.
            error: the error that ended the stream, perhaps before `begin`; None: the answer is complete.
        """


LEAST_LOGPROB: Final = -9999.0
"""OpenAI's value for minus infinity, which JSON can't represent."""


class OpenAIAnswer(AnswerForm):
    """An answer of OpenAI's chat or completions API. The constant parts of its chunks are encoded once.

    Args:
        model: the model's name.
        choices: total number of choices of all prompts.
        texts: the texts of the tokenizer's ids.
        logprobs: whether the answer contains the tokens' log probabilities.
        includes_usage: whether a stream's last chunk contains the numbers of tokens. All other chunks then contain null
            instead, unless `counts_usage` is set.
        counts_usage: whether every chunk contains the numbers of tokens so far.
    """

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    """``object`` of a whole answer."""
    chunk_kind: ClassVar[str]
    """``object`` of a chunk."""
    opening: ClassVar[bytes] = b""
    """Begins the object that contains a chunk's text. `closing` ends it. Both are empty if the choice itself contains
    the text."""
    text_key: ClassVar[bytes]
    """The key of a chunk's text, with a colon."""
    closing: ClassVar[bytes] = b""

    def __init__(
        self,
        model: str,
        choices: int,
        texts: TokenTexts,
        *,
        logprobs: bool,
        includes_usage: bool = False,
        counts_usage: bool = False,
    ) -> None:
        self.counts_usage = counts_usage
        self._texts = texts
        self._has_logprobs = logprobs
        self._includes_usage = includes_usage
        self._id = f"{self.id_prefix}-{secrets.token_hex(16)}"
        self._about = {"id": self._id, "object": self.kind, "created": int(time.time()), "model": model}
        self._head = orjson.dumps({**self._about, "object": self.chunk_kind})[:-1]
        self._heads = [b'%b,"choices":[{"index":%d,%b' % (self._head, n, self.opening) for n in range(choices)]
        self._text_heads = [head + self.text_key for head in self._heads]
        self._end_chunks(b'}],"usage":null}' if includes_usage else b"}]}")

    def _end_chunks(self, tail: bytes) -> None:
        """Set the bytes that end each chunk."""
        self._tail = tail
        self._text_tail = self.closing + b',"logprobs":null,"finish_reason":null' + tail

    def count(self, usage: Usage) -> None:
        self._end_chunks(b'}],"usage":%b}' % orjson.dumps(usage.as_json()))

    def whole(self, texts: Sequence[TextPiece], usage: Usage) -> bytes:
        return self._whole([self._choice(place, text) for place, text in enumerate(texts)], usage)

    def _choice(self, place: int, text: TextPiece) -> dict[str, Any]:
        """A choice of a whole answer."""
        return {
            "index": place,
            "finish_reason": text.finish,
            **self._text_fields(place, text),
            "logprobs": self._logprobs(text.logprobs) if self._has_logprobs else None,
        }

    def _whole(self, choices: Sequence[dict[str, Any]], usage: Usage) -> bytes:
        return orjson.dumps({**self._about, "choices": choices, "usage": usage.as_json()})

    def piece(self, place: int, piece: TextPiece) -> list[bytes]:
        if piece.finish is not None or piece.logprobs:
            return self._events(place, piece)
        return [b"%b%b%b" % (self._text_heads[place], orjson.dumps(piece.text), self._text_tail)] if piece.text else []

    def end(self, usage: Usage, error: HeadwaterError | None) -> list[bytes]:
        if error is not None:
            return [orjson.dumps(openai_error(error)), b"[DONE]"]
        if self._includes_usage:
            return [b'%b,"choices":[],"usage":%b}' % (self._head, orjson.dumps(usage.as_json())), b"[DONE]"]
        return [b"[DONE]"]

    def _chunk(self, begin: bytes, logprobs: Sequence[TokenLogprob], finish: str | None) -> bytes:
        """A chunk that begins with `begin`."""
        shown = self._logprobs(logprobs) if logprobs else None
        end = (self.closing, orjson.dumps(shown), orjson.dumps(finish), self._tail)
        return b'%b%b,"logprobs":%b,"finish_reason":%b%b' % (begin, *end)

    @abstractmethod
    def _events(self, place: int, piece: TextPiece) -> list[bytes]:
        """The events for a piece that has log probabilities or a finish reason; if a class overrides `piece`, perhaps
        for other pieces, too."""

    @abstractmethod
    def _text_fields(self, place: int, text: TextPiece) -> dict[str, Any]:
        """The fields of a whole choice that contain its text, and its finish reason if it differs from
        `text.finish`."""

    @abstractmethod
    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """``logprobs`` of a choice or chunk with these tokens."""


def shown_logprob(logprob: float | None) -> float | None:
    """A log probability that JSON can represent: at least `LEAST_LOGPROB`, also for minus infinity. `None` stays
    `None`."""
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


def shown_tokens(entries: Sequence[TokenLogprob], texts: TokenTexts) -> list[dict[str, Any]]:
    """Tokens with their log probabilities, in the form of OpenAI's chat API."""

    def shown(token_id: int, logprob: float | None) -> dict[str, Any]:
        token, raw = texts.shown(token_id)
        return {"token": token, "logprob": shown_logprob(logprob), "bytes": list(raw)}

    return [
        {**shown(entry.token, entry.logprob), "top_logprobs": [shown(token, logprob) for token, logprob in entry.top]}
        for entry in entries
    ]
