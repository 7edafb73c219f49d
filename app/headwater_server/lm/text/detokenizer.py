"""Decodes a stream of token ids: into exactly the text that decoding all ids at once gives, and each piece as soon as
it is final.

Decoding a moving window of the last tokens, as `tokenizers`' ``DecodeStream`` does, isn't exact. ``DecodeStream`` holds
back a real U+FFFD, and loses a U+FFFD at the text's end. In a run of byte-fallback tokens it emits characters that a
later invalid byte changes into U+FFFD, and then raises an exception. So this module applies the decoder's rules token
by token, which is also faster.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:  # importing tokenizers takes memory: only workers with a language model import it
    from headwater_server.lm.text.token_texts import TokenTexts

__all__ = ["Detokenizer", "offsets_in"]

_CHARACTER_BYTES: Final = 4
"""Maximum number of bytes of a character in UTF-8. Earlier bytes don't affect the text that follows."""


class Detokenizer:
    """The text of a sequence, piece by piece. Only a single thread may use it at a time.

    The joined pieces are the decoded text of prompt and answer together, minus the decoded text of the prompt alone. So
    the answer begins with a space if its first word follows a word of the prompt. (If the prompt ends within a
    character, the answer begins where the two texts differ.)

    A run of byte-fallback tokens becomes a single piece, because its last byte can still change the text of the whole
    run.

    Args:
        texts: the texts of the tokenizer's ids.
        prompt_ids: the ids before the first generated id. Only the last few matter.
        skip_special_tokens: omit special tokens, as the tokenizer's `decode` does with this option.
        kept_ids: special tokens that are never omitted.
    """

    def __init__(
        self,
        texts: TokenTexts,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        kept_ids: frozenset[int] = frozenset(),
    ) -> None:
        skipped = texts.special_ids - kept_ids if skip_special_tokens else frozenset()
        tail = _deciding(texts, prompt_ids, skipped)
        self._text = _open(texts, skipped)
        final = self._text.push(tail)
        # The part of the prompt's text that isn't final yet. It is removed from the beginning of the answer.
        self._prompt_rest = _decode(texts, skipped, tail)[len(final) :]

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete. Ids that are not in the vocabulary have no text.

        Raises:
            OverflowError: an id below 0 or over 2³²-1.
        """
        return self._answer(self._text.push(ids))

    def finish(self) -> str:
        """The text that was held back. Must be the last call."""
        return self._answer(self._text.finish())

    def _answer(self, text: str) -> str:
        """Remove the rest of the prompt from the beginning of the text."""
        if not self._prompt_rest or not text:
            return text
        common = 0
        for ours, prompts in zip(text, self._prompt_rest, strict=False):
            if ours != prompts:
                self._prompt_rest = ""
                return text[common:]
            common += 1
        self._prompt_rest = self._prompt_rest[common:]
        return text[common:]


def offsets_in(text: str, ids: Sequence[int], texts: TokenTexts) -> list[int]:
    """The offset in characters at which the text of each token of `ids` begins in `text`, the text of these ids; see
    `TokenTexts.begin_of`. Special tokens that don't appear in `text` have no text."""
    shown = frozenset(token for token in texts.special_ids.intersection(ids) if texts.shown(token)[0] in text)
    detokenizer = Detokenizer(texts, kept_ids=shown)
    offsets, read = [], 0
    for token in ids:
        before, read = read, read + len(detokenizer.push((token,)))
        offsets.append(min(texts.begin_of(token, before, read), len(text)))  # a tokenizer may lengthen the text
    return offsets


class _Text(Protocol):
    """Decodes ids, and returns the text that is final."""

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


def _open(texts: TokenTexts, skipped: frozenset[int]) -> _Text:
    inner: _Text = _ByteText(texts, skipped) if texts.family == "bytes" else _PieceText(texts, skipped)
    return _Stripped(inner, *texts.strip) if texts.strip[1] else inner


def _decode(texts: TokenTexts, skipped: frozenset[int], ids: Sequence[int]) -> str:
    text = _open(texts, skipped)
    return text.push(ids) + text.finish()


def _deciding(texts: TokenTexts, ids: Sequence[int], skipped: frozenset[int]) -> Sequence[int]:
    """The last ids of a prompt: all that affect the text that follows."""
    size_bytes = 0
    for start in range(len(ids) - 1, -1, -1):
        if ids[start] in skipped:
            continue
        if texts.family == "bytes":
            held = texts.bytes_of[ids[start]]
            size_bytes += len(held)
            # After a byte that isn't the stripped character, the beginning of the text is over: later text isn't
            # stripped.
            if size_bytes >= _CHARACTER_BYTES and held.strip(texts.strip[0].encode() or b" "):
                return ids[start:]
        else:
            piece = texts.pieces[ids[start]]
            if isinstance(piece, str) and piece.strip(texts.strip[0] or None):
                return ids[start:]
    return ids


class _ByteText:
    """Decodes the joined bytes of all tokens as UTF-8, with U+FFFD for each longest invalid beginning of a
    character."""

    def __init__(self, texts: TokenTexts, skipped: frozenset[int]) -> None:
        self._texts = texts
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        bytes_of = self._texts.bytes_of
        return self._utf8.decode(b"".join([bytes_of[id_] for id_ in ids if id_ not in self._skipped]))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class _PieceText:
    """The tokens' texts one after another; runs of byte tokens are held until they end."""

    def __init__(self, texts: TokenTexts, skipped: frozenset[int]) -> None:
        self._texts = texts
        self._skipped = skipped
        self._is_first = True
        self._run = bytearray()
        self._held: tuple[int, bool] | None = None
        """The last token, and whether it is also the first. Used for decoders that treat the last token specially
        (`TokenTexts.holds_last`); otherwise None."""

    def push(self, ids: Sequence[int]) -> str:
        out: list[str] = []
        pieces = self._texts.pieces
        for id_ in ids:
            if id_ in self._skipped or (piece := pieces[id_]) is None:
                continue
            if self._texts.holds_last:
                out.append(self._release(last=False))
                self._held, self._is_first = (id_, self._is_first), False
                continue
            if isinstance(piece, int):
                self._run.append(piece)
                continue
            if self._run:
                out.append(self._end_run())
            if self._is_first:
                piece = self._texts.text(id_, first=True)
                self._is_first = False
            out.append(piece)
        return "".join(out)

    def finish(self) -> str:
        return self._release(last=True) + (self._end_run() if self._run else "")

    def _release(self, *, last: bool) -> str:
        if self._held is None:
            return ""
        (token_id, first), self._held = self._held, None
        return self._texts.text(token_id, first=first, last=last)

    def _end_run(self) -> str:
        """The text of a run of byte tokens. If the run isn't valid UTF-8, the text has a U+FFFD for every byte."""
        try:
            elements = [self._run.decode()]
        except UnicodeDecodeError:
            elements = ["\ufffd"] * len(self._run)
        self._run.clear()
        out = [self._texts.element(element, first=self._is_first and n == 0) for n, element in enumerate(elements[:2])]
        self._is_first = False
        return "".join(out) + "".join(out[1:]) * (len(elements) - 2)


class _Stripped:
    """Removes up to `count` occurrences of a character from the beginning of a text."""

    def __init__(self, text: _Text, character: str, count: int) -> None:
        self._text = text
        self._character = character
        self._left = count

    def push(self, ids: Sequence[int]) -> str:
        return self._strip(self._text.push(ids))

    def finish(self) -> str:
        return self._strip(self._text.finish())

    def _strip(self, text: str) -> str:
        if not self._left or not text:
            return text
        kept = text.lstrip(self._character)
        cut = min(len(text) - len(kept), self._left)
        self._left = 0 if kept else self._left - cut
        return text[cut:]
