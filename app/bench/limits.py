"""Limits that a request has to meet, and a run's percentiles: ``--slo``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from app.option_values import named, number

if TYPE_CHECKING:  # the command line reads limits before it needs any of this
    from app.bench.asking import Sample

__all__ = ["NO_LIMITS", "OF_REQUESTS", "OF_RUNS", "Limits", "read_limits", "request_limits"]

OF_REQUESTS: Final = ("latency_ms", "ttft_ms", "itl_ms", "tpot_ms")
"""Each request meets them or doesn't."""
OF_RUNS: Final = {"p50_ms": "p50", "p90_ms": "p90", "p99_ms": "p99", "p999_ms": "p99.9"}
"""Percentiles of the latency: a run meets them or doesn't."""


class Limits(NamedTuple):
    """None: no limit. All in seconds."""

    latency_s: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    tpot_s: float | None = None

    def are_met(self, sample: Sample, begin_s: float) -> bool:
        """Whether a request with a good answer met all.

        Args:
            sample: what came of it.
            begin_s: when its latency begins.
        """
        if self.latency_s is not None and sample.ended_s - begin_s > self.latency_s:
            return False
        stream = sample.stream
        if stream is None or not stream.times_s:
            return True
        times = stream.times_s
        if self.ttft_s is not None and times[0] - begin_s > self.ttft_s:
            return False
        if self.itl_s is not None and any(b - a > self.itl_s for a, b in itertools.pairwise(times)):
            return False
        if self.tpot_s is not None and stream.tokens > 1:
            return (times[-1] - times[0]) / (stream.tokens - 1) <= self.tpot_s
        return True


NO_LIMITS: Final = Limits()


def read_limits(text: str) -> dict[str, float]:
    """Limits by name, in milliseconds, of what stands behind ``--slo``.

    Raises:
        ValueError: the message says what was expected.
    """
    return named(text, (*OF_REQUESTS, *OF_RUNS), number(lambda ms: ms > 0, "milliseconds above 0, such as 200"))


def request_limits(told: Mapping[str, float]) -> Limits:
    """Those that single requests have to meet."""
    return Limits(*(told[name] / 1000 if name in told else None for name in OF_REQUESTS))
