"""Sends a request to a replica, relays the answer within deadlines, and cancels the request when the client leaves."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TypeVar

from headwater_server.codecs.wording import PARSE_ERRORS
from headwater_server.deadline_timer import TIMER_RESOLUTION_S, DeadlineTimer
from headwater_server.dispatch.pool import Replica
from headwater_server.errors import (
    RETRY_AFTER_LOST_S,
    CallableFailed,
    DeadlineExceeded,
    HeadwaterError,
    QueueFull,
    ReplicaLost,
)
from headwater_server.lm.openai_answer import Event
from headwater_server.telemetry.tracing import GenerationTrace
from headwater_server.transport.relay_client import RelayClient, UpstreamAnswer
from headwater_server.vllm.answers import DONE, LOST, EventReader, RelayedAnswer, WholeAnswer, refusal
from headwater_server.vllm.requests import PATHS, VllmRequest

__all__ = ["Relay", "VllmReplica"]

R = TypeVar("R")

TRIES = 2
"""Maximum number of times that a request is sent: see `Relay`."""


@dataclass(slots=True, eq=False)
class VllmReplica(Replica):
    """A replica and its number of requests in flight."""

    client: RelayClient
    requests: int = 0
    """Requests of this worker."""
    others: int = 0
    """Requests of other workers, from the last sample; 0 if there was no sample, or if samples are too old for a choice
    (`headwater_server.vllm.vllm_model.MOST_SAMPLED`)."""

    @property
    def load(self) -> int:
        """Requests of this worker and, from the last sample, of other workers."""
        return self.requests + self.others


class Relay:
    """Relays a request to a replica, and the answer to the client. Either `whole` or `events` is called, once; it sends
    the request.

    If the replica is lost before any part of the answer was converted for the client, the request is sent once more, if
    possible to another replica; if the replica's queue is full, only to another replica.

    Args:
        request: the checked request.
        request_id: the request's id from the client, by which the request can be cancelled.
        cache_scope: scope of the prefix cache. Only requests with the same scope share cached prefixes.
        key: the name of the request's API key; empty without a key.
        choose: chooses a replica, if possible not the given replica, which has failed the request; raises `Unavailable`
            if there is no replica.
        on_lost: called with a replica whose connection has ended or can't be made.
        on_left: called once, when the relay is closed.
        idle_s: the longest wait for an event of a stream in seconds, including time in the queue. It doesn't apply to a
            whole answer.
        trace: the trace of the request, if it is traced.
        began_s: loop time of the request's beginning, from which its own ``timeout_s`` counts; default: now.
    """

    def __init__(
        self,
        request: VllmRequest,
        request_id: str,
        cache_scope: str,
        *,
        key: str,
        choose: Callable[[VllmRequest, VllmReplica | None], VllmReplica],
        on_lost: Callable[[VllmReplica], None],
        on_left: Callable[[Relay], None],
        idle_s: float,
        trace: GenerationTrace | None,
        began_s: float | None = None,
    ) -> None:
        self.request_id = request_id
        self.model = request.model
        self.key = key
        self.trace = trace
        self.replica: VllmReplica | None = None
        """The replica that has the request; None before the request is sent, between two tries, and after the request's
        end."""
        self._request = request
        self._body = request.encoded(cache_scope)
        self._choose = choose
        self._on_lost = on_lost
        self._on_left = on_left
        self._idle_s = idle_s if request.streams else math.inf
        self._limit_s = math.inf if request.timeout_s is None else request.timeout_s
        self._loop = asyncio.get_running_loop()
        self._heard_s = self._loop.time()
        self._began_s = self._heard_s if began_s is None else began_s
        self._answer: UpstreamAnswer | None = None
        self._tried: VllmReplica | None = None
        """The replica that has failed the request."""
        self._full: QueueFull | None = None
        """The error of the `_tried` replica, if its queue was full."""
        self._is_waiting = True
        """Whether the relay waits for vLLM, not for the client to read."""
        self._error: HeadwaterError | None = None
        self._failure = ""
        """The type of the error that the last try ended with, for the trace; empty without an error."""
        self._is_left = False
        self._timer = DeadlineTimer(self._deadline, self._expire)
        self._timer.start()

    async def whole(self, answer: WholeAnswer) -> bytes:
        """Send the request, and return the client's whole answer. Closes the relay.

        Raises:
            HeadwaterError: the request failed.
        """
        tries = TRIES
        try:
            while True:
                tries -= 1
                try:
                    upstream = await self._send()
                    body = self._converted(answer.whole, await upstream.whole())
                    answer.count.end()
                    return body
                except HeadwaterError as error:
                    if not self._is_sent_again(error, may_be=tries > 0):
                        raise
        finally:
            self._end(answer)

    async def events(self, answer: RelayedAnswer) -> AsyncGenerator[Event, None]:
        """Send the request, and yield the client's events, without the events of `RelayedAnswer.end`. Closes the relay
        at the end.

        Raises:
            HeadwaterError: the request failed, possibly after some events.
        """
        tries, has_begun = TRIES, False
        try:
            while True:
                tries -= 1
                try:
                    upstream = await self._send()
                    reader = EventReader()
                    while data := await self._read(upstream):
                        for name, event in reader.take(data):
                            if self._error is not None:  # the event arrived before `fail` was called
                                raise self._error.again()
                            if event == DONE:
                                answer.count.end()
                                return
                            client_events = self._converted(answer.events, name, event)
                            has_begun = True
                            for client_event in client_events:
                                yield client_event
                    raise ReplicaLost(LOST, retry_after_s=RETRY_AFTER_LOST_S)
                except HeadwaterError as error:
                    if not self._is_sent_again(error, may_be=tries > 0 and not has_begun):
                        raise
        finally:
            self._end(answer)

    def fail(self, error: HeadwaterError) -> None:
        """End the request with an error, which `whole` or `events` then raises. No effect on a request that has ended
        or failed."""
        if self._error is None and not self._is_left:
            self._error = error
            if self._answer is not None:
                self._answer.close()  # wakes a task that waits for data
            self._leave_replica()

    @property
    def is_running(self) -> bool:
        """Whether the request has neither ended nor failed."""
        return not self._is_left and self._error is None

    def close(self) -> None:
        """Cancel the request on the replica if it still runs. May be called more than once."""
        if self._is_left:
            return
        self._is_left = True
        self._timer.cancel()
        self._leave_replica()
        self._on_left(self)

    # The replica

    async def _send(self) -> UpstreamAnswer:
        """Send the request to a replica, and return the replica's answer, which has the status 200 and was not read
        yet.

        Raises:
            HeadwaterError: there is no replica; the replica is full, is lost or refused the request; or `fail` was
                called.
        """
        if self._error is not None:
            raise self._error.again()
        replica = self._choose(self._request, self._tried)
        if replica is self._tried and self._full is not None:
            raise self._full.again()
        self.replica = replica
        replica.requests += 1
        self._is_waiting, self._failure = True, ""
        upstream = await replica.client.connect()
        if self._error is not None or self._is_left:
            upstream.release()
            raise ReplicaLost(LOST)
        self._answer = upstream
        # vLLM needs a unique id, and a client's id need not be unique.
        header = f"X-Request-Id: {secrets.token_hex(16)}\r\n"
        await upstream.send("POST", PATHS[self._request.route], self._body, header)
        if upstream.status != 200:
            raise refusal(upstream.status, await upstream.whole())
        return upstream

    async def _read(self, upstream: UpstreamAnswer) -> bytes:
        self._heard_s, self._is_waiting = self._loop.time(), True
        data = await upstream.read()
        self._is_waiting = False
        return data

    def _converted(self, convert: Callable[..., R], *data: bytes) -> R:
        """The result of a method of `WholeAnswer` or `RelayedAnswer`.

        Raises:
            CallableFailed: vLLM's answer is not of the expected form.
            HeadwaterError: the answer says that the request failed.
        """
        try:
            return convert(*data)
        except (*PARSE_ERRORS, ValueError, LookupError) as error:
            raise CallableFailed(
                f"model `{self.model}`: expected an answer in the form of vLLM's API, got something else: {error}"
            ) from None

    def _is_sent_again(self, error: HeadwaterError, *, may_be: bool) -> bool:
        """Leave the replica that has failed the request. Returns whether to send the request again.

        Args:
            error: the error of this try.
            may_be: whether the request may still be sent again after this error.

        Raises:
            HeadwaterError: the error that `fail` ended the request with.
        """
        if self._error is not None:
            raise self._error.again() from None
        is_lost = isinstance(error, ReplicaLost)
        # A replica with an intact connection may have failed only this request, so it continues to get other requests.
        if is_lost and self.replica is not None and (self._answer is None or self._answer.is_lost):
            self._on_lost(self.replica)
        self._tried = self.replica
        self._leave_replica()
        self._failure = type(error).__name__
        self._full = error if isinstance(error, QueueFull) else None
        return may_be and (is_lost or self._full is not None)

    def _leave_replica(self) -> None:
        replica, self.replica = self.replica, None
        if replica is not None:
            replica.requests -= 1
        upstream, self._answer = self._answer, None
        if upstream is not None:
            upstream.release()

    def _end(self, answer: WholeAnswer) -> None:
        if self.trace is not None:
            name = self._failure if self._error is None else type(self._error).__name__
            self.trace.end(1, answer.count.usage.completion_tokens, name)
        self.close()

    # Deadlines

    def _deadline(self) -> float:
        idle_since_s = self._heard_s if self._is_waiting else self._loop.time()
        return min(self._began_s + self._limit_s, idle_since_s + self._idle_s)

    def _expire(self) -> None:
        if self._loop.time() + TIMER_RESOLUTION_S >= self._began_s + self._limit_s:
            self.fail(DeadlineExceeded(f"the deadline of {self._limit_s:g} s passed"))
        else:
            self.fail(DeadlineExceeded(f"the stream sent no output for {self._idle_s:g} s"))
