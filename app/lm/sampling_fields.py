"""The fields of a request that say how tokens are chosen and where the text ends: the same in all three APIs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from app.codecs.faults import at, key_text, read_json, shown
from app.errors import BadRequest
from app.lm.text.stop_strings import StopFinder
from inference.engine import SAMPLING_FIELDS, EngineLimits, Sampling

__all__ = [
    "MAX_LOGPROBS",
    "SamplingFields",
    "StreamFields",
    "StreamOptions",
    "TextEnd",
    "checked_ids",
    "checked_integer",
]

MAX_LOGPROBS: Final = 20
_MAX_SECONDS: Final = 1_000_000.0
_DEFAULTS: Final = Sampling()
_INT64: Final = 2**63
_BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
}
_MAX_BIAS: Final = 100
_ID_DIGITS: Final = 10


def _itself(name: str) -> str:
    return name


class TextEnd(NamedTuple):
    """Where a text ends, and what of it is shown."""

    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    ignore_eos: bool
    include_stop: bool
    skip_special_tokens: bool


_Fields = TypeVar("_Fields", bound="SamplingFields")


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields; null is as if a field weren't there. Types are checked by decoding, and values by the methods."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

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
            BadRequest: a field is out of bounds, or this model does not support it.
        """
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise at(path(name), None, f"expected a number from {low} to {high}, got {shown(value)}")
        given: dict[str, object] = {"logprobs": logprobs}
        for name in _BOUNDS:
            if (value := getattr(self, name)) is not None:
                given[name] = float(value)
        if self.top_k is not None:
            given["top_k"] = checked_integer(path("top_k"), self.top_k, 0, 2**31 - 1, "; 0 keeps all tokens")
        if self.seed is not None:
            given["seed"] = checked_integer(path("seed"), self.seed, -_INT64, _INT64 - 1)
        if self.logit_bias:
            given["logit_bias"] = _biases(self.logit_bias, limits.vocab_size, path("logit_bias"))
        sampling = Sampling(**given)  # type: ignore[arg-type]  # each is checked above
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
            BadRequest: a stop string is empty or too long, or a stop token isn't in the vocabulary.
        """
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        try:
            StopFinder(stops)
        except BadRequest as error:
            name, _, message = error.message.partition(": ")
            if isinstance(self.stop, str):
                name = "stop"  # not `stop[0]`
            raise at(path(name), None, message) from None
        for n, token in enumerate(self.stop_token_ids or ()):
            checked_integer(path(f"stop_token_ids[{n}]"), token, 0, limits.vocab_size - 1)
        return TextEnd(
            stops=stops,
            stop_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
        )


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's ``stream_options``."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Random padding against guessing texts by their lengths; only false can be had."""


class StreamFields(SamplingFields, kw_only=True):
    """What both of OpenAI's APIs have besides."""

    model: str
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """A label of the client's own end user; it changes nothing here."""
    timeout_s: float | None = None

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
        if self.timeout_s is not None and not 0 < self.timeout_s <= _MAX_SECONDS:
            expected = f"expected seconds, above 0 and up to {_MAX_SECONDS:.0f}"
            raise at("timeout_s", None, f"{expected}, got {shown(self.timeout_s)}")


def checked_integer(path: str, value: int, low: int, high: int, said: str = "") -> int:
    """An integer within bounds.

    Raises:
        BadRequest: it is not; the message says also what `said` does.
    """
    if low <= value <= high:
        return value
    raise at(path, None, f"expected an integer from {low} to {high}{said}, got {shown(value)}")


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
