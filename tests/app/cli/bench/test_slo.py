"""Limits that requests meet or don't."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from headwater_server.cli.bench.outcomes import Outcomes, merged
from headwater_server.cli.bench.sample_reader import Sample, TokenReader
from headwater_server.cli.bench.slo import Limits, read_limits, request_limits


def sample(*times_s: float, tokens: int | None = None, ended_s: float = 10.0) -> Sample:
    reader = TokenReader("chat")
    reader.times_s, reader.reported_tokens = list(times_s), tokens
    return Sample(None, 0.0, ended_s, reader)


@pytest.mark.parametrize(
    ("limits", "met"),
    [
        (Limits(), True),
        (Limits(latency_s=10.0), True),
        (Limits(latency_s=9.9), False),
        (Limits(ttft_s=1.0), True),
        (Limits(ttft_s=0.9), False),
        (Limits(itl_s=4.0), True),  # the longest gap counts
        (Limits(itl_s=3.9), False),
        (Limits(tpot_s=1.0), True),  # (7 - 1) / (7 - 1)
        (Limits(tpot_s=0.9), False),
        (Limits(latency_s=10.0, ttft_s=0.9), False),
    ],
)
def test_a_request_meets_all_or_not(limits: Limits, met: bool) -> None:
    assert limits.are_met(sample(1.0, 3.0, 7.0, tokens=7), 0.0) is met


def test_latencies_begin_when_the_request_should_have_been_sent() -> None:
    assert not Limits(ttft_s=1.0).are_met(sample(1.0), -0.5)
    assert not Limits(latency_s=10.0).are_met(sample(1.0), -0.5)


def test_they_are_read_in_milliseconds() -> None:
    told = read_limits("latency_ms=200, ttft_ms=50,p99_ms=1e3")
    assert told == {"latency_ms": 200, "ttft_ms": 50, "p99_ms": 1000}
    assert request_limits(told) == Limits(latency_s=0.2, ttft_s=0.05)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("foo=1", "expected one of latency_ms, .*got 'foo'"),
        ("latency_ms", "latency_ms: expected milliseconds above 0, such as 200, got ''"),
        ("latency_ms=-1", "above 0"),
        ("latency_ms=nan", "above 0"),
        ("latency_ms=inf", "above 0"),
        ("ttft_ms=1,ttft_ms=2", "got it twice"),
        ("", "expected one of"),
    ],
)
def test_nonsense_is_told(text: str, told: str) -> None:
    with pytest.raises(ArgumentTypeError, match=told):
        read_limits(text)


def test_a_stream_is_counted_by_its_tokens() -> None:
    outcomes = Outcomes()
    outcomes.note(sample(1.0, 3.0, 7.0, tokens=7), 0.5, Limits())
    assert (outcomes.answers, outcomes.met, outcomes.tokens) == (1, 1, 7)
    assert list(outcomes.first_token_s) == [0.5]
    assert list(outcomes.gaps_s) == [2.0, 4.0]
    assert list(outcomes.per_token_s) == [1.0]
    assert list(outcomes.latencies_s) == [9.5]


def test_outcomes_of_several_processes_add_up() -> None:
    parts = []
    for place in (1, 2):
        part = Outcomes(requests_per_s=place, cpu_share=place / 10, ended="" if place == 1 else "gone")
        part.note(sample(1.0, tokens=1, ended_s=place), 0.0, Limits())
        parts.append(part)
    whole = merged(parts)
    assert list(whole.latencies_s) == [1.0, 2.0]
    assert (whole.requests_per_s, whole.cpu_share, whole.ended, whole.tokens, whole.met) == (3.0, 0.2, "gone", 2, 2)
