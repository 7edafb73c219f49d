"""The items that an answer of ``POST /v1/responses`` consists of.

Source: OpenAI's API reference, and the Open Responses specification.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec
import orjson

from headwater_server.lm.response_tools import ToolName

__all__ = ["CARRIED", "CallItem", "CustomCallItem", "FunctionCallItem", "ItemEvents", "Message", "ReasoningItem"]

_Fields: TypeAlias = dict[str, Any]
ItemEvents: TypeAlias = Sequence[tuple[str, _Fields]]
"""The types and fields of events."""

CARRIED: Final = "headwater:"
"""The beginning of ``encrypted_content`` that this server makes: the reasoning's text follows, unencrypted."""
_OPENING: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAX_OPENING: Final = 100
"""Maximum number of characters before the value of a custom tool's parameter."""
_MAX_ESCAPE: Final = 12
"""Length of a pair of surrogates as escapes."""
_CHARACTERS: Final = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?:[0-9a-cefA-CEF][0-9a-fA-F]|[dD][0-7])[0-9a-fA-F]{2}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)
"""Whole characters within a JSON string; a pair of surrogates is a character."""


class _OutputItem(ABC):
    """An item of the output.

    Args:
        index: the item's index in the output.
    """

    prefix: str
    """Prefix of the item's id."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.id = f"{self.prefix}_{secrets.token_hex(16)}"
        self.status = "in_progress"
        self.place: _Fields = {"item_id": self.id, "output_index": index}
        """The fields that identify the item in events."""

    def end(self, status: str) -> None:
        """Set the item's final status."""
        self.status = status

    @abstractmethod
    def shown(self) -> _Fields:
        """The JSON of the item so far."""

    def opening(self) -> ItemEvents:
        """The events after the event that adds the item."""
        return ()

    @abstractmethod
    def closing(self) -> ItemEvents:
        """The events before the event that completes the item."""


class Message(_OutputItem):
    """A text message."""

    prefix = "msg"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.place["content_index"] = 0
        self.encoded_place = orjson.dumps(self.place)[1:-1]
        self.text: list[str] = []
        self.logprobs: list[bytes] = []
        """The tokens' log probabilities as JSON, encoded once: several of the last events repeat them, and they may
        take megabytes."""

    def shown(self) -> _Fields:
        content = [] if self.status == "in_progress" else [self._part()]
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": content}

    def opening(self) -> ItemEvents:
        return [("response.content_part.added", {**self.place, "part": self._part()})]

    def closing(self) -> ItemEvents:
        part = self._part()
        return [
            ("response.output_text.done", {**self.place, "text": part["text"], "logprobs": part["logprobs"]}),
            ("response.content_part.done", {**self.place, "part": part}),
        ]

    def _part(self) -> _Fields:
        logprobs = msgspec.Raw(b"[%b]" % b",".join(self.logprobs))
        return {"type": "output_text", "text": "".join(self.text), "annotations": [], "logprobs": logprobs}


class ReasoningItem(_OutputItem):
    """The model's reasoning.

    Args:
        index: the item's index in the output.
        has_summary: whether the text is the summary, too.
        is_carried: whether the text is ``encrypted_content``, too.
    """

    prefix = "rs"

    def __init__(self, index: int, *, has_summary: bool, is_carried: bool) -> None:
        super().__init__(index)
        self._text: list[str] = []
        self._is_carried = is_carried
        content = ("content_part", "reasoning_text", {**self.place, "content_index": 0})
        summary = ("reasoning_summary_part", "reasoning_summary_text", {**self.place, "summary_index": 0})
        self._parts = [content, summary] if has_summary else [content]
        """The places where the text stands: names of the events of a part and of its text, and their fields."""

    def add(self, text: str) -> ItemEvents:
        """Add text. Returns the events for it."""
        self._text.append(text)
        return [(f"response.{name}.delta", {**place, "delta": text}) for _, name, place in self._parts]

    def shown(self) -> _Fields:
        is_ended = self.status != "in_progress"
        content, *summary = [self._part(name) for _, name, _ in self._parts] if is_ended else [None]
        item = {"id": self.id, "type": "reasoning", "status": self.status, "summary": summary}
        item["content"] = [] if content is None else [content]
        if self._is_carried and is_ended:
            item["encrypted_content"] = CARRIED + "".join(self._text)
        return item

    def opening(self) -> ItemEvents:
        return [(f"response.{part}.added", {**place, "part": self._part(name)}) for part, name, place in self._parts]

    def closing(self) -> ItemEvents:
        text = "".join(self._text)
        events = []
        for part, name, place in self._parts:
            events.append((f"response.{name}.done", {**place, "text": text}))
            events.append((f"response.{part}.done", {**place, "part": self._part(name)}))
        return events

    def _part(self, name: str) -> _Fields:
        return {"type": name.replace("reasoning_summary", "summary"), "text": "".join(self._text)}


class CallItem(_OutputItem):
    """A call of a tool.

    Args:
        index: the item's index in the output.
        tool: the tool.
        call_id: the call's id.
    """

    def __init__(self, index: int, tool: ToolName, call_id: str) -> None:
        super().__init__(index)
        namespace = {"namespace": tool.namespace} if tool.namespace else {}
        self.called = {"call_id": call_id, "name": tool.name, **namespace}
        self._pieces: list[str] = []

    @property
    def arguments(self) -> str:
        """The arguments' JSON so far."""
        return "".join(self._pieces)

    def add(self, arguments: str) -> ItemEvents:
        """Add characters of the arguments' JSON. Returns the events for them."""
        self._pieces.append(arguments)
        return ()

    def end(self, status: str) -> None:
        """Set ``completed`` if the arguments are complete JSON, else ``incomplete``; ``status`` is ignored."""
        self.status = "completed" if _is_json(self.arguments) else "incomplete"


class FunctionCallItem(CallItem):
    """A call of a function."""

    prefix = "fc"

    def add(self, arguments: str) -> ItemEvents:
        super().add(arguments)
        return [("response.function_call_arguments.delta", {**self.place, "delta": arguments})]

    def shown(self) -> _Fields:
        call = {"id": self.id, "type": "function_call", "status": self.status}
        return {**call, **self.called, "arguments": self.arguments}

    def closing(self) -> ItemEvents:
        return [("response.function_call_arguments.done", {**self.place, "arguments": self.arguments})]


class CustomCallItem(CallItem):
    """A call of a custom tool. Its input is the value of the function's parameter, decoded as it arrives. Arguments
    without the parameter at their beginning are the input as they are."""

    prefix = "ctc"

    def __init__(self, index: int, tool: ToolName, call_id: str) -> None:
        super().__init__(index, tool, call_id)
        self._input: list[str] = []
        self._rest: str | None = ""
        """Characters of the arguments that are not decoded yet; None: no more are decoded."""
        self._is_inside = False
        """Whether the rest is within the value."""

    def add(self, arguments: str) -> ItemEvents:
        super().add(arguments)
        if self._rest is None:
            return ()
        self._rest += arguments
        if not self._is_inside:
            opening = _OPENING.match(self._rest)
            if opening is None:
                self._rest = self._rest if len(self._rest) < _MAX_OPENING else None
                return ()
            self._is_inside, self._rest = True, self._rest[opening.end() :]
        end = _end_of_characters(self._rest)
        text, self._rest = self._rest[:end], self._rest[end:]
        if self._rest.startswith('"') or len(self._rest) > _MAX_ESCAPE:  # the value's end, or no character begins here
            self._rest = None
        return self._add(json.loads(f'"{text}"', strict=False)) if text else ()

    def _add(self, text: str) -> ItemEvents:
        self._input.append(text)
        return [("response.custom_tool_call_input.delta", {**self.place, "delta": text})]

    def end(self, status: str) -> None:
        super().end(status)
        if not self._is_inside and self.status == "completed":
            self._input.append(self.arguments)

    def shown(self) -> _Fields:
        call = {"id": self.id, "type": "custom_tool_call", "status": self.status}
        return {**call, **self.called, "input": "".join(self._input)}

    def closing(self) -> ItemEvents:
        text = "".join(self._input)
        done = ("response.custom_tool_call_input.done", {**self.place, "input": text})
        if self._is_inside or not text:
            return [done]
        return [("response.custom_tool_call_input.delta", {**self.place, "delta": text}), done]


def _end_of_characters(text: str) -> int:
    match = _CHARACTERS.match(text)
    assert match is not None
    return match.end()


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
