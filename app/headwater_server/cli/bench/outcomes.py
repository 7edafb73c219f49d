"""The outcomes of a run: counts, rates and percentiles."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from headwater_server.cli.bench.sample_reader import Fault, Sample
from headwater_server.cli.bench.slo import Limits

__all__ = ["Outcomes", "distribution_ms", "merged", "percentile"]

MOST_REASONS: Final = 50
"""Maximum number of kinds of errors that are counted separately; further errors are counted by kind and status, without
their reasons."""
_ENOUGH: Final = {"p50": (50.0, 1), "p90": (90.0, 10), "p99": (99.0, 100), "p99.9": (99.9, 1000)}
"""The reported percentiles, each with the number of values that it needs; with fewer values it would equal the
maximum."""


def _floats() -> array[float]:
    return array("d")


def percentile(values: Sequence[float] | npt.NDArray[Any], percent: float) -> float:
    """The smallest value that at least ``percent`` of all values do not exceed. By nearest rank, so it is always one of
    the values.

    Args:
        values: in any order; at least one.
        percent: 0 to 100.
    """
    return float(np.percentile(values, percent, method="inverted_cdf"))


def distribution_ms(values_s: Sequence[float]) -> dict[str, float | int | None]:
    """Count, mean, minimum, maximum and percentiles of times. The arguments are seconds, the results milliseconds.

    A percentile is None if there are too few values: p90 needs 10, p99 100, p99.9 1,000.
    """
    values = np.asarray(values_s, float) * 1000
    count = len(values)
    figures: dict[str, float | int | None] = {"count": count, "mean": None, "min": None, "max": None}
    if count:
        figures |= {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}
    for name, (percent, min_count) in _ENOUGH.items():
        figures[name] = percentile(values, percent) if count >= min_count else None
    return figures


@dataclass
class Outcomes:
    """Counts, rates and times of the requests sent, or due, in the measured time. `latencies_s`, `first_token_s`,
    `gaps_s` and `per_token_s` are of good answers only."""

    latencies_s: array[float] = field(default_factory=_floats)
    first_token_s: array[float] = field(default_factory=_floats)
    """TTFT: for each stream, the time until its first event with text."""
    gaps_s: array[float] = field(default_factory=_floats)
    """ITL: the times between events with text, over all streams."""
    per_token_s: array[float] = field(default_factory=_floats)
    """TPOT: for each stream with two tokens or more, (last - first) / (tokens - 1)."""
    errors: Counter[Fault] = field(default_factory=Counter)
    """Number of requests without a good answer, by fault."""
    met: int = 0
    """Good answers that met all limits."""
    tokens: int = 0
    """Tokens of good answers; see `TokenReader.tokens`."""
    endings: Counter[str] = field(default_factory=Counter)
    """Good answers of streams, by `TokenReader.ending`, which is meaningful for chats only."""
    requests_per_s: float = 0.0
    """Good answers per second."""
    met_per_s: float = 0.0
    """Goodput: good answers per second that met all limits."""
    tokens_per_s: float = 0.0
    elapsed_s: float = 0.0
    """Seconds by which the counts were divided for the rates (see `closed_loop` and `open_loop`); of several
    connections or processes, the maximum."""
    lateness_s: array[float] = field(default_factory=_floats)
    """Open loop: the delay with which each answered request was sent, for any reason."""
    behind_s: array[float] = field(default_factory=_floats)
    """Open loop: the part of each request's delay that the generator caused."""
    waited: int = 0
    """Open loop: requests that had to wait for a free connection."""
    cpu_share: float = 0.0
    """The fraction of a core that the generator's thread used; with several processes, the maximum."""
    ended: str = ""
    """Why the run ended early; empty if it did not."""

    @property
    def answers(self) -> int:
        """Requests with a good answer."""
        return len(self.latencies_s)

    @property
    def failures(self) -> int:
        """Requests without a good answer."""
        return sum(self.errors.values())

    @property
    def requests(self) -> int:
        """All requests that count."""
        return self.answers + self.failures

    @property
    def error_share(self) -> float:
        """The fraction of requests that failed; 0 without requests."""
        return self.failures / self.requests if self.requests else 0.0

    def latency_ms(self, percent: float) -> float:
        """A percentile of the latency in milliseconds; ``percent`` is 50 for the median.

        Raises:
            ValueError: there was no good answer.
        """
        if not self.latencies_s:
            raise ValueError("no request had a good answer")
        return percentile(self.latencies_s, percent) * 1000

    def note(self, sample: Sample, begin_s: float, limits: Limits) -> None:
        """Count a request.

        Args:
            sample: the request.
            begin_s: the time at which its latency begins: when it was sent, or when it should have been sent.
            limits: the limits that the request should meet.
        """
        if sample.fault is not None:
            self.note_fault(sample.fault)
            return
        self.latencies_s.append(sample.ended_s - begin_s)
        self.met += limits.are_met(sample, begin_s)
        stream = sample.stream
        if stream is None:
            return
        times, tokens = stream.times_s, stream.tokens
        self.tokens += tokens
        self.endings[stream.ending] += 1
        if times:
            self.first_token_s.append(times[0] - begin_s)
            self.gaps_s.extend(after - before for before, after in itertools.pairwise(times))
            if tokens > 1:
                self.per_token_s.append((times[-1] - times[0]) / (tokens - 1))

    def note_fault(self, fault: Fault, count: int = 1) -> None:
        """Count requests that failed."""
        if fault not in self.errors and len(self.errors) >= MOST_REASONS:
            fault = fault._replace(reason="other reasons")
        self.errors[fault] += count

    def set_rates(self, elapsed_s: float) -> None:
        """Divide the counts by ``elapsed_s``, which is above 0, once all requests are counted."""
        self.elapsed_s = elapsed_s
        self.requests_per_s = self.answers / elapsed_s
        self.met_per_s = self.met / elapsed_s
        self.tokens_per_s = self.tokens / elapsed_s


def merged(parts: Iterable[Outcomes]) -> Outcomes:
    """Merge the outcomes of several connections or processes that sent requests at the same time: their rates are
    added."""
    whole = Outcomes()
    for part in parts:
        for times in ("latencies_s", "first_token_s", "gaps_s", "per_token_s", "lateness_s", "behind_s"):
            getattr(whole, times).extend(getattr(part, times))
        for fault, count in part.errors.items():
            whole.note_fault(fault, count)
        whole.met += part.met
        whole.tokens += part.tokens
        whole.endings.update(part.endings)
        whole.requests_per_s += part.requests_per_s
        whole.met_per_s += part.met_per_s
        whole.tokens_per_s += part.tokens_per_s
        whole.waited += part.waited
        whole.elapsed_s = max(whole.elapsed_s, part.elapsed_s)
        whole.cpu_share = max(whole.cpu_share, part.cpu_share)
        whole.ended = whole.ended or part.ended
    return whole
