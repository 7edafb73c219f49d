"""The custom metrics of a repository's models: declared and counted over a socket, and shown on a page."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headwater_server.process.socket_http import ask_socket
from headwater_server.repository.metric_registry import (
    CALLS_SOCKET,
    PAGE_SOCKET,
    MetricFault,
    MetricRegistry,
    serve_metrics,
)


def values(registry: MetricRegistry) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(registry.text())
        for sample in family.samples
    }


def test_counters_gauges_and_histograms_are_on_the_page() -> None:
    registry = MetricRegistry()
    counter, gauge = registry.declare("seen", "Seen.", "COUNTER"), registry.declare("level", "A\nlevel.", "GAUGE")
    times = registry.declare("times", "Times.", "HISTOGRAM")
    count = registry.add(counter, {"b": "2", "a": 'x"\\\n'}, None)
    assert registry.change(counter, count, "increment", 2) == 2
    assert registry.change(counter, count, "increment", 0.5) == 2.5
    level = registry.add(gauge, {}, None)
    registry.change(gauge, level, "set", 3)
    assert registry.change(gauge, level, "increment", -1.5) == 1.5
    assert registry.change(gauge, level, "value") == 1.5
    time = registry.add(times, {}, [0.1, 1])
    for value in (0.1, 0.5, 20):
        registry.change(times, time, "observe", value)
    assert values(registry) == {
        """seen_total[('a', 'x"\\\\\\n'), ('b', '2')]""": 2.5,
        "level[]": 1.5,
        "times_bucket[('le', '+Inf')]": 3,
        "times_bucket[('le', '0.1')]": 1,
        "times_bucket[('le', '1')]": 2,
        "times_count[]": 3,
        "times_sum[]": 20.6,
    }


def test_a_family_is_common_to_all_and_goes_with_the_last() -> None:
    registry = MetricRegistry()
    first, second = (registry.declare("seen", "Seen.", "COUNTER") for _ in range(2))
    assert first is second
    one, other = (registry.add(first, {"a": "b"}, None) for _ in range(2))
    assert one is other
    registry.change(first, one, "increment", 1)
    for _ in range(2):
        assert values(registry)
        registry.leave(first, one)
    assert registry.text() == ""
    registry.leave(first, None)
    registry.leave(first, None)
    assert registry.declare("seen", "Other.", "GAUGE").type == "GAUGE"


def refused(registry: MetricRegistry, call: Any) -> str:
    with pytest.raises(MetricFault) as caught:
        call(registry)
    return str(caught.value)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda made: made.declare("bad name!", "x", "COUNTER"), "Invalid metric name"),
        (lambda made: made.declare("seen", "x", "GAUGE"), "Family name already exists with different type"),
        (lambda made: made.add(made.declare("times", "x", "HISTOGRAM"), {}, None), "Missing required buckets"),
        (lambda made: made.add(made.declare("times", "x", "HISTOGRAM"), {}, [1, 1]), "in ascending order"),
        (lambda made: made.add(made.declare("seen", "x", "COUNTER"), {"a-b": "c"}, None), "got 'a-b'"),
    ],
)
def test_what_is_invalid_is_refused(call: Any, expected: str) -> None:
    registry = MetricRegistry()
    registry.declare("seen", "Seen.", "COUNTER")
    assert expected in refused(registry, call)


@pytest.mark.parametrize(
    ("kind", "method", "value"),
    [("COUNTER", "set", 1), ("COUNTER", "observe", 1), ("COUNTER", "increment", -1),
     ("COUNTER", "increment", float("nan")), ("GAUGE", "observe", 1), ("HISTOGRAM", "increment", 1),
     ("HISTOGRAM", "value", 0)],
)  # fmt: skip
def test_a_kind_allows_only_what_it_means(kind: Any, method: str, value: float) -> None:
    registry = MetricRegistry()
    family = registry.declare("m", "x", kind)
    series = registry.add(family, {}, [1])
    assert kind in refused(registry, lambda made: made.change(family, series, method, value))


def test_series_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater_server.repository.metric_registry.MAX_SERIES", 3)
    registry = MetricRegistry()
    family = registry.declare("m", "x", "COUNTER")
    for number in range(3):
        registry.add(family, {"n": str(number)}, None)
    assert "at most 3 series" in refused(registry, lambda made: made.add(family, {"n": "3"}, None))


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hw-") as name:  # a socket's path is short
        yield Path(name)


def test_over_sockets(folder: Path) -> None:
    serve_metrics(folder, folder / "m")  # no Triton listens there
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(folder / CALLS_SOCKET))
        file = connection.makefile("rwb")

        def ask(*call: Any) -> Any:
            file.write(json.dumps(call).encode() + b"\n")
            file.flush()
            return json.loads(file.readline())

        family = ask("metric_family", "seen", "Seen.", "COUNTER")["value"]
        metric = ask("metric", family, {"a": "b"}, None)["value"]
        assert ask("metric_do", metric, "increment", 2.0) == {"value": 2.0}
        assert "does not support Set" in ask("metric_do", metric, "set", 2.0)["error"]
        wrong: list[Any]
        for wrong in (["metric_do", 99, "value"], ["metric_do", family, "value"], ["metric"], ["nothing", family], []):
            assert "error" in ask(*wrong)
        assert ask("metric_do", metric, "value") == {"value": 2.0}
        file.close()
    status, body = ask_socket(folder / PAGE_SOCKET, "GET", "/metrics", None, 5)
    assert (status, body) == (200, b'# HELP seen Seen.\n# TYPE seen counter\nseen{a="b"} 2.0\n')
