"""Engines of language models that compute nothing, and ones that fail as a prompt's first token says.

``options: {engine: "engines:null"}`` and the like; the model's folder gives the tokenizer only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from headwater.engine import Engine, EngineLimits, SequenceRequest, TokenEvent
from headwater.lm.null_engine import NullEngine

Fault: TypeAlias = Literal["repeat", "skip", "history", "raise"]

FAULTS: Final = {11: "repeat", 12: "skip", 13: "history", 14: "error", 15: "raise"}
"""What is wrong with a sequence, by the first token of its prompt; with others, nothing is."""
AFTER: Final = 5
"""The index of the token at which it begins."""
FAILURE: Final = "ValueError: this sequence fails on purpose"


def null(folder: Path, *, device: str, on_broken: Any, step_s: float = 0, **limits: int) -> Engine:
    """An engine whose token of index i is i, modulo the vocabulary."""
    return NullEngine(_limits(**limits), step_s=step_s)


def faulty(folder: Path, *, device: str, on_broken: Any, step_s: float = 0, **limits: int) -> Engine:
    """The same, but for the prompts that begin with one of `FAULTS`."""
    engine: Engine = _Failing(_limits(**limits), step_s)
    for first, fault in FAULTS.items():
        if fault != "error":
            engine = _Faulty(engine, fault, first)
    return engine


def _limits(
    *,
    max_sequences: int = 64,
    max_waiting: int = 1024,
    context_length: int = 100_000,
    cache_tokens: int = 10_000_000,
    vocab_size: int = 4096,
) -> EngineLimits:
    return EngineLimits(max_sequences, max_waiting, context_length, cache_tokens, vocab_size)


class FaultyEngine:
    """Wraps an engine and falsifies the events of chosen sequences.

    Args:
        engine: the engine whose events are passed on.
        fault: ``repeat`` reports a token twice, ``skip`` leaves one out, ``history`` reports all tokens again at each
            step, ``raise`` makes `step` raise.
        after: the index of the token at which the fault starts.
        is_faulty: chooses sequences by id.
    """

    def __init__(
        self, engine: Engine, fault: Fault, *, after: int = 3, is_faulty: Callable[[str], bool] = lambda id: True
    ) -> None:
        self._engine = engine
        self._fault = fault
        self._after = after
        self._is_faulty = is_faulty
        self._histories: dict[str, list[TokenEvent]] = {}

    @property
    def limits(self) -> EngineLimits:
        return self._engine.limits

    @property
    def active(self) -> int:
        return self._engine.active

    @property
    def waiting(self) -> int:
        return self._engine.waiting

    @property
    def cache_used(self) -> int:
        return self._engine.cache_used

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def submit(self, request: SequenceRequest) -> None:
        """As `Engine.submit`."""
        self._engine.submit(request)

    def cancel(self, id: str) -> bool:
        """As `Engine.cancel`."""
        return self._engine.cancel(id)

    def step(self) -> list[TokenEvent]:
        """As `Engine.step`, with the fault."""
        events: list[TokenEvent] = []
        for event in self._engine.step():
            events += self._spoiled(event) if self._is_faulty(event.id) else [event]
        return events

    def close(self) -> None:
        """As `Engine.close`."""
        self._histories.clear()
        self._engine.close()

    def _spoiled(self, event: TokenEvent) -> list[TokenEvent]:
        if self._fault == "raise" and event.index >= self._after:
            raise RuntimeError(f"a deliberate fault in sequence {event.id}")
        if self._fault == "repeat" and event.index == self._after:
            return [msgspec.structs.replace(event, finish=None), event]
        if self._fault == "skip" and event.index == self._after and event.finish is None:
            return []
        if self._fault == "history":
            history = self._histories.setdefault(event.id, [])
            events = [*history, event] if event.index >= self._after else [event]
            history.append(event)
            if event.finish:
                del self._histories[event.id]
            return events
        return [event]


class _Faulty(FaultyEngine):
    """Breaks the contract for prompts that begin with one token."""

    def __init__(self, engine: Engine, fault: Any, first: int) -> None:
        self._first = first
        self._ids: set[str] = set()
        super().__init__(engine, fault, after=AFTER, is_faulty=self._ids.__contains__)

    def submit(self, request: SequenceRequest) -> None:
        """As `Engine.submit`."""
        super().submit(request)
        if request.prompt[0] == self._first:
            self._ids.add(request.id)


class _Failing(NullEngine):
    """Ends sequences with an error, as an engine may, for prompts that begin with one token."""

    def __init__(self, limits: EngineLimits, step_s: float) -> None:
        super().__init__(limits, step_s=step_s)
        self._failing: set[str] = set()

    def submit(self, request: SequenceRequest) -> None:
        """As `Engine.submit`."""
        super().submit(request)
        if FAULTS.get(request.prompt[0]) == "error":
            self._failing.add(request.id)

    def step(self) -> list[TokenEvent]:
        """As `Engine.step`."""
        events = []
        for event in super().step():
            if event.id in self._failing and event.index >= AFTER:
                self._failing.discard(event.id)
                if self.cancel(event.id):
                    self._pending = [one for one in self._pending if one.id != event.id]
                event = TokenEvent(event.id, event.index, None, finish="error", error=FAILURE)
            events.append(event)
        return events
