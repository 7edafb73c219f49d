"""Requests and answers of ``POST /v1/responses``.

Source: OpenAI's API reference. A request is a chat in other words: it becomes a `ChatRequest`, which makes the plan.
Nothing is kept on the server, so what needs an earlier answer is refused. The extensions are those of `app.lm.chat`.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

import msgspec
import orjson
from msgspec import Meta, structs, to_builtins

from app.codecs.faults import at, key_text, shown
from app.errors import BadRequest, HeadwaterError
from app.lm.answer_grammar import JsonSchemaFormat, ResponseFormat, Schema
from app.lm.answers import AnswerForm, Event, shown_tokens
from app.lm.chat import ChatRequest, TemplateVariables
from app.lm.sampling_fields import StreamFields
from app.lm.sequence import SequenceSpec
from app.lm.text_plan import TextPlan
from app.lm.text_stream import TextPiece, Usage
from inference.engine import EngineLimits, Sampling, TopLogprobs

if TYPE_CHECKING:
    from app.lm.text.language import LanguageText
    from app.lm.text.token_texts import TokenTexts

__all__ = ["ResponsesAnswer", "ResponsesRequest"]

_DEFAULTS: Final = Sampling()
_LOGPROBS: Final = "message.output_text.logprobs"
_DELTA: Final = b"response.output_text.delta"
_DELTA_EVENT: Final = b'{"type":"%b","sequence_number":%%d,%%b,"delta":%%b,"logprobs":[%%b]}' % _DELTA


class ResponsesAnswer(AnswerForm):
    """The answer to a request: one message with one text. Each event of a stream has a name and a number.

    Args:
        request: what the answer repeats of it.
        texts: the tokenizer's.
    """

    def __init__(self, request: ResponsesRequest, texts: TokenTexts) -> None:
        self._texts = texts
        self._about = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": request.model,
            **request.repeated(),
        }
        self._item_id = f"msg_{secrets.token_hex(16)}"
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._encoded_place = orjson.dumps(self._place)[1:-1]
        self._number = 0
        """Of the next event."""
        self._text: list[str] = []
        self._logprobs: list[bytes] = []
        """The tokens', encoded: there may be megabytes of them, which several of the last events repeat."""
        self._finish: str | None = None

    def whole(self, texts: Sequence[TextPiece], usage: Usage) -> bytes:
        self._take(*texts)
        return orjson.dumps(self._ended(usage))

    def begin(self) -> list[Event]:
        return [
            *self._opened(),
            self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
            self._event("response.content_part.added", **self._place, part=self._part()),
        ]

    def piece(self, place: int, piece: TextPiece) -> list[Event]:
        logprobs = self._take(piece)
        if not piece.text and not logprobs:
            return []
        event = _DELTA_EVENT % (self._number, self._encoded_place, orjson.dumps(piece.text), b",".join(logprobs))
        self._number += 1
        return [(_DELTA, event)]

    def end(self, usage: Usage, error: HeadwaterError | None) -> list[Event]:
        if error is not None:
            has_begun = self._number > 0
            events = [] if has_begun else self._opened()
            output = [self._item("incomplete", [self._part()])] if has_begun else []
            failed = self._response("failed", output, usage, error=_shown_error(error))
            return [*events, self._event("response.failed", response=failed)]
        response = self._ended(usage)
        (item,) = response["output"]
        (part,) = item["content"]
        return [
            self._event("response.output_text.done", **self._place, text=part["text"], logprobs=part["logprobs"]),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{response['status']}", response=response),
        ]

    def _take(self, piece: TextPiece) -> list[bytes]:
        """Add a piece to the text; its tokens, encoded."""
        self._text.append(piece.text)
        logprobs = []
        if piece.logprobs:
            logprobs = [orjson.dumps(token) for token in shown_tokens(piece.logprobs, self._texts)]
            self._logprobs += logprobs
        self._finish = piece.finish
        return logprobs

    def _opened(self) -> list[Event]:
        response = self._response("in_progress", [], None)
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return kind.encode(), orjson.dumps(event)

    def _ended(self, usage: Usage) -> dict[str, Any]:
        status = "completed" if self._finish == "stop" else "incomplete"
        return self._response(status, [self._item(status, [self._part()])], usage)

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: Usage | None, *, error: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {
            **self._about,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": None if usage is None else _shown_usage(usage),
        }

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self) -> dict[str, Any]:
        logprobs = orjson.Fragment(b"[%b]" % b",".join(self._logprobs))
        return {"type": "output_text", "text": "".join(self._text), "annotations": [], "logprobs": logprobs}


def _shown_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _shown_error(error: HeadwaterError) -> dict[str, Any]:
    """``error`` of an answer that failed: its codes are a list of their own."""
    code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
    return {"code": code, "message": error.message, "param": error.field}


_ROLES: Final = ("developer", "system", "user", "assistant")
_TEXT_KINDS: Final = ("input_text", "output_text")
_NOT_FOR_TEMPLATES: Final = frozenset({"type", "id", "status", "phase"})
"""Fields of a message that say nothing to a chat template."""
_MAX_LABELS: Final = 16
_MAX_KEY: Final = 64
_MAX_LABEL: Final = 512

_PART: Final = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"type": "string", "enum": list(_TEXT_KINDS)}, "text": {"type": "string"}},
}
_ITEM: Final = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "type": {"type": "string", "enum": ["message"]},
        "role": {"type": "string", "enum": list(_ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
    },
}
_LABELS: Final = {
    "maxProperties": _MAX_LABELS,
    "propertyNames": {"maxLength": _MAX_KEY},
    "additionalProperties": {"type": "string", "maxLength": _MAX_LABEL},
}
"""For the OpenAPI schema, as those above."""
_NO_TOOLS: Final = {"expected": "an empty array, since this model does not support tools"}
_Label: TypeAlias = Annotated[str, Meta(max_length=_MAX_LABEL, description="A label, without effect")]


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """``text.format``: a chat's ``response_format``, in which a schema stands one level deeper."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None

    def chat_format(self) -> ResponseFormat:
        """The same for a chat.

        Raises:
            BadRequest: a schema has no name, or a name no schema's type.
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
    verbosity: None = None


class ResponsesRequest(StreamFields, kw_only=True):
    """The body of a request."""

    input: str | Annotated[list[Any], Meta(extra_json_schema={"items": _ITEM})]
    instructions: Annotated[str | None, Meta(description="A system message before the input")] = None
    max_output_tokens: Annotated[int, Meta(ge=1, description="Default: as many as fit")] | None = None
    text: _TextFields | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: TopLogprobs | None = None
    truncation: Literal["disabled"] | None = None
    store: Annotated[bool | None, Meta(description="No answer is kept: only false is supported")] = None
    background: Annotated[bool | None, Meta(description="Only false is supported")] = None
    previous_response_id: Annotated[str | None, Meta(description="Not supported: send the items themselves")] = None
    tools: Annotated[list[Any], Meta(max_length=0, extra=_NO_TOOLS)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[str, str] | None, Meta(description="Labels", extra_json_schema=_LABELS)] = None
    user: _Label | None = None
    safety_identifier: _Label | None = None
    prompt_cache_key: _Label | None = None
    service_tier: Literal["auto", "default"] | None = None
    chat_template_kwargs: TemplateVariables = None
    access_programs: None = None
    context_management: None = None
    conversation: None = None
    image: None = None
    max_tokens: None = None
    max_tool_calls: None = None
    moderation: None = None
    n: None = None
    prompt: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    reasoning: None = None

    def answer_form(self, plan: TextPlan, texts: TokenTexts) -> ResponsesAnswer:
        """The form of the answer to this request, of which `plan` made the plan."""
        return ResponsesAnswer(self, texts)

    def plan(self, text: LanguageText, limits: EngineLimits) -> TextPlan:
        """Check the request, and turn it into tokens. Takes too long for the event loop.

        Raises:
            BadRequest: a field is wrong, or asks for more than the model can take.
        """
        self._check_state()
        self._check_metadata()
        messages, fields = self._conversation()
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
        )
        try:
            plan = chat.plan(text, limits)
        except BadRequest as error:
            raise _renamed(error, fields) from None
        return plan._replace(specs=[_from_text_format(spec) for spec in plan.specs])

    def repeated(self) -> dict[str, Any]:
        """The fields that an answer repeats, with their defaults."""
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": None, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": _DEFAULTS.temperature if self.temperature is None else self.temperature,
            "text": {"format": to_builtins((self.text and self.text.format) or TextFormat(type="text"))},
            "tool_choice": self.tool_choice or "auto",
            "tools": [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": _DEFAULTS.top_p if self.top_p is None else self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }

    def _check_state(self) -> None:
        keeps = "this server keeps no answers"
        if self.store:
            raise at("store", None, f"{keeps}, so none can be asked for later; expected false, got true")
        if self.background:
            raise at("background", None, f"{keeps}, so none can be asked for later; expected false, got true")
        if self.previous_response_id is not None:
            fix = "leave it out, and send the earlier items in input"
            raise at("previous_response_id", None, f"{keeps}, so there is none to go on from; {fix}")

    def _check_metadata(self) -> None:
        given = self.metadata or {}
        if len(given) > _MAX_LABELS:
            raise at("metadata", None, f"expected at most {_MAX_LABELS} keys, got {len(given)}")
        for key, value in given.items():
            path = f"metadata.{key_text(key)}"
            if len(key) > _MAX_KEY:
                raise at(path, None, f"expected a key of at most {_MAX_KEY} characters, got {len(key)}")
            if len(value) > _MAX_LABEL:
                raise at(path, None, f"expected at most {_MAX_LABEL} characters, got {len(value)}")

    def _conversation(self) -> tuple[list[Any], list[str]]:
        """The messages of a chat, and the field that each comes from."""
        messages: list[Any] = []
        fields = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
            fields.append("instructions")
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
            fields.append("input")
            return messages, fields
        for n, item in enumerate(self.input):
            fields.append(f"input[{n}]")
            messages.append(_chat_message(item, fields[-1]))
        return messages, fields


def _chat_message(item: object, path: str) -> dict[str, Any]:
    """An item of the input as a chat's message; what both have in common, the chat checks."""
    if not isinstance(item, dict):
        raise at(path, None, f"expected a message with 'role' and 'content', got {shown(item)}")
    if item.get("type") not in (None, "message"):
        expected = "expected 'message', the only kind of item this model takes"
        raise at(f"{path}.type", None, f"{expected}, got {shown(item['type'])}")
    if item.get("role") not in _ROLES:
        raise at(f"{path}.role", None, f"expected one of {', '.join(_ROLES)}, got {shown(item.get('role'))}")
    content = item.get("content")
    if isinstance(content, list):
        content = [_chat_part(part, f"{path}.content[{n}]") for n, part in enumerate(content)]
    return {**{name: value for name, value in item.items() if name not in _NOT_FOR_TEMPLATES}, "content": content}


def _chat_part(part: object, path: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        expected = 'a content part like {"type": "input_text", "text": "..."}'
        raise at(path, None, f"expected {expected}, got {shown(part)}")
    if part.get("type") not in _TEXT_KINDS:
        expected = "'input_text' or 'output_text', the only kinds of content this model takes"
        raise at(f"{path}.type", None, f"expected {expected}, got {shown(part.get('type'))}")
    return {"type": "text", "text": part.get("text")}


def _from_text_format(spec: SequenceSpec) -> SequenceSpec:
    """The sequence with `text.format` as its grammar's field, which the replica names if it refuses the grammar."""
    if spec.grammar is None or not spec.grammar.field.startswith("response_format"):
        return spec
    return structs.replace(spec, grammar=structs.replace(spec.grammar, field="text.format"))


_MESSAGE: Final = re.compile(r"messages\[(\d+)\]")
_FIELD: Final = re.compile(r"messages|max_completion_tokens|response_format(\.json_schema)?|logprobs")
_FIELDS: Final = {"messages": "input", "max_completion_tokens": "max_output_tokens", "logprobs": "include"}


def _renamed(error: BadRequest, fields: Sequence[str]) -> BadRequest:
    """The error of a chat request, by the names of this one's fields.

    Args:
        error: the chat's.
        fields: where each of its messages comes from.
    """
    path = error.field or ""
    field = path
    if found := _MESSAGE.match(path):
        field = fields[int(found[1])] + path[found.end() :]
    elif found := _FIELD.match(path):
        field = _FIELDS.get(found[0], "text.format") + path[found.end() :]
    said = error.message.removeprefix(path).replace(" in messages, and an answer", " in input, and an answer", 1)
    return type(error)(field + said, field=field)
