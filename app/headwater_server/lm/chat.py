"""Requests and answers of ``POST /v1/chat/completions``.

Source: OpenAI's API reference. Unsupported features are refused with an error that names the field. `top_k`, `min_p`,
`repetition_penalty`, `min_tokens`, `stop_token_ids`, `ignore_eos`, `structured_outputs` and the other fields of
`CONSTRAINTS`, `chat_template_kwargs`, `add_generation_prompt`, `continue_final_message`, `timeout_s`,
`include_stop_str_in_output`, `skip_special_tokens` and `stream_options.continuous_usage_stats` are extensions, mostly
from vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import orjson
from msgspec import Meta

from headwater.engine import EngineLimits, Grammar, TopLogprobs
from headwater_server.codecs.faults import at, shown
from headwater_server.errors import HeadwaterError
from headwater_server.lm.answer_grammar import ResponseFormat, checked_grammar
from headwater_server.lm.call_grammar import call_grammar, can_hold_strict, required_format
from headwater_server.lm.openai_answer import OpenAIAnswer, shown_tokens
from headwater_server.lm.reasoning_fields import ReasoningFields, ReasoningWish, is_off, template_variables
from headwater_server.lm.reasoning_grammar import content_opening
from headwater_server.lm.reasoning_plan import reasoning_plan
from headwater_server.lm.sampling_fields import ONLY_TEXTS, Flag
from headwater_server.lm.text.answer_parts import AnswerPart, CallPart, ReasoningPart
from headwater_server.lm.text.answer_reader import AnswerReader, AnswerReading
from headwater_server.lm.text.chat_messages import checked_messages
from headwater_server.lm.text.tool_calls import ToolUse
from headwater_server.lm.text_plan import Prompt, TextPlan, answer_tokens, plan, text_ids
from headwater_server.lm.text_stream import TextPiece, TokenLogprob, Usage
from headwater_server.lm.tools import CHOICE_SCHEMA, TOOLS_SCHEMA, checked_choice, checked_tools, unknown_fields

if TYPE_CHECKING:
    from headwater_server.lm.text.language import LanguageText
    from headwater_server.lm.text.token_texts import TokenTexts

__all__ = [
    "ChatAnswer",
    "ChatRequest",
    "Continued",
    "GenerationPrompt",
    "Messages",
    "TemplateVariables",
    "Verbosity",
    "checked_variables",
]


class ChatAnswer(OpenAIAnswer):
    """The answer to a chat completions request.

    Args:
        reading: how the texts are divided into reasoning, content and tool calls; `None` if the whole texts are
            content.

    All other arguments: see `OpenAIAnswer`.
    """

    id_prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    opening, text_key, closing = b'"delta":{', b'"content":', b"}"

    def __init__(
        self,
        model: str,
        choices: int,
        texts: TokenTexts,
        *,
        reading: AnswerReading | None = None,
        **options: bool,
    ) -> None:
        super().__init__(model, choices, texts, **options)
        self._readers = [reading.reader() for _ in range(choices)] if reading is not None else []

    def begin(self) -> list[bytes]:
        return [b'%b"role":"assistant","content":""%b' % (head, self._text_tail) for head in self._heads]

    def whole(self, texts: Sequence[TextPiece], usage: Usage) -> bytes:
        choices = [self._choice(place, text) for place, text in enumerate(texts)]  # counts the reasoning
        return self._whole(choices, self._counted(usage))

    def piece(self, place: int, piece: TextPiece) -> list[bytes]:
        return self._events(place, piece) if self._readers else super().piece(place, piece)

    def end(self, usage: Usage, error: HeadwaterError | None) -> list[bytes]:
        return super().end(self._counted(usage), error)

    def count(self, usage: Usage) -> None:
        super().count(self._counted(usage))

    def _counted(self, usage: Usage) -> Usage:
        return usage._replace(reasoning_tokens=sum(reader.reasoning_tokens for reader in self._readers))

    def _events(self, place: int, piece: TextPiece) -> list[bytes]:
        if self._readers:
            return self._events_of_parts(place, piece, self._readers[place])
        events = []
        if piece.text or piece.logprobs:
            events.append(self._chunk(self._text_heads[place] + orjson.dumps(piece.text), piece.logprobs, None))
        if piece.finish is not None:
            events.append(self._chunk(self._heads[place], (), piece.finish))
        return events

    def _events_of_parts(self, place: int, piece: TextPiece, reader: AnswerReader) -> list[bytes]:
        parts = reader.read(piece.text, piece.finish, piece.ends)
        begins = [self._heads[place] + orjson.dumps(_delta(part))[1:-1] for part in parts]
        if piece.logprobs and not begins:  # the text of these tokens is held back
            begins.append(self._text_heads[place] + b'""')
        events = [self._chunk(begin, piece.logprobs if n == 0 else (), None) for n, begin in enumerate(begins)]
        if piece.finish is not None:
            events.append(self._chunk(self._heads[place], (), _finish(reader, piece.finish)))
        return events

    def _text_fields(self, place: int, text: TextPiece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text.text, "refusal": None}
        if not self._readers:
            return {"message": message}
        reader = self._readers[place]
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        for part in reader.read(text.text, text.finish, text.ends):
            if isinstance(part, str):
                content.append(part)
            elif isinstance(part, ReasoningPart):
                reasoning.append(part.text)
            elif part.name:
                calls.append(_call(part))
            else:
                calls[part.number]["function"]["arguments"] += part.arguments
        message["content"] = "".join(content)
        if reasoning:
            message |= _reasoning_fields("".join(reasoning))
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return {"message": message, "finish_reason": _finish(reader, text.finish)}

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"content": shown_tokens(entries, self._texts), "refusal": None}


def _delta(part: AnswerPart) -> dict[str, Any]:
    """A part in the form that streams send."""
    if isinstance(part, str):
        return {"content": part}
    if isinstance(part, ReasoningPart):
        return _reasoning_fields(part.text)
    call = _call(part) if part.name else {"function": {"arguments": part.arguments}}
    return {"tool_calls": [{"index": part.number, **call}]}


def _call(part: CallPart) -> dict[str, Any]:
    """The first part of a call."""
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments}}


def _reasoning_fields(text: str) -> dict[str, str]:
    """Reasoning under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _finish(reader: AnswerReader, finish: str | None) -> str | None:
    return "tool_calls" if finish == "stop" and reader.has_calls else finish


LEAST_CHAT_TOKENS: Final = 256
"""Lower bound of the default for an answer's maximum length in tokens, even if prompt and answer then exceed a
sequence's share of the cache. The default is lower only if fewer tokens fit into context and cache."""

_RESERVED: Final = frozenset({
    "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template",
})  # fmt: skip
"""Template variables that clients can't set."""

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
"""Used in the OpenAPI schema only: `headwater_server.lm.text.chat_messages` checks the messages."""
Messages: TypeAlias = Annotated[Any, Meta(extra_json_schema={"type": "array", "minItems": 1, "items": _MESSAGE})]
TemplateVariables: TypeAlias = Annotated[
    dict[str, Any] | None, Meta(description="Further variables of the model's chat template")
]
GenerationPrompt: TypeAlias = Annotated[
    bool | None, Meta(description="false: the prompt ends with the last message", extra_json_schema={"default": True})
]
Continued: TypeAlias = Annotated[
    bool | None, Meta(description="The answer continues the last message, the assistant's")
]
Verbosity: TypeAlias = Annotated[Literal["low", "medium", "high"], Meta(description="Without effect")]
_ONLY_TEXT: Final = {"expected": '["text"]'}


class ChatRequest(ReasoningFields, kw_only=True):
    """The body of a request."""

    messages: Messages
    max_completion_tokens: Annotated[int, Meta(ge=1, description="Default: as many as fit")] | None = None
    max_tokens: Annotated[int, Meta(ge=1, extra_json_schema={"deprecated": True})] | None = None
    logprobs: Flag | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: TemplateVariables = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: Continued = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="false: at most one call in an answer")] = None
    metadata: Annotated[
        dict[str, str | None] | None, Meta(description="Labels, without effect", extra_json_schema=ONLY_TEXTS)
    ] = None
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
    prompt_cache_retention: Annotated[str | None, Meta(description="Without effect")] = None
    tool_choice: Annotated[Any, Meta(extra_json_schema=CHOICE_SCHEMA)] = None
    tools: Annotated[Any, Meta(extra_json_schema=TOOLS_SCHEMA)] = None
    verbosity: Verbosity | None = None
    web_search_options: None = None

    def answer_form(self, plan: TextPlan, texts: TokenTexts) -> ChatAnswer:
        """The form of the answer to this request. `plan` and `texts` must come from this request and its model."""
        reading = plan.reading
        if reading is not None and not self.reasoning_wish().is_shown:
            reading = reading._replace(is_shown=False)
        return ChatAnswer(
            self.model, len(plan.specs), texts, logprobs=bool(self.logprobs), includes_usage=self.includes_usage,
            counts_usage=self.counts_usage, reading=reading,
        )  # fmt: skip

    def plan(
        self, text: LanguageText, limits: EngineLimits, prompt: str = "messages", *, caps_answer: bool = False
    ) -> TextPlan:
        """Check the request, and convert it into tokens. Takes too long for the event loop. ``prompt`` is the client's
        field that contains the prompt, for errors. With ``caps_answer`` an answer of as many tokens as the client
        allows need not fit: it ends where the context ends.

        Raises:
            BadRequest: a field is wrong, or exceeds a limit of the model.
        """
        self.check_stream()
        if self.store:
            raise at("store", None, "this server keeps no answers; expected false, got true")
        sampling = self.sampling(limits, text.sampling, logprobs=self._logprobs())
        end = self.text_end(limits)
        grammar = checked_grammar(self.response_format, self.structured_outputs, limits, self.constraints)
        path, wanted = self._max_tokens()
        tools, use, grammar = self._tool_use(text, limits, grammar)
        wish = self.reasoning_wish()
        variables, ignored = self._variables(text, wish)
        messages = checked_messages(self.messages, limits.context_length)
        rendered = text.chat_text(
            messages, variables, tools or None, add_generation_prompt=self.add_generation_prompt,
            continues=bool(self.continue_final_message),
        )  # fmt: skip
        reasoning = reasoning_plan(text, limits, rendered, wish.budget, grammar, is_off=is_off(variables))
        format = reasoning.format
        if use is not None and not use.is_constrained and text.reasoning_format is None:
            format = text.tool_reasoning
        reading = None
        if use is not None or format is not None:
            reading = AnswerReading(use, format).with_tokens(text.tokenizer.texts.added_id).after(reasoning.prompt)
        ids = text_ids(prompt, reasoning.prompt, text.encode_chat, limits)
        default = max(limits.cache_tokens // limits.max_sequences - len(ids), LEAST_CHAT_TOKENS)
        capped = wanted if caps_answer else None
        fixed = None if caps_answer else wanted
        prompts = [Prompt(ids, answer_tokens(prompt, path, ids, fixed, capped or default, limits))]
        made = plan(prompts, self.n or 1, sampling, end, limits, self.timeout_s, reasoning.grammar)
        loose = self._loose_tools() if use is not None and (grammar is None or grammar.field != "tools") else []
        return made._replace(reading=reading, ignored=(*ignored, *reasoning.ignored, *loose))

    def _loose_tools(self) -> list[str]:
        """The paths of the tools' fields ``strict`` that ask for more than an answer without a grammar keeps to."""
        functions = enumerate(tool["function"] for tool in self.tools)
        return [f"tools[{n}].function.strict" for n, function in functions if function.get("strict")]

    def _variables(self, text: LanguageText, wish: ReasoningWish) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Further variables of the chat template, and the request's fields without effect.

        Raises:
            BadRequest: a variable is reserved for the server.
        """
        variables: dict[str, Any] = {}
        ignored = ["verbosity"] if self.verbosity not in (None, "medium") else []
        if text.template is not None:
            can_reason = text.reasoning_format is not None
            variables, without_effect = template_variables(wish, text.template, can_reason=can_reason)
            ignored += without_effect
        ignored += unknown_fields(self.tools)
        return {**variables, **(checked_variables(self.chat_template_kwargs) or {})}, tuple(ignored)

    def _tool_use(
        self, text: LanguageText, limits: EngineLimits, grammar: Grammar | None
    ) -> tuple[list[dict[str, Any]], ToolUse | None, Grammar | None]:
        """The tools that the chat template gets, how the answers are searched for calls, and the grammar of the
        answers. An empty list and `None` if the answers can't have calls; no grammar if any text is allowed.

        Args:
            text: the model's tokenizer and chat template.
            limits: the engine's limits.
            grammar: the grammar of answers without calls, if any.

        Raises:
            BadRequest: a tool or the choice is wrong, or the model doesn't support tools, this choice, or tools with
                this grammar.
        """
        tools = checked_tools(self.tools)
        choice = checked_choice(self.tool_choice, tools)
        if not choice.names:
            return [], None, grammar
        callable_ = {n: tool for n, tool in enumerate(tools) if tool["function"]["name"] in choice.names}
        is_held = (choice.is_required or grammar is not None) and "lark" in limits.grammars
        format = required_format(text.tool_format, callable_) if is_held else text.tool_format
        if format is None:
            reason = "this model's chat template has no known format of tool calls"
            raise at("tools", None, f"{reason}; leave them out, or set the deployment's `options.tool_parser`")
        if choice.is_required and "lark" not in limits.grammars:
            raise at("tool_choice", None, "this model does not support it; expected 'auto' or 'none'")
        if grammar is not None and (grammar.kind != "json_schema" or "lark" not in limits.grammars):
            raise at(grammar.field, None, "this model does not support it with tools; leave one of them out")
        is_single = choice.is_single or self.parallel_tool_calls is False
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        schemas = {name: schemas[name] for name in choice.names}
        strict = [n for n in callable_ if self.tools[n]["function"].get("strict")]
        token_id = text.tokenizer.texts.added_id
        is_strict = bool(strict) and "lark" in limits.grammars and can_hold_strict(text.tool_format, token_id)
        if is_held or is_strict:
            grammar = call_grammar(
                format, callable_, token_id, is_single=is_single,
                content=None if choice.is_required else grammar, content_opening=content_opening(text.reasoning_format),
                strict=None if is_held else strict,
            )  # fmt: skip
        return tools, ToolUse(format, schemas, choice.is_required, is_single), grammar

    def _logprobs(self) -> int | None:
        """The value of `Sampling.logprobs` that the request asks for.

        Raises:
            BadRequest: ``top_logprobs`` is set without ``logprobs``.
        """
        if self.top_logprobs and not self.logprobs:
            raise at("top_logprobs", None, 'allowed only with "logprobs": true; leave it out, or set "logprobs"')
        return (self.top_logprobs or 0) if self.logprobs else None

    def _max_tokens(self) -> tuple[str, int | None]:
        """The path of the field that limits the answer's length, and its value; `None` if the request sets no limit.

        Raises:
            BadRequest: both fields are set, with different values.
        """
        new, old = self.max_completion_tokens, self.max_tokens
        path = "max_tokens" if new is None else "max_completion_tokens"
        if new is not None and old is not None and new != old:
            expected = f"expected the same as max_tokens, which it replaces, got {shown(new)} and {shown(old)}"
            raise at(path, None, f"{expected}; leave one of them out")
        return path, old if new is None else new


def checked_variables(variables: dict[str, Any] | None) -> dict[str, Any] | None:
    """Check the request's ``chat_template_kwargs``, and return them without nulls, which stand for absent variables.

    Raises:
        BadRequest: a variable is reserved for the server.
    """
    for name in variables or ():
        if name in _RESERVED:
            path = f"chat_template_kwargs.{name}"
            raise at(path, None, "expected a variable of the model's own chat template; leave it out")
    return variables and {name: value for name, value in variables.items() if value is not None}
