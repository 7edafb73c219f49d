"""Converts a request's tokens into text, piece by piece: detokenizes, finds stop strings, adds log probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from headwater_server.errors import ContractBroken
from headwater_server.lm.sequence import Generation, Tokens
from headwater_server.lm.text.answer_parts import SPECIAL
from headwater_server.lm.text.detokenizer import Detokenizer
from headwater_server.lm.text.stop_automaton import StopAutomaton
from headwater_server.lm.text.stop_strings import StopFinder

if TYPE_CHECKING:
    from headwater_server.lm.text.token_texts import TokenTexts

__all__ = ["TextGeneration", "TextPiece", "TextStream", "TokenLogprob", "Usage"]


class TokenLogprob(NamedTuple):
    """A token of an answer, or of the prompt if the answer repeats it, with its log probability."""

    token: int
    logprob: float | None
    """`None` for the prompt's first token."""
    top: tuple[tuple[int, float], ...]
    """The most probable tokens at this position with their log probabilities, best first; empty if the request didn't
    ask for them, and for the prompt's first token."""
    offset: int
    """Offset in characters at which the token's text begins in the answer, which begins with the stream's ``prefix``.
    If the token is only part of a character: offset of this character."""


class TextPiece(NamedTuple):
    """New text of an answer."""

    text: str
    logprobs: Sequence[TokenLogprob] = ()
    """The tokens that begin in this piece; empty if the request didn't ask for log probabilities."""
    finish: str | None = None
    """Set in the last piece: ``stop`` (a stop token or a stop string) or ``length``. None in earlier pieces."""
    stop: str | None = None
    """The stop string that has ended the text; None if no stop string has."""
    ends: Sequence[int] = ()
    """For each new token the number of characters of the answer up to the token's end, including text that is held
    back; empty unless the request counts the tokens of parts of the answer."""


class TextStream:
    """The text of a sequence. The grouping of the tokens into calls of `take` affects only how the text is divided into
    pieces, not the text as a whole or the token count.

    A stop token contributes neither text nor a log probability, unless stops are included. If the prompt has log
    probabilities, a stop token contributes its log probability as well: clients then expect an entry for every
    generated token.

    Args:
        texts: the texts of the tokenizer's ids.
        prompt: the prompt's token ids.
        stops: the strings that end the text; `None` if there are no such strings.
        min_tokens: a stop string that is complete within this number of tokens doesn't end the text.
        include_stop: whether the text includes the token or string that stops it.
        skip_special_tokens: whether the text omits special tokens.
        marks: the texts of tokens that are never omitted, by their ids. In the text, `SPECIAL` stands before each.
        has_ends: whether pieces have `TextPiece.ends`.
        logprobs: whether pieces have log probabilities.
        prefix: text to put before the answer.
        offsets: offset of each token of the prompt in `prefix`, if the prompt has log probabilities; otherwise empty.
    """

    def __init__(
        self,
        texts: TokenTexts,
        prompt: Sequence[int],
        *,
        stops: StopAutomaton | None = None,
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        marks: Mapping[int, str] = MappingProxyType({}),
        has_ends: bool = False,
        logprobs: bool = False,
        prefix: str = "",
        offsets: Sequence[int] = (),
    ) -> None:
        kept_ids = frozenset(marks)
        self._detokenizer = Detokenizer(texts, prompt, skip_special_tokens=skip_special_tokens, kept_ids=kept_ids)
        self._marks = marks
        self._ends: list[int] | None = [] if has_ends else None
        self._texts = texts
        self._stops = StopFinder(stops, include_stop=include_stop) if stops is not None else None
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._has_logprobs = logprobs
        self._prefix = prefix
        self._prompt = prompt if offsets else ()
        self._offsets = offsets
        self._told = 0
        """Number of the prompt's tokens whose entries were returned in pieces."""
        self._held: deque[TokenLogprob] = deque()
        """Entries of tokens that begin in text that was not returned yet."""
        self._read = len(prefix)
        """Number of characters of the prefix and of the decoded text so far, including held-back text."""
        self._sent = 0
        """Number of characters that were returned in pieces, including the prefix."""
        self.completion_tokens = 0
        """Number of generated tokens so far, up to and including the token that stopped the text."""
        self.finish: str | None = None
        """The `TextPiece.finish` of the last piece; None until the last piece was returned."""
        self._stop: str | None = None
        """The stop string that has ended the text."""

    def take(self, news: Tokens) -> TextPiece:
        """The text that these tokens complete. The first piece begins with the prefix; if the prompt has log
        probabilities, each part of the prefix comes with the entries of its tokens. After the last piece, pieces are
        empty and without `finish`."""
        if self.finish is not None:
            return TextPiece("")
        is_plain = self._stops is None and not self._has_logprobs and self._ends is None
        text = self._take_all(news) if is_plain else self._take_each(news)
        echoed = self._echoed(news) if self._offsets else []
        if self._sent < len(self._prefix):
            end = self._offsets[self._told] if self._told < len(self._offsets) else len(self._prefix)
            text = self._prefix[self._sent : end] + text
        self._sent += len(text)
        ends: Sequence[int] = ()
        if self._ends is not None:
            ends, self._ends = self._ends, []
        logprobs = [*echoed, *self._released()] if self._has_logprobs else ()
        return TextPiece(text, logprobs, self.finish, self._stop, ends)

    def _echoed(self, news: Tokens) -> list[TokenLogprob]:
        """The entries of the prompt's next tokens."""
        first: list[tuple[float | None, tuple[tuple[int, float], ...]]] = [] if self._told else [(None, ())]
        entries = [
            TokenLogprob(self._prompt[place], logprob, top, self._offsets[place])
            for place, (logprob, top) in enumerate([*first, *news.prompt], self._told)
        ]
        self._told += len(entries)
        return entries

    def _take_all(self, news: Tokens) -> str:
        """Decode the tokens of a text without stop strings and log probabilities."""
        ids = news.tokens
        self.completion_tokens += len(ids)
        if news.finish is None:
            return self._decoded(ids)
        self.finish = news.finish
        if news.finish == "stop" and not self._include_stop:
            ids = ids[:-1]
        return self._decoded(ids) + self._detokenizer.finish()

    def _decoded(self, ids: Sequence[int]) -> str:
        """The text that these tokens complete, with `SPECIAL` before the text of each mark."""
        if self._marks.keys().isdisjoint(ids):
            return self._detokenizer.push(ids)
        parts = []
        for token in ids:
            text, mark = self._detokenizer.push((token,)), self._marks.get(token)
            if mark is not None and text.endswith(mark):
                text = f"{text.removesuffix(mark)}{SPECIAL}{mark}"
            parts.append(text)
        return "".join(parts)

    def _take_each(self, news: Tokens) -> str:
        """Like `_take_all`, but token by token: to find the token that completes a stop string, and each token's
        offset."""
        parts = []
        stop_at = len(news.tokens) - 1 if news.finish == "stop" and not self._include_stop else -1
        for n, token in enumerate(news.tokens):
            self.completion_tokens += 1
            before = self._read
            if n != stop_at:
                parts.append(self._search(self._decoded((token,))))
            if self._ends is not None:
                self._ends.append(self._read - len(self._prefix))
            if self._has_logprobs and (n != stop_at or self._offsets):
                assert news.logprobs is not None
                top = news.tops[n] if news.tops is not None else ()
                offset = self._texts.begin_of(token, before, self._read)
                self._held.append(TokenLogprob(token, news.logprobs[n], top, offset))
            if self.finish is not None:
                return "".join(parts)
        if news.finish is not None:
            parts.append(self._search(self._detokenizer.finish()))
            if self.finish is None:
                rest, stop = self._stops.finish() if self._stops is not None else ("", None)
                parts.append(rest)
                if stop is not None:
                    self._cut(stop)
                else:
                    self.finish = news.finish
        return "".join(parts)

    def _search(self, text: str) -> str:
        """Add decoded text, and return the text that can be sent. Ends the text if a stop string is found."""
        self._read += len(text)
        if self._stops is None:
            return text
        if self.completion_tokens <= self._min_tokens:
            return self._stops.skip(text)
        sent, stop = self._stops.push(text)
        if stop is not None:
            self._cut(stop)
        return sent

    def _cut(self, stop: str) -> None:
        self.finish, self._stop = "stop", stop

    def _released(self) -> list[TokenLogprob]:
        """Remove and return the held entries of tokens that begin in the text sent so far; at the end of a text that no
        stop string has cut, all held entries."""
        held, is_whole = self._held, self.finish is not None and self._stop is None
        released = []
        while held and (is_whole or held[0].offset < self._sent):  # the offsets are in ascending order
            released.append(held.popleft())
        return released


class Usage(NamedTuple):
    """The numbers of tokens of a request, over all its prompts and answers."""

    prompt_tokens: int
    """Tokens of all prompts. A prompt with several answers counts once."""
    completion_tokens: int
    cached_tokens: int = 0
    """Tokens of the prompts that the prefix cache had, counted once for prompts with several answers."""
    reasoning_tokens: int = 0
    """Tokens of the answers that are reasoning."""

    def as_json(self) -> dict[str, Any]:
        """The JSON of OpenAI's ``usage``."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class TextGeneration:
    """Converts the tokens of a generation into text, and ends sequences at their stop strings.

    Args:
        generation: the request in flight.
        streams: the text streams of the request's sequences, in order.
        prompt_tokens: number of tokens of all prompts.
        spend: called with each number of newly used tokens, first with `prompt_tokens`; the number may be 0.
        n: number of consecutive streams with the same prompt. The usage counts only the first stream's cached tokens.
    """

    def __init__(
        self,
        generation: Generation,
        streams: Sequence[TextStream],
        prompt_tokens: int,
        spend: Callable[[int], None] | None = None,
        n: int = 1,
    ) -> None:
        self._generation = generation
        self._n = n
        self._cached_tokens = 0
        self._streams = streams
        self._prompt_tokens = prompt_tokens
        self._spend = spend
        self._spent = 0
        if spend is not None:
            spend(prompt_tokens)

    @property
    def usage(self) -> Usage:
        """The numbers of tokens so far."""
        completion_tokens = sum(stream.completion_tokens for stream in self._streams)
        return Usage(self._prompt_tokens, completion_tokens, self._cached_tokens)

    def completion_tokens(self, place: int) -> int:
        """The number of tokens so far of the sequence with this index."""
        return self._streams[place].completion_tokens

    async def news(self) -> list[tuple[int, TextPiece]]:
        """Wait for new tokens of any sequence. Returns index and piece of each sequence with new tokens; a piece may be
        empty. Returns an empty list once all sequences have ended.

        Raises:
            HeadwaterError: the whole request failed, or a sequence ended without a reason (`ContractBroken`).
        """
        pieces = []
        for place, tokens in await self._generation.news():
            stream = self._streams[place]
            pieces.append((place, stream.take(tokens)))
            if place % self._n == 0:
                self._cached_tokens += tokens.cached
            if stream.finish is not None and tokens.finish is None:
                self._generation.drop(place)
        if self._spend is not None:
            used = self.usage.completion_tokens
            self._spend(used - self._spent)
            self._spent = used
        if not pieces:
            for place, stream in enumerate(self._streams):
                if stream.finish is None:
                    raise ContractBroken(f"sequence {place}: expected the engine's reason for its end, got no reason")
        return pieces

    async def whole(self) -> list[TextPiece]:
        """Wait for all sequences to end. Returns the whole text of each sequence, in order.

        Raises:
            HeadwaterError: as `news`.
        """
        parts: list[list[TextPiece]] = [[] for _ in self._streams]
        while pieces := await self.news():
            for place, piece in pieces:
                parts[place].append(piece)
        return [_joined(pieces) for pieces in parts]

    def close(self) -> None:
        """Cancel all sequences that still run. May be called more than once."""
        self._generation.close()


def _joined(pieces: Sequence[TextPiece]) -> TextPiece:
    text = "".join([piece.text for piece in pieces])
    logprobs = [entry for piece in pieces for entry in piece.logprobs]
    return pieces[-1]._replace(text=text, logprobs=logprobs, ends=tuple(end for piece in pieces for end in piece.ends))
