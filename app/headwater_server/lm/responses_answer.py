"""Answers of ``POST /v1/responses``: items of reasoning, text and calls, whole or as events.

Source: OpenAI's API reference.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec
import orjson

from headwater_server.errors import ContextTooLong, HeadwaterError
from headwater_server.lm.openai_answer import Event, shown_tokens
from headwater_server.lm.parts_answer import PartsAnswer
from headwater_server.lm.response_items import (
    CallItem,
    CustomCallItem,
    FunctionCallItem,
    ItemEvents,
    Message,
    ReasoningItem,
)
from headwater_server.lm.response_tools import ToolName
from headwater_server.lm.text.answer_parts import AnswerPart, ReasoningPart
from headwater_server.lm.text.answer_reader import AnswerReading
from headwater_server.lm.text_stream import TokenLogprob, Usage

if TYPE_CHECKING:
    from headwater_server.lm.text.token_texts import TokenTexts

__all__ = ["ReasoningShown", "ResponsesAnswer"]

_DELTA: Final = b"response.output_text.delta"
_DELTA_EVENT: Final = b'{"type":"%b","sequence_number":%%d,%%b,"delta":%%b,"logprobs":[%%b]}' % _DELTA
_Fields: TypeAlias = dict[str, Any]


class ReasoningShown(NamedTuple):
    """How an answer shows the model's reasoning."""

    has_summary: bool = False
    """Whether the text is the item's summary, too."""
    is_carried: bool = False
    """Whether the text is the item's ``encrypted_content``, too."""
    is_shown: bool = True
    """Whether the answer has the reasoning at all."""


class ResponsesAnswer(PartsAnswer):
    """The answer to a `ResponsesRequest`: a sequence of items. Each event of a stream has a name and a number.

    Args:
        repeated: the request fields that the answer repeats, including the model's name.
        texts: the texts of the tokenizer's ids; `None` if another server divides the text into parts, without log
            probabilities.
        reading: how the text is divided into items; `None` if the whole text is a single message.
        names: custom tools, and tools within a namespace, by the name that the model sees.
        reasoning: how the model's reasoning is shown.
    """

    def __init__(
        self,
        repeated: Mapping[str, Any],
        texts: TokenTexts | None,
        reading: AnswerReading | None = None,
        names: Mapping[str, ToolName] = MappingProxyType({}),
        reasoning: ReasoningShown = ReasoningShown(),  # noqa: B008
    ) -> None:
        super().__init__(reading)
        self._texts = texts
        self._is_single = texts is not None and reading is None
        self._names = names
        self._reasoning = reasoning
        self._about = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            **repeated,
        }
        self._number = 0
        """Number of the next event."""
        self._items: list[Message | ReasoningItem | CallItem] = []
        """The items so far. All except the last are complete."""
        self._finish: str | None = None

    def body(self, usage: Usage) -> bytes:
        self._end_items()
        return msgspec.json.encode(self._response(self._status, usage))

    def begin(self) -> list[Event]:
        events = self._begin()
        return events + self._open(Message(0)) if self._is_single else events

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
                events += self._thought(part.text) if self._reasoning.is_shown else []
            elif part.name:
                tool = self._names.get(part.name, ToolName(part.name))
                kind = CustomCallItem if tool.is_custom else FunctionCallItem
                events += self._open(kind(len(self._items), tool, part.id))
            else:
                call = self._items[-1] if self._items else None
                if not isinstance(call, CallItem):
                    raise ValueError("expected a call before its arguments")
                events += self._events(call.add(part.arguments))
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
        if not isinstance(message, Message):
            message = Message(len(self._items))
            events = self._open(message)
        encoded: list[bytes] = []
        if logprobs:
            assert self._texts is not None
            encoded = [orjson.dumps(token) for token in shown_tokens(logprobs, self._texts)]
        message.text.append(text)
        message.logprobs += encoded
        fields = (self._number, message.encoded_place, orjson.dumps(text), b",".join(encoded))
        self._number += 1
        return [*events, (_DELTA, _DELTA_EVENT % fields)]

    def _thought(self, text: str) -> list[Event]:
        """Add reasoning to the last item if it is reasoning, or else begin an item. Returns the events for it."""
        events = []
        item = self._items[-1] if self._items else None
        if not isinstance(item, ReasoningItem):
            has_summary, is_carried, _ = self._reasoning
            item = ReasoningItem(len(self._items), has_summary=has_summary, is_carried=is_carried)
            events = self._open(item)
        return [*events, *self._events(item.add(text))]

    def _open(self, item: Message | ReasoningItem | CallItem) -> list[Event]:
        """End the previous item, and begin this item. Returns the events for both."""
        events = self._close("completed") if self._items else []
        self._items.append(item)
        added = self._event("response.output_item.added", output_index=item.index, item=item.shown())
        return [*events, added, *self._events(item.opening())]

    def _close(self, status: str) -> list[Event]:
        """End the last item. Returns the events for it."""
        item = self._items[-1]
        item.end(status)
        events = self._events(item.closing())
        return [*events, self._event("response.output_item.done", output_index=item.index, item=item.shown())]

    def _end_items(self) -> list[Event]:
        """End the last item. An answer without items gets an empty message. Returns the events for it."""
        events = [] if self._items else self._open(Message(0))
        return events + self._close(self._status)

    def _events(self, events: ItemEvents) -> list[Event]:
        return [self._event(kind, **fields) for kind, fields in events]

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


def _shown_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _shown_error(error: HeadwaterError) -> dict[str, Any]:
    """``error`` of a failed answer. This API has its own list of error codes, and clients know
    ``context_length_exceeded`` besides."""
    code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
    if isinstance(error, ContextTooLong):
        code = "context_length_exceeded"
    return {"code": code, "message": error.message, "param": error.field}
