"""One sequence's tokens as text, piece by piece: detokenized, ended at a stop string, with its logarithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from app.errors import ContractBroken
from app.lm.generation import Tokens
from app.text.detokenizer import Detokenizer
from app.text.stop_strings import StopFinder

if TYPE_CHECKING:  # tokenizers take memory: they are loaded where there is a language model
    from app.text.token_texts import TokenTexts

__all__ = ["TextPiece", "TextStream", "TokenLogprob"]


class TokenLogprob(NamedTuple):
    """A token of an answer, as ``logprobs`` reports it."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most probable tokens in its place, best first."""
    offset: int
    """Where its text begins in the answer's, in characters; that of a part of a character, where the character does."""


class TextPiece(NamedTuple):
    """What has come of an answer."""

    text: str
    logprobs: Sequence[TokenLogprob] = ()
    """Of the tokens whose text begins in this piece; empty if they were not asked for."""
    finish: str | None = None
    """Set in the last piece: ``stop`` (a stop token or a stop string) or ``length``."""


class TextStream:
    """The text of one sequence. How its tokens are grouped changes only how the text is cut, not the text or the count.

    A stop token has no text and no logarithm here, unless stops are to be included.

    Args:
        texts: of the tokenizer.
        prompt: the ids before the answer.
        stops: strings that end the text.
        include_stop: whether what stops it, token or string, is a part of the text.
        skip_special_tokens: leave special tokens out.
        logprobs: whether the tokens come with their logarithms.
        prefix: a text that stands before the answer's.

    Raises:
        BadRequest: a stop string is none.
    """

    def __init__(
        self,
        texts: TokenTexts,
        prompt: Sequence[int],
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        logprobs: bool = False,
        prefix: str = "",
    ) -> None:
        self._detokenizer = Detokenizer(texts, prompt, skip_special_tokens=skip_special_tokens)
        self._stops = StopFinder(stops, include_stop=include_stop) if stops else None
        self._include_stop = include_stop
        self._has_logprobs = logprobs
        self._prefix = prefix
        self._held: list[TokenLogprob] = []
        """Those whose text is held back."""
        self._read = len(prefix)
        """Characters that the tokens have come to, those held back included."""
        self._sent = 0
        self.completion_tokens = 0
        """Tokens that were taken: up to the one that stopped the text, and that included."""
        self.finish: str | None = None
        """As `TextPiece.finish`, once that was given."""
        self._is_cut = False
        """Whether it ends before the text of all its tokens does."""

    def take(self, news: Tokens) -> TextPiece:
        """The text that is final with these tokens; after the last piece, an empty one."""
        if self.finish is not None:
            return TextPiece("")
        is_plain = self._stops is None and not self._has_logprobs
        text = self._take_all(news) if is_plain else self._take_each(news)
        if self._prefix:
            text, self._prefix = self._prefix + text, ""
        self._sent += len(text)
        return TextPiece(text, self._released() if self._has_logprobs else (), self.finish)

    def _take_all(self, news: Tokens) -> str:
        ids = news.tokens
        self.completion_tokens += len(ids)
        if news.finish is None:
            return self._detokenizer.push(ids)
        self.finish = news.finish
        if news.finish == "stop" and not self._include_stop:
            ids = ids[:-1]
        return self._detokenizer.push(ids) + self._detokenizer.finish()

    def _take_each(self, news: Tokens) -> str:
        """The same token by token, so that the one is known with which a stop string is complete."""
        if self._has_logprobs:
            _check_logprobs(news)
        parts = []
        stop_at = len(news.tokens) - 1 if news.finish == "stop" and not self._include_stop else -1
        for n, token in enumerate(news.tokens):
            self.completion_tokens += 1
            if n == stop_at:
                break
            if self._has_logprobs:
                assert news.logprobs is not None
                top = news.tops[n] if news.tops is not None else ()
                self._held.append(TokenLogprob(token, news.logprobs[n], top, self._read))
            parts.append(self._search(self._detokenizer.push((token,))))
            if self.finish is not None:
                return "".join(parts)
        if news.finish is not None:
            parts.append(self._search(self._detokenizer.finish()))
            if self.finish is None:
                rest, found = self._stops.finish() if self._stops is not None else ("", None)
                parts.append(rest)
                if found is not None:
                    self._cut()
                else:
                    self.finish = news.finish
        return "".join(parts)

    def _search(self, text: str) -> str:
        """What of a text can be sent."""
        self._read += len(text)
        if self._stops is None:
            return text
        sent, found = self._stops.push(text)
        if found is not None:
            self._cut()
        return sent

    def _cut(self) -> None:
        self.finish = "stop"
        self._is_cut = True

    def _released(self) -> list[TokenLogprob]:
        """Those of the held logarithms whose text begins in what is sent; at the end, the others have none."""
        if self.finish is not None and not self._is_cut:
            released, self._held = self._held, []
            return released
        count = 0
        for entry in self._held:
            if entry.offset >= self._sent:
                break
            count += 1
        released = self._held[:count]
        del self._held[:count]
        return released


def _check_logprobs(news: Tokens) -> None:
    count = len(news.tokens)
    logprobs = len(news.logprobs or ())
    tops = len(news.tops) if news.tops is not None else count
    if logprobs != count or tops != count:
        raise ContractBroken(
            f"logprobs: expected the engine to give one a token, got {logprobs} (and {tops} lists of the most "
            f"probable) for {count} tokens"
        )
