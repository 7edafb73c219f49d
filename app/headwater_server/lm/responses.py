"""Requests of ``POST /v1/responses``.

Source: OpenAI's API reference. A request is converted into the equivalent `ChatRequest`, which makes the plan. The
server stores nothing, so requests that refer to an earlier answer are refused. A request may also have the extensions
that `headwater_server.lm.chat` lists, and the fields that OpenAI has for chats only: ``stop``, ``seed``,
``logit_bias``, ``presence_penalty`` and ``frequency_penalty``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, structs, to_builtins

from headwater.engine import EngineLimits, Sampling, TopLogprobs
from headwater_server.codecs.faults import at, key_text, shown
from headwater_server.errors import BadRequest, ContextTooLong
from headwater_server.lm.answer_grammar import JsonSchemaFormat, ResponseFormat, Schema
from headwater_server.lm.chat import ChatRequest, TemplateVariables, Verbosity
from headwater_server.lm.reasoning_fields import Effort
from headwater_server.lm.renamed_fields import own_path, renamed
from headwater_server.lm.response_input import ROLES, TEXT_KINDS, conversation
from headwater_server.lm.response_tools import offered_tools
from headwater_server.lm.responses_answer import ReasoningShown, ResponsesAnswer
from headwater_server.lm.sampling_fields import ONLY_TEXTS, SamplingFields, StreamFields
from headwater_server.lm.sequence import SequenceSpec
from headwater_server.lm.text_plan import TextPlan
from headwater_server.lm.tools import CHOICE_SCHEMA, TOOLS_SCHEMA

if TYPE_CHECKING:
    from headwater_server.lm.text.answer_reader import AnswerReading
    from headwater_server.lm.text.language import LanguageText
    from headwater_server.lm.text.token_texts import TokenTexts

__all__ = ["ResponsesForm", "ResponsesRequest"]

_LOGPROBS: Final = "message.output_text.logprobs"
_ENCRYPTED: Final = "reasoning.encrypted_content"
_MAX_LABELS: Final = 16
_MAX_KEY: Final = 64
_MAX_LABEL: Final = 512

_PART: Final = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"type": "string", "enum": list(TEXT_KINDS)}, "text": {"type": "string"}},
}
_TEXT: Final = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}


def _object(kind: str, required: Sequence[str], **fields: Any) -> dict[str, Any]:
    properties = {"type": {"type": "string", "enum": [kind]}, **fields}
    return {"type": "object", "required": required, "properties": properties}


_STRING: Final = {"type": "string"}
_ITEM: Final = {
    "anyOf": [
        _object("message", ["role", "content"], role={"type": "string", "enum": list(ROLES)}, content=_TEXT),
        _object(
            "function_call", ["type", "call_id", "name", "arguments"],
            call_id=_STRING, name=_STRING, arguments={"type": "string", "description": "An object, as JSON"},
        ),
        _object("function_call_output", ["type", "call_id", "output"], call_id=_STRING, output=_TEXT),
    ]
}  # fmt: skip
_LABELS: Final = {
    "maxProperties": _MAX_LABELS,
    "propertyNames": {"maxLength": _MAX_KEY},
    "additionalProperties": {"type": "string", "maxLength": _MAX_LABEL},
}
"""Used in the OpenAPI schema only, like `_ITEM`."""


def _flat(schema: dict[str, Any]) -> dict[str, Any]:
    """Convert the schema of a chat request's tool, or tool choice, into the form of this API: without the nested
    ``function`` object."""
    function = schema["properties"]["function"]
    return _object("function", ["type", *function["required"]], **function["properties"])


_CUSTOM: Final = _object("custom", ["type", "name"], name=_STRING, description=_STRING, format={"type": "object"})
_CALLABLE: Final = {"anyOf": [_flat(TOOLS_SCHEMA["items"]), _CUSTOM]}
_SPACE: Final = _object(
    "namespace", ["type", "name", "tools"], name=_STRING, tools={"type": "array", "items": _CALLABLE}
)
_TOOLS: Final = {**TOOLS_SCHEMA, "items": {"anyOf": [*_CALLABLE["anyOf"], _SPACE]}}
_ALLOWED: Final = _object(
    "allowed_tools", ["type", "tools"],
    mode=CHOICE_SCHEMA["anyOf"][0], tools={"type": "array", "items": {"type": "object"}, "minItems": 1},
)  # fmt: skip
_CHOICE: Final = {
    "anyOf": [
        CHOICE_SCHEMA["anyOf"][0], _flat(CHOICE_SCHEMA["anyOf"][1]), _object("custom", ["type", "name"], name=_STRING),
        _ALLOWED,
    ]
}  # fmt: skip
Summary: TypeAlias = Annotated[
    Literal["auto", "concise", "detailed"], Meta(description="The reasoning's text is its summary, too")
]
_Label: TypeAlias = Annotated[str, Meta(max_length=_MAX_LABEL, description="A label, without effect")]


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """``text.format``: like ``response_format`` of a chat request, but without the nested ``json_schema`` object."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None

    def chat_format(self) -> ResponseFormat:
        """Convert it into ``response_format`` of a chat request.

        Raises:
            BadRequest: the type is ``json_schema`` and there is no name, or a schema without a name is given with
                another type.
        """
        if self.type == "json_schema" and self.name is None:
            raise at("text.format.name", None, "expected a string, got none; add it")
        if self.name is None:
            if self.schema is not None:
                expected = f'expected it with the type "json_schema" only, got {shown(self.type)}'
                raise at("text.format.schema", None, f"{expected}; leave it out")
            return ResponseFormat(type=self.type)
        schema = JsonSchemaFormat(name=self.name, description=self.description, schema=self.schema, strict=self.strict)
        return ResponseFormat(type=self.type, json_schema=schema)


class _TextFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class _Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    """The former name of ``summary``."""


class ResponsesForm(NamedTuple):
    """The equivalent chat request."""

    fields: dict[str, Any]
    names: dict[str, str]
    """Paths of the client's request, by the paths of the chat request's fields."""
    ignored: tuple[str, ...]
    """Paths of the client's fields without effect."""
    expressions: tuple[str, ...]
    """Paths of the client's fields that have an effect only where the answer has a grammar."""


class ResponsesRequest(StreamFields, kw_only=True):
    """The body of a request."""

    input: str | Annotated[list[Any], Meta(extra_json_schema={"items": _ITEM})]
    instructions: Annotated[str | None, Meta(description="A system message before the input")] = None
    max_output_tokens: Annotated[int, Meta(ge=1, description="Default: as many as fit")] | None = None
    text: _TextFields | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: TopLogprobs | None = None
    truncation: Annotated[Literal["disabled", "auto"] | None, Meta(description="Nothing is cut off")] = None
    store: Annotated[bool | None, Meta(description="No answer is kept: only false is supported")] = None
    background: Annotated[bool | None, Meta(description="Only false is supported")] = None
    previous_response_id: Annotated[str | None, Meta(description="Not supported: send the items themselves")] = None
    tools: Annotated[Any, Meta(extra_json_schema=_TOOLS)] = None
    tool_choice: Annotated[Any, Meta(extra_json_schema=_CHOICE)] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="false: at most one call in an answer")] = None
    metadata: Annotated[dict[str, str | None] | None, Meta(description="Labels", extra_json_schema=_LABELS)] = None
    user: _Label | None = None
    safety_identifier: _Label | None = None
    prompt_cache_key: _Label | None = None
    service_tier: Annotated[str | None, Meta(description="Without effect")] = None
    chat_template_kwargs: TemplateVariables = None
    access_programs: None = None
    context_management: Annotated[list[Any] | None, Meta(description="Nothing is cut off or compacted")] = None
    conversation: None = None
    image: None = None
    max_tokens: None = None
    max_tool_calls: Annotated[int, Meta(ge=1, description="Of tools that this server runs: none")] | None = None
    moderation: None = None
    n: Literal[1] | None = None
    prompt: None = None
    prompt_cache_options: Annotated[dict[str, Any] | None, Meta(description="Without effect")] = None
    prompt_cache_retention: Annotated[str | None, Meta(description="Without effect")] = None
    reasoning: _Reasoning | None = None
    include_reasoning: Annotated[bool | None, Meta(description="false: the answer has no reasoning")] = None
    client_metadata: Annotated[
        dict[str, str | None] | None, Meta(description="Labels, without effect", extra_json_schema=ONLY_TEXTS)
    ] = None

    @property
    def _effort(self) -> Effort | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def _summary(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.summary or self.reasoning.generate_summary

    def answer_form(self, plan: TextPlan, texts: TokenTexts) -> ResponsesAnswer:
        """The form of the answer to this request. `plan` and `texts` must come from this request and its model."""
        return self._answer(plan.specs[0].sampling, texts, plan.reading)

    def relayed_answer(self) -> ResponsesAnswer:
        """The form of an answer that another server divides into parts, for `ResponsesAnswer.add`."""
        return self._answer(self, None, None)

    def fails_in_stream(self, error: ContextTooLong) -> bool:
        """Whether a refusal is the end of a stream: of a streamed answer whose prompt is too long, whatever the limit
        that the client set."""
        return bool(self.stream) and error.field != "max_output_tokens"

    def _answer(
        self, sampling: Sampling | SamplingFields, texts: TokenTexts | None, reading: AnswerReading | None
    ) -> ResponsesAnswer:
        names = offered_tools(self.tools, self.tool_choice).names
        is_shown = self.include_reasoning is not False
        reasoning = ReasoningShown(bool(self._summary), _ENCRYPTED in (self.include or ()), is_shown)
        return ResponsesAnswer(self._repeated(sampling), texts, reading, names, reasoning)

    def plan(self, text: LanguageText, limits: EngineLimits) -> TextPlan:
        """Check the request, and convert it into tokens. Takes too long for the event loop.

        Raises:
            BadRequest: a field is wrong, or exceeds a limit of the model.
        """
        form = self.chat_form()
        try:
            plan = ChatRequest(**form.fields).plan(text, limits, prompt="input")
        except BadRequest as error:
            raise renamed(error, form.names) from None
        if form.fields["logprobs"] and plan.reading is not None:
            expected = "this model does not support log probabilities of an answer that may reason or call tools"
            raise at("include", None, f'{expected}; leave one of them out, or set "tool_choice": "none"')
        ignored = [*form.ignored, *(own_path(name, form.names) for name in plan.ignored)]
        if plan.specs[0].grammar is None:
            ignored += form.expressions
        if self._summary and (plan.reading is None or plan.reading.reasoning is None):
            ignored.append("reasoning.summary")
        return plan._replace(specs=[_from_text_format(spec) for spec in plan.specs], ignored=tuple(ignored))

    def chat_form(self, *, takes_media: bool = False) -> ResponsesForm:
        """Convert the request into the equivalent chat request.

        Args:
            takes_media: whether the model may take images, audio and files; else they are refused.

        Raises:
            BadRequest: a field is wrong. Fields are checked only as far as the chat request can't check them.
        """
        self._check_state()
        self._check_metadata()
        messages, names = conversation(self.input, self.instructions, takes_media=takes_media)
        offered = offered_tools(self.tools, self.tool_choice)
        has_logprobs = _LOGPROBS in (self.include or ())
        if self.top_logprobs and not has_logprobs:
            expected = f'expected it with "include": ["{_LOGPROBS}"] only'
            raise at("top_logprobs", None, f"{expected}; leave it out, or add that")
        form = None if self.text is None else self.text.format
        fields = {
            **{name: getattr(self, name) for name in StreamFields.__struct_fields__},
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": has_logprobs,
            "top_logprobs": self.top_logprobs if has_logprobs else None,
            "response_format": form.chat_format() if form is not None else None,
            "chat_template_kwargs": self.chat_template_kwargs,
            "tools": offered.tools,
            "tool_choice": offered.choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self._effort,
            "verbosity": None if self.text is None else self.text.verbosity,
        }
        ignored = (*offered.ignored, *self._without_effect())
        return ResponsesForm(fields, {**_NAMES, **names, **offered.places}, ignored, offered.expressions)

    def _without_effect(self) -> list[str]:
        """The fields without effect on any answer, which a client may take for something else."""
        ignored = []
        if self.truncation == "auto":
            ignored.append("truncation")
        if self.context_management:
            ignored.append("context_management")
        if self.service_tier not in (None, "auto", "default"):
            ignored.append("service_tier")
        return ignored

    def _repeated(self, sampling: Sampling | SamplingFields) -> dict[str, Any]:
        """The request fields that an answer repeats, with defaults for absent fields. `sampling` is the sampling of the
        planned sequence, or the request's, whose defaults aren't known."""
        return {
            "model": self.model,
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": {name: label for name, label in (self.metadata or {}).items() if label is not None},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "frequency_penalty": sampling.frequency_penalty or 0.0,
            "presence_penalty": sampling.presence_penalty or 0.0,
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self._effort, "summary": self._summary},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": self._repeated_text(),
            "tool_choice": self.tool_choice or "auto",
            "tools": [_repeated_tool(tool) for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": self.user,
        }

    def _repeated_text(self) -> dict[str, Any]:
        text = self.text or _TextFields()
        verbosity = {} if text.verbosity is None else {"verbosity": text.verbosity}
        return {"format": to_builtins(text.format or TextFormat(type="text")), **verbosity}

    def _check_state(self) -> None:
        keeps = "this server keeps no answers"
        for field in ("store", "background"):
            if getattr(self, field):
                raise at(field, None, f"{keeps}, so no answer can be fetched later; expected false, got true")
        if self.previous_response_id is not None:
            fix = "leave it out, and send the earlier items in input"
            raise at("previous_response_id", None, f"{keeps}, so it can't continue an earlier answer; {fix}")

    def _check_metadata(self) -> None:
        metadata = self.metadata or {}
        if len(metadata) > _MAX_LABELS:
            raise at("metadata", None, f"expected at most {_MAX_LABELS} keys, got {len(metadata)}")
        for key, value in metadata.items():
            path = f"metadata.{key_text(key)}"
            if len(key) > _MAX_KEY:
                raise at(path, None, f"expected a key of at most {_MAX_KEY} characters, got {len(key)}")
            if value is not None and len(value) > _MAX_LABEL:
                raise at(path, None, f"expected at most {_MAX_LABEL} characters, got {len(value)}")


def _repeated_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as an answer repeats it."""
    fields = {"description": None, "parameters": None, "strict": None} if tool.get("type") == "function" else {}
    return {**fields, **tool}


def _from_text_format(spec: SequenceSpec) -> SequenceSpec:
    """The sequence with `text.format` in place of `response_format` as the field of its grammar. The replica's error
    names this field if it refuses the grammar. Other sequences are returned unchanged."""
    if spec.grammar is None or not spec.grammar.field.startswith("response_format"):
        return spec
    return structs.replace(spec, grammar=structs.replace(spec.grammar, field="text.format"))


_NAMES: Final = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "logprobs": "include",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "tool_choice.function": "tool_choice",
}
"""Map from field paths of a chat request to the paths in a responses request."""
