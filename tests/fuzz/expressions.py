"""Target: the regular expressions of the source, on texts that grow."""

from __future__ import annotations

from functools import cache
from typing import Final

from tests.fuzz.draw import Draw
from tests.regular_expressions import Automaton, expressions

__all__ = ["expression"]

_TIMES: Final = 32
"""How often a text's middle is repeated at first; then four times as often."""
_LETTERS: Final = 12


_automaton = cache(Automaton)


def expression(data: bytes) -> bool:
    """An expression tries at most five times as many steps for a text whose middle is repeated four times as often."""
    draw = Draw(data)
    automaton = _automaton(draw.choice(expressions()))
    begin = automaton.word([draw.below(256) for _ in range(draw.below(_LETTERS))])
    middle = automaton.word([draw.below(256) for _ in range(1 + draw.below(_LETTERS))], begin)
    few, many = (automaton.paths(begin + middle * times) for times in (_TIMES, 4 * _TIMES))
    assert many <= 5 * few + 1000, f"{automaton.expression}: {few} steps, then {many} for {begin!r} + n * {middle!r}"
    return few > _TIMES
