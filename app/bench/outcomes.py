"""What came of one run of load."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from dataclasses import dataclass, field
from functools import reduce
from typing import Final

from app.bench.asking import Sample
from app.bench.faults import Fault
from app.bench.limits import Limits
from app.bench.percentiles import percentile

__all__ = ["Outcomes", "merged"]

MOST_REASONS: Final = 50
"""Kinds of errors that are told apart; of a server whose reasons all differ, the rest is counted by status."""


def _floats() -> array[float]:
    return array("d")


@dataclass
class Outcomes:
    """Counts, rates and times of the requests that were sent in the measured time. Times are of good answers only."""

    latencies_s: array[float] = field(default_factory=_floats)
    first_token_s: array[float] = field(default_factory=_floats)
    """TTFT: until the first event with text, of each stream."""
    gaps_s: array[float] = field(default_factory=_floats)
    """ITL: between events with text, of all streams together."""
    per_token_s: array[float] = field(default_factory=_floats)
    """TPOT, of each stream with two tokens or more: (last - first) / (tokens - 1)."""
    errors: Counter[Fault] = field(default_factory=Counter)
    met: int = 0
    """Good answers that met all limits."""
    tokens: int = 0
    requests_per_s: float = 0.0
    """Good answers per second."""
    met_per_s: float = 0.0
    """Goodput."""
    tokens_per_s: float = 0.0
    elapsed_s: float = 0.0
    """From the first request that counts to the last answer."""
    lateness_s: array[float] = field(default_factory=_floats)
    """Open loop: how long after its time each request was sent, for whatever reason; those with an answer only."""
    behind_s: array[float] = field(default_factory=_floats)
    """Open loop: how long after its time the generator itself came to each request."""
    waited: int = 0
    """Open loop: requests for which no connection was free at their time."""
    cpu_share: float = 0.0
    """Of one core, that the generator itself took; of several processes, the busiest one's."""
    ended: str = ""
    """Why it ended before its time; empty: it did not."""

    @property
    def answers(self) -> int:
        """Requests with a good answer."""
        return len(self.latencies_s)

    @property
    def failures(self) -> int:
        """Requests without one."""
        return sum(self.errors.values())

    @property
    def requests(self) -> int:
        """All that count."""
        return self.answers + self.failures

    @property
    def error_share(self) -> float:
        """Failures among the requests; 0 without any."""
        return self.failures / self.requests if self.requests else 0.0

    def latency_ms(self, percent: float) -> float:
        """A percentile of the latency, for example 50 for the median.

        Raises:
            ValueError: there was no good answer.
        """
        if not self.latencies_s:
            raise ValueError("no request had a good answer")
        return percentile(self.latencies_s, percent) * 1000

    def note(self, sample: Sample, begin_s: float, limits: Limits) -> tuple[bool, bool, int]:
        """Count a request.

        Args:
            sample: what came of it.
            begin_s: when its latency begins: when it was sent, or should have been.
            limits: what it should meet.

        Returns:
            Whether its answer was good, whether it met the limits, and how many tokens it had.
        """
        if sample.fault is not None:
            self._note_fault(sample.fault)
            return False, False, 0
        self.latencies_s.append(sample.ended_s - begin_s)
        met = limits.are_met(sample, begin_s)
        self.met += met
        stream = sample.stream
        if stream is None:
            return True, met, 0
        times, tokens = stream.times_s, stream.tokens
        self.tokens += tokens
        if times:
            self.first_token_s.append(times[0] - begin_s)
            self.gaps_s.extend(after - before for before, after in itertools.pairwise(times))
            if tokens > 1:
                self.per_token_s.append((times[-1] - times[0]) / (tokens - 1))
        return True, met, tokens

    def _note_fault(self, fault: Fault) -> None:
        if fault not in self.errors and len(self.errors) >= MOST_REASONS:
            fault = fault._replace(reason="other reasons")
        self.errors[fault] += 1


def merged(parts: list[Outcomes]) -> Outcomes:
    """Several generators' outcomes of the same time as one."""
    return reduce(_merge, parts)


def _merge(a: Outcomes, b: Outcomes) -> Outcomes:
    return Outcomes(
        latencies_s=a.latencies_s + b.latencies_s,
        first_token_s=a.first_token_s + b.first_token_s,
        gaps_s=a.gaps_s + b.gaps_s,
        per_token_s=a.per_token_s + b.per_token_s,
        errors=a.errors + b.errors,
        met=a.met + b.met,
        tokens=a.tokens + b.tokens,
        requests_per_s=a.requests_per_s + b.requests_per_s,
        met_per_s=a.met_per_s + b.met_per_s,
        tokens_per_s=a.tokens_per_s + b.tokens_per_s,
        elapsed_s=max(a.elapsed_s, b.elapsed_s),
        lateness_s=a.lateness_s + b.lateness_s,
        behind_s=a.behind_s + b.behind_s,
        waited=a.waited + b.waited,
        cpu_share=max(a.cpu_share, b.cpu_share),
        ended=a.ended or b.ended,
    )
