"""Custom metrics: what may be declared and counted, and their bounds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import headwater
from headwater.errors import DeclarationError
from headwater.metrics_file import FileCounts, decode_counts, used_bytes
from headwater.model import Model
from headwater.model_metrics import MAX_CHARS, Metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "counts"


@pytest.fixture
def metrics(path: Path) -> Metrics:
    metrics = Metrics(max_series=5)
    metrics.open(path, "m")
    return metrics


def read(path: Path) -> FileCounts:
    return decode_counts(used_bytes(path))


def numbers(path: Path) -> dict[tuple[str, ...], list[float]]:
    return {(declared.name, *values): counts for declared, values, counts in read(path).series}


def test_metrics_are_counted_in_the_file(metrics: Metrics, path: Path) -> None:
    texts = metrics.counter("texts", "Texts read.", labels=["language", "kind"])
    texts.inc(kind="long", language="en")
    texts.inc(2.5, language="en", kind="long")
    texts.inc(kind=3, language="de")
    metrics.gauge("size", "Size.").set(-7)
    lengths = metrics.histogram("lengths", "Lengths.", buckets=[1, 2])
    for value in (1, 1.5, 3):
        lengths.observe(value)
    assert read(path).deployment == "m"
    assert numbers(path) == {  # labels are sorted by name
        ("texts", "long", "en"): [3.5], ("texts", "3", "de"): [1], ("size",): [-7], ("lengths",): [1, 1, 1, 5.5],
    }  # fmt: skip


def test_without_a_metric_there_is_no_file(metrics: Metrics, path: Path) -> None:
    assert not path.exists()
    metrics.counter("texts", "Texts.")
    assert numbers(path) == {("texts",): [0]}  # before it is first counted


def test_equal_declarations_are_one_metric(metrics: Metrics, path: Path) -> None:
    metrics.counter("texts", "Texts.", labels=["a", "b"]).inc(a=1, b=2)
    metrics.counter("texts", "Texts.", labels=("b", "a")).inc(a=1, b=2)
    assert numbers(path) == {("texts", "1", "2"): [2]}
    for declare in (
        lambda: metrics.counter("texts", "Texts.", labels=["a"]),
        lambda: metrics.counter("texts", "Other.", labels=["a", "b"]),
        lambda: metrics.gauge("texts", "Texts.", labels=["a", "b"]),
    ):
        with pytest.raises(DeclarationError, match=r"metric 'texts': expected .* again, got"):
            declare()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("a-b", "Help."), "name: expected at most 100 letters"),
        (("1a", "Help."), "beginning with a letter"),
        (("", "Help."), "name: expected"),
        (("x" * 101, "Help."), "name: expected"),
        (("texts_total", "Help."), "name: expected an end other than _total"),
        (("a", ""), "help: expected a text"),
        (("a", "Help.", "label"), "labels: expected a list"),
        (("a", "Help.", ["b", "b"]), "labels: expected a list"),
        (("a", "Help.", list("abcdefghijk")), "labels: expected a list of at most 10"),
        (("a", "Help.", ["deployment"]), "labels: expected no deployment, le, quantile, replica, value"),
        (("a", "Help.", ["__b"]), "labels: expected each at most 100 letters"),
    ],
)
def test_bad_declarations_are_refused(metrics: Metrics, arguments: tuple[Any, ...], expected: str) -> None:
    with pytest.raises(DeclarationError, match=expected):
        metrics.counter(*arguments)


@pytest.mark.parametrize("buckets", [[], [2, 1], [1, 1], [float("inf")], ["a"], range(51)])
def test_bad_buckets_are_refused(metrics: Metrics, buckets: Any) -> None:
    with pytest.raises(DeclarationError, match="buckets: expected 1 to 50 numbers in ascending order"):
        metrics.histogram("a", "Help.", buckets=buckets)


def test_bad_updates_are_refused(metrics: Metrics) -> None:
    texts = metrics.counter("texts", "Texts.", labels=["language"])
    wrong: list[dict[str, str]] = [{}, {"kind": "a"}, {"language": "en", "kind": "a"}]
    for labels in wrong:
        with pytest.raises(ValueError, match="labels: expected 'language', got"):
            texts.inc(1, **labels)
    with pytest.raises(ValueError, match="labels: expected no labels, got 'a'"):
        metrics.counter("plain", "Help.").inc(a="b")
    for value in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="expected a number of at least 0"):
            texts.inc(value, language="en")
    with pytest.raises(ValueError, match="expected a finite number"):
        metrics.histogram("lengths", "Lengths.").observe(float("nan"))


def test_series_beyond_the_bound_are_dropped_with_one_warning(
    metrics: Metrics, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = metrics.counter("texts", "Texts.", labels=["language"])
    for number in range(1000):
        texts.inc(language=number)
    texts.inc(language=0)
    assert len(numbers(path)) == 5
    assert numbers(path)["texts", "0"] == [2]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "further series of all metrics are dropped" in caplog.text


def test_long_and_unencodable_labels_are_cut_and_replaced(metrics: Metrics, path: Path) -> None:
    texts = metrics.counter("texts", "Texts.", labels=["language"])
    for end in range(10):
        texts.inc(language="x" * MAX_CHARS + str(end))
    texts.inc(language="\ud800")
    assert numbers(path) == {("texts", "x" * MAX_CHARS): [10], ("texts", "?"): [1]}


def test_a_warm_up_is_not_counted(metrics: Metrics, path: Path) -> None:
    texts = metrics.counter("texts", "Texts.", labels=["language"])
    texts.inc(language="en")
    with metrics.muted():
        texts.inc(language="en")
        texts.inc(language="de")
        late = metrics.counter("late", "Declared in a call.")
        late.inc()
    late.inc()
    texts.inc(language="de")
    assert numbers(path) == {("texts", "en"): [1], ("texts", "de"): [1], ("late",): [1]}


def test_a_forked_process_does_not_count(metrics: Metrics, path: Path) -> None:
    texts = metrics.counter("texts", "Texts.", labels=["language"])
    texts.inc(language="en")
    metrics.lock.acquire()  # as another thread may
    pid = os.fork()
    if pid == 0:
        metrics.detach()
        texts.inc(language="en")
        texts.inc(language="de")
        os._exit(0)
    metrics.lock.release()
    assert os.waitpid(pid, 0)[1] == 0
    assert numbers(path) == {("texts", "en"): [1]}


def test_a_file_that_cannot_be_made_is_logged_and_counts_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    metrics.open(tmp_path / "missing" / "counts", "m")
    metrics.counter("texts", "Texts.").inc()
    assert "the custom metrics are not in /metrics" in caplog.text


def test_models_and_functions_share_the_metrics_of_the_process() -> None:
    assert Model.metrics is headwater.metrics
