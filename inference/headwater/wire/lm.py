"""Messages between gateway workers and a replica's engine, and the packed answers of the engine.

A replica binds a single decoupled model. Every request carries a `Message` in the input `CONTROL`, UINT8 [1, size]. The
answers are `StepFrame`s. A response carries a frame, or a parcel of frames, in the output `headwater.wire.frame.FRAME`,
UINT8 [1, size]. Messages and frames are MessagePack.

- `Open` opens a channel, which belongs to a single gateway worker. The channel's frames are a stream, as with any other
  model: they are sent in parcels (`headwater.wire.parcel`). The stream provides flow control, ends when its worker
  ends, and is cancelled to close the channel. The first frame has no events and confirms the channel. Then each engine
  step makes a frame with the tokens of all the channel's sequences; if the worker is behind by a window, steps are
  merged into the next frame.
- `Post` starts and cancels sequences of a channel. It is answered only if the channel is unknown: with a single frame
  that says so in `closed`. Values that several sequences share (the choices of a prompt share it) are in the message
  only once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, structs

from headwater.engine import Grammar, LogitBias, PromptLogprob, Sampling, TokenId, TopLogprobs

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
    "most_bytes",
]

CONTROL: Final = "control"

_TOKEN_BYTES: Final = 5
_FLOAT_BYTES: Final = 9
_CHARACTER_BYTES: Final = 4
"""The most bytes of a token id, a float and a character in MessagePack."""
_Place: TypeAlias = Annotated[int, Meta(ge=0)]

Ending: TypeAlias = Literal["stop", "length", "cancelled", "error", "full", "rejected", "out_of_memory"]
"""Why a sequence ended: a `headwater.engine.Finish`, where ``rejected`` also stands for a `RequestRejected` that
`Engine.submit` raised; or ``full``: a queue of the engine is full. The last four values come with a message in
`SequenceEvent.error`."""


class Submit(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A sequence to generate; the fields from ``prompt`` on are those of `headwater.engine.SequenceRequest`."""

    number: int
    """Number of the sequence within its channel; never used twice."""
    request_id: str
    """Id of the request, which may have several sequences."""
    prompt: list[TokenId]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[TokenId] = frozenset()
    ignore_eos: bool = False
    cache_scope: str = ""
    grammar: Grammar | None = None
    prompt_logprobs: TopLogprobs | None = None

    @property
    def shared(self) -> tuple[list[TokenId], frozenset[TokenId], LogitBias, Grammar | None]:
        """The values that may be large, and that sequences of a request may share as the same object."""
        return self.prompt, self.stop_ids, self.sampling.logit_bias, self.grammar


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """Opens a channel."""

    channel: str
    """The channel's name, which must be new; also the name of the channel's stream."""


class Post(msgspec.Struct, frozen=True, array_like=True, tag="post", omit_defaults=True):
    """A worker's message on its channel."""

    channel: str
    submits: list[Submit] = []
    cancels: list[int] = []
    """The numbers of the sequences to cancel."""


Message: TypeAlias = Open | Post


class _PackedSubmit(msgspec.Struct, array_like=True):
    """A sequence without its shareable values, and for each of these values its index in the message's tables."""

    submit: Submit
    prompt: _Place
    stop_ids: _Place
    logit_bias: _Place
    grammar: _Place


class _PackedPost(msgspec.Struct, array_like=True, tag="post"):
    """A `Post` in the form that is sent."""

    channel: str
    submits: list[_PackedSubmit]
    cancels: list[int]
    prompts: list[list[TokenId]]
    stop_ids: list[frozenset[TokenId]]
    biases: list[LogitBias]
    grammars: list[Grammar | None]

    @classmethod
    def of(cls, post: Post) -> _PackedPost:
        """Pack a `Post`: a value that sequences share as the same object is in the message only once."""
        packed = cls(post.channel, [], post.cancels, [], [], [], [])
        tables: tuple[list[Any], ...] = (packed.prompts, packed.stop_ids, packed.biases, packed.grammars)
        place_tables: tuple[dict[int, int], ...] = ({}, {}, {}, {})
        for submit in post.submits:
            places = []
            for value, table, place_of in zip(submit.shared, tables, place_tables, strict=True):
                if (place := place_of.get(id(value))) is None:
                    place = place_of[id(value)] = len(table)
                    table.append(value)
                places.append(place)
            sampling = submit.sampling
            if sampling.logit_bias:
                sampling = structs.replace(sampling, logit_bias={})
            bare = structs.replace(submit, prompt=[], stop_ids=frozenset(), grammar=None, sampling=sampling)
            packed.submits.append(_PackedSubmit(bare, *places))
        return packed

    def post(self) -> Post:
        """Unpack the `Post`: sequences share values as the same object again.

        Raises:
            msgspec.ValidationError: an index is outside of its table.
        """
        try:
            return Post(self.channel, [self._submit(packed) for packed in self.submits], self.cancels)
        except IndexError:
            raise msgspec.ValidationError("expected the place of a value in this message") from None

    def _submit(self, packed: _PackedSubmit) -> Submit:
        submit, bias = packed.submit, self.biases[packed.logit_bias]
        return structs.replace(
            submit,
            prompt=self.prompts[packed.prompt],
            stop_ids=self.stop_ids[packed.stop_ids],
            grammar=self.grammars[packed.grammar],
            sampling=structs.replace(submit.sampling, logit_bias=bias) if bias else submit.sampling,
        )


class SequenceEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Consecutive tokens of a sequence, or the sequence's end, or both; or a part of the prompt's log probabilities."""

    number: int
    index: int
    """Position of the event's first token in the answer; without tokens, the length of the answer."""
    tokens: list[int]
    logprobs: list[float] | None = None
    """The log probability of each token, if the request asked for logprobs."""
    tops: list[tuple[tuple[int, float], ...]] | None = None
    """For each token the most probable tokens with their logprobs, if the request asked for them."""
    finish: Ending | None = None
    """Why the sequence ended; set only in the sequence's last event."""
    error: str = ""
    cached: int = 0
    """With the first token: the number of prompt tokens found in the engine's prefix cache."""
    prompt: tuple[PromptLogprob, ...] = ()
    """A part of the prompt's log probabilities: see `headwater.engine.TokenEvent.prompt`."""


class Load(msgspec.Struct, array_like=True, gc=False):
    """The engine's load, over all channels."""

    active: int = 0
    """Sequences that are being computed."""
    waiting: int = 0
    """Sequences in the engine's queue."""
    cache_used: int = 0
    """Tokens reserved in the engine's cache."""


class StepFrame(msgspec.Struct, array_like=True, omit_defaults=True):
    """A response on a channel: the events of a step or of several merged steps."""

    number: int
    """The frame's number in its channel, from 0."""
    events: list[SequenceEvent]
    load: Load
    closed: str = ""
    """In the channel's last frame: why the channel ended. Empty in earlier frames."""


def most_bytes(value: list[TokenId] | frozenset[TokenId] | LogitBias | Grammar | None) -> int:
    """The most bytes that a value of `Submit.shared` takes in a message, without the few bytes of its headers and its
    kind."""
    if value is None:
        return 1
    if isinstance(value, Grammar):
        return _CHARACTER_BYTES * (len(value.text) + len(value.field))
    return (_TOKEN_BYTES + _FLOAT_BYTES * isinstance(value, dict)) * len(value)


_encoder = msgspec.msgpack.Encoder()


def encode(message: Message | StepFrame) -> bytes:
    """Encode a message or a frame."""
    return _encoder.encode(_PackedPost.of(message) if isinstance(message, Post) else message)


def _decoder(kind: Any) -> Callable[[bytes | memoryview], Any]:
    decode = msgspec.msgpack.Decoder(kind).decode

    def decode_raw(raw: bytes | memoryview) -> Any:
        try:
            return decode(raw)
        except (UnicodeDecodeError, RecursionError) as error:  # not converted by msgspec
            raise msgspec.DecodeError(str(error)) from None

    return decode_raw


_decode_packed: Callable[[bytes | memoryview], Open | _PackedPost] = _decoder(Open | _PackedPost)


def decode_message(raw: bytes | memoryview) -> Message:
    """Decode a message that `encode` encoded.

    Raises:
        msgspec.MsgspecError: the bytes are not a message.
    """
    message = _decode_packed(raw)
    return message if isinstance(message, Open) else message.post()


decode_frame: Callable[[bytes | memoryview], StepFrame] = _decoder(StepFrame)
"""Decodes a frame that `encode` encoded; raises `msgspec.MsgspecError` if the bytes are not a frame."""
