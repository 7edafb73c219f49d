"""The drill's timings are the chart's."""

from __future__ import annotations

from tests.drill.__main__ import chart_timings


def test_timings_are_the_chart_s_divided_by_the_scale() -> None:
    whole, scaled = chart_timings(1), chart_timings(10)
    assert (whole.ready_every_s, whole.live_every_s, whole.pre_stop_s, whole.drain_delay_s) == (2, 10, 10, 5)
    assert (scaled.pre_stop_s, scaled.shutdown_s) == (1, 3)
    assert (scaled.ready_failures, scaled.grace_s) == (whole.ready_failures, 65)


def test_checks_notice_within_the_drain_delay() -> None:
    timings = chart_timings(1)
    assert timings.ready_every_s * timings.ready_failures < timings.drain_delay_s
