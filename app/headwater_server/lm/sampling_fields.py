"""The request fields for choosing tokens and ending the text, which all text APIs of Headwater's language models share.
For a model that vLLM serves, only the generate extension uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from headwater.engine import SAMPLING_FIELDS, EngineLimits, Penalty, RepetitionPenalty, Sampling, Seed, Share
from headwater_server.codecs.faults import at, key_text, read_json, shown
from headwater_server.lm.answer_grammar import CONSTRAINTS, SchemaOrText, StructuredOutputs
from headwater_server.lm.text.stop_strings import StopString, StopStrings

__all__ = [
    "DEFAULT_TOKENS",
    "ONLY_TEXTS",
    "Flag",
    "SamplingFields",
    "StreamFields",
    "StreamOptions",
    "TextEnd",
    "checked_ids",
]

DEFAULT_TOKENS: Final = 16
"""The default maximum length in tokens of a completion or a generated text, as in OpenAI's completions API."""
_DEFAULTS: Final = Sampling()
_MAX_TOP_K: Final = 2**31 - 1
_MAX_SECONDS: Final = 1_000_000
_MAX_BIAS: Final = 100
_ID_DIGITS: Final = 10


_TOP_K: Final = {"expected": f"an integer from -1 to {_MAX_TOP_K}; 0 and -1 keep all tokens"}
TopK: TypeAlias = Annotated[int, Meta(ge=-1, le=_MAX_TOP_K, description="0 or -1: all tokens", extra=_TOP_K)]
_Bias: TypeAlias = Annotated[float, Meta(extra_json_schema={"minimum": -_MAX_BIAS, "maximum": _MAX_BIAS})]
LogitBias: TypeAlias = Annotated[dict[str, _Bias], Meta(description="By token id")]
_SECONDS: Final = {"expected": f"seconds, above 0 and up to {_MAX_SECONDS}"}
_LIMIT: Final = "How long the request may take in all"
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=_MAX_SECONDS, description=_LIMIT, extra=_SECONDS)]
ONLY_TEXTS: Final = {"additionalProperties": {"type": "string"}}
"""Used in the OpenAPI schema only: a label that is null is as good as no label."""
Flag: TypeAlias = Annotated[bool, Meta(extra_json_schema={"default": False})]
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=2, description="0: the likeliest")]


class TextEnd(NamedTuple):
    """Where a text ends, and which parts of it are omitted."""

    stops: tuple[str, ...]
    """The text ends at the first of these strings."""
    stop_ids: frozenset[int]
    """Tokens that end the text, in addition to the model's end-of-sequence tokens."""
    ignore_eos: bool
    """Whether the model's end-of-sequence tokens don't end the text, except where a grammar allows no other token."""
    include_stop: bool
    """Whether the text includes the token or string that ends it."""
    skip_special_tokens: bool
    """Whether the text omits special tokens."""


_Fields = TypeVar("_Fields", bound="SamplingFields")


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields for choosing tokens and ending the text. Null means absent.

    Decoding checks types and most bounds; the methods check biases, and limits that depend on the model.
    """

    temperature: Temperature | None = None
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
    min_tokens: Annotated[int, Meta(ge=0, description="Until then only `max_tokens` ends the text")] | None = None
    stop: Annotated[StopString | StopStrings | None, Meta(description="The text ends before the first of them")] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: Flag | None = None
    include_stop_str_in_output: Flag | None = None
    skip_special_tokens: Annotated[bool, Meta(extra_json_schema={"default": True})] | None = None
    structured_outputs: Annotated[StructuredOutputs | None, Meta(description="Constrains the answer")] = None

    @classmethod
    def read(cls: type[_Fields], raw: bytes) -> _Fields:
        """Decode a request's body.

        Raises:
            BadRequest: the body is not a valid request; the message names the field.
        """
        return read_json(raw, cls)

    def sampling(self, limits: EngineLimits, defaults: Sampling, *, logprobs: int | None = None) -> Sampling:
        """How tokens are chosen.

        Args:
            limits: the engine's limits.
            defaults: the model's defaults, for fields that are absent.
            logprobs: see `Sampling.logprobs`.

        Raises:
            BadRequest: a bias is out of bounds or has an invalid token id, or the engine does not support a field.
        """
        fields = {name: getattr(self, name) for name in SAMPLING_FIELDS - {"logprobs", "logit_bias"}}
        fields = {name: value for name, value in fields.items() if value is not None}
        if self.top_k == -1:
            fields["top_k"] = 0
        biases = _biases(self.logit_bias or {}, limits.vocab_size)
        sampling = msgspec.structs.replace(defaults, **fields, logit_bias=biases, logprobs=logprobs)
        for name in sorted(SAMPLING_FIELDS - limits.sampling):
            if getattr(sampling, name) != getattr(_DEFAULTS, name):
                raise at(name, None, "this model does not support it; leave it out")
        return sampling

    def text_end(self, limits: EngineLimits) -> TextEnd:
        """Where the text ends.

        Raises:
            BadRequest: a stop token isn't in the vocabulary.
        """
        return TextEnd(
            stops=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_ids=frozenset(checked_ids("stop_token_ids", self.stop_token_ids or (), limits.vocab_size)),
            ignore_eos=bool(self.ignore_eos),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
        )


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's options for streams."""

    include_usage: Flag | None = None
    continuous_usage_stats: Annotated[bool | None, Meta(description="Every chunk has the numbers so far")] = None
    include_obfuscation: Annotated[bool | None, Meta(description="Random padding; only false is supported")] = None


class StreamFields(SamplingFields, kw_only=True):
    """Further fields that the requests of OpenAI's chat, completions and responses APIs share."""

    model: str
    n: Annotated[int, Meta(ge=1, le=128, extra_json_schema={"default": 1})] | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(description="A label, without effect")] | None = None
    timeout_s: Seconds | None = None
    guided_json: SchemaOrText = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1)] | None = None
    guided_grammar: str | None = None
    json_schema: SchemaOrText = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None

    @property
    def constraints(self) -> dict[str, Any]:
        """The fields of `CONSTRAINTS` that are set. An empty grammar is llama.cpp's default: no grammar."""
        fields = {name: getattr(self, name) for name in CONSTRAINTS}
        return {name: value for name, value in fields.items() if value is not None and (name, value) != ("grammar", "")}

    @property
    def includes_usage(self) -> bool:
        """Whether a stream's last chunk contains the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def counts_usage(self) -> bool:
        """Whether every chunk of a stream contains the numbers of tokens so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats is True

    def check_stream(self) -> None:
        """Check the stream options.

        Raises:
            BadRequest: an option is not supported, or is set in a request that doesn't ask for a stream.
        """
        asks = self.includes_usage or self.counts_usage
        if asks and not self.stream:
            raise at("stream_options", None, 'expected it with "stream": true only; leave it out, or stream')
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise at(
                "stream_options.include_obfuscation", None, "this model does not support it; expected false, got true"
            )


def _biases(logit_bias: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    biases = {}
    for key, bias in logit_bias.items():
        path = f"logit_bias.{key_text(key)}"
        if not (key.isascii() and key.isdecimal() and len(key) <= _ID_DIGITS and int(key) < vocab_size):
            raise at(path, None, f"expected a token id from 0 to {vocab_size - 1}, got {shown(key)}")
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise at(path, None, f"expected a number from -{_MAX_BIAS} to {_MAX_BIAS}, got {shown(bias)}")
        biases[int(key)] = float(bias)
    return biases


def checked_ids(path: str, ids: Sequence[object], vocab_size: int) -> list[int]:
    """Check token ids that the client sent, and return them.

    Raises:
        BadRequest: an id is not an integer, or outside the vocabulary.
    """
    checked: list[int] = []
    for n, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise at(f"{path}[{n}]", None, f"expected a token id from 0 to {vocab_size - 1}, got {shown(token)}")
        checked.append(token)
    return checked
