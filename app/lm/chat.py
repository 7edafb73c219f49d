"""``POST /v1/chat/completions``: its requests and answers.

Source: OpenAI's API reference. What these models can't do is refused by the field's name, never ignored; `top_k`,
`min_p`, `repetition_penalty`, `stop_token_ids`, `ignore_eos`, `chat_template_kwargs`, `include_stop_str_in_output`,
`skip_special_tokens` and `timeout_s` are extensions, most of them vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import orjson
from msgspec import Meta

from app.codecs.faults import at, shown
from app.errors import HeadwaterError
from app.lm.answers import Chunks, shown_logprob
from app.lm.sampling_fields import Flag, StreamFields
from app.lm.text.logprob_tokens import logprob_token
from app.lm.text_plan import CHAT_ANSWER_TOKENS, Prompt, TextPlan, answer_capacity, check_size, fitting_tokens, plan
from app.lm.text_stream import TextPiece, TokenLogprob, Usage
from inference.engine import EngineLimits, TopLogprobs

if TYPE_CHECKING:
    from app.lm.text.language import LanguageText
    from app.lm.text.token_texts import TokenTexts

__all__ = ["ChatAnswer", "ChatRequest"]


class ChatAnswer:
    """One answer; see `app.lm.answers.AnswerForm`.

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


_RESERVED: Final = frozenset({"messages", "tools", "add_generation_prompt", "chat_template"})
"""Names that a template knows, and that are not the client's to set."""


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
"""For the OpenAPI schema; a message itself is read by the chat template."""
_FORMAT: Final = {"type": "object", "required": ["type"], "properties": {"type": {"type": "string", "enum": ["text"]}}}


class ChatRequest(StreamFields, kw_only=True):
    """The body."""

    messages: Annotated[Any, Meta(extra_json_schema={"type": "array", "minItems": 1, "items": _MESSAGE})]
    max_completion_tokens: Annotated[int, Meta(ge=1, description="Default: what there is room for")] | None = None
    max_tokens: Annotated[int, Meta(ge=1, extra_json_schema={"deprecated": True})] | None = None
    logprobs: Flag | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: Annotated[Any, Meta(extra_json_schema=_FORMAT)] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="What the model's chat template takes besides")
    ] = None
    audio: None = None
    function_call: None = None
    functions: None = None
    metadata: None = None
    modalities: None = None
    moderation: None = None
    parallel_tool_calls: None = None
    prediction: None = None
    prompt_cache_key: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    reasoning_effort: None = None
    safety_identifier: None = None
    service_tier: None = None
    store: None = None
    tool_choice: None = None
    tools: None = None
    verbosity: None = None
    web_search_options: None = None

    def answer_form(self, plan: TextPlan, texts: TokenTexts) -> ChatAnswer:
        """What its answer looks like.

        Args:
            plan: what `plan` gave.
            texts: of the tokenizer.
        """
        return ChatAnswer(
            self.model,
            len(plan.specs),
            texts,
            logprobs=bool(self.logprobs),
            includes_usage=self.includes_usage,
        )

    def plan(self, text: LanguageText, limits: EngineLimits) -> TextPlan:
        """Check the request, and make tokens of it. Takes too long for the event loop.

        Raises:
            BadRequest: something in it is wrong, or more than the model can take.
        """
        self.check_stream()
        sampling = self.sampling(limits, logprobs=self._logprobs())
        end = self.text_end(limits)
        if self.response_format is not None and self.response_format != {"type": "text"}:
            raise at("response_format", None, 'this model supports {"type": "text"} only; leave it out')
        path, max_tokens = self._max_tokens()
        rendered = text.chat_text(self._messages(limits), self._variables())
        check_size("messages", rendered, limits)
        ids = text.encode_chat(rendered)
        room = answer_capacity("messages", ids, limits)
        if max_tokens is None:
            share = max(limits.cache_tokens // limits.max_sequences, len(ids) + CHAT_ANSWER_TOKENS)
            max_tokens = min(room, share - len(ids))
        max_tokens = fitting_tokens("messages", path, max_tokens, ids, room, limits)
        return plan([Prompt(ids, max_tokens)], self.n or 1, sampling, end, limits, self.timeout_s)

    def _messages(self, limits: EngineLimits) -> object:
        """The messages, without what no template can make sense of, or no context holds."""
        messages = self.messages
        if not isinstance(messages, list):
            return messages  # who reads them says what is wrong
        if len(messages) > limits.context_length:
            raise at(
                "messages",
                None,
                f"this model's maximum context length is {limits.context_length} tokens; expected at most as many "
                f"messages, got {len(messages)}",
            )
        for place, message in enumerate(messages):
            if not isinstance(message, dict):
                continue
            for field in ("tool_calls", "function_call", "tool_call_id"):
                if message.get(field) is not None:
                    raise at(f"messages[{place}].{field}", None, "this model does not support it; leave it out")
            if isinstance(message.get("role"), str) and message.get("content") is None:
                raise at(f"messages[{place}].content", None, "expected a string or an array of text parts, got null")
        return messages

    def _variables(self) -> dict[str, Any] | None:
        for name in self.chat_template_kwargs or ():
            if name in _RESERVED:
                raise at(
                    f"chat_template_kwargs.{name}", None, "expected a variable of the model's own chat template; "
                    "leave it out"
                )  # fmt: skip
        return self.chat_template_kwargs

    def _logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise at("top_logprobs", None, 'expected it with "logprobs": true only; leave it out, or set that')
        return (self.top_logprobs or 0) if self.logprobs else None

    def _max_tokens(self) -> tuple[str, int | None]:
        """The field that says how long the answer may be, and what it says."""
        new, old = self.max_completion_tokens, self.max_tokens
        path = "max_tokens" if new is None else "max_completion_tokens"
        if new is not None and old is not None and new != old:
            raise at(
                path, None, f"expected the same as max_tokens, which it replaces, got {shown(new)} and {shown(old)}; "
                "leave one of them out"
            )  # fmt: skip
        return path, old if new is None else new
