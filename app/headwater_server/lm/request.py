"""A language model's request in flight: its sequences with their unread tokens, its reader, and its deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from headwater.engine import PromptLogprob
from headwater.wire.lm import SequenceEvent, Submit
from headwater_server.deadline_timer import TIMER_RESOLUTION_S, DeadlineTimer
from headwater_server.errors import Cancelled, ContractBroken, DeadlineExceeded, HeadwaterError
from headwater_server.lm.sequence import Generation, SequenceSpec, Tokens
from headwater_server.telemetry.recorder import LanguageModelMeter
from headwater_server.telemetry.tracing import GenerationTrace

__all__ = ["RequestRun", "TokenSlot"]


class SequenceChannel(Protocol):
    """The methods of `headwater_server.lm.engine_channel.Channel` that a request calls."""

    def submit(self, slot: TokenSlot) -> None: ...

    def cancel(self, slot: TokenSlot) -> None: ...


class TokenSlot:
    """A sequence of a request, with its unread tokens: at most `SequenceSpec.max_tokens`.

    Args:
        owner: the request.
        place: the sequence's index in the request.
        spec: the prompt and parameters of the sequence.
    """

    __slots__ = (
        "_cached", "_logprobs", "_logprobs_wanted", "_max_tokens", "_prompt", "_prompt_left", "_spec", "_tokens",
        "_tops", "channel", "count", "finish", "has_prompt_logprobs", "heard_s", "is_listed", "is_running", "number",
        "owner", "place", "prompt_tokens",
    )  # fmt: skip

    def __init__(self, owner: RequestRun, place: int, spec: SequenceSpec) -> None:
        self.owner = owner
        self.place = place
        self.prompt_tokens = len(spec.prompt)
        self.has_prompt_logprobs = spec.prompt_logprobs is not None
        self.channel: SequenceChannel | None = None
        """The channel that the sequence was last submitted on. `number` identifies the sequence within the channel."""
        self.number = -1
        self.is_running = True
        """Whether the sequence has neither ended nor been cancelled."""
        self.is_listed = False
        """Whether the sequence is in its owner's list of unread sequences."""
        self.count = 0
        """Number of tokens received."""
        self.heard_s = 0.0
        """Loop time at which the last token was received; 0 before the first."""
        self.finish: str | None = None
        """``stop`` or ``length``, once the sequence has ended normally; otherwise None."""
        self._spec: SequenceSpec | None = spec
        self._max_tokens = spec.max_tokens
        self._logprobs_wanted = spec.sampling.logprobs
        self._tokens: list[int] = []
        self._cached = 0
        self._logprobs: list[float] | None = None
        self._tops: list[tuple[tuple[int, float], ...]] | None = None
        self._prompt: list[PromptLogprob] = []
        self._prompt_left = self.prompt_tokens - 1 if self.has_prompt_logprobs else 0
        """Number of the prompt's log probabilities that have not arrived yet."""

    def submit(self) -> Submit:
        """The message that starts the sequence. Must not be called after `forget_spec`."""
        spec = self._spec
        assert spec is not None
        return Submit(
            self.number, self.owner.request_id, spec.prompt, spec.max_tokens, spec.sampling, spec.stop_ids,
            spec.ignore_eos, self.owner.cache_scope, spec.grammar, spec.prompt_logprobs,
        )  # fmt: skip

    def forget_spec(self) -> None:
        """Free the prompt and the parameters: the replica has received them, so they are never sent again."""
        self._spec = None

    def take(self, event: SequenceEvent) -> None:
        """Add an event's tokens, and its log probabilities of the prompt. The event's `finish` is left to the channel.

        Raises:
            ContractBroken: the event doesn't continue the sequence, has too many tokens, or has a wrong number of
                cached tokens or log probabilities. No token was added.
        """
        if event.index != self.count:
            did = "repeated tokens" if event.index < self.count else "left tokens out"
            raise self._broken(f"expected token {self.count}, got {event.index}: the engine {did}")
        tokens = event.tokens
        if event.prompt or self._prompt_left:
            self._take_prompt(event)
        if not tokens:
            return
        count = self.count + len(tokens)
        if count > self._max_tokens:
            reason = "the engine went on after the end"
            raise self._broken(f"expected at most {self._max_tokens} tokens, got {count}: {reason}")
        most_cached = 0 if self.count else self.prompt_tokens
        if not 0 <= event.cached <= most_cached:
            raise self._broken(f"cached: expected 0 to {most_cached} tokens of the prompt, got {event.cached}")
        if self._logprobs_wanted is not None:
            self._take_logprobs(event)
        self._cached += event.cached
        if self._tokens:
            self._tokens += tokens
        else:
            self._tokens = tokens
        self.count = count

    def read(self) -> Tokens:
        """Take all unread tokens, with the end if the sequence has ended."""
        news = Tokens(self._tokens, self._logprobs, self._tops, self.finish, self._cached, self._prompt)
        self._tokens, self._logprobs, self._tops, self._cached, self._prompt = [], None, None, 0, []
        return news

    def after_end(self, event: SequenceEvent) -> ContractBroken:
        """The error for an event that arrives after the sequence's end."""
        got = f"token {event.index}" if event.tokens else f"another end ({event.finish})"
        return self._broken(f"expected nothing after its end at {self.count} tokens, got {got}")

    def _take_prompt(self, event: SequenceEvent) -> None:
        remaining = self._prompt_left - len(event.prompt)
        if remaining < 0 or (remaining and (event.tokens or event.finish in ("stop", "length"))):
            raise self._broken(f"prompt: expected {self._prompt_left} more log probabilities, got {len(event.prompt)}")
        self._prompt += event.prompt
        self._prompt_left = remaining

    def _take_logprobs(self, event: SequenceEvent) -> None:
        counts = {"logprobs": len(event.logprobs or ())}
        if self._logprobs_wanted:
            counts["tops"] = len(event.tops or ())
        for name, got in counts.items():
            if got != len(event.tokens):
                raise self._broken(f"{name}: expected {len(event.tokens)}, one a token, got {got}")
        if self._logprobs is None:
            self._logprobs, self._tops = event.logprobs, event.tops if self._logprobs_wanted else None
        else:
            self._logprobs += event.logprobs or []
            if self._tops is not None:
                self._tops += event.tops or []

    def _broken(self, fault: str) -> ContractBroken:
        return ContractBroken(f"sequence {self.place}: {fault}")


class RequestRun(Generation):
    """The sequences of a request. If any sequence fails, the whole request fails and its other sequences are cancelled.

    Args:
        request_id: the request's id from the client, which need not be unique.
        specs: the sequences.
        meter: the model's metrics.
        start: submits all sequences to a replica; raises `Unavailable` if there is no replica.
        on_left: called once, when the request is closed or abandoned.
        idle_s: maximum time in seconds without any news of any sequence, including time in the queue. News are tokens,
            log probabilities of the prompt and a sequence's end.
        limit_s: maximum duration of the whole request in seconds; None: no maximum.
        trace: the trace of the request, if it is traced. The first token is noted in it, and it ends with `close`.
        cache_scope: the name of the request's API key; empty without a key. Only requests with the same scope share
            cached prefixes.
    """

    def __init__(
        self,
        request_id: str,
        specs: Sequence[SequenceSpec],
        meter: LanguageModelMeter,
        *,
        start: Callable[[RequestRun], None],
        on_left: Callable[[RequestRun], None],
        idle_s: float,
        limit_s: float | None = None,
        trace: GenerationTrace | None = None,
        cache_scope: str = "",
    ) -> None:
        self.request_id = request_id
        self.cache_scope = cache_scope
        self.slots = [TokenSlot(self, place, spec) for place, spec in enumerate(specs)]
        self._meter = meter
        self._start = start
        self._on_left = on_left
        self._idle_s = idle_s
        self._limit_s = limit_s
        self._trace = trace
        self._loop = asyncio.get_running_loop()
        self._running = len(self.slots)
        self._news: list[TokenSlot] = []
        """Sequences with unread tokens, unread log probabilities of the prompt or an unread end."""
        self._error: HeadwaterError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_read = False
        """Whether the reader has received any news."""
        self._is_left = False
        """Whether the request was closed or abandoned."""
        self._is_restarted = False
        self._began_ns = time.perf_counter_ns()
        self._began_s = self._heard_s = self._loop.time()
        self._has_token = False
        self._timer = DeadlineTimer(self._deadline, self._expire)
        if self._running:
            self._timer.start()

    @property
    def is_running(self) -> bool:
        """Whether any sequence has neither ended nor been cancelled."""
        return self._running > 0

    def submit(self, channel: SequenceChannel) -> None:
        """Submit, on this channel, all sequences that are still running."""
        for slot in self.slots:
            if slot.is_running:
                channel.submit(slot)

    def abandon(self) -> None:
        """Drop a request that never started. Metrics and traces do not contain it."""
        self._is_left = True
        self._timer.cancel()
        self._on_left(self)

    # Generation

    async def news(self) -> list[tuple[int, Tokens]]:
        """See `Generation.news`. If the request has failed, unread tokens are returned before the error is raised,
        unless nothing has been read yet. With the error, or the empty list, the request is closed."""
        while True:
            if self._error is not None and not (self._news and self._is_read):
                self.close()
                raise self._error.again()  # a copy, because the traceback of the raised error refers to self
            if self._news:
                return self._read()
            if not self._running:
                self.close()
                return []
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def drop(self, place: int) -> None:
        if self._is_left:
            return
        slot = self.slots[place]
        if slot.is_listed:
            slot.is_listed = False
            self._news.remove(slot)
        if slot.is_running:
            self._stop(slot)
            self._wake()

    def close(self) -> None:
        """See `Generation.close`. Drops the slots, because channels keep ended slots, which refer to this request."""
        if self._is_left:
            return
        self._is_left = True
        if self._error is None and not self._running and not self._news:
            self._meter.sequences.add(len(self.slots))
        if self._trace is not None:
            name = type(self._error).__name__ if self._error is not None else ""
            self._trace.end(len(self.slots), sum(slot.count for slot in self.slots), name)
        self._stop_all()
        self._news = []
        self.slots = []
        self._wake()
        self._on_left(self)

    # Called by the channel

    def note_tokens(self, slot: TokenSlot, now_s: float) -> None:
        """Note that a sequence has unread tokens, unread log probabilities of the prompt or an unread end."""
        self._heard_s = now_s
        if not self._has_token and slot.count:
            self._has_token = True
            self._meter.first_token.observe(time.perf_counter_ns() - self._began_ns)
            if self._trace is not None:
                self._trace.first_token()
        if not slot.is_listed:
            slot.is_listed = True
            self._news.append(slot)
            self._wake()

    def end(self, slot: TokenSlot, now_s: float) -> None:
        """Note that a sequence has ended normally. Its last tokens may still be unread."""
        slot.is_running = False
        self._running -= 1
        if not self._running:
            self._timer.cancel()
        self.note_tokens(slot, now_s)

    def fail(self, error: HeadwaterError) -> None:
        """Fail the request, and cancel its running sequences. No effect on a request that has failed, was closed or was
        abandoned."""
        if self._error is not None or self._is_left:
            return
        self._error = error
        self._stop_all()
        self._wake()

    def restart(self, error: HeadwaterError) -> None:
        """Submit the request's running sequences again, because a channel ended before the replica received a sequence.
        A request that was restarted before, has received tokens, or can't be submitted, fails with `error` instead."""
        if self._is_restarted or any(slot.count for slot in self.slots):
            self.fail(error)
            return
        self._is_restarted = True
        try:
            self._start(self)
        except HeadwaterError:
            self.fail(error)

    def cancel(self) -> int:
        """Fail a running request with `Cancelled`. Returns the number of sequences that were still running."""
        running = self._running
        if running:
            self.fail(Cancelled("the request was cancelled"))
        return running

    # The reader

    def _read(self) -> list[tuple[int, Tokens]]:
        self._is_read = True
        listed, self._news = self._news, []
        for slot in listed:
            slot.is_listed = False
        return [(slot.place, slot.read()) for slot in listed]

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _stop(self, slot: TokenSlot) -> None:
        slot.is_running = False
        self._running -= 1
        if not self._running:
            self._timer.cancel()
        if slot.channel is not None:
            slot.channel.cancel(slot)

    def _stop_all(self) -> None:
        for slot in self.slots:
            if slot.is_running:
                self._stop(slot)
        self._running = 0
        self._timer.cancel()

    # Deadlines

    def _deadline(self) -> float:
        idle_end_s = self._heard_s + self._idle_s
        return idle_end_s if self._limit_s is None else min(idle_end_s, self._began_s + self._limit_s)

    def _expire(self) -> None:
        if self._limit_s is not None and self._loop.time() + TIMER_RESOLUTION_S >= self._began_s + self._limit_s:
            where = "while it was computed" if self._has_token else "while it waited in the queue"
            self.fail(DeadlineExceeded(f"the deadline of {self._limit_s:g} s passed {where}"))
        elif self._has_token:
            self.fail(DeadlineExceeded(f"the stream sent no output for {self._idle_s:g} s"))
        else:
            self.fail(DeadlineExceeded(f"the deadline of {self._idle_s:g} s passed while it waited in the queue"))
