"""What each token id contributes to a text: the tokenizer's decoder, taken apart so that it can work token by token.

A decoder of `tokenizers` is a chain of steps over the list of all tokens. Most steps look at one token at a time and
at whether it is the first; these are left to the library. The others are those that a stream must hold text back for,
and come in one of three families:

- bytes: ``ByteLevel`` (GPT-2, Llama 3, Qwen) makes bytes of every token and decodes them as one UTF-8 text;
- byte fallback: ``ByteFallback`` (Llama 2, Gemma) does so for each run of tokens like ``<0xE2>``, and if a run isn't
  valid as a whole, every byte of it becomes U+FFFD, the valid ones too;
- neither: ``Metaspace`` (T5), ``WordPiece`` (BERT), ``BPEDecoder`` (GPT-1), or no decoder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeVar, cast

import tokenizers

from app.errors import ConfigError

__all__ = ["Family", "TokenTexts"]

Family = Literal["bytes", "byte_fallback", "texts"]

_ONE_BY_ONE: Final = ("Replace", "Metaspace", "WordPiece", "BPEDecoder", "Strip")
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f+][0-9A-Fa-f])>\Z")
"""As Rust reads a byte of two hexadecimal digits: ``+A`` is one."""

_NEIGHBOUR: Final = "\ue000"
"""A token that no step changes: a character for private use."""

_T = TypeVar("_T")


class _Table(dict[int, _T]):
    """A dictionary that works out what it doesn't have yet. Two threads may both do so: they get the same."""

    def __init__(self, work_out: Callable[[int], _T]) -> None:
        super().__init__()
        self._work_out = work_out

    def __missing__(self, token_id: int) -> _T:
        value = self[token_id] = self._work_out(token_id)
        return value


class TokenTexts:
    """A tokenizer's ids, and what each contributes to the decoded text. Threads may share it.

    Args:
        tokenizer: the tokenizer; its vocabulary must not change any more.
        decoder: the decoder as ``tokenizer.json`` has it; None: the tokens are joined with spaces.
        name: what errors call the decoder.

    Raises:
        ConfigError: a decoder, or an order of its steps, that can't decode a stream.
    """

    family: Final[Family]
    strip: Final[tuple[str, int]]
    """A character, and how many of it at the very beginning don't belong to the text."""
    holds_last: Final[bool]
    """Whether the last token's text differs from what it would be with another after it."""
    bytes_of: Final[Mapping[int, bytes]]
    """Family "bytes": each id's bytes; empty for unknown ids."""
    pieces: Final[Mapping[int, str | int | None]]
    """The other families: each id's text where it isn't first, or its byte as a number; None for unknown ids."""
    special_ids: Final[frozenset[int]]

    def __init__(self, tokenizer: tokenizers.Tokenizer, decoder: object, name: str = "tokenizer.json: decoder") -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.content in special)
        steps = list(_flat(decoder, name))
        head, joint, body, rest = _split(steps)
        self.family = "bytes" if joint == "ByteLevel" else "byte_fallback" if joint == "ByteFallback" else "texts"
        self.strip = _strip(rest, name)
        self.holds_last = any(step["type"] == "BPEDecoder" for step in head)
        _check_order([step["type"] for step in head], joint, [step["type"] for step in body], name)
        self._joins_with_spaces = decoder is None
        self._head = _library_decoder(head)
        self._body = _library_decoder(body)
        self.bytes_of = _Table(self._bytes_of)
        self.pieces = _Table(self._piece)

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary has it; None: no such id.

        Raises:
            OverflowError: an id below 0 or over 2³²-1.
        """
        return self._tokenizer.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, with its leading space; of an id that the vocabulary lacks: none."""
        if self.family == "bytes":
            return self.bytes_of[token_id]
        piece = self.pieces[token_id]
        if isinstance(piece, int):
            return bytes([piece])
        return piece.encode() if piece else b""

    def shown(self, token_id: int) -> tuple[str, bytes]:
        """The token's text and bytes as ``logprobs`` shows them; both empty for an id that the vocabulary lacks.

        Bytes that are no text, as of a part of a character, look like ``bytes:\\xe2\\x96``, printable ASCII as it is.
        """
        raw = self.token_bytes(token_id)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in raw), raw

    def text(self, token_id: int, *, first: bool, last: bool = False) -> str:
        """The text of a token that isn't a byte, at its place in the sequence; empty for unknown ids."""
        token = self.token(token_id)
        if token is None:
            return ""
        if self._joins_with_spaces:
            return token if first else f" {token}"
        return self.element(_apply(self._head, token, first, last), first=first)

    def element(self, text: str, *, first: bool) -> str:
        """What the steps after ``ByteFallback`` make of one of the texts that it gives."""
        return _apply(self._body, text, first, False)

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if token is None:
            return b""
        text = _apply(self._head, token, False, False)
        try:
            return bytes(_BYTE_OF[character] for character in text)
        except KeyError:
            return text.encode()

    def _piece(self, token_id: int) -> str | int | None:
        token = self.token(token_id)
        if token is None:
            return None
        if self.family == "byte_fallback" and (byte := _BYTE_TOKEN.match(_apply(self._head, token, False, False))):
            return int(byte[1], 16)
        return self.text(token_id, first=False)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable Latin-1 stands for itself, the others count up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF: Final = _byte_level_alphabet()


def _flat(decoder: object, name: str) -> list[dict[str, Any]]:
    """The steps of a decoder, nested sequences taken apart."""
    if decoder is None:
        return []
    if not isinstance(decoder, dict) or not isinstance(decoder.get("type"), str):
        raise ConfigError(f"{name}: expected an object with a 'type', got {decoder!r:.80}")
    kind = decoder["type"]
    if kind == "Sequence":
        inner = decoder.get("decoders")
        if not isinstance(inner, list):
            raise ConfigError(f"{name}.decoders: expected an array, got {inner!r:.80}")
        return [step for n, entry in enumerate(inner) for step in _flat(entry, f"{name}.decoders[{n}]")]
    if kind not in (*_ONE_BY_ONE, "ByteLevel", "ByteFallback", "Fuse"):
        known = ", ".join((*_ONE_BY_ONE, "ByteLevel", "ByteFallback", "Fuse", "Sequence"))
        raise ConfigError(f"{name}.type: expected one that can decode a stream ({known}), got {kind!r}")
    return [cast("dict[str, Any]", decoder)]


def _split(
    steps: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, Any]], str | None, list[dict[str, Any]], list[dict[str, Any]]]:
    """The one-by-one steps, the step that works on bytes, more one-by-one steps, and all from the fusing on."""
    kinds = [step["type"] for step in steps]
    start = next((n for n, kind in enumerate(kinds) if kind not in _ONE_BY_ONE), len(kinds))
    joint = kinds[start] if start < len(kinds) and kinds[start] != "Fuse" else None
    after = start + (joint is not None)
    if joint == "ByteLevel":
        return list(steps[:start]), joint, [], list(steps[after:])
    fuse = next((n for n in range(after, len(kinds)) if kinds[n] not in _ONE_BY_ONE), len(kinds))
    return list(steps[:start]), joint, list(steps[after:fuse]), list(steps[fuse:])


def _check_order(head: Sequence[str], joint: str | None, body: Sequence[str], name: str) -> None:
    """Refuse what no tokenizer has, and what would need more state than a stream of tokens keeps here."""
    if joint is not None and "BPEDecoder" in (*head, *body):
        raise ConfigError(f"{name}: expected BPEDecoder without {joint}, got both")
    if joint == "ByteLevel" and {"Metaspace", "WordPiece"} & set(head):
        raise ConfigError(f"{name}: expected ByteLevel without a step before it that looks at the first token")


def _strip(rest: Sequence[dict[str, Any]], name: str) -> tuple[str, int]:
    """The one step that can follow when the tokens are one text: to strip its beginning."""
    strips = [step for step in rest if step["type"] != "Fuse"]
    if not strips:
        return "", 0
    step = strips[0]
    if len(strips) > 1 or step["type"] != "Strip" or step["stop"] != 0:
        kinds = ", ".join(step["type"] for step in strips)
        raise ConfigError(
            f"{name}: expected at most a Strip of the text's beginning where the tokens are one text already, "
            f"got {kinds}: it could change text that a stream has sent"
        )
    return step["content"], step["start"]


def _library_decoder(steps: Sequence[dict[str, Any]]) -> tokenizers.decoders.Decoder | None:
    """The library's decoder of some steps; None: no steps."""
    if not steps:
        return None
    empty = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}}
    steps_json = {"type": "Sequence", "decoders": list(steps)}
    decoder = tokenizers.Tokenizer.from_str(json.dumps({**empty, "decoder": steps_json})).decoder
    return cast("tokenizers.decoders.Decoder", decoder)


def _apply(decoder: tokenizers.decoders.Decoder | None, token: str, first: bool, last: bool) -> str:
    """What one-by-one steps make of a token that stands at the beginning, at the end, or between others."""
    if decoder is None:
        return token
    whole = decoder.decode([*([] if first else [_NEIGHBOUR]), token, *([] if last else [_NEIGHBOUR])])
    left = len(decoder.decode([_NEIGHBOUR]))
    begin = 0 if first else left
    end = 0 if last else len(decoder.decode([_NEIGHBOUR, _NEIGHBOUR])) - left
    return whole[begin : len(whole) - end]
