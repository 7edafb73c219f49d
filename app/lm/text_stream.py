"""A request's sequences as text, piece by piece: detokenized, ended at a stop string, with log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from app.errors import ContractBroken
from app.lm.sequence import Generation, Tokens
from app.lm.text.detokenizer import Detokenizer
from app.lm.text.stop_strings import StopFinder

if TYPE_CHECKING:
    from app.lm.text.token_texts import TokenTexts

__all__ = ["TextGeneration", "TextPiece", "TextStream", "TokenLogprob", "Usage"]


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


class Usage(NamedTuple):
    """How many tokens a request took."""

    prompt_tokens: int
    """Each prompt once, however many answers it has."""
    completion_tokens: int

    def as_json(self) -> dict[str, int]:
        """OpenAI's ``usage``."""
        return {**self._asdict(), "total_tokens": self.prompt_tokens + self.completion_tokens}


class TextGeneration:
    """Makes text of what a generation gives, and ends sequences at their stop strings.

    Args:
        generation: gives the tokens.
        streams: one for each of its sequences, in their order.
        prompt_tokens: of all prompts.
        spend: told of the tokens that were used, first those of the prompts.
    """

    def __init__(
        self,
        generation: Generation,
        streams: Sequence[TextStream],
        prompt_tokens: int,
        spend: Callable[[int], None] | None = None,
    ) -> None:
        self._generation = generation
        self._streams = streams
        self._prompt_tokens = prompt_tokens
        self._spend = spend
        self._spent = 0
        if spend is not None:
            spend(prompt_tokens)

    @property
    def usage(self) -> Usage:
        """So far."""
        return Usage(self._prompt_tokens, sum(stream.completion_tokens for stream in self._streams))

    async def news(self) -> list[tuple[int, TextPiece]]:
        """Wait until any sequence has news: its place, and a piece of text, which may be empty. Empty: all have ended.

        Raises:
            HeadwaterError: the request failed as a whole.
        """
        pieces = []
        for place, tokens in await self._generation.news():
            stream = self._streams[place]
            pieces.append((place, stream.take(tokens)))
            if stream.finish is not None and tokens.finish is None:
                self._generation.drop(place)
        if self._spend is not None:
            used = self.usage.completion_tokens
            self._spend(used - self._spent)
            self._spent = used
        if not pieces:
            for place, stream in enumerate(self._streams):
                if stream.finish is None:
                    raise ContractBroken(f"sequence {place}: expected the engine to say why it ended, got nothing")
        return pieces

    async def whole(self) -> list[TextPiece]:
        """All of each sequence, in their order.

        Raises:
            HeadwaterError: the request failed as a whole.
        """
        parts: list[list[TextPiece]] = [[] for _ in self._streams]
        while pieces := await self.news():
            for place, piece in pieces:
                parts[place].append(piece)
        return [
            TextPiece(
                "".join([piece.text for piece in of_one]),
                [entry for piece in of_one for entry in piece.logprobs],
                of_one[-1].finish,
            )
            for of_one in parts
        ]

    def close(self) -> None:
        """Nobody wants any more of it. May be called more than once."""
        self._generation.close()
