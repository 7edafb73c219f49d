"""Engines for tests and benchmarks: one that computes nothing, and one that breaks the contract of `Engine`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from inference.engine import Engine, EngineLimits, Finish, SequenceRequest, TokenEvent
from inference.lm.admission import Admission

__all__ = ["FaultyEngine", "NullEngine"]

Fault: TypeAlias = Literal["repeat", "skip", "history", "raise"]

_LIMITS = EngineLimits(
    max_sequences=64, max_waiting=1024, context_length=1_000_000, cache_tokens=64_000_000, vocab_size=1000
)


class NullEngine:
    """Computes nothing: the token of index i is i modulo the vocabulary size. Otherwise it behaves like any engine.

    Args:
        limits: the engine's limits.
        eos_ids: tokens that end a sequence.
        step_s: how long a step takes, in seconds.
    """

    def __init__(
        self, limits: EngineLimits = _LIMITS, *, eos_ids: frozenset[int] = frozenset(), step_s: float = 0
    ) -> None:
        self._admission = Admission(limits)
        self._eos_ids = eos_ids
        self._step_s = step_s
        self._running: dict[str, _Progress] = {}
        self._pending: list[TokenEvent] = []

    @property
    def limits(self) -> EngineLimits:
        return self._admission.limits

    @property
    def active(self) -> int:
        return self._admission.active

    @property
    def waiting(self) -> int:
        return self._admission.waiting

    @property
    def cache_used(self) -> int:
        return self._admission.reserved

    @property
    def has_work(self) -> bool:
        return bool(self._pending or self.active or self.waiting)

    def submit(self, request: SequenceRequest) -> None:
        """As `Engine.submit`."""
        self._admission.submit(request)

    def cancel(self, id: str) -> bool:
        """As `Engine.cancel`."""
        if not self._admission.release(id):
            return False
        progress = self._running.pop(id, None)
        self._pending.append(TokenEvent(id, progress.produced if progress else 0, None, finish="cancelled"))
        return True

    def step(self) -> list[TokenEvent]:
        """As `Engine.step`."""
        if self._step_s:
            time.sleep(self._step_s)
        events, self._pending = self._pending, []
        while (request := self._admission.take()) is not None:
            stops = request.stop_ids if request.ignore_eos else request.stop_ids | self._eos_ids
            self._running[request.id] = _Progress(request, stops)
        vocab_size = self.limits.vocab_size
        ended = []
        for id, progress in self._running.items():
            index = progress.produced
            finish: Finish | None = None
            if index == progress.max_tokens:  # 0
                events.append(TokenEvent(id, 0, None, finish="length"))
                ended.append(id)
                continue
            token = index % vocab_size
            progress.produced = index + 1
            if token in progress.stops:
                finish = "stop"
            elif index + 1 == progress.max_tokens:
                finish = "length"
            events.append(TokenEvent(id, index, token, finish=finish))
            if finish:
                ended.append(id)
        for id in ended:
            del self._running[id]
            self._admission.release(id)
        return events

    def close(self) -> None:
        """As `Engine.close`."""
        self._admission.clear()
        self._running.clear()
        self._pending.clear()


class _Progress:
    """The progress of a sequence."""

    __slots__ = ("max_tokens", "produced", "stops")

    def __init__(self, request: SequenceRequest, stops: frozenset[int]) -> None:
        self.max_tokens = request.max_tokens
        self.stops = stops
        self.produced = 0


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
