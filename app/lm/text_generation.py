"""A request's sequences under way, as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from app.errors import ContractBroken
from app.lm.generation import Generation
from app.lm.text_stream import TextPiece, TextStream

__all__ = ["TextGeneration", "Usage"]


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
