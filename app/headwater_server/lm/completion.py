"""Requests and answers of ``POST /v1/completions``.

Source: OpenAI's API reference; the extensions are the same as in `headwater_server.lm.chat`, without
`chat_template_kwargs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import orjson
from msgspec import Meta

from headwater.engine import EngineLimits, TopLogprobs
from headwater_server.codecs.faults import at, shown
from headwater_server.lm.answer_grammar import ResponseFormat, checked_grammar
from headwater_server.lm.openai_answer import OpenAIAnswer, shown_logprob
from headwater_server.lm.sampling_fields import DEFAULT_TOKENS, StreamFields, checked_ids
from headwater_server.lm.text.detokenizer import offsets_in
from headwater_server.lm.text_plan import Prompt, TextPlan, answer_tokens, check_count, plan, text_ids
from headwater_server.lm.text_stream import TextPiece, TokenLogprob

if TYPE_CHECKING:
    from headwater_server.lm.text.language import LanguageText
    from headwater_server.lm.text.token_texts import TokenTexts

__all__ = ["CompletionAnswer", "CompletionRequest"]


class CompletionAnswer(OpenAIAnswer):
    """The answer to a completions request, which may have several prompts. The choices of all prompts are numbered
    consecutively."""

    id_prefix = "cmpl"
    kind = chunk_kind = "text_completion"
    text_key = b'"text":'

    def _events(self, place: int, piece: TextPiece) -> list[bytes]:
        text_begin = self._text_heads[place] + orjson.dumps(piece.text)
        return [self._chunk(text_begin, piece.logprobs, piece.finish)]

    def _text_fields(self, place: int, text: TextPiece) -> dict[str, Any]:
        return {"text": text.text}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "tokens": [self._token(entry.token) for entry in entries],
            "token_logprobs": [shown_logprob(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float | None] | None:
        """The log probabilities of the most probable tokens and of the chosen token, by text. Of tokens with the same
        text only the most probable counts. `None` for a prompt's first token."""
        if entry.logprob is None:
            return None
        top: dict[str, float | None] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(self._token(token), shown_logprob(logprob))
        return top

    def _token(self, token_id: int) -> str:
        return self._texts.shown(token_id)[0]


_MAX_PROMPTS: Final = 256
_MAX_SEQUENCES: Final = 256
"""Maximum of prompts times choices."""

_ECHO: Final = "The text begins with the prompt, and `logprobs` with the prompt's tokens"
_NO_SUFFIX: Final = {"expected": "an empty string, since this model does not support suffixes"}
_IDS: Final = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_SEVERAL: Final = {"type": "array", "minItems": 1, "maxItems": _MAX_PROMPTS}
_PROMPTS: Final = {"anyOf": [_IDS, {**_SEVERAL, "items": {"type": "string"}}, {**_SEVERAL, "items": _IDS}]}
"""Used in the OpenAPI schema only."""


class CompletionRequest(StreamFields, kw_only=True):
    """The body of a request."""

    prompt: str | Annotated[list[Any], Meta(extra_json_schema=_PROMPTS)]
    logprobs: TopLogprobs | None = None
    echo: Annotated[bool | None, Meta(description=_ECHO, extra_json_schema={"default": False})] = None
    best_of: Annotated[int | None, Meta(description="Only the same as `n` is supported")] = None
    response_format: ResponseFormat | None = None
    suffix: Annotated[str, Meta(max_length=0, extra=_NO_SUFFIX)] | None = None

    def answer_form(self, plan: TextPlan, texts: TokenTexts) -> CompletionAnswer:
        """The form of the answer to this request. `plan` and `texts` must come from this request and its model."""
        has_logprobs = self.logprobs is not None
        return CompletionAnswer(
            self.model, len(plan.specs), texts, logprobs=has_logprobs, includes_usage=self.includes_usage,
            counts_usage=self.counts_usage,
        )  # fmt: skip

    def plan(self, text: LanguageText, limits: EngineLimits) -> TextPlan:
        """Check the request, and convert it into tokens. Takes too long for the event loop.

        Raises:
            BadRequest: a field is wrong, or exceeds a limit of the model.
        """
        self.check_stream()
        n = self.n or 1
        if self.best_of is not None and self.best_of != n:
            reason = f"this model ranks no answers; expected {n}, the same as n, got {shown(self.best_of)}"
            raise at("best_of", None, f"{reason}; leave it out")
        prompt_logprobs = self.logprobs if self.echo else None
        if prompt_logprobs is not None and not limits.prompt_logprobs:
            raise at("logprobs", None, "this model has no log probabilities of prompts; leave out logprobs or echo")
        sampling = self.sampling(limits, text.sampling, logprobs=self.logprobs)
        end = self.text_end(limits)
        grammar = checked_grammar(self.response_format, self.structured_outputs, limits, self.constraints)
        entries = self._entries()
        if len(entries) * n > _MAX_SEQUENCES:
            raise at("n", None, f"expected at most {_MAX_SEQUENCES} answers in all, got {len(entries)} prompts x {n}")
        prompts = [self._prompt(field, entry, text, limits) for field, entry in entries]
        return plan(prompts, n, sampling, end, limits, self.timeout_s, grammar, prompt_logprobs)

    def _entries(self) -> list[tuple[str, str | list[Any]]]:
        """The prompts, texts or arrays of token ids, each with the path of its field.

        Raises:
            BadRequest: the prompts are of different or unknown types, too many, or an empty array.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [("prompt", prompt)]
        if not prompt:
            raise at("prompt", None, "expected at least one string or token id, got an empty array")
        kinds = {type(entry) for entry in prompt}
        if kinds == {int}:
            return [("prompt", prompt)]
        if kinds not in ({str}, {list}):
            raise at(
                "prompt",
                None,
                "expected a string, an array of strings, an array of token ids, or an array of such arrays; got an "
                f"array with {' and '.join(sorted({_kind(entry) for entry in prompt}))}",
            )
        if len(prompt) > _MAX_PROMPTS:
            raise at("prompt", None, f"expected at most {_MAX_PROMPTS} prompts, got {len(prompt)}")
        return [(f"prompt[{place}]", entry) for place, entry in enumerate(prompt)]

    def _prompt(self, field: str, prompt: str | list[Any], text: LanguageText, limits: EngineLimits) -> Prompt:
        if isinstance(prompt, str):
            ids = text_ids(field, prompt, partial(text.encode_text, field=field), limits)
        else:
            check_count(field, len(prompt), limits)
            ids = checked_ids(field, prompt, limits.vocab_size)
        max_tokens = answer_tokens(field, "max_tokens", ids, self.max_tokens, DEFAULT_TOKENS, limits)
        prefix = ""
        if self.echo:
            skips = self.skip_special_tokens is not False
            prefix = prompt if isinstance(prompt, str) else text.tokenizer.decode(ids, skip_special_tokens=skips)
        has_logprobs = self.echo and self.logprobs is not None
        return Prompt(ids, max_tokens, prefix, offsets_in(prefix, ids, text.tokenizer.texts) if has_logprobs else ())


def _kind(value: object) -> str:
    if isinstance(value, (str, list)):
        return "strings" if isinstance(value, str) else "arrays"
    return "token ids" if type(value) is int else shown(value)
