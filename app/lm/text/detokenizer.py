"""Text out of a stream of token ids: exactly that of the whole decode, and each piece as soon as it is final.

Neither of the usual ways is exact. Decoding a moving window of the last tokens, which is also what `tokenizers`'
``DecodeStream`` does, takes a text that ends in U+FFFD for unfinished: it holds a true U+FFFD back (at the end for
good, as ``DecodeStream`` can't be flushed), and in a run of byte-fallback tokens it emits characters that a later
invalid byte turns into U+FFFD, after which it raises. So the decoder's own rules are applied as the tokens come, which
also costs less.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:  # tokenizers take memory: they are loaded where there is a language model
    from app.lm.text.token_texts import TokenTexts

__all__ = ["Detokenizer"]

_CHARACTER_BYTES: Final = 4
"""The longest character in UTF-8: earlier bytes than these don't matter to what follows."""


class Detokenizer:
    """The text of one sequence, piece by piece. One thread at a time.

    The pieces together are what the whole decode gives for prompt and answer, without what it gives for the prompt
    alone: so the space before the answer's first word is there if the prompt has a word before it. (If the prompt ends
    within a character, the answer begins where the two decodes differ.)

    A run of byte-fallback tokens comes as one piece when it ends, because its last byte can still change all of it.

    Args:
        texts: of the tokenizer.
        prompt_ids: the ids before the first generated one: all, or the last that the caller has. Only the last few are
            looked at.
        skip_special_tokens: leave special tokens out, as decoding with this option does.
    """

    def __init__(self, texts: TokenTexts, prompt_ids: Sequence[int] = (), *, skip_special_tokens: bool = True) -> None:
        skipped = texts.special_ids if skip_special_tokens else frozenset()
        tail = _deciding(texts, prompt_ids, skipped)
        self._text = _open(texts, skipped)
        final = self._text.push(tail)
        # What of the prompt isn't final yet: it comes again with the answer, and is taken away from its beginning.
        self._prompt_rest = _decode(texts, skipped, tail)[len(final) :]

    def push(self, ids: Sequence[int]) -> str:
        """The text that is final with these ids; empty if it takes more of them.

        Raises:
            OverflowError: an id below 0 or over 2³²-1.
        """
        return self._answer(self._text.push(ids))

    def finish(self) -> str:
        """The text that was held back; after it, nothing more is pushed."""
        return self._answer(self._text.finish())

    def _answer(self, text: str) -> str:
        """The text without what of it is the prompt's."""
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


class _Text(Protocol):
    """A sequence's text as it becomes final."""

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


def _open(texts: TokenTexts, skipped: frozenset[int]) -> _Text:
    inner: _Text = _ByteText(texts, skipped) if texts.family == "bytes" else _PieceText(texts, skipped)
    return _Stripped(inner, *texts.strip) if texts.strip[1] else inner


def _decode(texts: TokenTexts, skipped: frozenset[int], ids: Sequence[int]) -> str:
    text = _open(texts, skipped)
    return text.push(ids) + text.finish()


def _deciding(texts: TokenTexts, ids: Sequence[int], skipped: frozenset[int]) -> Sequence[int]:
    """The last ids of a prompt, as far back as they decide on the text that follows."""
    size_bytes = 0
    for start in range(len(ids) - 1, -1, -1):
        if ids[start] in skipped:
            continue
        if texts.family == "bytes":
            held = texts.bytes_of[ids[start]]
            size_bytes += len(held)
            # A byte that isn't the stripped character: what is before it is at the text's beginning no more.
            if size_bytes >= _CHARACTER_BYTES and held.strip(texts.strip[0].encode() or b" "):
                return ids[start:]
        else:
            piece = texts.pieces[ids[start]]
            if isinstance(piece, str) and piece.strip(texts.strip[0] or None):
                return ids[start:]
    return ids


class _ByteText:
    """The tokens' bytes as one UTF-8 text, in which each longest beginning of a character that isn't one is U+FFFD."""

    def __init__(self, texts: TokenTexts, skipped: frozenset[int]) -> None:
        self._bytes_of = texts.bytes_of
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join([self._bytes_of[id_] for id_ in ids if id_ not in self._skipped]))

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
        """The last token and whether it is the first, for decoders that treat the last one in another way."""

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
        """A run's text: if it isn't UTF-8 as a whole, a U+FFFD for every byte."""
        try:
            elements = [self._run.decode()]
        except UnicodeDecodeError:
            elements = ["\ufffd"] * len(self._run)
        self._run.clear()
        out = [self._texts.element(element, first=self._is_first and n == 0) for n, element in enumerate(elements[:2])]
        self._is_first = False
        return "".join(out) + "".join(out[1:]) * (len(elements) - 2)


class _Stripped:
    """A text without some of one character at its very beginning."""

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
