"""An engine for tests and benchmarks that computes nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass

from headwater.engine import EngineLimits, Finish, TokenEvent
from headwater.lm.admission import Admission

__all__ = ["NullEngine"]

_LIMITS = EngineLimits(
    max_sequences=64, max_waiting=1024, context_length=1_000_000, cache_tokens=64_000_000, vocab_size=1000
)


class NullEngine(Admission):
    """Computes nothing: the token of index i is i modulo the vocabulary size, for any prompt and sampling, and without
    logprobs. Otherwise it behaves like any engine.

    Args:
        limits: the engine's limits.
        eos_ids: tokens that end a sequence.
        step_s: how long a step takes, in seconds.
    """

    def __init__(
        self, limits: EngineLimits = _LIMITS, *, eos_ids: frozenset[int] = frozenset(), step_s: float = 0
    ) -> None:
        super().__init__(limits)
        self._eos_ids = eos_ids
        self._step_s = step_s
        self._running: dict[str, _Progress] = {}
        self._pending: list[TokenEvent] = []

    @property
    def has_work(self) -> bool:
        return bool(self._pending or self.active or self.waiting)

    def cancel(self, id: str) -> bool:
        """See `Engine.cancel`."""
        if not self.release(id):
            return False
        progress = self._running.pop(id, None)
        self._pending.append(TokenEvent(id, progress.produced if progress else 0, None, finish="cancelled"))
        return True

    def step(self) -> list[TokenEvent]:
        """See `Engine.step`."""
        if self._step_s:
            time.sleep(self._step_s)
        events, self._pending = self._pending, []
        while (request := self.take()) is not None:
            stops = request.stop_ids if request.ignore_eos else request.stop_ids | self._eos_ids
            self._running[request.id] = _Progress(request.max_tokens, stops)
        vocab_size = self.limits.vocab_size
        ended = []
        for id, progress in self._running.items():
            index = progress.produced
            finish: Finish | None = None
            if index == progress.max_tokens:  # max_tokens is 0
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
            self.release(id)
        return events

    def close(self) -> None:
        """See `Engine.close`."""
        self.clear()
        self._running.clear()
        self._pending.clear()


@dataclass(eq=False)
class _Progress:
    """The progress of a sequence."""

    max_tokens: int
    stops: frozenset[int]
    produced: int = 0
