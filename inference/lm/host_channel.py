"""A channel as the replica has it: what a gateway worker is yet to be told, and what it asked for."""

from __future__ import annotations

import asyncio
from typing import Final

from inference.engine import TokenEvent
from inference.lm.step_watch import Wait
from inference.wire.lm import Ending, Load, SequenceEvent, StepFrame, Submit

__all__ = ["HostChannel", "HostSequence"]

_ENDINGS: Final = frozenset({"stop", "length", "cancelled", "error"})


class HostSequence:
    """A sequence of a channel, from the message that asks for it to the event that ends it."""

    __slots__ = ("channel", "event", "id", "is_cancelled", "is_submitted", "number", "submit", "taken")

    def __init__(self, channel: HostChannel, submit: Submit) -> None:
        self.channel = channel
        self.submit = submit
        self.number = submit.number
        self.id = f"{channel.name}/{submit.number}"
        """The engine's name of it."""
        self.is_submitted = False
        """Whether the engine has it; known to the engine's thread only."""
        self.is_cancelled = False
        """Whether nobody wants more of it."""
        self.event: SequenceEvent | None = None
        """Its last event."""
        self.taken = -1
        """The channel's `HostChannel.sent` when that was made: another one now means that it is on its way."""


class HostChannel:
    """What is known of a channel. The engine's thread and the channel's loop share it under the host's lock.

    Args:
        name: of the channel.
        window: frames that may be on their way without having been acknowledged.
        loop: that of the request which its frames answer.
        now: monotonic seconds.
    """

    def __init__(self, name: str, window: int, loop: asyncio.AbstractEventLoop, now: float) -> None:
        self.name = name
        self.sequences: dict[int, HostSequence] = {}
        """Those that have not ended, by number."""
        self.heard = Wait(now)
        """For a word of its worker."""
        self.held_up: Wait | None = None
        """The engine's, for it to be drained."""
        self.tokens = 0
        """How many are pending."""
        self.sent = 0
        """Frames."""
        self.news = asyncio.Event()
        """Set if there may be a frame to send; only its loop touches it."""
        self.is_waking = False
        """Whether `wake` has been called, and the loop has not looked since."""
        self.end: str | None = None
        """Why it has ended; nothing if the worker wished so."""
        self._window = window
        self._loop = loop
        self._acknowledged = 0
        self._events: list[SequenceEvent] = []

    @property
    def is_busy(self) -> bool:
        """Whether a worker that lives has a reason to be heard of."""
        return bool(self.sequences or self._events)

    @property
    def has_frame(self) -> bool:
        """Whether there is something to send, and it may be sent."""
        return self.end is not None or (bool(self._events) and self.sent - self._acknowledged < self._window)

    def acknowledge(self, frames: int) -> None:
        """The worker has taken in so many frames."""
        self._acknowledged = max(self._acknowledged, min(frames, self.sent))

    def add(self, sequence: HostSequence, event: TokenEvent) -> None:
        """A sequence has got on. Tokens join those that are pending only where they continue them exactly, so that what
        an engine does wrong is seen by the worker, which counts."""
        last = sequence.event
        token, logprob, top = event.token, event.logprob, event.top
        if (
            last is None
            or sequence.taken != self.sent
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
            )
            self._events.append(last)
        elif token is not None:
            last.tokens.append(token)
            if last.logprobs is not None and logprob is not None:
                last.logprobs.append(logprob)
            if last.tops is not None:
                last.tops.append(top)
        self.tokens += token is not None
        if event.finish is not None:
            if event.finish in _ENDINGS:
                last.finish, last.error = event.finish, event.error
            else:
                last.finish = "error"
                last.error = f"the engine: finish: expected one of {', '.join(sorted(_ENDINGS))}, got {event.finish!r}"

    def add_end(self, sequence: HostSequence, finish: Ending, error: str = "") -> None:
        """A sequence has ended, by no word of the engine."""
        last = sequence.event
        index = 0 if last is None else last.index + len(last.tokens)
        self._events.append(SequenceEvent(sequence.number, index, [], finish=finish, error=error))

    def take(self, load: Load) -> StepFrame:
        """A frame with everything that is pending."""
        events, self._events = self._events, []
        self.tokens = 0
        self.held_up = None
        number = self.sent
        self.sent = number + 1
        return StepFrame(number, events, load, closed=self.end or "")

    def wake(self) -> None:
        """If there is a frame, have the loop send it; once, however often it is called before the loop does."""
        if self.is_waking or not self.has_frame:
            return
        self.is_waking = True
        try:
            self._loop.call_soon_threadsafe(self.news.set)
        except RuntimeError:  # the loop is closed, as it is while the process ends: nobody waits for the frame
            self.end = "its loop has ended"
