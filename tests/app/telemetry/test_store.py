"""What is counted in a file: by whom, how exactly, and what is left of it when the process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import timeit
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater_server.telemetry.catalogue import CATALOGUE, OUTCOMES, REQUESTS
from headwater_server.telemetry.instruments import ACCEPTED_AT, Counter, Gauge, Histogram, Requests
from headwater_server.telemetry.store import SeriesKey, Store, read_store

COUNTING = """
import sys
from pathlib import Path
from headwater_server.telemetry.instruments import Requests
from headwater_server.telemetry.store import Store
store = Store(Path(sys.argv[1]))
requests = Requests(store, "m", "infer")
sys.stdout.write("x")
sys.stdout.flush()
while True:
    for _ in range(1000):
        requests.accept()
        requests.end("ok", 1000)
    sys.stdout.write("x")
    sys.stdout.flush()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    Store.create(tmp_path / "counts")
    return tmp_path / "counts"


def written(store: Store) -> list[int]:
    return list(store.slots[: store.slots[0]])


def test_another_process_sees_what_was_counted_at_once(path: Path) -> None:
    store = Store(path)
    counter = Counter(store, "headwater_retries", "m")
    gauge = Gauge(store, "headwater_queue_rows", "m")
    counter.add()
    counter.add(4)
    gauge.set(7)
    gauge.set(3)
    seen = read_store(path)
    assert seen.pid == os.getpid()
    assert seen.records == {
        SeriesKey("headwater_retries", ("m",)): [5],
        SeriesKey("headwater_queue_rows", ("m",)): [3],
    }


def test_the_same_series_is_the_same_record(path: Path) -> None:
    store = Store(path)
    for _ in range(3):
        Counter(store, "headwater_retries", "m").add()
    assert read_store(path).records == {SeriesKey("headwater_retries", ("m",)): [3]}


@given(st.lists(st.text(max_size=40), min_size=1, max_size=20, unique=True))
def test_any_label_comes_back(labels: list[str]) -> None:
    store = Store()
    for count, label in enumerate(labels, 1):
        Counter(store, "headwater_retries", label).add(count)
    assert store.snapshot().records == {
        SeriesKey("headwater_retries", (label,)): [count] for count, label in enumerate(labels, 1)
    }


@given(st.lists(st.integers(0, 2000), max_size=50))
def test_a_histogram_counts_each_number_in_the_bucket_that_it_fits(values: list[int]) -> None:
    store = Store()
    histogram = Histogram(store, "headwater_batch_rows", "m")
    for value in values:
        histogram.observe(value)
    *buckets, total = store.snapshot().records[SeriesKey("headwater_batch_rows", ("m",))]
    assert total == sum(values)
    assert sum(buckets) == len(values)
    for index, bound in enumerate(CATALOGUE["headwater_batch_rows"].bounds):
        assert sum(buckets[: index + 1]) == sum(value <= bound for value in values)


@given(st.lists(st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 3)), max_size=30), max_size=5))
def test_what_is_counted_in_one_turn_is_written_at_its_end(turns: list[list[tuple[int, int]]]) -> None:
    at_end: list[Callable[[], None]] = []
    at_once, in_turns = Store(), Store(call_soon=at_end.append)
    histograms = [Histogram(store, "headwater_batch_rows", "m") for store in (at_once, in_turns)]
    for turn in turns:
        before = written(at_once)
        for value, times in turn:
            for histogram in histograms:
                if times == 1:
                    histogram.observe(value)
                else:
                    histogram.observe_times(value, times)
        assert written(in_turns) == before
        assert len(at_end) == bool(turn)  # however much is counted
        while at_end:
            at_end.pop()()
        assert written(in_turns) == written(at_once)


def test_a_snapshot_of_the_process_itself_includes_what_waits(path: Path) -> None:
    store = Store(path, call_soon=lambda write: None)
    Histogram(store, "headwater_batch_rows", "m").observe(3)
    Requests(store, "m", "infer").accept()
    key = SeriesKey("headwater_batch_rows", ("m",))
    assert not any(read_store(path).records[key])
    assert read_store(path).records[SeriesKey(REQUESTS, ("m", "infer"))][ACCEPTED_AT] == 1  # waits for nothing
    assert store.snapshot().records[key][-1] == read_store(path).records[key][-1] == 3


def test_it_grows(path: Path) -> None:
    store = Store(path)
    for number in range(3000):
        Counter(store, "headwater_retries", f"deployment-{number}").add(number)
    records = read_store(path).records
    assert len(records) == 3000
    assert records[SeriesKey("headwater_retries", ("deployment-2999",))] == [2999]


def test_a_record_beyond_the_capacity_is_not_counted_and_harms_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    store = Store(path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    counters = [Counter(store, "headwater_retries", f"deployment-{number}") for number in range(3000)]
    for counter in counters:
        counter.add()
    records = read_store(path).records
    assert 100 < len(records) < 3000
    assert set(map(tuple, records.values())) == {(1,)}
    keys = [SeriesKey("headwater_retries", (f"deployment-{number}",)) for number in range(3000)]
    assert [store.numbers(key, 1) for key in keys] == [records.get(key, [0]) for key in keys]
    assert sum("no space" in record.message for record in caplog.records) == 1


def test_a_process_that_is_killed_leaves_what_it_counted(path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", COUNTING, str(path)], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert child.stdout is not None
    written = child.stdout.read(20)  # after each thousand
    child.send_signal(signal.SIGKILL)
    child.wait()
    written += child.stdout.read()
    child.stdout.close()
    numbers = read_store(path).records[SeriesKey(REQUESTS, ("m", "infer"))]
    accepted, ok = numbers[ACCEPTED_AT], numbers[OUTCOMES.index("ok")]
    assert accepted >= 1000 * (len(written) - 1)
    assert accepted - ok in (0, 1)
    assert sum(numbers[:ACCEPTED_AT]) == ok


def test_who_reads_meanwhile_never_sees_more_ended_than_accepted(path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", COUNTING, str(path)], stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[3]
    )
    try:
        key = SeriesKey(REQUESTS, ("m", "infer"))
        seen = 0
        readings = 0
        while readings < 2000 or not seen:
            numbers = read_store(path).records.get(key)
            if numbers is None:
                assert child.poll() is None
                continue
            readings += 1
            ended = sum(numbers[:ACCEPTED_AT])
            assert ended <= numbers[ACCEPTED_AT]
            assert seen <= numbers[ACCEPTED_AT]
            seen = numbers[ACCEPTED_AT]
    finally:
        child.kill()
        child.wait()


def test_counting_costs_microseconds_at_most() -> None:
    store = Store()
    requests = Requests(store, "m", "infer")
    took_s = min(timeit.repeat(requests.accept, number=10_000, repeat=5))
    assert took_s / 10_000 < 5e-6  # measured: 0.2; a system call, or a lock between processes, would take more


def test_numbers_that_cannot_be_written_keep_no_others_from_it(caplog: pytest.LogCaptureFixture) -> None:
    turns: list[Callable[[], None]] = []
    store = Store(call_soon=turns.append)
    name = "headwater_request_phase_seconds"
    wrong, right = (Histogram(store, name, "m", phase) for phase in ("queue", "compute"))
    wrong.observe(1 << 64)  # more than a slot holds
    for _ in range(3):
        right.observe(1)
        turns.pop()()
    buckets = len(CATALOGUE[name].bounds) + 1
    at = store.record(SeriesKey(name, ("m", "compute")), buckets + 1)
    assert sum(store.slots[at : at + buckets]) == 3
    assert "can't be written" in caplog.text
