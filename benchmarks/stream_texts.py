"""Prompts for the shipped model, and whether answers are what its engine alone gives."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from typing import Final

import tokenizers

from benchmarks.stream_engine import VOCAB_SIZE, Ran, folder
from benchmarks.stream_load import Answer

__all__ = ["TIE", "AnswerWrong", "check", "check_counting", "counting", "encoded", "prompts", "text_of"]

TIE: Final = 1e-4
"""Where the best two tokens are nearer than this, batches of other sizes may differ."""

_tokenizer: Final = tokenizers.Tokenizer.from_file(str(folder() / "tokenizer.json"))


class AnswerWrong(RuntimeError):
    """What came isn't what should have."""


def encoded(text: str) -> list[int]:
    """Its ids."""
    return _tokenizer.encode(text, add_special_tokens=False).ids


def text_of(ids: Sequence[int]) -> str:
    """Their text as an answer has it."""
    return _tokenizer.decode(ids, skip_special_tokens=True)


def prompts(count: int, shortest: int = 16, longest: int = 64) -> list[list[int]]:
    """Pieces of a program, their lengths spread evenly."""
    ids = encoded(inspect.getsource(argparse))
    lengths = [shortest + row * (longest - shortest) // max(1, count - 1) for row in range(count)]
    return [ids[61 * row % (len(ids) - longest) :][:length] for row, length in enumerate(lengths)]


def counting(tokens: int) -> str:
    """What an engine that computes nothing says."""
    return text_of([index % VOCAB_SIZE for index in range(tokens)])


def check(answers: Sequence[Answer], ran: Ran, max_tokens: int, tie: float = TIE) -> int:
    """Compare streams with what the engine alone made of the same prompts; the number of those that differ at a tie.

    Args:
        answers: the streams' answers.
        ran: what the engine made.
        max_tokens: of each.
        tie: where a token leads by less, another one may be there.

    Raises:
        AnswerWrong: a stream failed, has another number of tokens, or another text where that is no tie.
    """
    ties = 0
    for row, answer in enumerate(answers):
        _check_end(row, answer, max_tokens)
        got, ids = answer.texts.get(0, ""), ran.tokens[row]
        if got == text_of(ids):
            continue
        place = next((n for n in range(len(ids)) if not got.startswith(text_of(ids[: n + 1]).rstrip("\ufffd"))), -1)
        if place < 0 or ran.leads[row][place] >= tie:
            raise AnswerWrong(f"stream {row}: expected {text_of(ids)!r:.300}, got {got!r:.300}")
        ties += 1
    return ties


def check_counting(answers: Sequence[Answer], tokens: int, choices: int = 1) -> None:
    """Compare streams with `counting`.

    Raises:
        AnswerWrong: one failed or has another text.
    """
    expected = counting(tokens)
    for row, answer in enumerate(answers):
        _check_end(row, answer, tokens * choices)
        for index in range(choices):
            if answer.texts.get(index) != expected:
                raise AnswerWrong(f"stream {row}: expected the tokens in order, got {answer.texts.get(index)!r:.300}")


def _check_end(row: int, answer: Answer, tokens: int) -> None:
    if answer.error:
        raise AnswerWrong(f"stream {row}: status {answer.status}: {answer.error}")
    if answer.tokens != tokens or set(answer.finishes.values()) != {"length"}:
        raise AnswerWrong(
            f"stream {row}: expected {tokens} tokens and the end `length`, got {answer.tokens}, {answer.finishes}"
        )
