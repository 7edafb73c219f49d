"""Each change of a deployment's state is logged once and counted once, and the gauges say where that led."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater_server.control.routing import State
from headwater_server.process.proc import group_uses, process_use
from headwater_server.telemetry.ledger import read_totals
from headwater_server.telemetry.observer import DeploymentView, Observer, ReplicaView
from headwater_server.telemetry.recorder import use
from headwater_server.telemetry.store import SeriesKey, Store
from tests.app.supervisor.stand_in import Supervisor, one, settle

TRANSITION = re.compile(r"(?P<name>\S+): (?P<before>[A-Z]+) -> (?P<after>[A-Z]+): ")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    use(Store())


class Watched(Supervisor):
    """Shows its deployments to an observer whenever one has changed, as the supervisor does."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        super().__init__({**one(), "b": {"model": "m:B"}})

    def on_change(self) -> None:
        super().on_change()
        self.observer.see_deployments(
            DeploymentView(one.name, one.state, len(one.ready), one.wanted) for one in self.sets.values()
        )


STEPS = st.lists(
    st.tuples(st.sampled_from(["load", "unload", "reload", "crash", "break", "fix"]), st.sampled_from("ab")),
    max_size=8,
)


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
async def test_transitions_in_the_log_and_in_the_metrics_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture, steps: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("observer") / "metrics"
    caplog.set_level(logging.INFO)
    caplog.clear()
    supervisor = Watched(Observer(folder))
    await supervisor.start()
    for action, name in steps:
        if action == "crash":
            for replica in supervisor.launched:
                if replica.name == name:
                    replica.end("killed by a test")
        elif action == "break":
            supervisor.failing.add(name)
        elif action == "fix":
            supervisor.failing.discard(name)
        else:
            await supervisor.do(action, name)
        await settle()
    final = {name: one.state for name, one in supervisor.sets.items()}
    supervisor.stop()
    records = read_totals(folder).records
    logged: Counter[SeriesKey] = Counter()
    for record in caplog.records:
        if found := TRANSITION.match(record.getMessage()):
            logged[SeriesKey("headwater_deployment_state_transitions", found.groups())] += 1
    counted = {
        key: numbers[0] for key, numbers in records.items() if key.name == "headwater_deployment_state_transitions"
    }
    assert counted == logged
    gone_through: Counter[SeriesKey] = Counter()
    for name, seen in supervisor.states.items():
        for before, after in zip([State.LOADING, *seen], seen, strict=False):
            if before is not after:
                labels = name, before.value, after.value
                gone_through[SeriesKey("headwater_deployment_state_transitions", labels)] += 1
    assert counted == gone_through
    for name, state in final.items():
        hot = {one for one in State if records[SeriesKey("headwater_deployment_state", (name, one.value))] == [1]}
        assert hot == {state}


def test_a_deployment_that_is_gone_leaves_its_count_and_no_state(tmp_path: Path) -> None:
    observer = Observer(tmp_path / "metrics")
    observer.see_deployments([DeploymentView("a", State.LOADING, 0, 1), DeploymentView("b", State.READY, 2, 2)])
    observer.see_deployments([DeploymentView("a", State.READY, 1, 1), DeploymentView("b", State.READY, 2, 2)])
    observer.see_deployments([DeploymentView("b", State.READY, 1, 2)])
    records = read_totals(tmp_path / "metrics").records
    assert records[SeriesKey("headwater_deployment_state_transitions", ("a", "LOADING", "READY"))] == [1]
    assert {key.labels[0] for key in records if key.name == "headwater_deployment_state"} == {"b"}
    assert records[SeriesKey("headwater_replicas_ready", ("b",))] == [1]
    assert records[SeriesKey("headwater_replicas_wanted", ("b",))] == [2]


def test_a_worker_counts_in_a_file_of_its_own_and_its_end_is_booked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    observer = Observer(tmp_path / "metrics")
    first = observer.start_worker(0)
    requests = use(Store(Path(first))).requests("m", "infer")
    requests.accept()
    observer.end_worker(0)
    observer.end_worker(0)
    second = observer.start_worker(0)
    assert second != first
    assert not Path(first).exists()
    assert Path(second).exists()
    assert read_totals(tmp_path / "metrics").records[SeriesKey("headwater_requests", ("m", "infer", "lost"))] == [1]
    assert "ended with 1 requests in flight" in caplog.text


async def test_with_metrics_off_it_makes_no_file() -> None:
    observer = Observer(None)
    assert observer.start_worker(0) == ""
    observer.see_deployments([DeploymentView("a", State.LOADING)])
    observer.see_deployments([DeploymentView("a", State.READY)])
    observer.end_worker(0)
    await asyncio.wait_for(observer.watch(list), 5)


def test_replicas_are_measured_while_they_are_there(tmp_path: Path) -> None:
    observer = Observer(tmp_path / "metrics")
    with subprocess.Popen(
        [sys.executable, "-c", "input('x')"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        child.stdout.read(1)  # it runs
        views = [ReplicaView("m", "m-1", child.pid), ReplicaView("m", "m-2", 0)]
        observer.see_replicas(views)
        observer.see_deployments([DeploymentView("m", State.READY, 1, 1)])
        records = read_totals(tmp_path / "metrics").records
        assert records[SeriesKey("headwater_replica_threads", ("m", "m-1"))] == [1]
        assert records[SeriesKey("headwater_replica_resident_memory_bytes", ("m", "m-1"))][0] > 1_000_000
        assert SeriesKey("headwater_replica_threads", ("m", "m-2")) not in records
        child.communicate(b"\n")
    assert group_uses([child.pid])[child.pid].threads == 0
    assert process_use(child.pid) is None


class Nvml(ModuleType):
    """Stands for the package: two GPUs, on both of which this process has memory."""

    class NVMLError(Exception): ...

    class Process(NamedTuple):
        pid: int
        usedGpuMemory: int | None

    def __init__(self, *, works: bool = True) -> None:
        super().__init__("pynvml")
        self.__spec__ = ModuleSpec("pynvml", None)
        self.works = works
        self.opened = 0

    class Sample(NamedTuple):
        pid: int
        timeStamp: int
        smUtil: int

    def nvmlInit(self) -> None:
        if not self.works:
            raise self.NVMLError
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> list[Process]:
        return [self.Process(os.getpid(), 1000 * (device + 1)), self.Process(1, None)]

    def nvmlDeviceGetProcessUtilization(self, device: int, since_us: int) -> list[Sample]:
        if device:
            raise self.NVMLError("not found")
        assert 0 < time.time() * 1e6 - since_us < 60e6
        found = [(os.getpid(), since_us + 1, 50), (os.getpid(), since_us + 2, 100), (1, since_us + 1, 9)]
        return [self.Sample(*one) for one in [*found, (os.getpid(), since_us - 1, 3)]]


@pytest.mark.parametrize(("works", "used"), [(True, 3000), (False, None)])
def test_gpu_memory_is_what_nvml_tells(monkeypatch: pytest.MonkeyPatch, works: bool, used: int | None) -> None:
    nvml = Nvml(works=works)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert group_uses([os.getpgid(0)])[os.getpgid(0)].gpu_bytes == used
    assert nvml.opened == 0


def test_gpu_utilization_is_the_mean_of_what_nvml_sampled_lately(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    observer = Observer(tmp_path / "metrics")
    observer.see_replicas([ReplicaView("m", "m-1", os.getpgid(0), batch_limit=4)])
    observer.see_deployments([DeploymentView("m", State.READY, 1, 1)])
    records = read_totals(tmp_path / "metrics").records
    assert records[SeriesKey("headwater_replica_gpu_utilization", ("m", "m-1"))] == [750]
    assert records[SeriesKey("headwater_replica_gpu_memory_bytes", ("m", "m-1"))] == [3000]
    assert records[SeriesKey("headwater_replica_batch_limit", ("m", "m-1"))] == [4]
    assert nvml.opened == 0


def test_utilization_is_of_what_has_replicas_now(tmp_path: Path) -> None:
    observer = Observer(tmp_path / "metrics")

    def seen() -> dict[tuple[str, ...], list[int]]:
        records = read_totals(tmp_path / "metrics").records.items()
        return {key.labels: numbers for key, numbers in records if key.name == "headwater_utilization"}

    observer.see_utilization({"a": 0.5, "b": 1.0})
    assert seen() == {("a",): [500], ("b",): [1000]}
    observer.see_utilization({"a": 0.0})
    assert seen() == {("a",): [0]}


def test_a_process_is_measured() -> None:
    use = process_use(os.getpid())
    assert use is not None
    assert use.threads >= 1
    assert use.resident_bytes > 5_000_000
    assert use.cpu_s > 0
    assert use.open_fds >= 3
    assert use.started_s > 0
