"""Load on token streams, from a process of its own: bare sockets, and nothing is parsed before the last byte is there.

``python -m benchmarks.stream_load`` reads jobs, JSON lines, and answers each with one (`Job`, `list[Answer]`). A cheap
client matters here: it shares the machine with what it measures.
"""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import sys
import time
from typing import cast

import msgspec
import uvloop

from benchmarks.stream_child import Child, give_back

__all__ = ["Answer", "Ask", "Job", "LoadGenerator", "raw_body"]

_LAST_CHUNK = b"0\r\n\r\n"
_STAMP = re.compile(rb'"text":"(\d+) ",')


class Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    """One stream to ask for."""

    body: msgspec.Raw
    path: str = "/v1/completions"
    stall_s: float = 0
    """For how long to stop reading when the first event is there."""
    receive_bytes: int = 0
    """What the system may buffer of it; 0: what it likes."""


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """Streams to ask for, at the same time; their connections are all there before the first is asked for."""

    address: int | str
    """A port, or the path of a unix socket."""
    asks: list[Ask]
    one_by_one: bool = False
    """Whether each waits for the one before it."""
    with_gaps: bool = False
    with_delays: bool = False
    """Whether the texts are the times at which they were sent (`benchmarks.vllm_stand_in`)."""
    timeout_s: float = 300
    """For each of them, or for all at once."""


class Answer(msgspec.Struct):
    """What came of a stream; times in seconds since the job's first byte was sent."""

    status: int = 0
    sent: float = 0
    first: float = 0
    """When the first event with text was there."""
    ended: float = 0
    texts: dict[int, str] = {}
    """By the number of the choice."""
    finishes: dict[int, str] = {}
    tokens: int = 0
    """As ``usage`` says."""
    events: int = 0
    """That carried text."""
    size_bytes: int = 0
    """Of all that came."""
    gaps_s: list[float] = []
    """Between what arrived; what arrived together counts as one."""
    delays_s: list[float] = []
    """If asked for: from when each event was sent to when it arrived."""
    error: str = ""


class LoadGenerator(Child):
    """The process."""

    def __init__(self) -> None:
        super().__init__("benchmarks.stream_load")

    def begin(self, job: Job) -> None:
        """Start a job."""
        self.send(msgspec.json.encode(job))

    def has_answers(self, timeout_s: float) -> bool:
        """Wait so long for the job's end."""
        return self.has_line(timeout_s)

    def answers(self) -> list[Answer]:
        """Wait for the job's end."""
        return msgspec.json.decode(self.receive(), type=list[Answer])

    def run(self, job: Job) -> list[Answer]:
        """A job from its start to its end."""
        self.begin(job)
        return self.answers()


class _Stream(asyncio.Protocol):
    """One connection, with one request."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._transport: asyncio.Transport
        self._reads: list[bytes] = []
        self._times: list[float] = []
        self._sent = 0.0
        self._has_stalled = not ask.stall_s
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self) -> None:
        """Ask."""
        body = bytes(self._ask.body)
        head = (
            f"POST {self._ask.path} HTTP/1.1\r\nHost: benchmark\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._sent = time.perf_counter()
        self._transport.write(head.encode() + body)

    def close(self) -> None:
        """Leave, whatever still comes."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's says it is none

    def data_received(self, data: bytes) -> None:
        self._times.append(time.perf_counter())
        self._reads.append(data)
        if data.endswith(_LAST_CHUNK):
            self._end()
        elif not self._has_stalled and b"data: " in data:
            self._has_stalled = True
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(self._ask.stall_s, self._transport.resume_reading)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def answer(self, start: float, job: Job) -> Answer:
        """What came, parsed."""
        head, _, rest = b"".join(self._reads).partition(b"\r\n\r\n")
        answer = Answer(sent=self._sent - start, ended=(self._times[-1] - start) if self._times else 0)
        answer.size_bytes = sum(map(len, self._reads))
        if not head:
            answer.error = "the connection ended without an answer"
            return answer
        answer.status = int(head.split(b" ", 2)[1])
        if answer.status != 200:
            answer.error = rest.decode(errors="replace")[:500]
            return answer
        if not rest.endswith(_LAST_CHUNK):
            answer.error = "the stream ended without its last chunk"
        _read_events(_dechunked(rest), answer)
        # The read in which the first event with text ended.
        seen = b""
        for read, when in zip(self._reads, self._times, strict=True):
            seen += read
            if _has_text(seen):
                answer.first = when - start
                break
        if job.with_delays:
            times = [
                (int(stamp), when)
                for read, when in zip(self._reads, self._times, strict=True)
                for stamp in _STAMP.findall(read)
            ]
            answer.delays_s = [when - stamp / 1e9 for stamp, when in times]
        if job.with_gaps:
            # The first few reads are the head and the first event.
            answer.gaps_s = [after - before for before, after in zip(self._times[2:-1], self._times[3:], strict=False)]
        return answer

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class _Choice(msgspec.Struct):
    index: int = 0
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


_event = msgspec.json.Decoder(_Event)


def _has_text(raw: bytes) -> bool:
    """Whether an event with text has come whole; `raw` is a stream's beginning, with its head."""
    for block in _dechunked(raw.partition(b"\r\n\r\n")[2]).split(b"\n\n")[:-1]:
        if block.startswith(b"data: {") and any(choice.text for choice in _event.decode(block[6:]).choices):
            return True
    return False


def _dechunked(raw: bytes) -> bytes:
    pieces = []
    place = 0
    while (end := raw.find(b"\r\n", place)) >= 0:
        size = int(raw[place:end], 16)
        if size == 0:
            break
        pieces.append(raw[end + 2 : end + 2 + size])
        place = end + 2 + size + 2
    return b"".join(pieces)


def _read_events(body: bytes, answer: Answer) -> None:
    texts: dict[int, list[str]] = {}
    is_done = False
    for line in body.split(b"\n"):
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]":
            is_done = True
            continue
        event = _event.decode(line[6:])
        if event.error is not None:
            answer.error = bytes(event.error).decode()[:500]
        if event.usage is not None:
            answer.tokens = event.usage.completion_tokens
        for choice in event.choices:
            if choice.text:
                answer.events += 1
                texts.setdefault(choice.index, []).append(choice.text)
            if choice.finish_reason is not None:
                answer.finishes[choice.index] = choice.finish_reason
    answer.texts = {index: "".join(pieces) for index, pieces in texts.items()}
    if not is_done and not answer.error:
        answer.error = "the stream has no [DONE]"


async def _run(job: Job) -> list[Answer]:
    streams = [] if job.one_by_one else [await _connected(ask, job.address) for ask in job.asks]
    gc.disable()
    start = time.perf_counter()
    try:
        if job.one_by_one:
            for ask in job.asks:  # a server ends connections on which nothing is asked for long
                streams.append(await _connected(ask, job.address))
                streams[-1].send()
                await asyncio.wait([streams[-1].ended], timeout=job.timeout_s)
        else:
            for stream in streams:
                stream.send()
            await asyncio.wait([stream.ended for stream in streams], timeout=job.timeout_s)
    finally:
        gc.enable()
        for stream in streams:
            stream.close()  # one that hasn't ended by now has no last chunk, and its answer says so
    return [stream.answer(start, job) for stream in streams]


async def _connected(ask: Ask, address: int | str) -> _Stream:
    loop = asyncio.get_running_loop()
    plug = socket.socket(socket.AF_INET if isinstance(address, int) else socket.AF_UNIX)
    if ask.receive_bytes:
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ask.receive_bytes)
    plug.setblocking(False)
    await loop.sock_connect(plug, ("127.0.0.1", address) if isinstance(address, int) else address)
    _, stream = await loop.create_connection(lambda: _Stream(ask), sock=plug)
    return stream


def main() -> None:
    """Do jobs until the input ends."""
    for line in sys.stdin.buffer:
        answers = uvloop.run(_run(msgspec.json.decode(line, type=Job)))
        give_back(msgspec.json.encode(answers))


def raw_body(body: dict[str, object]) -> msgspec.Raw:
    """A request's body, encoded."""
    return msgspec.Raw(msgspec.json.encode(body))


if __name__ == "__main__":
    main()
