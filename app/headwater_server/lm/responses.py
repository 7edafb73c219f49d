"""Requests of ``POST /v1/responses``.

Source: OpenAI's API reference. A request is converted into the equivalent `ChatRequest`, which makes the plan. The
server stores nothing, so requests that refer to an earlier answer are refused. A request may also have the extensions
that `headwater_server.lm.chat` lists, and the fields that OpenAI has for chats only: ``stop``, ``seed``,
``logit_bias``, ``presence_penalty`` and ``frequency_penalty``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import msgspec
import orjson
from msgspec import Meta, structs, to_builtins

from headwater.engine import EngineLimits, Sampling, TopLogprobs
from headwater_server.codecs.faults import at, key_text, shown
from headwater_server.errors import BadRequest
from headwater_server.lm.answer_grammar import JsonSchemaFormat, ResponseFormat, Schema
from headwater_server.lm.chat import ChatRequest, TemplateVariables, Verbosity
from headwater_server.lm.reasoning_fields import Effort
from headwater_server.lm.renamed_fields import own_path, renamed
from headwater_server.lm.response_tools import chat_tool, flat_name, offered_tools
from headwater_server.lm.responses_answer import ResponsesAnswer
from headwater_server.lm.sampling_fields import ONLY_TEXTS, StreamFields
from headwater_server.lm.sequence import SequenceSpec
from headwater_server.lm.text_plan import TextPlan
from headwater_server.lm.tools import CHOICE_SCHEMA, TOOLS_SCHEMA

if TYPE_CHECKING:
    from headwater_server.lm.text.language import LanguageText
    from headwater_server.lm.text.token_texts import TokenTexts

__all__ = ["ResponsesRequest"]

_LOGPROBS: Final = "message.output_text.logprobs"

_ROLES: Final = ("developer", "system", "user", "assistant")
_TEXT_KINDS: Final = ("input_text", "output_text")
_NOT_FOR_TEMPLATES: Final = frozenset({"type", "id", "status", "phase", "call_id", "output", "tool_calls"})
"""Fields of an item that chat templates don't use, or that have another place in a chat message."""
_CALLS: Final = ("function_call", "custom_tool_call")
_RESULTS: Final = ("function_call_output", "custom_tool_call_output")
_MAX_LABELS: Final = 16
_MAX_KEY: Final = 64
_MAX_LABEL: Final = 512

_PART: Final = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"type": "string", "enum": list(_TEXT_KINDS)}, "text": {"type": "string"}},
}
_TEXT: Final = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}


def _object(kind: str, required: Sequence[str], **fields: Any) -> dict[str, Any]:
    properties = {"type": {"type": "string", "enum": [kind]}, **fields}
    return {"type": "object", "required": required, "properties": properties}


_STRING: Final = {"type": "string"}
_ITEM: Final = {
    "anyOf": [
        _object("message", ["role", "content"], role={"type": "string", "enum": list(_ROLES)}, content=_TEXT),
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


_TOOLS: Final = {**TOOLS_SCHEMA, "items": _flat(TOOLS_SCHEMA["items"])}
_CHOICE: Final = {"anyOf": [CHOICE_SCHEMA["anyOf"][0], _flat(CHOICE_SCHEMA["anyOf"][1])]}
Summary: TypeAlias = Annotated[Literal["auto", "concise", "detailed"], Meta(description="Without effect")]
_NO_CONTEXT: Final = {"expected": "an empty array, since this server cuts no conversation"}
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
    service_tier: Literal["auto", "default"] | None = None
    chat_template_kwargs: TemplateVariables = None
    access_programs: None = None
    context_management: Annotated[list[Any], Meta(max_length=0, extra=_NO_CONTEXT)] | None = None
    conversation: None = None
    image: None = None
    max_tokens: None = None
    max_tool_calls: Annotated[int | None, Meta(description="Without effect: it is for OpenAI's own tools")] = None
    moderation: None = None
    n: Literal[1] | None = None
    prompt: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: Annotated[str | None, Meta(description="Without effect")] = None
    reasoning: _Reasoning | None = None
    client_metadata: Annotated[
        dict[str, str | None] | None, Meta(description="Labels, without effect", extra_json_schema=ONLY_TEXTS)
    ] = None

    @property
    def _effort(self) -> Effort | None:
        return None if self.reasoning is None else self.reasoning.effort

    def answer_form(self, plan: TextPlan, texts: TokenTexts) -> ResponsesAnswer:
        """The form of the answer to this request. `plan` and `texts` must come from this request and its model."""
        namespaces = offered_tools(self.tools, self.tool_choice).namespaces
        return ResponsesAnswer(self._repeated(plan.specs[0].sampling), texts, plan.reading, namespaces)

    def plan(self, text: LanguageText, limits: EngineLimits) -> TextPlan:
        """Check the request, and convert it into tokens. Takes too long for the event loop.

        Raises:
            BadRequest: a field is wrong, or exceeds a limit of the model.
        """
        self._check_state()
        self._check_metadata()
        messages, names = self._conversation()
        offered = offered_tools(self.tools, self.tool_choice)
        names |= offered.places
        has_logprobs = _LOGPROBS in (self.include or ())
        if self.top_logprobs and not has_logprobs:
            expected = f'expected it with "include": ["{_LOGPROBS}"] only'
            raise at("top_logprobs", None, f"{expected}; leave it out, or add that")
        form = None if self.text is None else self.text.format
        chat = ChatRequest(
            **{name: getattr(self, name) for name in StreamFields.__struct_fields__},
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            logprobs=has_logprobs,
            top_logprobs=self.top_logprobs if has_logprobs else None,
            response_format=form.chat_format() if form is not None else None,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=offered.tools,
            tool_choice=chat_tool(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self._effort,
            verbosity=None if self.text is None else self.text.verbosity,
        )
        try:
            plan = chat.plan(text, limits, prompt="input")
        except BadRequest as error:
            raise renamed(error, names) from None
        if has_logprobs and plan.reading is not None:
            expected = "this model does not support log probabilities of an answer that may reason or call tools"
            raise at("include", None, f'{expected}; leave one of them out, or set "tool_choice": "none"')
        ignored = [*offered.ignored, *(own_path(path, names) for path in plan.ignored)]
        if self.reasoning is not None and (self.reasoning.summary or self.reasoning.generate_summary):
            ignored.append("reasoning.summary")
        if self.truncation == "auto":
            ignored.append("truncation")
        return plan._replace(specs=[_from_text_format(spec) for spec in plan.specs], ignored=tuple(ignored))

    def _repeated(self, sampling: Sampling) -> dict[str, Any]:
        """The request fields that an answer repeats, with defaults for absent fields. `sampling` is the sampling of the
        planned sequence."""
        return {
            "model": self.model,
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": {name: label for name, label in (self.metadata or {}).items() if label is not None},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self._effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": to_builtins((self.text and self.text.format) or TextFormat(type="text"))},
            "tool_choice": self.tool_choice or "auto",
            "tools": [_repeated_tool(tool) for tool in self.tools or ()],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": self.user,
        }

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

    def _conversation(self) -> tuple[list[Any], dict[str, str]]:
        """The messages of the equivalent chat request, and a map from field paths of the chat request to the paths in
        this request, for the messages and the fields in `_NAMES`.

        Raises:
            BadRequest: an item is wrong; its fields are checked only as far as the chat request can't check them.
        """
        messages: list[Any] = []
        names = dict(_NAMES)
        reasoning: str | None = None
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
            names["messages[0]"] = "instructions"
        if isinstance(self.input, str):
            names[f"messages[{len(messages)}]"] = "input"
            messages.append({"role": "user", "content": self.input})
            return messages, names
        for n, item in enumerate(self.input):
            path = f"input[{n}]"
            kind = item.get("type") if isinstance(item, dict) else None
            if kind == "reasoning":
                reasoning = _reasoning(item, path)
                continue
            if kind in _CALLS:
                _add_call(item, path, messages, names)
                _think(messages[-1], reasoning)
                reasoning = None
                continue
            place = f"messages[{len(messages)}]"
            names[place] = path
            if kind in _RESULTS:
                names |= {f"{place}.tool_call_id": f"{path}.call_id", f"{place}.content": f"{path}.output"}
                messages.append(_chat_result(item, path))
            else:
                messages.append(_chat_message(item, path))
            _think(messages[-1], reasoning)
            reasoning = None
        return messages, names


def _reasoning(item: dict[str, Any], path: str) -> str | None:
    """The text of an item with the model's reasoning: its content, or else its summary; None if it has no text."""
    for field in ("content", "summary"):
        parts = item.get(field)
        if parts is None:
            continue
        if not isinstance(parts, list):
            raise at(f"{path}.{field}", None, f"expected an array of texts, got {shown(parts)}")
        for n, part in enumerate(parts):
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise at(f"{path}.{field}[{n}]", None, f"expected an object with a text, got {shown(part)}")
        if parts:
            return "\n".join(part["text"] for part in parts)
    return None


def _think(message: dict[str, Any], reasoning: str | None) -> None:
    """Give the reasoning before a message to it, if it is the assistant's; else the reasoning is dropped."""
    if reasoning is not None and message["role"] == "assistant":
        message.setdefault("reasoning_content", reasoning)


def _repeated_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as an answer repeats it."""
    fields = {"description": None, "parameters": None, "strict": None} if tool.get("type") == "function" else {}
    return {**fields, **tool}


def _add_call(item: dict[str, Any], path: str, messages: list[Any], names: dict[str, str]) -> None:
    """Add a function call to the last message if it is the assistant's, or else to a new assistant message."""
    if not messages or messages[-1]["role"] != "assistant":
        names[f"messages[{len(messages)}]"] = path
        messages.append({"role": "assistant", "content": None})
    calls = messages[-1].setdefault("tool_calls", [])
    place = f"messages[{len(messages) - 1}].tool_calls[{len(calls)}]"
    names |= {place: path, f"{place}.id": f"{path}.call_id", f"{place}.function": path}
    name, arguments = flat_name(item.get("name"), item.get("namespace")), item.get("arguments")
    if item.get("type") == "custom_tool_call":
        arguments = orjson.dumps({"input": item.get("input")}).decode()
    function = {"name": name, "arguments": arguments}
    calls.append({"id": item.get("call_id"), "type": "function", "function": function})


def _chat_result(item: dict[str, Any], path: str) -> dict[str, Any]:
    """Convert an item with a function's result into a chat message. The chat request checks its content."""
    if not isinstance(item.get("call_id"), str):
        raise at(f"{path}.call_id", None, f"expected a string, got {shown(item.get('call_id'))}")
    return {**_rest(item), "role": "tool", "tool_call_id": item["call_id"], "content": _content(item, "output", path)}


def _chat_message(item: object, path: str) -> dict[str, Any]:
    """Convert an item of the input into a chat message. The chat request checks the fields that both forms share."""
    if not isinstance(item, dict):
        raise at(path, None, f"expected a message with 'role' and 'content', got {shown(item)}")
    if item.get("type") not in (None, "message"):
        expected = "expected 'message', 'reasoning', 'function_call' or 'function_call_output'"
        raise at(f"{path}.type", None, f"{expected}, the kinds of items this model takes, got {shown(item['type'])}")
    if item.get("role") not in _ROLES:
        raise at(f"{path}.role", None, f"expected one of {', '.join(_ROLES)}, got {shown(item.get('role'))}")
    if item.get("tool_calls") is not None:
        raise at(f"{path}.tool_calls", None, "expected each call as an item of the type 'function_call'; leave it out")
    return {**_rest(item), "content": _content(item, "content", path)}


def _rest(item: dict[str, Any]) -> dict[str, Any]:
    """The fields of an item that are passed to the chat template unchanged."""
    return {name: value for name, value in item.items() if name not in _NOT_FOR_TEMPLATES}


def _content(item: dict[str, Any], field: str, path: str) -> object:
    content = item.get(field)
    if isinstance(content, list):
        return [_chat_part(part, f"{path}.{field}[{n}]") for n, part in enumerate(content)]
    return content


def _chat_part(part: object, path: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        expected = 'a content part like {"type": "input_text", "text": "..."}'
        raise at(path, None, f"expected {expected}, got {shown(part)}")
    if part.get("type") not in _TEXT_KINDS:
        expected = "'input_text' or 'output_text', the only kinds of content this model takes"
        raise at(f"{path}.type", None, f"expected {expected}, got {shown(part.get('type'))}")
    return {"type": "text", "text": part.get("text")}


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
