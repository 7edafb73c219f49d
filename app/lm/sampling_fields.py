"""The fields of a request that say how tokens are chosen and where the text ends: the same in all three APIs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from app.codecs.faults import at, key_text, read_json, shown
from app.lm.text.stop_strings import StopString, StopStrings
from inference.engine import SAMPLING_FIELDS, EngineLimits, Penalty, RepetitionPenalty, Sampling, Seed, Share

__all__ = [
    "DEFAULT_TOKENS",
    "Flag",
    "SamplingFields",
    "StreamFields",
    "StreamOptions",
    "TextEnd",
    "checked_ids",
    "checked_integer",
]

DEFAULT_TOKENS: Final = 16
"""Of an answer, where the client doesn't say: OpenAI's figure."""
_DEFAULTS: Final = Sampling()
_MAX_TOP_K: Final = 2**31 - 1
_MAX_SECONDS: Final = 1_000_000
_MAX_BIAS: Final = 100
_ID_DIGITS: Final = 10


def _itself(name: str) -> str:
    return name


TopK: TypeAlias = Annotated[
    int,
    Meta(
        ge=0,
        le=_MAX_TOP_K,
        description="0: all tokens",
        extra={"expected": f"an integer from 0 to {_MAX_TOP_K}; 0 keeps all tokens"},
    ),
]
_Bias: TypeAlias = Annotated[float, Meta(extra_json_schema={"minimum": -_MAX_BIAS, "maximum": _MAX_BIAS})]
LogitBias: TypeAlias = Annotated[dict[str, _Bias], Meta(description="By token id")]
Seconds: TypeAlias = Annotated[
    float,
    Meta(
        gt=0,
        le=_MAX_SECONDS,
        description="How long the request may take in all",
        extra={"expected": f"seconds, above 0 and up to {_MAX_SECONDS}"},
    ),
]
Flag: TypeAlias = Annotated[bool, Meta(extra_json_schema={"default": False})]


class TextEnd(NamedTuple):
    """Where a text ends, and what of it is shown."""

    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    ignore_eos: bool
    include_stop: bool
    skip_special_tokens: bool


_Fields = TypeVar("_Fields", bound="SamplingFields")


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields; null is as if a field weren't there.

    Types and bounds are checked by decoding, and by the methods what depends on the model. The OpenAPI schema is made
    of them, too.
    """

    temperature: Annotated[float, Meta(ge=0, le=2, description="0: the likeliest")] | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[Seed | None, Meta(description="The same seed gives the same answer; choice i: the seed plus i")] = (
        None
    )
    max_tokens: Annotated[int, Meta(ge=0, extra_json_schema={"default": DEFAULT_TOKENS})] | None = None
    stop: Annotated[StopString | StopStrings | None, Meta(description="The text ends before the first of them")] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: Flag | None = None
    include_stop_str_in_output: Flag | None = None
    skip_special_tokens: Annotated[bool, Meta(extra_json_schema={"default": True})] | None = None

    @classmethod
    def read(cls: type[_Fields], raw: bytes) -> _Fields:
        """Decode a request's body.

        Raises:
            BadRequest: it is none; the message names the field.
        """
        return read_json(raw, cls)

    def sampling(
        self, limits: EngineLimits, *, logprobs: int | None = None, path: Callable[[str], str] = _itself
    ) -> Sampling:
        """How tokens are chosen.

        Args:
            limits: what the model can take.
            logprobs: as `Sampling.logprobs`.
            path: a field's path in the request, by its name.

        Raises:
            BadRequest: a bias is of no token or out of bounds, or this model does not support a field.
        """
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS - {"logprobs", "logit_bias"}}
        given = {name: value for name, value in given.items() if value is not None}
        biases = _biases(self.logit_bias or {}, limits.vocab_size, path("logit_bias"))
        sampling = Sampling(**given, logit_bias=biases, logprobs=logprobs)
        for name in sorted(SAMPLING_FIELDS - limits.sampling):
            if getattr(sampling, name) != getattr(_DEFAULTS, name):
                raise at(path(name), None, "this model does not support it; leave it out")
        return sampling

    def text_end(self, limits: EngineLimits, path: Callable[[str], str] = _itself) -> TextEnd:
        """Where the text ends.

        Args:
            limits: what the model can take.
            path: a field's path in the request, by its name.

        Raises:
            BadRequest: a stop token isn't in the vocabulary.
        """
        for n, token in enumerate(self.stop_token_ids or ()):
            checked_integer(path(f"stop_token_ids[{n}]"), token, 0, limits.vocab_size - 1)
        return TextEnd(
            stops=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
        )


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's options of a stream."""

    include_usage: Flag | None = None
    include_obfuscation: Annotated[bool | None, Meta(description="Random padding; only false can be had")] = None


class StreamFields(SamplingFields, kw_only=True):
    """What both of OpenAI's APIs have besides."""

    model: str
    n: Annotated[int, Meta(ge=1, le=16, extra_json_schema={"default": 1})] | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(description="A label, without effect")] | None = None
    timeout_s: Seconds | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the number of its tokens."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    def check_stream(self) -> None:
        """See whether the fields that say how to answer agree.

        Raises:
            BadRequest: they don't.
        """
        if self.stream_options is not None and not self.stream:
            raise at("stream_options", None, 'expected it with "stream": true only; leave it out, or stream')
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise at("stream_options.include_obfuscation", None, "expected false, which is what there is, got true")


def checked_integer(path: str, value: int, low: int, high: int) -> int:
    """An integer within bounds.

    Raises:
        BadRequest: it is not.
    """
    if low <= value <= high:
        return value
    raise at(path, None, f"expected an integer from {low} to {high}, got {shown(value)}")


def _biases(given: Mapping[str, float], vocab_size: int, path: str) -> dict[int, float]:
    biases = {}
    for key, bias in given.items():
        is_id = key.isascii() and key.isdecimal() and len(key) <= _ID_DIGITS and int(key) < vocab_size
        if not is_id:
            expected = f"expected a token id from 0 to {vocab_size - 1}"
            raise at(f"{path}.{key_text(key)}", None, f"{expected}, got {shown(key)}")
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            expected = f"expected a number from -{_MAX_BIAS} to {_MAX_BIAS}"
            raise at(f"{path}.{key}", None, f"{expected}, got {shown(bias)}")
        biases[int(key)] = float(bias)
    return biases


def checked_ids(path: str, ids: Sequence[object], vocab_size: int) -> list[int]:
    """Token ids of a client's choosing.

    Raises:
        BadRequest: one is no integer, or none of the vocabulary.
    """
    checked: list[int] = []
    for n, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            expected = f"expected a token id from 0 to {vocab_size - 1}"
            raise at(f"{path}[{n}]", None, f"{expected}, got {shown(token)}")
        checked.append(token)
    return checked
