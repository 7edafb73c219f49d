"""Reads answers, complete JSON or streams of server-sent events, and reports the faults in them.

Sources: the HTML standard's section on server-sent events; OpenAI's chat and text completions; Triton's generate
extension.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple

import msgspec

__all__ = ["LONGEST_REASON", "EventParser", "Fault", "Sample", "TokenReader", "answer_fault", "failed_status"]

LONGEST_REASON: Final = 160
"""Maximum length of a fault's reason."""
_ID: Final = re.compile(r"[0-9a-f]{16,}")
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Fault(NamedTuple):
    """A kind of error; equal faults are counted together."""

    kind: str
    """``status``: a status other than 200; ``connect``: no connection; ``reset``: the connection ended before the
    answer; ``timeout``: no complete answer in time; ``bad answer``: status 200, but the answer violates the protocol;
    ``stream``: an error among the events of a stream."""
    status: int | None
    """The status of the answer, or of the error event in a stream; None without a status."""
    reason: str

    def __str__(self) -> str:
        kind = self.kind if self.status is None else f"{self.kind} {self.status}"
        return f"{kind}: {self.reason}" if self.reason else kind


def failed_status(status: int | None, body: bytes, kind: str = "status") -> Fault:
    """The fault of an error answer. Ids in its reason are masked, so that equal faults are counted together."""
    reason = body.decode(errors="replace")
    try:
        content = msgspec.json.decode(body)
    except _UNREADABLE:
        content = None
    if isinstance(content, dict):
        error = content.get("error", content.get("detail", ""))
        reason = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    lines = reason.splitlines()
    return Fault(kind, status, _ID.sub("…", lines[0])[:LONGEST_REASON] if lines else "")


class _InferAnswer(msgspec.Struct):
    outputs: msgspec.Raw


_answer: Final = msgspec.json.Decoder(_InferAnswer)


def answer_fault(body: bytes, json_length: int | None) -> Fault | None:
    """The fault of an inference answer with status 200; None if it has no fault. The tensors are not decoded, since
    decoding would cost as much as the request itself.

    Args:
        body: the answer.
        json_length: the number of leading bytes that are JSON; None: the whole answer.
    """
    try:
        _answer.decode(body if json_length is None else memoryview(body)[:json_length])
    except _UNREADABLE as error:
        return Fault("bad answer", None, f"not an inference answer: {error}"[:LONGEST_REASON])
    return None


class EventParser:
    """Splits a stream of bytes into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The events completed by this data."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
        return events


class _Function(msgspec.Struct):
    arguments: str | None = None


class _ToolCallDelta(msgspec.Struct):
    index: int = 0
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCallDelta] | None = None


class _ChunkChoice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _ChunkUsage(msgspec.Struct):
    completion_tokens: int = 0


class _OpenAiEvent(msgspec.Struct):
    choices: list[_ChunkChoice] = []
    usage: _ChunkUsage | None = None
    error: Any = None


class _GenerateEvent(msgspec.Struct):
    final: bool = False
    error: Any = None
    status: int | str | None = None
    head: str | None = None
    text_output: str | None = None
    completion_tokens: int | None = None


_openai_event: Final = msgspec.json.Decoder(_OpenAiEvent)
_generate_event: Final = msgspec.json.Decoder(_GenerateEvent)


class TokenReader:
    """Reads a stream: the number and the times of its tokens, and its fault.

    Args:
        mode: a streaming mode of `headwater_server.cli.bench.job.PATHS`.
    """

    def __init__(self, mode: str) -> None:
        self._parser = EventParser()
        self._read = self._generate if mode == "stream" else self._openai
        self._now_s = 0.0
        self._fault: Fault | None = None
        self.is_done = False
        """Whether the stream's last event has come."""
        self.times_s: list[float] = []
        """The times at which events with text or with a result arrived."""
        self.reported_tokens: int | None = None
        """The number of tokens that the server reports; None if it reports no number."""
        self._finish_reason: str | None = None
        self._content: list[str] = []
        self._arguments: dict[int, list[str]] = {}

    @property
    def ending(self) -> str:
        """How an OpenAI answer with a single choice ended.

        ``cut``: the answer did not finish by itself. Otherwise ``calls``: it has calls of tools, and the arguments of
        all calls are JSON objects; ``json``: it has no calls, and its content is JSON; ``other``: anything else.
        """
        if self._finish_reason not in ("stop", "tool_calls"):
            return "cut"
        texts = list(self._arguments.values()) or [self._content]
        try:
            # Parsed as floats, integers may have any number of digits.
            values = [json.loads("".join(text), parse_int=float) for text in texts]
        except (ValueError, RecursionError):
            return "other"
        if not self._arguments:
            return "json"
        return "calls" if all(isinstance(value, dict) for value in values) else "other"

    @property
    def tokens(self) -> int:
        """The number of tokens that the server reports; if it reports no number, the number of events with text."""
        return self.reported_tokens if self.reported_tokens is not None else len(self.times_s)

    def feed(self, data: bytes, now_s: float) -> None:
        """Read data that arrived at ``now_s``."""
        self._now_s = now_s
        for event in self._parser.feed(data):
            try:
                self._read(event)
            except _UNREADABLE:
                self._note(Fault("bad answer", None, f"invalid event: {event[:60].decode('latin-1')}"))

    def end(self) -> Fault | None:
        """Return the fault of the stream, which has ended; None if it has no fault."""
        if self._fault is None and not self.is_done:
            return Fault("bad answer", None, "the stream ended without its last event")
        return self._fault

    def _note(self, fault: Fault) -> None:
        self._fault = self._fault or fault

    def _openai(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        event = _openai_event.decode(data)
        if event.error is not None:
            self._note(failed_status(None, data, "stream"))
        if event.usage is not None:
            self.reported_tokens = event.usage.completion_tokens
        has_text = False
        for choice in event.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
            has_text = has_text or bool(choice.text)
            if (delta := choice.delta) is None:
                continue
            has_text = has_text or bool(delta.content or delta.reasoning_content or delta.tool_calls)
            if delta.content:
                self._content.append(delta.content)
            for call in delta.tool_calls or ():
                arguments = call.function.arguments if call.function is not None else None
                self._arguments.setdefault(call.index, []).append(arguments or "")
        if has_text:
            self.times_s.append(self._now_s)

    def _generate(self, data: bytes) -> None:
        event = _generate_event.decode(data)
        if event.completion_tokens is not None:
            self.reported_tokens = event.completion_tokens
        if event.final:
            self.is_done = True
        elif event.error is not None and event.head is not None:
            self._note(Fault("stream", None, f"head {event.head}: {event.status}"))
        elif event.error is not None:
            self._note(failed_status(event.status if isinstance(event.status, int) else None, data, "stream"))
        elif event.text_output != "":
            self.times_s.append(self._now_s)


class Sample(NamedTuple):
    """A request and its outcome; times are of `time.perf_counter`."""

    fault: Fault | None
    """The fault; None for a good answer."""
    sent_s: float = 0.0
    """When the request was sent; 0 if it was not sent."""
    ended_s: float = 0.0
    """When the last byte of the answer arrived; 0 without an answer."""
    stream: TokenReader | None = None
