"""What is counted in a file is what is read of it, also while threads count."""

from __future__ import annotations

import threading
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.metrics_file import SIZE_SLOTS, CountsFile, Declaration, decode_counts, used_bytes
from headwater.model_metrics import Metrics

TEXT = st.text(st.characters(codec="utf-8"), max_size=40)


@settings(max_examples=60)
@given(
    deployment=TEXT,
    series=st.dictionaries(st.tuples(TEXT, TEXT), st.floats(allow_nan=False), max_size=8),
    bounds=st.lists(st.floats(0, 1e6), max_size=3, unique=True).map(sorted),
)
def test_what_is_written_is_read(
    tmp_path_factory: object, deployment: str, series: dict[tuple[str, str], float], bounds: list[float]
) -> None:
    path = tmp_path_factory.mktemp("counts") / "file"  # type: ignore[attr-defined]
    counts = CountsFile(path, deployment)
    plain = Declaration("c", "counter", "Help.", ("a", "b"))
    histogram = Declaration("h", "histogram", "Help.", (), tuple(bounds))
    for declaration in (plain, histogram):
        assert counts.append(declaration, 0) is not None
    for labels, value in series.items():
        slot = counts.append(["c", *labels], 1)
        assert slot is not None
        counts.numbers[slot] = value
    slot = counts.append(["h"], histogram.numbers)
    assert slot is not None
    expected = [float(number) for number in range(histogram.numbers)]
    for at, number in enumerate(expected, slot):
        counts.numbers[at] = number
    read = decode_counts(used_bytes(path))
    assert read.deployment == deployment
    assert read.series == [
        *((plain, labels, [value]) for labels, value in series.items()), (histogram, (), expected),
    ]  # fmt: skip


def test_a_file_without_content_has_no_counts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert decode_counts(used_bytes(tmp_path / "file")) == ("", [])


def test_the_file_grows_to_its_bound_and_then_refuses(tmp_path: Path) -> None:
    counts = CountsFile(tmp_path / "file", "m")
    appended = 0
    while counts.append(["c", "x" * 1000], 8000) is not None:
        appended += 1
    assert appended > SIZE_SLOTS // 8000 * 0.9


@settings(max_examples=5)
@given(threads=st.integers(2, 4), labels=st.lists(TEXT.filter(str.isprintable), min_size=1, max_size=5, unique=True))
def test_a_reader_sees_whole_records_while_threads_count(
    tmp_path_factory: object, threads: int, labels: list[str]
) -> None:
    path = tmp_path_factory.mktemp("counts") / "file"  # type: ignore[attr-defined]
    metrics = Metrics()
    metrics.open(path, "m")
    counter = metrics.counter("c", "Help.", ["label"])
    histogram = metrics.histogram("h", "Help.", ["label"], buckets=[1, 2])

    def count() -> None:
        for value in range(300):
            for label in labels:
                counter.inc(2, label=label)
                histogram.observe(value % 3 + 0.5, label=label)

    workers = [threading.Thread(target=count) for _ in range(threads)]
    for worker in workers:
        worker.start()
    before: dict[tuple[str, ...], float] = {}
    while any(worker.is_alive() for worker in workers):
        now = {values: numbers[0] for declared, values, numbers in decode_counts(used_bytes(path)).series
               if declared.kind == "counter"}  # fmt: skip
        assert all(now[values] >= number for values, number in before.items())
        before = now
    for worker in workers:
        worker.join()
    series = decode_counts(used_bytes(path)).series
    assert {(declared.name, values[0]): numbers for declared, values, numbers in series} == {
        **{("c", label): [600.0 * threads] for label in labels},
        **{("h", label): [100.0 * threads, 100.0 * threads, 100.0 * threads, 450.0 * threads] for label in labels},
    }
