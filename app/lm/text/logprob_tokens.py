"""Tokens as OpenAI's ``logprobs`` show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # tokenizers take memory: they are loaded where there is a language model
    from app.lm.text.token_texts import TokenTexts

__all__ = ["LogprobToken", "logprob_token"]


class LogprobToken(NamedTuple):
    """A token on its own: a token can be a part of a character only."""

    token: str
    """Its text; if its bytes are no text, like ``bytes:\\xe2\\x96``, with the ASCII among them as it is."""
    bytes: list[int]
    """Its bytes in UTF-8: those of all tokens together are the text's, perhaps with a space before its first word."""


def logprob_token(texts: TokenTexts, token_id: int) -> LogprobToken:
    """A token's text and bytes; of an id that the vocabulary lacks: none.

    Raises:
        OverflowError: an id below 0 or over 2³²-1.
    """
    raw = texts.token_bytes(token_id)
    try:
        return LogprobToken(raw.decode(), list(raw))
    except UnicodeDecodeError:
        shown = "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in raw)
        return LogprobToken(f"bytes:{shown}", list(raw))
