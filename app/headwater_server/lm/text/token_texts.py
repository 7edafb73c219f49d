"""The text or bytes that each token id contributes to a decoded text. The tokenizer's decoder is split into steps that
work token by token.

A decoder of `tokenizers` is a chain of steps over the list of all tokens. Most steps depend only on a token and on
whether it is the first, and are left to the library. The steps that combine several tokens require a stream to hold
text back. By these steps, tokenizers fall into three families:

- bytes: ``ByteLevel`` (GPT-2, Llama 3, Qwen) converts every token to bytes and decodes all bytes together as UTF-8;
- byte fallback: ``ByteFallback`` (Llama 2, Gemma) does the same for each run of tokens like ``<0xE2>``. If a run isn't
  valid as a whole, each of its bytes becomes U+FFFD, even valid bytes;
- texts, with neither of these steps: ``Metaspace`` (T5), ``WordPiece`` (BERT), ``BPEDecoder`` (GPT-1), or no decoder.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast

import tokenizers

from headwater_server.errors import ConfigError

__all__ = ["Family", "TokenTexts"]

Family = Literal["bytes", "byte_fallback", "texts"]

_ONE_BY_ONE: Final = ("Replace", "Metaspace", "WordPiece", "BPEDecoder", "Strip")
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f+][0-9A-Fa-f])>\Z")
"""A byte token. Its two hexadecimal digits are as Rust parses them: Rust also accepts ``+A``."""

_NEIGHBOUR: Final = "\ue000"
"""A token that no step changes: a private-use character."""

_Step: TypeAlias = dict[str, Any]
_T = TypeVar("_T")


class _ComputedTable(dict[int, _T]):
    """A dictionary that computes missing values with a method of its owner. Two threads may compute the same value.

    The reference to the method is weak: a reference cycle would keep the tokenizer, about a megabyte, until the garbage
    collector runs.
    """

    def __init__(self, compute: Callable[[int], _T]) -> None:
        super().__init__()
        self._compute = weakref.WeakMethod(compute)

    def __missing__(self, token_id: int) -> _T:
        compute = self._compute()
        assert compute is not None, "a table is used only by who holds its TokenTexts"
        value = self[token_id] = compute(token_id)
        return value


class TokenTexts:
    """The text or bytes that each id of a tokenizer contributes to the decoded text. Threads may share it.

    Args:
        tokenizer: the tokenizer. Its vocabulary must not change afterwards.
        decoder: the decoder's JSON in ``tokenizer.json``; `None` if tokens are joined with spaces.
        name: the decoder's name in error messages.

    Raises:
        ConfigError: the decoder can't decode a stream.
    """

    family: Final[Family]
    strip: Final[tuple[str, int]]
    """A character, and the maximum number of its occurrences to remove from the beginning of the text; empty and 0 if
    none are removed."""
    holds_last: Final[bool]
    """Whether a token's text differs if it is the last token."""
    bytes_of: Final[Mapping[int, bytes]]
    """In the family "bytes": each id's bytes; empty for unknown ids."""
    pieces: Final[Mapping[int, str | int | None]]
    """In the other families: each id's text if it is neither the first nor the last token, or its byte as an integer;
    `None` for unknown ids."""
    special_ids: Final[frozenset[int]]
    """The ids of the special tokens."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, decoder: object, name: str = "tokenizer.json: decoder") -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.content in special)
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        head, joint, body, rest = _split(_flat(decoder, name))
        self.family = "bytes" if joint == "ByteLevel" else "byte_fallback" if joint == "ByteFallback" else "texts"
        self.strip = _strip(rest, name)
        self.holds_last = any(step["type"] == "BPEDecoder" for step in head)
        _check_order([step["type"] for step in head], joint, [step["type"] for step in body], name)
        self._joins_with_spaces = decoder is None
        self._head = _library_decoder(head)
        self._body = _library_decoder(body)
        self.bytes_of = _ComputedTable(self._bytes_of)
        self.pieces = _ComputedTable(self._piece)

    def special_id(self, token: str) -> int | None:
        """The id of a special token; `None` for any other text."""
        token_id = self.id_of(token)
        return token_id if token_id in self.special_ids else None

    def added_id(self, token: str) -> int | None:
        """The id of an added token, special or not: other tokens can't spell its text without a difference that ids
        show. `None` for any other text."""
        return self._added_ids.get(token)

    def id_of(self, token: str) -> int | None:
        """The id of a token; `None` if it is not in the vocabulary."""
        return self._tokenizer.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token that isn't the first, including its leading space; empty for an id that is not in the
        vocabulary."""
        if self.family == "bytes":
            return self.bytes_of[token_id]
        piece = self.pieces[token_id]
        if isinstance(piece, int):
            return bytes([piece])
        return piece.encode() if piece else b""

    def shown(self, token_id: int) -> tuple[str, bytes]:
        """The token's text and bytes as ``logprobs`` shows them; both are empty for an id that is not in the
        vocabulary.

        Bytes that are not valid UTF-8, such as a part of a character, are shown like ``bytes:\\xe2\\x96``, with
        printable ASCII unescaped.
        """
        raw = self.token_bytes(token_id)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in raw), raw

    def begin_of(self, token_id: int, before: int, after: int) -> int:
        """The offset in characters at which a token's text begins. If the token is only part of a character: the offset
        of this character.

        Args:
            token_id: the token.
            before, after: number of characters that a detokenizer had returned before and after it received the token.
        """
        if self.holds_last:
            return after
        piece = None if self.family == "bytes" else self.pieces[token_id]
        return max(before, after - len(piece)) if isinstance(piece, str) else before

    def text(self, token_id: int, *, first: bool, last: bool = False) -> str:
        """The text of a token that isn't a byte, depending on its position in the sequence; empty for unknown ids."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        if self._joins_with_spaces:
            return token if first else f" {token}"
        return self.element(_apply(self._head, token, first, last), first=first)

    def element(self, text: str, *, first: bool) -> str:
        """Apply the steps after ``ByteFallback`` to a text that this step returned."""
        return _apply(self._body, text, first, False)

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        text = _apply(self._head, token, False, False)
        try:
            return bytes(_BYTE_OF[character] for character in text)
        except KeyError:
            return text.encode()

    def _piece(self, token_id: int) -> str | int | None:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return None
        if self.family == "byte_fallback" and (byte := _BYTE_TOKEN.match(_apply(self._head, token, False, False))):
            return int(byte[1], 16)
        return self.text(token_id, first=False)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable Latin-1 characters stand for themselves, and all other bytes are
    numbered from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(unprintable)}


_BYTE_OF: Final = _byte_level_alphabet()


def _flat(decoder: object, name: str) -> list[_Step]:
    """The steps of a decoder, without nesting.

    Raises:
        ConfigError: the decoder is malformed, or has a step of an unknown type.
    """
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
        kinds = ", ".join((*_ONE_BY_ONE, "ByteLevel", "ByteFallback", "Fuse", "Sequence"))
        raise ConfigError(f"{name}.type: expected a decoder for streams ({kinds}), got {kind!r}")
    return [cast("_Step", decoder)]


def _split(steps: list[_Step]) -> tuple[list[_Step], str | None, list[_Step], list[_Step]]:
    """Split a decoder's steps into four parts: steps that work on single tokens, the type of the step that works on
    bytes (`None` if there is no such step), more steps that work on single tokens, and the steps that get all tokens as
    one text, with ``Fuse`` itself."""
    kinds = [step["type"] for step in steps]
    start = next((n for n, kind in enumerate(kinds) if kind not in _ONE_BY_ONE), len(kinds))
    joint = kinds[start] if start < len(kinds) and kinds[start] != "Fuse" else None
    after = start + (joint is not None)
    if joint == "ByteLevel":
        return steps[:start], joint, [], steps[after:]
    fuse = next((n for n in range(after, len(kinds)) if kinds[n] not in _ONE_BY_ONE), len(kinds))
    return steps[:start], joint, steps[after:fuse], steps[fuse:]


def _check_order(head: Sequence[str], joint: str | None, body: Sequence[str], name: str) -> None:
    """Refuse orders of steps that no tokenizer has, or that would need more state.

    Raises:
        ConfigError: the steps have such an order.
    """
    if joint is not None and "BPEDecoder" in (*head, *body):
        raise ConfigError(f"{name}: expected BPEDecoder without {joint}, got both")
    if joint == "ByteLevel" and {"Metaspace", "WordPiece"} & set(head):
        raise ConfigError(f"{name}: expected ByteLevel without a step before it that looks at the first token")


def _strip(rest: Sequence[_Step], name: str) -> tuple[str, int]:
    """The character and count of the only step that may follow fusing: ``Strip`` of the text's beginning. An empty
    string and 0 if no step follows.

    Raises:
        ConfigError: another step follows.
    """
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


def _library_decoder(steps: Sequence[_Step]) -> tokenizers.decoders.Decoder | None:
    """The library's decoder for these steps; `None` if there are no steps."""
    if not steps:
        return None
    empty = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""}}
    steps_json = {"type": "Sequence", "decoders": list(steps)}
    decoder = tokenizers.Tokenizer.from_str(json.dumps({**empty, "decoder": steps_json})).decoder
    return cast("tokenizers.decoders.Decoder", decoder)


def _apply(decoder: tokenizers.decoders.Decoder | None, token: str, first: bool, last: bool) -> str:
    """Apply steps that work on single tokens to a token. `first` and `last` say whether it is the first or last
    token."""
    if decoder is None:
        return token
    whole = decoder.decode([*([] if first else [_NEIGHBOUR]), token, *([] if last else [_NEIGHBOUR])])
    neighbour_length = len(decoder.decode([_NEIGHBOUR]))
    begin = 0 if first else neighbour_length
    end = 0 if last else len(decoder.decode([_NEIGHBOUR, _NEIGHBOUR])) - neighbour_length
    return whole[begin : len(whole) - end]
