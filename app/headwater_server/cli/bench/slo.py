"""The limits of ``--slo``: limits for each request, and limits for a whole run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from headwater_server.cli.option_values import named, number

if TYPE_CHECKING:
    from headwater_server.cli.bench.sample_reader import Sample

__all__ = ["OF_REQUESTS", "OF_RUNS", "Limits", "read_limits", "request_limits"]

OF_REQUESTS: Final = ("latency_ms", "ttft_ms", "itl_ms", "tpot_ms")
"""Names of the limits for each request, in the order of the fields of `Limits`."""
OF_RUNS: Final = {"p50_ms": "p50", "p90_ms": "p90", "p99_ms": "p99", "p999_ms": "p99.9"}
"""Limits for a whole run: the percentile of its latency, by the limit's name."""


class Limits(NamedTuple):
    """The limits for a request, in seconds; None: no limit. They limit its latency, the time to its first event with
    text (TTFT), each gap between such events (ITL), and the average time of a token after the first (TPOT)."""

    latency_s: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    tpot_s: float | None = None

    def are_met(self, sample: Sample, begin_s: float) -> bool:
        """Whether a request, which must have a good answer, met all limits. An answer without text meets the limits on
        tokens.

        Args:
            sample: the request.
            begin_s: the time at which the request's latency begins.
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


def read_limits(text: str) -> dict[str, float]:
    """Parse the value of ``--slo``. Returns limits in milliseconds, by name.

    Raises:
        argparse.ArgumentTypeError: a limit is wrong.
    """
    return named(text, (*OF_REQUESTS, *OF_RUNS), number(lambda ms: ms > 0, "milliseconds above 0, such as 200"))


def request_limits(slo: Mapping[str, float]) -> Limits:
    """The limits for single requests, from limits in milliseconds by name."""
    return Limits(*(slo[name] / 1000 if name in slo else None for name in OF_REQUESTS))
