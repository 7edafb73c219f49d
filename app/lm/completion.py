"""``POST /v1/completions``: its requests and answers.

Source: OpenAI's API reference; the extensions are those of `app.lm.chat`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import orjson
from msgspec import Meta

from app.codecs.faults import at, shown
from app.errors import BadRequest, HeadwaterError
from app.lm.answers import Chunks, shown_logprob
from app.lm.sampling_fields import DEFAULT_TOKENS, Flag, StreamFields, checked_ids
from app.lm.text.logprob_tokens import logprob_token
from app.lm.text_plan import Prompt, TextPlan, answer_capacity, check_size, fitting_tokens, plan
from app.lm.text_stream import TextPiece, TokenLogprob, Usage
from inference.engine import EngineLimits, TopLogprobs

if TYPE_CHECKING:
    from app.lm.text.language import LanguageText
    from app.lm.text.token_texts import TokenTexts

__all__ = ["MAX_SEQUENCES", "CompletionAnswer", "CompletionRequest"]


class CompletionAnswer:
    """One answer; see `app.lm.answers.AnswerForm`.

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


_MAX_PROMPTS: Final = 64

MAX_SEQUENCES: Final = 256
"""Prompts times choices."""


_IDS: Final = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_SEVERAL: Final = {"type": "array", "minItems": 1, "maxItems": _MAX_PROMPTS}
_PROMPTS: Final = {"anyOf": [_IDS, {**_SEVERAL, "items": {"type": "string"}}, {**_SEVERAL, "items": _IDS}]}
"""For the OpenAPI schema."""


class CompletionRequest(StreamFields, kw_only=True):
    """The body."""

    prompt: str | Annotated[list[Any], Meta(extra_json_schema=_PROMPTS)]
    logprobs: TopLogprobs | None = None
    echo: Flag | None = None
    best_of: Annotated[int | None, Meta(description="Only 1 can be had")] = None
    suffix: None = None

    def answer_form(self, plan: TextPlan, texts: TokenTexts) -> CompletionAnswer:
        """What its answer looks like.

        Args:
            plan: what `plan` gave.
            texts: of the tokenizer.
        """
        return CompletionAnswer(
            self.model,
            len(plan.specs),
            texts,
            logprobs=self.logprobs is not None,
            includes_usage=self.includes_usage,
        )

    def plan(self, text: LanguageText, limits: EngineLimits) -> TextPlan:
        """Check the request, and make tokens of it. Takes too long for the event loop.

        Raises:
            BadRequest: something in it is wrong, or more than the model can take.
        """
        self.check_stream()
        n = self.n or 1
        if self.best_of is not None and self.best_of != 1:
            raise at("best_of", None, f"this model does not support it; expected 1, got {shown(self.best_of)}")
        if self.logprobs is not None and self.echo:
            raise at("logprobs", None, "this model gives none of prompts; leave it out, or echo")
        sampling = self.sampling(limits, logprobs=self.logprobs)
        end = self.text_end(limits)
        given = self._given()
        if len(given) * n > MAX_SEQUENCES:
            raise at("n", None, f"expected at most {MAX_SEQUENCES} answers in all, got {len(given)} prompts x {n}")
        prompts = [self._prompt(field, one, text, limits) for field, one in given]
        return plan(prompts, n, sampling, end, limits, self.timeout_s)

    def _given(self) -> list[tuple[str, str | list[Any]]]:
        """The prompts, each with its path."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [("prompt", prompt)]
        if not prompt:
            raise at("prompt", None, "expected at least one string or token id, got an empty array")
        kinds = {type(one) for one in prompt}
        if kinds == {int}:
            return [("prompt", prompt)]
        if kinds not in ({str}, {list}):
            raise at(
                "prompt",
                None,
                "expected a string, an array of strings, an array of token ids, or an array of such arrays; got an "
                f"array with {' and '.join(sorted({_kind(one) for one in prompt}))}",
            )
        if len(prompt) > _MAX_PROMPTS:
            raise at("prompt", None, f"expected at most {_MAX_PROMPTS} prompts, got {len(prompt)}")
        return [(f"prompt[{place}]", one) for place, one in enumerate(prompt)]

    def _prompt(self, field: str, given: str | list[Any], text: LanguageText, limits: EngineLimits) -> Prompt:
        if isinstance(given, str):
            check_size(field, given, limits)
            try:
                ids = text.encode_text(given)
            except BadRequest as error:
                raise at(field, None, error.message.partition(": ")[2]) from None
        else:
            ids = checked_ids(field, given, limits.vocab_size)
        room = answer_capacity(field, ids, limits)
        max_tokens = min(DEFAULT_TOKENS, room) if self.max_tokens is None else self.max_tokens
        max_tokens = fitting_tokens(field, "max_tokens", max_tokens, ids, room, limits)
        prefix = ""
        if self.echo:
            skips = self.skip_special_tokens is not False
            prefix = given if isinstance(given, str) else text.tokenizer.decode(ids, skip_special_tokens=skips)
        return Prompt(ids, max_tokens, prefix)


def _kind(value: object) -> str:
    if isinstance(value, (str, list)):
        return "strings" if isinstance(value, str) else "arrays"
    return "token ids" if type(value) is int else shown(value)
