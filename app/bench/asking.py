"""One request and what came of it."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from app.bench.connection import Connection, Reply
from app.bench.events import TokenReader
from app.bench.faults import AskFailed, Fault, failed_status

__all__ = ["Sample", "ask"]


class Sample(NamedTuple):
    """One request; times are `time.perf_counter`'s."""

    fault: Fault | None
    """None: the answer was good."""
    sent_s: float
    ended_s: float
    stream: TokenReader | None = None


class _Answer(msgspec.Struct):
    outputs: msgspec.Raw


_answer: Final = msgspec.json.Decoder(_Answer)


async def ask(connection: Connection, request: bytes, kind: str, begin_s: float, expires_s: float) -> Sample:
    """Send a request and wait for its whole answer.

    Args:
        connection: one that isn't lost, with nothing under way.
        request: all of it, encoded.
        kind: one of `app.bench.target.KINDS`.
        begin_s: now, or when it should have been sent.
        expires_s: when it is given up.
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
    """What is wrong with an inference answer. Its tensors are not decoded: that would cost as much as asking."""
    raw = reply.body if reply.json_length is None else memoryview(reply.body)[: reply.json_length]
    try:
        _answer.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return Fault("bad answer", None, f"no inference answer: {error}"[:160])
    return None
