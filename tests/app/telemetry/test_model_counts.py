"""Custom metrics of replicas are added up, and every count is read once, whatever ends meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from headwater.metrics_file import used_bytes
from headwater.model_metrics import Metrics
from headwater_server.telemetry.model_counts import ModelCounts, ModelSeries, read_model_totals


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def replica(counts: ModelCounts, id: str, deployment: str = "m") -> Metrics:
    metrics = Metrics()
    metrics.open(counts.path(id), deployment)
    return metrics


def rows(folder: Path, **labels: str) -> float:
    """The sum of the counter ``rows``."""
    return sum(
        numbers[0]
        for series, numbers in read_model_totals(folder).records.items()
        if series.name == "rows" and labels.items() <= dict(series.labels).items()
    )


def count(metrics: Metrics, value: float, sign: str = "plus") -> None:
    metrics.counter("rows", "Rows.", labels=["sign"]).inc(value, sign=sign)


def test_replicas_are_added_up(folder: Path) -> None:
    counts = ModelCounts(folder)
    for number in (1, 2):
        metrics = replica(counts, f"m-{number}")
        count(metrics, number)
        metrics.histogram("values", "Values.", buckets=[1]).observe(number)
        metrics.gauge("size", "Size.").set(number)
    count(replica(counts, "n-3", "n"), 5)
    assert read_model_totals(folder).records == {
        ModelSeries("rows", "counter", "m", (("sign", "plus"),), ()): [3],
        ModelSeries("rows", "counter", "n", (("sign", "plus"),), ()): [5],
        ModelSeries("values", "histogram", "m", (), (1.0,)): [1, 1, 3],
        ModelSeries("size", "gauge", "m", (("replica", "m-1"),), ()): [1],
        ModelSeries("size", "gauge", "m", (("replica", "m-2"),), ()): [2],
    }
    assert read_model_totals(folder).helps["size"] == "Size."


def test_counters_outlive_their_replicas_and_gauges_do_not(folder: Path) -> None:
    counts = ModelCounts(folder)
    for number in range(3):
        metrics = replica(counts, f"m-{number}")
        count(metrics, 2)
        count(metrics, 1, f"only-{number}")
        metrics.gauge("size", "Size.").set(1)
        counts.end(f"m-{number}")
        assert rows(folder, sign="plus") == 2 * (number + 1)
    assert rows(folder) == 9
    assert not any(series.type == "gauge" for series in read_model_totals(folder).records)
    assert [path.name for path in folder.iterdir()] == ["ended-replicas"]


def test_nothing_counts_twice_if_a_file_stays_after_its_counts_were_moved(folder: Path) -> None:
    counts = ModelCounts(folder)
    count(replica(counts, "m-1"), 3)
    kept = folder / "kept"
    shutil.copy(folder / "replica-m-1", kept)
    counts.end("m-1")
    kept.rename(folder / "replica-m-1")  # as if the process had been killed before it removed the file
    assert rows(folder) == 3


def test_a_replica_without_metrics_and_metrics_that_are_off_leave_nothing(folder: Path) -> None:
    ModelCounts(folder).end("m-1")
    off = ModelCounts(None)
    assert off.path("m-1") is None
    off.end("m-1")
    off.restore()
    assert list(folder.iterdir()) == []


def test_counts_of_ended_replicas_are_restored_with_the_folder(folder: Path) -> None:
    counts = ModelCounts(folder / "metrics")
    (folder / "metrics").mkdir()
    count(replica(counts, "m-1"), 3)
    counts.end("m-1")
    shutil.rmtree(folder / "metrics")
    (folder / "metrics").mkdir()
    counts.restore()
    assert rows(folder / "metrics") == 3


def test_an_error_keeps_the_file_which_is_still_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    counts = ModelCounts(folder)
    count(replica(counts, "m-1"), 3)

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        counts.end("m-1")
    assert "can't move the counts of the ended replica m-1" in caplog.text
    assert rows(folder) == 3
    counts.end("m-1")
    assert rows(folder) == 3


def test_counts_of_other_machines_are_replaced_until_their_replica_ends(folder: Path, tmp_path_factory: Any) -> None:
    there, here = ModelCounts(tmp_path_factory.mktemp("there")), ModelCounts(folder)
    metrics, path = replica(there, "replica-1"), there.path("replica-1")
    assert path is not None
    for expected in (1, 2):
        count(metrics, 1)
        here.take("replica-1", used_bytes(path))
        assert rows(folder) == expected
    assert [file.name for file in folder.iterdir()] == ["replica-replica-1"]
    here.end("replica-1")
    here.take("replica-1", used_bytes(path))  # too late
    assert rows(folder) == 2
    ModelCounts(None).take("replica-1", b"")
