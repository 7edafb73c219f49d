"""How many blocks make a model take a wanted time on this machine, on one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from headwater import Model

__all__ = ["calibrate", "call_ms", "loaded"]

SAMPLES = 9
FEW, MANY = 8, 48


def loaded(model: Model) -> Model:
    """The model, loaded on the CPU."""
    model.load("cpu")
    return model


def calibrate(build: Callable[[int], Model], argument: dict[str, object], wanted_ms: float) -> int:
    """The option ``repeats`` with which a call takes about ``wanted_ms``.

    Time is linear in it, so two counts, timed in turns, give what one more costs; a second look at the count found that
    way corrects what caches do at other lengths. All are medians of several calls.

    Args:
        build: makes a model from ``repeats``.
        argument: a call's keyword arguments.
        wanted_ms: milliseconds.
    """
    few, many = _medians_ms([loaded(build(FEW)), loaded(build(MANY))], argument)
    each = max((many - few) / (MANY - FEW), 1e-6)
    repeats = max(1, round(FEW + (wanted_ms - few) / each))
    (found,) = _medians_ms([loaded(build(repeats))], argument)
    return max(1, repeats + round((wanted_ms - found) / each))


def call_ms(model: Model, argument: dict[str, object]) -> tuple[float, dict[str, object]]:
    """Call a model: how long it took, in milliseconds, and what it gave."""
    started = time.perf_counter()
    result: dict[str, object] = model(**argument)
    return (time.perf_counter() - started) * 1e3, result


def _medians_ms(models: list[Model], argument: dict[str, object]) -> list[float]:
    times: list[list[float]] = [[] for _ in models]
    for model in models:
        call_ms(model, argument)
    for _ in range(SAMPLES):
        for found, model in zip(times, models, strict=True):
            found.append(call_ms(model, argument)[0])
    return [statistics.median(found) for found in times]
