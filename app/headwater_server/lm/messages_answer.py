"""Answers of ``POST /v1/messages``: blocks of text, reasoning and calls, whole or as events.

Source: Anthropic's API reference.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import orjson

from headwater_server.codecs.faults import key_text
from headwater_server.codecs.wording import PARSE_ERRORS
from headwater_server.errors import CallableFailed, HeadwaterError, anthropic_error
from headwater_server.lm.openai_answer import Event
from headwater_server.lm.parts_answer import PartsAnswer
from headwater_server.lm.text.answer_parts import AnswerPart, CallPart, ReasoningPart
from headwater_server.lm.text.answer_reader import AnswerReading
from headwater_server.lm.text_stream import TokenLogprob, Usage

__all__ = ["MessagesAnswer"]

_SIGNATURE: Final = "headwater"
"""The signature of thinking, which clients send back. It is never checked."""
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""By type of block, the type of its deltas, and the field of their text."""
_DELTA: Final = b"content_block_delta"
_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class MessagesAnswer(PartsAnswer):
    """The answer to a `MessagesRequest`.

    Args:
        model: the model's name.
        reading: how the text is divided into blocks; `None` if the whole text is content, or vLLM has divided it.
        max_tokens: the request's. If an answer ends by its length with fewer tokens, the model's context was full.
        hides_thinking: whether blocks of thinking are empty.
    """

    counts_usage = True

    def __init__(
        self, model: str, reading: AnswerReading | None, max_tokens: int, *, hides_thinking: bool = False
    ) -> None:
        super().__init__(reading)
        self._about = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._max_tokens = max_tokens
        self._hides_thinking = hides_thinking
        self._usage = Usage(0, 0)
        self._blocks: list[_ContentBlock] = []
        """The blocks so far. All except the last are complete."""
        self._finish: str | None = None
        self._stop: str | None = None

    def body(self, usage: Usage) -> bytes:
        blocks = self._blocks
        if blocks and self._finish == "length" and not blocks[-1].is_whole:
            blocks = blocks[:-1]  # the limit has cut a call
        content = [block.shown() for block in blocks or [_ContentBlock(0, "text")]]
        about = {**self._about, "content": content, **self._stopped(usage), "usage": _shown_usage(self.counted(usage))}
        return msgspec.json.encode(about)

    def count(self, usage: Usage) -> None:
        self._usage = usage

    def begin(self) -> list[Event]:
        message: dict[str, Any] = {**self._about, "content": [], "stop_reason": None, "stop_sequence": None}
        return [_event("message_start", message={**message, "usage": _shown_usage(self._usage)})]

    def add(
        self,
        parts: Sequence[AnswerPart],
        finish: str | None,
        stop: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> list[Event]:
        self._finish, self._stop = finish, stop
        events: list[Event] = []
        for part in parts:
            if isinstance(part, str):
                events += self._text("text", part)
            elif isinstance(part, ReasoningPart):
                events += self._text("thinking", "" if self._hides_thinking else part.text)
            else:
                events += self._call(part)
        return events

    def end(self, usage: Usage, error: HeadwaterError | None) -> list[Event]:
        if error is not None:
            return [(b"error", msgspec.json.encode(anthropic_error(error)))]
        events = self._close() if self._blocks else [*self._open(_ContentBlock(0, "text")), *self._close()]
        delta = _event("message_delta", delta=self._stopped(usage), usage=_shown_usage(self.counted(usage)))
        return [*events, delta, _event("message_stop")]

    def _text(self, kind: str, text: str) -> list[Event]:
        """Add text to the last block if it is of this kind, or else begin a block. Returns the events for it."""
        events = []
        if not self._blocks or self._blocks[-1].type_name != kind:
            events = self._open(_ContentBlock(len(self._blocks), kind))
        return [*events, *self._blocks[-1].add(text)]

    def _call(self, part: CallPart) -> list[Event]:
        events = self._open(_ContentBlock(len(self._blocks), "tool_use", part.id, part.name)) if part.name else []
        return [*events, *self._blocks[-1].add(part.arguments)]

    def _open(self, block: _ContentBlock) -> list[Event]:
        """End the previous block, and begin this block. Returns the events for both."""
        events = self._close() if self._blocks else []
        self._blocks.append(block)
        return [*events, _event("content_block_start", index=block.index, content_block=block.opening())]

    def _close(self) -> list[Event]:
        """End the last block. Returns the events for it."""
        block = self._blocks[-1]
        events = []
        if block.type_name == "thinking":
            signature = {"type": "signature_delta", "signature": _SIGNATURE}
            events.append(_event("content_block_delta", index=block.index, delta=signature))
        return [*events, _event("content_block_stop", index=block.index)]

    def _stopped(self, usage: Usage) -> dict[str, str | None]:
        """Why the answer has ended."""
        if self._stop is not None:
            reason = "stop_sequence"
        elif self._finish == "length":
            is_full = usage.completion_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        else:
            reason = "tool_use" if any(block.type_name == "tool_use" for block in self._blocks) else "end_turn"
        return {"stop_reason": reason, "stop_sequence": self._stop}


class _ContentBlock:
    """A block of an answer.

    Args:
        index: its index.
        kind: its type.
        id, name: of a call.
    """

    def __init__(self, index: int, kind: str, id: str = "", name: str = "") -> None:
        self.index = index
        self.type_name = kind
        self._about = {"type": kind, "id": id, "name": name} if kind == "tool_use" else {"type": kind}
        self._texts: list[str] = []
        delta = '{{"type":"content_block_delta","index":{},"delta":{{"type":"{}","{}":'
        self._delta = delta.format(index, *_DELTAS[kind]).encode() + b"%b}}"

    def add(self, text: str) -> list[Event]:
        """Add text, or the JSON of a call's input. Returns the event for it; none if it is empty."""
        if not text:
            return []
        self._texts.append(text)
        return [(_DELTA, self._delta % orjson.dumps(text))]

    def opening(self) -> dict[str, Any]:
        """The block in the event that begins it."""
        if self.type_name == "thinking":
            return {**self._about, "thinking": "", "signature": ""}
        return {**self._about, **({"input": {}} if self.type_name == "tool_use" else {"text": ""})}

    @property
    def is_whole(self) -> bool:
        """Whether the block isn't a call with an input that is no JSON object, as after a cut."""
        try:
            return self.type_name != "tool_use" or _object.decode("".join(self._texts) or "{}") is not None
        except PARSE_ERRORS:
            return False

    def shown(self) -> dict[str, Any]:
        """The whole block.

        Raises:
            CallableFailed: the input of a call is no JSON object.
        """
        text = "".join(self._texts)
        if self.type_name == "text":
            return {**self._about, "text": text}
        if self.type_name == "thinking":
            return {**self._about, "thinking": text, "signature": _SIGNATURE}
        if not self.is_whole:
            name = key_text(self._about["name"])
            raise CallableFailed(f"the model called `{name}` with arguments that are no JSON object")
        return {**self._about, "input": msgspec.Raw((text or "{}").encode())}


def _event(kind: str, **fields: Any) -> Event:
    return kind.encode(), msgspec.json.encode({"type": kind, **fields})


def _shown_usage(usage: Usage) -> dict[str, Any]:
    details = {"output_tokens_details": {"thinking_tokens": usage.reasoning_tokens}} if usage.reasoning_tokens else {}
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        **details,
    }
