"""What the supervisor keeps of workers that ended, and that every count is read once, whatever happens meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater_server.telemetry import ledger as ledger_module
from headwater_server.telemetry.catalogue import ACCEPTED, IN_FLIGHT, OUTCOMES, REQUESTS, Outcome
from headwater_server.telemetry.instruments import Counter, Gauge, Histogram, Requests
from headwater_server.telemetry.ledger import Ledger, merged, read_totals
from headwater_server.telemetry.store import SeriesKey, Snapshot, Store, read_store


def of(folder: Path) -> dict[SeriesKey, list[int]]:
    return read_totals(folder).records


def test_workers_are_added_up(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "metrics")
    for index in range(3):
        store = Store(ledger.add_worker(index))
        Counter(store, "headwater_retries", "m").add(index + 1)
        Gauge(store, "headwater_queue_rows", "m").set(10)
        Gauge(store, "headwater_active_sequences", "lm").set(index)
        Histogram(store, "headwater_batch_rows", "m").observe(4)
    Counter(ledger.store, "headwater_worker_restarts").add(2)
    records = of(tmp_path / "metrics")
    assert records[SeriesKey("headwater_retries", ("m",))] == [6]
    assert records[SeriesKey("headwater_queue_rows", ("m",))] == [30]
    assert records[SeriesKey("headwater_active_sequences", ("lm",))] == [2]  # each says what the engine has in all
    assert records[SeriesKey("headwater_batch_rows", ("m",))][2] == 3
    assert records[SeriesKey("headwater_worker_restarts", ())] == [2]


def test_counts_in_memory_end_with_their_worker_even_if_their_link_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    ledger = Ledger(tmp_path / "metrics")
    open_files = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(Store, "create", full)
        paths = [ledger.add_worker(index) for index in range(2)]
    assert len(os.listdir("/proc/self/fd")) == open_files + 2
    paths[1].unlink()
    for path in paths:
        ledger.end_worker(path)
    assert len(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.parametrize("failing", ["_replace", "create"])
def test_counts_that_could_not_be_made_again_are_made_at_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    ledger = Ledger(tmp_path / "metrics")
    Counter(ledger.store, "headwater_worker_restarts").add(2)
    shutil.rmtree(tmp_path / "metrics")
    with monkeypatch.context() as patched:
        patched.setattr(Ledger if failing == "_replace" else Store, failing, full)
        with pytest.raises(OSError, match="No space left"):
            ledger.restore()
        assert ledger.is_damaged
    Counter(ledger.store, "headwater_worker_restarts").add(1)
    ledger.restore()
    Counter(ledger.store, "headwater_worker_restarts").add(4)
    assert of(tmp_path / "metrics")[SeriesKey("headwater_worker_restarts", ())] == [7]


def test_of_a_worker_that_ended_counters_stay_gauges_go_and_what_it_had_is_lost(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "metrics")
    path = ledger.add_worker(0)
    store = Store(path)
    requests = Requests(store, "m", "infer")
    for _ in range(5):
        requests.accept()
    requests.end("ok", 1000)
    requests.end("failed", 1000)
    Gauge(store, "headwater_queue_rows", "m").set(10)
    assert of(tmp_path / "metrics")[SeriesKey(IN_FLIGHT, ("m", "infer"))] == [3]
    assert ledger.end_worker(path) == 3
    assert not path.exists()
    records = of(tmp_path / "metrics")
    assert records[SeriesKey(ACCEPTED, ("m", "infer"))] == [5]
    assert records[SeriesKey(IN_FLIGHT, ("m", "infer"))] == [0]
    ended = {outcome: records[SeriesKey(REQUESTS, ("m", "infer", outcome))][0] for outcome in OUTCOMES}
    assert {outcome: count for outcome, count in ended.items() if count} == {"ok": 1, "failed": 1, "lost": 3}
    assert SeriesKey("headwater_queue_rows", ("m",)) not in records


def test_a_worker_that_never_counted_leaves_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "metrics")
    assert ledger.end_worker(ledger.add_worker(0)) == 0
    assert of(tmp_path / "metrics") == {}


def test_a_place_has_the_process_of_its_latest_worker(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "metrics")
    paths = [ledger.add_worker(0) for _ in range(11)]
    for pid, path in ((17, paths[9]), (18, paths[10])):  # the first has ended, and is not booked yet
        Store(path).slots[1] = pid
    assert read_totals(tmp_path / "metrics").pids["worker-0"] == 18


def test_processes_are_named_by_their_place(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "metrics")
    ledger.end_worker(ledger.add_worker(0))
    Store(ledger.add_worker(0)).slots[1] = 17
    ledger.add_worker(1)  # not there yet
    assert read_totals(tmp_path / "metrics").pids == {"worker-0": 17, "supervisor": os.getpid()}


Step = tuple[str, int, Outcome]
STEPS: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(st.sampled_from(["accept", "accept", "end", "kill"]), st.integers(0, 2), st.sampled_from(OUTCOMES[:-1])),
    max_size=60,
)


@pytest.mark.slow
@settings(max_examples=30)
@given(steps=STEPS)
def test_whatever_ends_and_whoever_dies_accepted_is_the_sum(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Step]
) -> None:
    folder = tmp_path_factory.mktemp("ledger") / "metrics"
    ledger = Ledger(folder)
    paths = [ledger.add_worker(index) for index in range(3)]
    stores = [Store(path) for path in paths]
    workers = [Requests(store, "m", "infer") for store in stores]
    open_ = [0, 0, 0]
    accepted = 0
    ended: dict[Outcome, int] = dict.fromkeys(OUTCOMES, 0)
    for action, index, outcome in steps:
        if action == "accept":
            workers[index].accept()
            open_[index] += 1
            accepted += 1
        elif action == "end" and open_[index]:
            workers[index].end(outcome, 1000)
            open_[index] -= 1
            ended[outcome] += 1
        elif action == "kill":
            assert ledger.end_worker(paths[index]) == open_[index]
            ended["lost"] += open_[index]
            open_[index] = 0
            paths[index] = ledger.add_worker(index)
            stores[index] = Store(paths[index])
            workers[index] = Requests(stores[index], "m", "infer")
        records = of(folder)
        assert records[SeriesKey(ACCEPTED, ("m", "infer"))] == [accepted]
        assert records[SeriesKey(IN_FLIGHT, ("m", "infer"))] == [sum(open_)]
        assert {one: records[SeriesKey(REQUESTS, ("m", "infer", one))][0] for one in OUTCOMES} == ended


@pytest.mark.parametrize("moment", ["before its file is read", "after it"])
def test_a_worker_that_is_booked_during_a_scrape_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    folder = tmp_path / "metrics"
    ledger = Ledger(folder)
    path = ledger.add_worker(0)
    Counter(Store(path), "headwater_retries", "m").add(5)

    def read(which: Path) -> Snapshot:
        if which != path:
            return read_store(which)
        monkeypatch.undo()  # booking reads the file, too
        if moment == "before its file is read":
            ledger.end_worker(path)
            return read_store(which)
        seen = read_store(which)
        ledger.end_worker(path)
        return seen

    monkeypatch.setattr(ledger_module, "read_store", read)
    assert of(folder)[SeriesKey("headwater_retries", ("m",))] == [5]


def test_what_can_not_be_booked_is_counted_on_and_booked_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "metrics"
    ledger = Ledger(folder)
    path = ledger.add_worker(0)
    requests = Requests(Store(path), "m", "infer")
    requests.accept()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert ledger.end_worker(path) == 0
    assert of(folder)[SeriesKey(ACCEPTED, ("m", "infer"))] == [1]
    assert of(folder)[SeriesKey(IN_FLIGHT, ("m", "infer"))] == [1]
    assert ledger.end_worker(ledger.add_worker(1)) == 1
    assert of(folder)[SeriesKey(REQUESTS, ("m", "infer", "lost"))] == [1]
    assert of(folder)[SeriesKey(ACCEPTED, ("m", "infer"))] == [1]


def test_the_state_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    ledger = Ledger(folder)
    ledger.write_state({SeriesKey("headwater_replica_threads", ("m", "m-1")): 5})
    ledger.write_state({SeriesKey("headwater_replica_threads", ("m", "m-2")): 7})
    assert of(folder) == {SeriesKey("headwater_replica_threads", ("m", "m-2")): [7]}


def test_nothing_is_nothing() -> None:
    assert merged([]) == {}
