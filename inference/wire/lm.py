"""Messages between gateway workers and a replica's engine, and the packed answers of the engine.

A replica binds one decoupled model. Every request to it carries one `Message` in the input `CONTROL`, UINT8 [1, size];
every response carries one `StepFrame` in the output `inference.wire.frame.FRAME`, UINT8 [1, size]. Both are
MessagePack.

- `Open` makes a channel, which belongs to one gateway worker. Its frames are a stream like that of any other model
  (`inference.wire.parcel`), which also brings flow control, the channel's end with its worker, and the way to close it:
  cancelling the stream. The first frame has no events and confirms the channel. Then each engine step makes one frame
  with the tokens of all the channel's sequences; if the worker is behind by a window, steps are merged into the next
  frame.
- `Post` starts and cancels sequences of a channel. It is answered only if the channel is unknown: with one frame whose
  `closed` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias

import msgspec

from inference.engine import Grammar, PromptLogprob, Sampling, TokenId, TopLogprobs

__all__ = [
    "CONTROL",
    "Ending",
    "Load",
    "Message",
    "Open",
    "Post",
    "SequenceEvent",
    "StepFrame",
    "Submit",
    "decode_frame",
    "decode_message",
    "encode",
]

CONTROL: Final = "control"

Ending: TypeAlias = Literal["stop", "length", "cancelled", "error", "full", "rejected", "out_of_memory"]
"""Why a sequence ended: as `inference.engine.Finish`; ``full``: the engine's queue is full; ``rejected``: the sequence
can never be served. The last four have a message in `SequenceEvent.error`."""


class Submit(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A sequence to generate; the fields are those of `inference.engine.SequenceRequest`."""

    number: int
    """Identifies the sequence within its channel; never used twice."""
    request_id: str
    """Identifies the request, which may have several sequences."""
    prompt: list[TokenId]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[TokenId] = frozenset()
    ignore_eos: bool = False
    cache_scope: str = ""
    grammar: Grammar | None = None
    prompt_logprobs: TopLogprobs | None = None


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Opens a channel."""

    channel: str
    """The channel's name, never used before; also the name of its stream."""


class Post(msgspec.Struct, frozen=True, array_like=True, tag="post", omit_defaults=True):
    """A worker's message on its channel."""

    channel: str
    submits: list[Submit] = []
    cancels: list[int] = []
    """The numbers of the sequences to cancel."""


Message: TypeAlias = Open | Post


class SequenceEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Consecutive tokens of a sequence, or its end, or both; or a part of its prompt's log probabilities."""

    number: int
    index: int
    """Position of the first of these tokens in the answer; without tokens, the length of the answer."""
    tokens: list[int]
    logprobs: list[float] | None = None
    """One per token, if the request asked for them."""
    tops: list[tuple[tuple[int, float], ...]] | None = None
    """For each token the most probable tokens with their logprobs, if the request asked for them."""
    finish: Ending | None = None
    error: str = ""
    cached: int = 0
    """With the first token: how many of the prompt's tokens the engine's prefix cache had."""
    prompt: tuple[PromptLogprob, ...] = ()
    """As `inference.engine.TokenEvent.prompt`."""


class Load(msgspec.Struct, array_like=True, gc=False):
    """The engine's load, over all channels."""

    active: int = 0
    waiting: int = 0
    cache_used: int = 0
    """Tokens."""


class StepFrame(msgspec.Struct, array_like=True, omit_defaults=True):
    """One response."""

    number: int
    """The frame's number in its channel, from 0."""
    events: list[SequenceEvent]
    load: Load
    closed: str = ""
    """Why the channel ended, in its last frame."""


_encoder = msgspec.msgpack.Encoder()


def encode(what: Message | StepFrame) -> bytes:
    """The bytes of a message or a frame."""
    return _encoder.encode(what)


def _decoder(kind: Any) -> Callable[[bytes | memoryview], Any]:
    decode = msgspec.msgpack.Decoder(kind).decode

    def decode_raw(raw: bytes | memoryview) -> Any:
        try:
            return decode(raw)
        except (UnicodeDecodeError, RecursionError) as error:  # which msgspec lets through
            raise msgspec.DecodeError(str(error)) from None

    return decode_raw


decode_message: Callable[[bytes | memoryview], Message] = _decoder(Message)
"""Decodes what `encode` wrote; raises `msgspec.MsgspecError` for anything but a message."""
decode_frame: Callable[[bytes | memoryview], StepFrame] = _decoder(StepFrame)
"""Decodes what `encode` wrote; raises `msgspec.MsgspecError` for anything but a frame."""
