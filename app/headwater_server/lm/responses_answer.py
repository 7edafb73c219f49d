"""Answers of ``POST /v1/responses``: items of text and function calls, whole or as events.

Source: OpenAI's API reference.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec
import orjson

from headwater_server.errors import HeadwaterError
from headwater_server.lm.openai_answer import Event, shown_tokens
from headwater_server.lm.parts_answer import PartsAnswer
from headwater_server.lm.text.answer_parts import AnswerPart, ReasoningPart
from headwater_server.lm.text.answer_reader import AnswerReading
from headwater_server.lm.text_stream import TokenLogprob, Usage

if TYPE_CHECKING:
    from headwater_server.lm.text.token_texts import TokenTexts

__all__ = ["ResponsesAnswer"]

_DELTA: Final = b"response.output_text.delta"
_DELTA_EVENT: Final = b'{"type":"%b","sequence_number":%%d,%%b,"delta":%%b,"logprobs":[%%b]}' % _DELTA
_Fields: TypeAlias = dict[str, Any]


class ResponsesAnswer(PartsAnswer):
    """The answer to a `ResponsesRequest`: a sequence of items, each a message or a function call. Each event of a
    stream has a name and a number.

    Args:
        repeated: the request fields that the answer repeats, including the model's name.
        texts: the texts of the tokenizer's ids.
        reading: how the text is divided into items; `None` if the whole text is a single message.
        namespaces: the namespace and name of functions within a namespace, by the name that the model sees.
    """

    def __init__(
        self,
        repeated: Mapping[str, Any],
        texts: TokenTexts,
        reading: AnswerReading | None = None,
        namespaces: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    ) -> None:
        super().__init__(reading)
        self._texts = texts
        self._is_single = reading is None
        self._namespaces = namespaces
        self._about = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            **repeated,
        }
        self._number = 0
        """Number of the next event."""
        self._items: list[_Message | _FunctionCallItem] = []
        """The items so far. All except the last are complete."""
        self._finish: str | None = None

    def body(self, usage: Usage) -> bytes:
        self._end_items()
        return msgspec.json.encode(self._response(self._status, usage))

    def begin(self) -> list[Event]:
        events = self._begin()
        return events + self._open(_Message(0)) if self._is_single else events

    def add(
        self,
        parts: Sequence[AnswerPart],
        finish: str | None,
        stop: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> list[Event]:
        self._finish = finish
        events = []
        for part in parts:
            if isinstance(part, str):
                events += self._text(part, logprobs)
            elif isinstance(part, ReasoningPart):
                continue
            elif part.name:
                namespace, name = self._namespaces.get(part.name, ("", part.name))
                events += self._open(_FunctionCallItem(len(self._items), name, part.id, namespace))
            else:
                call = self._items[-1]
                assert isinstance(call, _FunctionCallItem)
                call.arguments.append(part.arguments)
                events.append(self._event("response.function_call_arguments.delta", **call.place, delta=part.arguments))
        return events

    def end(self, usage: Usage, error: HeadwaterError | None) -> list[Event]:
        if error is not None:
            events = [] if self._number > 0 else self._begin()
            if self._items:
                self._items[-1].end("incomplete")
            failed = self._response("failed", usage, error=_shown_error(error))
            return [*events, self._event("response.failed", response=failed)]
        events = self._end_items()
        response = self._response(self._status, usage)
        return [*events, self._event(f"response.{self._status}", response=response)]

    def _begin(self) -> list[Event]:
        response = self._response("in_progress", None)
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def _text(self, text: str, logprobs: Sequence[TokenLogprob]) -> list[Event]:
        """Add text to the last item if it is a message, or else begin a message. Returns the events for it."""
        events = []
        message = self._items[-1] if self._items else None
        if not isinstance(message, _Message):
            message = _Message(len(self._items))
            events = self._open(message)
        encoded = [orjson.dumps(token) for token in shown_tokens(logprobs, self._texts)] if logprobs else []
        message.text.append(text)
        message.logprobs += encoded
        fields = (self._number, message.encoded_place, orjson.dumps(text), b",".join(encoded))
        self._number += 1
        return [*events, (_DELTA, _DELTA_EVENT % fields)]

    def _open(self, item: _Message | _FunctionCallItem) -> list[Event]:
        """End the previous item, and begin this item. Returns the events for both."""
        events = self._close("completed") if self._items else []
        self._items.append(item)
        added = self._event("response.output_item.added", output_index=item.index, item=item.shown())
        return [*events, added, *[self._event(kind, **fields) for kind, fields in item.opening()]]

    def _close(self, status: str) -> list[Event]:
        """End the last item. Returns the events for it."""
        item = self._items[-1]
        item.end(status)
        events = [self._event(kind, **fields) for kind, fields in item.closing()]
        return [*events, self._event("response.output_item.done", output_index=item.index, item=item.shown())]

    def _end_items(self) -> list[Event]:
        """End the last item. An answer without items gets an empty message. Returns the events for it."""
        events = [] if self._items else self._open(_Message(0))
        return events + self._close(self._status)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return kind.encode(), msgspec.json.encode(event)

    @property
    def _status(self) -> str:
        return "completed" if self._finish == "stop" else "incomplete"

    def _response(self, status: str, usage: Usage | None, *, error: _Fields | None = None) -> _Fields:
        return {
            **self._about,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [item.shown() for item in self._items],
            "usage": None if usage is None else _shown_usage(self.counted(usage)),
        }


class _OutputItem(ABC):
    """An item of the output.

    Args:
        index: the item's index in the output.
        prefix: prefix of the item's id.
    """

    def __init__(self, index: int, prefix: str) -> None:
        self.index = index
        self.id = f"{prefix}_{secrets.token_hex(16)}"
        self.status = "in_progress"
        self.place: _Fields = {"item_id": self.id, "output_index": index}
        """The fields that identify the item in events."""

    def end(self, status: str) -> None:
        """Set the item's final status."""
        self.status = status

    @abstractmethod
    def shown(self) -> _Fields:
        """The JSON of the item so far."""

    def opening(self) -> Sequence[tuple[str, _Fields]]:
        """The events after the event that adds the item."""
        return ()

    @abstractmethod
    def closing(self) -> Sequence[tuple[str, _Fields]]:
        """The events before the event that completes the item."""


class _Message(_OutputItem):
    """A text message."""

    def __init__(self, index: int) -> None:
        super().__init__(index, "msg")
        self.place["content_index"] = 0
        self.encoded_place = orjson.dumps(self.place)[1:-1]
        self.text: list[str] = []
        self.logprobs: list[bytes] = []
        """The tokens' log probabilities as JSON, encoded once: several of the last events repeat them, and they may
        take megabytes."""

    def shown(self) -> _Fields:
        content = [] if self.status == "in_progress" else [self._part()]
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": content}

    def opening(self) -> Sequence[tuple[str, _Fields]]:
        return [("response.content_part.added", {**self.place, "part": self._part()})]

    def closing(self) -> Sequence[tuple[str, _Fields]]:
        part = self._part()
        return [
            ("response.output_text.done", {**self.place, "text": part["text"], "logprobs": part["logprobs"]}),
            ("response.content_part.done", {**self.place, "part": part}),
        ]

    def _part(self) -> _Fields:
        logprobs = msgspec.Raw(b"[%b]" % b",".join(self.logprobs))
        return {"type": "output_text", "text": "".join(self.text), "annotations": [], "logprobs": logprobs}


class _FunctionCallItem(_OutputItem):
    """A function call."""

    def __init__(self, index: int, name: str, call_id: str, namespace: str) -> None:
        super().__init__(index, "fc")
        self._namespace = {"namespace": namespace} if namespace else {}
        self._name = name
        self._call_id = call_id
        self.arguments: list[str] = []

    def end(self, status: str) -> None:
        """Set ``completed`` if the arguments are complete JSON, else ``incomplete``; ``status`` is ignored."""
        try:
            orjson.loads("".join(self.arguments))
        except orjson.JSONDecodeError:
            self.status = "incomplete"
        else:
            self.status = "completed"

    def shown(self) -> _Fields:
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self._call_id,
            "name": self._name,
            **self._namespace,
            "arguments": "".join(self.arguments),
        }

    def closing(self) -> Sequence[tuple[str, _Fields]]:
        return [("response.function_call_arguments.done", {**self.place, "arguments": "".join(self.arguments)})]


def _shown_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _shown_error(error: HeadwaterError) -> dict[str, Any]:
    """``error`` of a failed answer. This API has its own list of error codes."""
    code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
    return {"code": code, "message": error.message, "param": error.field}
