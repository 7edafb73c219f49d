"""Requests and answers of ``POST /v1/chat/completions``.

Source: OpenAI's API reference. What a field asks for is done or refused by name, never ignored; `top_k`, `min_p`,
`repetition_penalty`, `min_tokens`, `stop_token_ids`, `ignore_eos`, `chat_template_kwargs`, `timeout_s`,
`include_stop_str_in_output` and `skip_special_tokens` are extensions, most of them vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import orjson
from msgspec import Meta

from app.codecs.faults import at, shown
from app.lm.answer_grammar import ResponseFormat, checked_grammar
from app.lm.answers import OpenAIAnswer, shown_tokens
from app.lm.sampling_fields import Flag, StreamFields
from app.lm.text.messages import checked_messages
from app.lm.text_plan import Prompt, TextPlan, answer_tokens, check_size, plan
from app.lm.text_stream import TextPiece, TokenLogprob
from inference.engine import EngineLimits, TopLogprobs

if TYPE_CHECKING:
    from app.lm.text.language import LanguageText
    from app.lm.text.token_texts import TokenTexts

__all__ = ["ChatAnswer", "ChatRequest", "Messages", "TemplateVariables", "checked_variables"]


class ChatAnswer(OpenAIAnswer):
    """The answer to a conversation."""

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    opening, text_key, closing = b'"delta":{', b'"content":', b"}"

    def begin(self) -> list[bytes]:
        return [b'%b"role":"assistant","content":""%b' % (head, self._text_tail) for head in self._heads]

    def _events(self, place: int, piece: TextPiece) -> list[bytes]:
        events = []
        if piece.text or piece.logprobs:
            events.append(self._chunk(self._text_heads[place] + orjson.dumps(piece.text), piece.logprobs, None))
        if piece.finish is not None:
            events.append(self._chunk(self._heads[place], (), piece.finish))
        return events

    def _text_fields(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"content": shown_tokens(entries, self._texts), "refusal": None}


LEAST_CHAT_TOKENS: Final = 256
"""The default length of an answer, even if it exceeds a sequence's share of the cache."""

_RESERVED: Final = frozenset({"messages", "tools", "add_generation_prompt", "chat_template"})
"""Template variables that the client can't set."""

_PART: Final = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
}
_MESSAGE: Final = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string"},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
    },
}
"""For the OpenAPI schema; `app.lm.text.messages` checks the messages."""
Messages: TypeAlias = Annotated[Any, Meta(extra_json_schema={"type": "array", "minItems": 1, "items": _MESSAGE})]
TemplateVariables: TypeAlias = Annotated[
    dict[str, Any] | None, Meta(description="Further variables of the model's chat template")
]
_NO_TOOLS: Final = {"expected": "an empty array, since this model does not support tools"}
_ONLY_TEXT: Final = {"expected": '["text"]'}


class ChatRequest(StreamFields, kw_only=True):
    """The body of a request."""

    messages: Messages
    max_completion_tokens: Annotated[int, Meta(ge=1, description="Default: as many as fit")] | None = None
    max_tokens: Annotated[int, Meta(ge=1, extra_json_schema={"deprecated": True})] | None = None
    logprobs: Flag | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: TemplateVariables = None
    tools: Annotated[list[Any], Meta(max_length=0, extra=_NO_TOOLS)] | None = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, str] | None, Meta(description="Labels, without effect")] = None
    modalities: Annotated[list[Literal["text"]], Meta(min_length=1, max_length=1, extra=_ONLY_TEXT)] | None = None
    prompt_cache_key: Annotated[str | None, Meta(description="Without effect")] = None
    safety_identifier: Annotated[str | None, Meta(description="A label, without effect")] = None
    service_tier: Literal["auto", "default"] | None = None
    store: Annotated[bool | None, Meta(description="No answer is stored: only false is supported")] = None
    audio: None = None
    function_call: None = None
    functions: None = None
    moderation: None = None
    prediction: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None

    def answer_form(self, plan: TextPlan, texts: TokenTexts) -> ChatAnswer:
        """The form of the answer to this request, of which `plan` made the plan."""
        return ChatAnswer(
            self.model, len(plan.specs), texts, logprobs=bool(self.logprobs), includes_usage=self.includes_usage,
            counts_usage=self.counts_usage,
        )  # fmt: skip

    def plan(self, text: LanguageText, limits: EngineLimits) -> TextPlan:
        """Check the request, and turn it into tokens. Takes too long for the event loop.

        Raises:
            BadRequest: a field is wrong, or asks for more than the model can take.
        """
        self.check_stream()
        if self.store:
            raise at("store", None, "this server keeps no answers; expected false, got true")
        sampling = self.sampling(limits, logprobs=self._logprobs())
        end = self.text_end(limits)
        grammar = checked_grammar(self.response_format, self.structured_outputs, limits)
        path, wanted = self._max_tokens()
        rendered = text.chat_text(
            checked_messages(self.messages, limits.context_length), checked_variables(self.chat_template_kwargs)
        )
        check_size("messages", rendered, limits)
        ids = text.encode_chat(rendered)
        default = max(limits.cache_tokens // limits.max_sequences - len(ids), LEAST_CHAT_TOKENS)
        prompt = Prompt(ids, answer_tokens("messages", path, ids, wanted, default, limits))
        return plan([prompt], self.n or 1, sampling, end, limits, self.timeout_s, grammar)

    def _logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise at("top_logprobs", None, 'expected it with "logprobs": true only; leave it out, or set that')
        return (self.top_logprobs or 0) if self.logprobs else None

    def _max_tokens(self) -> tuple[str, int | None]:
        """The field that limits the answer's length, and its value."""
        new, old = self.max_completion_tokens, self.max_tokens
        path = "max_tokens" if new is None else "max_completion_tokens"
        if new is not None and old is not None and new != old:
            expected = f"expected the same as max_tokens, which it replaces, got {shown(new)} and {shown(old)}"
            raise at(path, None, f"{expected}; leave one of them out")
        return path, old if new is None else new


def checked_variables(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """The request's ``chat_template_kwargs``.

    Raises:
        BadRequest: one is the server's to set.
    """
    for name in given or ():
        if name in _RESERVED:
            path = f"chat_template_kwargs.{name}"
            raise at(path, None, "expected a variable of the model's own chat template; leave it out")
    return given
