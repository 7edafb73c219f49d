"""Sends one request and reads its answer, whole or as a stream of server-sent events.

Sources: the HTML standard's section on server-sent events; OpenAI's chat and text completions; Triton's generate
extension.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from app.cli.bench.connection import Connection, Reply
from app.cli.bench.faults import AskFailed, Fault, failed_status

__all__ = ["EventParser", "Sample", "TokenReader", "ask"]

_DONE: Final = b"[DONE]"


class EventParser:
    """Splits bytes into the data of events."""

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


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _OpenAiEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _GenerateEvent(msgspec.Struct):
    final: bool = False
    error: Any = None
    status: int | str | None = None
    head: str | None = None
    text_output: str | None = None
    completion_tokens: int | None = None
    model_name: str | None = None


_openai_event: Final = msgspec.json.Decoder(_OpenAiEvent)
_generate_event: Final = msgspec.json.Decoder(_GenerateEvent)


class TokenReader:
    """Reads one stream: the times and number of its tokens, and its fault. An `app.cli.bench.connection.EventReader`.

    Args:
        kind: one of `app.cli.bench.target.KINDS` that streams.
    """

    def __init__(self, kind: str) -> None:
        self._parser = EventParser()
        self._read = self._generate if kind == "generate" else self._openai
        self._now_s = 0.0
        self.is_done = False
        self.fault: Fault | None = None
        self.times_s: list[float] = []
        """The arrival of each event with text or with a result."""
        self.reported_tokens: int | None = None
        """The server's count of tokens."""

    @property
    def tokens(self) -> int:
        """The server's own count or, without one, the number of events with text."""
        return self.reported_tokens if self.reported_tokens is not None else len(self.times_s)

    def feed(self, data: bytes, now_s: float) -> None:
        """See `EventReader`."""
        self._now_s = now_s
        for event in self._parser.feed(data):
            try:
                self._read(event)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self._note(Fault("bad answer", None, f"invalid event: {event[:60].decode('latin-1')}"))

    def end(self) -> Fault | None:
        """The stream's fault, once it has ended."""
        if self.fault is None and not self.is_done:
            return Fault("bad answer", None, "the stream ended without its last event")
        return self.fault

    def _note(self, fault: Fault) -> None:
        self.fault = self.fault or fault

    def _openai(self, data: bytes) -> None:
        if data == _DONE:
            self.is_done = True
            return
        event = _openai_event.decode(data)
        if event.error is not None:
            self._note(_stream_fault(data))
        if event.usage is not None:
            self.reported_tokens = event.usage.completion_tokens
        for choice in event.choices:
            delta = choice.delta
            if choice.text or (delta is not None and (delta.content or delta.reasoning_content)):
                self.times_s.append(self._now_s)
                break

    def _generate(self, data: bytes) -> None:
        event = _generate_event.decode(data)
        if event.completion_tokens is not None:
            self.reported_tokens = event.completion_tokens
        if event.final:
            self.is_done = True
        elif event.error is not None:
            if event.head is None:
                self._note(_stream_fault(data, event.status if isinstance(event.status, int) else None))
            else:
                self._note(Fault("stream", None, f"head {event.head}: {event.status}"))
        elif event.text_output != "":
            self.times_s.append(self._now_s)


def _stream_fault(data: bytes, status: int | None = None) -> Fault:
    fault = failed_status(status or 0, data, "stream")
    return fault._replace(status=status)


class Sample(NamedTuple):
    """One request; times are `time.perf_counter`'s."""

    fault: Fault | None
    """None: the answer is good."""
    sent_s: float
    ended_s: float
    stream: TokenReader | None = None


class _Answer(msgspec.Struct):
    outputs: msgspec.Raw


_answer: Final = msgspec.json.Decoder(_Answer)


async def ask(connection: Connection, request: bytes, kind: str, begin_s: float, expires_s: float) -> Sample:
    """Send a request and wait for its whole answer.

    Args:
        connection: not lost, and without a pending request.
        request: the whole request, encoded.
        kind: one of `app.cli.bench.target.KINDS`.
        begin_s: now, or when it should have been sent.
        expires_s: when the request fails.
    """
    reader = None if kind == "infer" else TokenReader(kind)
    try:
        reply = await connection.exchange(request, expires_s, reader)
    except AskFailed as failed:
        return Sample(failed.fault, begin_s, begin_s)
    if reply.status != 200:
        return Sample(failed_status(reply.status, reply.body), reply.sent_s, reply.ended_s)
    fault = _whole_fault(reply) if reader is None else reader.end()
    return Sample(fault, reply.sent_s, reply.ended_s, reader)


def _whole_fault(reply: Reply) -> Fault | None:
    """The fault of an inference answer. Its tensors are not decoded, which would cost as much as the request."""
    raw = reply.body if reply.json_length is None else memoryview(reply.body)[: reply.json_length]
    try:
        _answer.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return Fault("bad answer", None, f"not an inference answer: {error}"[:160])
    return None
