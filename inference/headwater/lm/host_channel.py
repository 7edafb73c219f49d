"""The replica's side of a channel: a gateway worker's sequences, and their unsent events."""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple, get_args

from headwater.engine import Finish, TokenEvent
from headwater.lm.step_watch import Wait
from headwater.wire.lm import Ending, Load, SequenceEvent, StepFrame, Submit

__all__ = ["ChannelLimits", "HostChannel", "HostSequence"]

_FINISHES: Final = frozenset[str](get_args(Finish))


class ChannelLimits(NamedTuple):
    """How far a worker may be behind."""

    most_pending: int = 16_384
    """Number of a channel's unsent tokens at which its worker blocks the engine."""
    blocked_s: float = 6.0
    """Seconds for which a worker may block the engine."""


class HostSequence:
    """A sequence of a channel, from the message that starts it to the event that ends it."""

    __slots__ = ("channel", "event", "id", "is_cancelled", "is_submitted", "number", "submit", "taken")

    def __init__(self, channel: HostChannel, submit: Submit) -> None:
        self.channel = channel
        self.submit = submit
        self.number = submit.number
        self.id = f"{channel.name}/{submit.number}"
        """The engine's id of the sequence."""
        self.is_submitted = False
        """Whether the engine has the sequence; used by the engine's thread only."""
        self.is_cancelled = False
        """Whether the sequence has been cancelled."""
        self.event: SequenceEvent | None = None
        """The last event made from the engine's events; None before the first."""
        self.taken = -1
        """`HostChannel.sent` when `event` was made; if `sent` has changed since, the event is in a frame."""


class HostChannel:
    """The state of a channel, shared by the engine's thread and the channel's loop under the host's lock. It is made in
    the loop.

    Args:
        name: the channel's name.
        limits: how far the worker may be behind.
    """

    def __init__(self, name: str, limits: ChannelLimits) -> None:
        self.name = name
        self.sequences: dict[int, HostSequence] = {}
        """The sequences that have not ended, by number."""
        self.held_up: Wait | None = None
        """The timeout of the worker while it blocks the engine; otherwise None."""
        self.sent = 0
        """Number of frames that `take` has returned."""
        self.news = asyncio.Event()
        """Set if there may be a frame to send; used in the channel's loop only."""
        self.is_waking = False
        """Whether `wake` has been called and the loop has not reacted yet."""
        self.end: str | None = None
        """Why the channel has ended; empty if its stream ended; None while it is open."""
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._events: list[SequenceEvent] = []
        self._tokens = 0
        """Unsent tokens, and tokens of prompts with unsent log probabilities."""

    def overdue(self, now: float) -> str | None:
        """Why the channel must end now; None if it may stay open. Also notes whether the worker blocks the engine."""
        if self.end is not None:
            return self.end
        if self._tokens < self._limits.most_pending:
            self.held_up = None
        elif self.held_up is None:
            self.held_up = Wait(now)
        elif self.held_up.is_over(now, self._limits.blocked_s):
            return f"its worker left {self._tokens} tokens unread for {self._limits.blocked_s:g} s"
        return None

    def next_look(self) -> float | None:
        """When to call `overdue` again, in monotonic seconds; None: after the next step."""
        return None if self.held_up is None else self.held_up.next_look(self._limits.blocked_s)

    @property
    def has_frame(self) -> bool:
        """Whether there is a frame to send."""
        return self.end is not None or bool(self._events)

    def add(self, sequence: HostSequence, event: TokenEvent) -> None:
        """Add an engine's event. Tokens are merged with unsent tokens only if their indices continue exactly: the
        worker checks the indices, and so notices an engine's fault."""
        last = sequence.event
        token, logprob, top = event.token, event.logprob, event.top
        if (
            last is None
            or sequence.taken != self.sent
            or event.prompt
            or last.prompt
            or event.index != last.index + len(last.tokens)
            or (
                token is not None and ((last.logprobs is None) != (logprob is None) or (last.tops is None) == bool(top))
            )
        ):
            sequence.taken = self.sent
            sequence.event = last = SequenceEvent(
                sequence.number,
                event.index,
                [] if token is None else [token],
                None if logprob is None else [logprob],
                [top] if top else None,
                cached=event.cached,
                prompt=event.prompt,
            )
            self._events.append(last)
        elif token is not None:
            last.tokens.append(token)
            if last.logprobs is not None and logprob is not None:
                last.logprobs.append(logprob)
            if last.tops is not None:
                last.tops.append(top)
        self._tokens += len(event.prompt) + (token is not None)
        if event.finish is not None:
            if event.finish in _FINISHES:
                last.finish, last.error = event.finish, event.error
            else:
                last.finish = "error"
                last.error = f"the engine: finish: expected one of {', '.join(sorted(_FINISHES))}, got {event.finish!r}"

    def add_end(self, sequence: HostSequence, finish: Ending, error: str = "") -> None:
        """End a sequence without an event of the engine."""
        last = sequence.event
        index = 0 if last is None else last.index + len(last.tokens)
        self._events.append(SequenceEvent(sequence.number, index, [], finish=finish, error=error))

    def take(self, load: Load) -> StepFrame:
        """Take a frame with all unsent events, perhaps none. It says why the channel has ended, if it has."""
        events, self._events = self._events, []
        self._tokens = 0
        self.held_up = None
        number = self.sent
        self.sent = number + 1
        return StepFrame(number, events, load, closed=self.end or "")

    def wake(self) -> None:
        """Have the loop send a frame if there is a frame to send. Further calls before the loop reacts do nothing."""
        if self.is_waking or not self.has_frame:
            return
        self.is_waking = True
        try:
            self._loop.call_soon_threadsafe(self.news.set)
        except RuntimeError:  # the loop is closed because the process is ending: the frame has no reader
            self.end = "its loop has ended"
