"""Admission of sequences: a first-come-first-served queue in front of a cache with a budget in tokens."""

from __future__ import annotations

from collections.abc import Collection

from headwater.engine import (
    SAMPLING_FIELDS,
    EngineFull,
    EngineLimits,
    LogitBias,
    RequestRejected,
    RequestTooLong,
    Sampling,
    SequenceRequest,
)

__all__ = ["Admission", "id_in_use"]

_DEFAULTS = Sampling()


class Admission:
    """The part of an engine that queues and admits requests; engines derive from this class and compute the admitted
    requests.

    A request reserves capacity for its prompt and whole answer before it starts, so the cache suffices until the
    request ends. The cache is a rectangle, sequences × length: the reservation is the number of sequences times the
    length of the longest. A request that doesn't fit yet holds back later requests, so no request waits for ever.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self._waiting: dict[str, SequenceRequest] = {}
        """Waiting requests, in order of arrival."""
        self._ready: dict[str, SequenceRequest] = {}
        """Admitted requests that `take` hasn't returned yet, in order of arrival."""
        self._reserved: dict[str, int] = {}
        """The most tokens that each admitted request may need, by id."""
        self._checked_bias: LogitBias = {}
        """The last logit bias that passed the check. It is not checked again: a request's sequences share it, and it
        may be large."""

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """The number of admitted requests."""
        return len(self._reserved)

    @property
    def cache_used(self) -> int:
        """Reserved tokens of the cache."""
        return len(self._reserved) * max(self._reserved.values(), default=0)

    def submit(self, request: SequenceRequest) -> None:
        """Admit a request, or add it to the queue.

        Raises:
            EngineFull, RequestTooLong, RequestRejected: as `Engine.submit`.
        """
        self._check(request)
        if (self._waiting or not self._fits(request)) and self.waiting >= self.limits.max_waiting:
            raise self._full()
        self._enqueue(request)

    def take(self) -> SequenceRequest | None:
        """Take the next admitted request; None if all are taken."""
        for id in self._ready:
            return self._ready.pop(id)
        return None

    def release(self, id: str) -> bool:
        """Drop a request, admitted or waiting, and admit the waiting requests that now fit; False if no request has
        this id."""
        if self._waiting.pop(id, None) is None and self._reserved.pop(id, None) is None:
            return False
        self._ready.pop(id, None)
        for request in list(self._waiting.values()):
            if not self._fits(request):
                break
            del self._waiting[request.id]
            self._place(request)
        return True

    def clear(self) -> None:
        """Drop all requests."""
        self._waiting.clear()
        self._ready.clear()
        self._reserved.clear()

    def _enqueue(self, request: SequenceRequest) -> None:
        """Admit a checked request, or add it to the queue."""
        if self._waiting or not self._fits(request):
            self._waiting[request.id] = request
        else:
            self._place(request)

    def _full(self) -> EngineFull:
        return EngineFull(
            f"{self.active} sequences run and {self.waiting} wait; `max_waiting` is {self.limits.max_waiting}"
        )

    def _fits(self, request: SequenceRequest) -> bool:
        count = len(self._reserved) + 1
        longest = max(_tokens(request), *self._reserved.values(), 0)
        return count <= self.limits.max_sequences and count * longest <= self.limits.cache_tokens

    def _place(self, request: SequenceRequest) -> None:
        self._reserved[request.id] = _tokens(request)
        self._ready[request.id] = request

    def _check(self, request: SequenceRequest) -> None:
        limits = self.limits
        if request.id in self._waiting or request.id in self._reserved:
            raise id_in_use(request.id)
        if not request.prompt:
            raise RequestRejected("prompt: expected at least one token, got none")
        tokens = _tokens(request)
        for limit, limit_name in (
            (limits.context_length, "the model's context"),
            (limits.cache_tokens, "the cache's size"),
        ):
            if tokens > limit:
                raise RequestTooLong(
                    f"expected prompt and max_tokens to be at most {limit} tokens, {limit_name}; "
                    f"got {len(request.prompt)} + {request.max_tokens}"
                )
        if limits.sampling != SAMPLING_FIELDS:
            for name in sorted(SAMPLING_FIELDS - limits.sampling):
                if getattr(request.sampling, name) != getattr(_DEFAULTS, name):
                    raise RequestRejected(f"{name}: this engine does not support it")
        grammar = request.grammar
        if grammar is not None and grammar.kind not in limits.grammars:
            raise RequestRejected(f"{grammar.field}: this engine does not support it")
        if request.prompt_logprobs is not None and not limits.prompt_logprobs:
            raise RequestRejected("prompt_logprobs: this engine does not support it")
        bias = request.sampling.logit_bias
        if bias is not self._checked_bias:
            self._check_ids("logit_bias", bias)
            self._checked_bias = bias
        self._check_ids("prompt", request.prompt)

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self.limits.vocab_size):
            raise RequestRejected(
                f"{name}: expected tokens from 0 to {self.limits.vocab_size - 1}, got {min(ids)} to {max(ids)}"
            )


def id_in_use(id: str) -> RequestRejected:
    """The error for a request with the id of another request that has not ended."""
    return RequestRejected(f"id: expected an id that is not in use, got {id!r}")


def _tokens(request: SequenceRequest) -> int:
    return len(request.prompt) + request.max_tokens
