"""A deployment's replicas as real process groups with their guardians; only the hosts are scripts, without a Triton."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import pytest

from headwater_server.config.schema import Config, Deployment
from headwater_server.config.sections import ReplicaBounds
from headwater_server.control.messages import Drained, ReplicaLoss
from headwater_server.control.routing import State, unavailable
from headwater_server.errors import CallableFailed, MemoryBudgetExceeded
from headwater_server.process.machine import HOST as HOST_MEMORY
from headwater_server.process.proc import group_members
from headwater_server.supervisor.child_processes import ChildProcesses
from headwater_server.supervisor.deployments import Deployments
from headwater_server.supervisor.handle import ReplicaHandle
from headwater_server.supervisor.memory_budget import MemoryBudget, ReplicaMemory
from headwater_server.supervisor.replacement import Replacement
from headwater_server.supervisor.replica_process import ReplicaProcess
from headwater_server.supervisor.replica_set import ReplicaSet

HOST = """
import json, os, signal, sys, time
folder = sys.argv[2]
spec = json.load(open(folder + "/spec.json"))
mode = spec["options"].get("mode", "")
fd = int(sys.argv[3])
def say(**status):
    os.write(fd, json.dumps(status).encode() + b"\\n")
def end(number, frame):
    if mode == "raises":
        say(event="failed", text="RuntimeError: no end")
        os._exit(1)
    say(event="unloaded")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
if mode == "fails":
    say(event="failed", text="RuntimeError: no weights here")
    sys.exit(1)
if mode == "wrong":
    say(event="failed", text="model m:M: there is no module 'm'; looked in /srv/models", cause="there is no module 'm'",
        is_permanent=True)
    sys.exit(1)
if mode == "lacks":
    say(event="failed", text="the machine lacks space on a disk: no", cause="no space", is_shortage=True)
    sys.exit(1)
if mode == "lacks threads":
    print("OpenBLAS blas_thread_init: pthread_create failed: Resource temporarily unavailable", flush=True)
    sys.exit(1)
if mode == "fails later":
    say(event="progress", text="loading on cpu")
    say(event="failed", text="model m:M: load() raised OSError: no weights at /srv/m.py:3", cause="OSError: no weights")
    sys.exit(1)
if mode == "segfaults":
    import ctypes, faulthandler
    faulthandler.enable()
    ctypes.string_at(0)
signature = {"name": "m", "inputs": [], "outputs": [], "max_batch_size": 1}
if mode == "crashes":
    open(folder + "/ready", "w").close()
    say(event="ready", signature=signature, facts={"device": "cpu"})
    print("\\nits last words", flush=True)
    os._exit(3)
taken = bytearray(b".") * 100_000_000
os.fork()
open(folder + "/ready", "w").close()
say(event="ready", signature=signature, facts={"device": "cpu"})
while True:  # briefly: a signal just before a sleep begins does not end it
    time.sleep(0.05)
"""


class Processes(ChildProcesses):
    """Remembers the replicas that it has started."""

    def __init__(self, folder: Path) -> None:
        async def drain(*_: object) -> Drained:
            return Drained()

        super().__init__(ReplicaMemory(), (), drain, lambda: None)
        self.folder = folder
        self.launched: list[ReplicaProcess] = []
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.reap)

    def launch(self, *arguments: Any) -> ReplicaHandle:
        replica = super().launch(*arguments)
        assert isinstance(replica, ReplicaProcess)
        self.launched.append(replica)
        return replica


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas are scripts."""

    def command(self: ReplicaProcess, status_fd: int) -> list[str]:
        return [sys.executable, "-c", HOST, "m", str(self.directory), str(status_fd)]

    # private: the program of a replica follows from its kind, and no kind runs a script
    monkeypatch.setattr(ReplicaProcess, "_command", command)


@contextlib.asynccontextmanager
async def replica_set(**fields: Any) -> AsyncIterator[tuple[Processes, ReplicaSet]]:
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        children = Processes(Path(folder))
        replicas = ReplicaSet("m", Deployment.model_validate({"model": "m:M", **fields}), children)
        try:
            yield children, replicas
        finally:
            children.stop()
            for replica in children.launched:
                replica.kill()
            await replicas.end_unload()


def replacement_with(children: Processes) -> Replacement:
    config = Config.model_validate({"deployments": {"m": {"model": "m:M"}}})
    return Replacement(Deployments(config, children), children)


async def test_unload_ends_the_whole_group_and_measures_it() -> None:
    async with replica_set() as (children, replicas):
        await replicas.load()
        assert (replicas.state, list(replicas.ready)) == (State.READY, ["m-1"])
        (replica,) = children.launched
        group = replica.group
        assert len(group_members({group})) == 2
        await replicas.begin_unload(1)
        retired = await replicas.end_unload()
        assert (retired.leftovers, retired.warnings) == ([], [])
        assert retired.report()["freed"]["host_bytes"] > 100_000_000
        assert retired.after is not None
        assert retired.after.resident_bytes == 0
        assert not replica.directory.exists()
        assert group_members({group}) == []
        assert (replicas.state.value, replicas.is_loaded) == ("UNAVAILABLE", False)


async def test_a_reload_has_both_for_a_while_and_then_only_the_new_one() -> None:
    async with replica_set() as (children, replicas):
        await replicas.load()
        replacement = replacement_with(children)
        await replacement.start([replicas], replicas.config)
        old, new = (replica.group for replica in children.launched)
        assert len(group_members({old, new})) == 4
        retired = await replacement.take_over()
        assert (retired.leftovers, group_members({old}), len(group_members({new}))) == ([], [], 2)
        assert (replicas.state, list(replicas.ready)) == (State.READY, ["m-2"])


async def test_replicas_are_added_while_what_they_really_take_fits_and_leave_nothing_when_they_go() -> None:
    async with replica_set() as (children, replicas):
        # A replica's two processes share 100 MB, which count once.
        children.memory = ReplicaMemory(MemoryBudget({HOST_MEMORY: 290_000_000}))
        await replicas.load()
        await replicas.scale(ReplicaBounds(min=2, max=2))
        assert list(replicas.ready) == ["m-1", "m-2"]
        assert 200_000_000 < children.memory.budget.taken(HOST_MEMORY) < 290_000_000
        with pytest.raises(MemoryBudgetExceeded, match=r"no capacity for another replica of `m`: .* of the 277 MiB"):
            await replicas.scale(ReplicaBounds(min=3, max=3))
        with pytest.raises(MemoryBudgetExceeded, match="expected `strategy: recreate`"):
            await replacement_with(children).start([replicas], replicas.config)
        assert (list(replicas.ready), len(children.launched), replicas.bounds.max) == (["m-1", "m-2"], 2, 2)
        leaving = children.launched[1]
        group = leaving.group
        retired = await replicas.scale(ReplicaBounds(min=1, max=1))
        assert retired is not None
        assert (retired.leftovers, retired.warnings, group_members({group})) == ([], [], [])
        assert retired.report()["freed"]["host_bytes"] > 100_000_000
        assert not leaving.directory.exists()
        assert children.memory.budget.taken(HOST_MEMORY) < 150_000_000
        assert (replicas.state, list(replicas.ready)) == (State.READY, ["m-1"])


async def test_a_start_that_fails_leaves_nothing_and_says_why() -> None:
    async with replica_set(options={"mode": "fails"}) as (children, replicas):
        with pytest.raises(CallableFailed, match="RuntimeError: no weights here"):
            await replicas.load()
        assert (replicas.state, replicas.is_loaded, len(children.launched)) == (State.FAILED, False, 1)
        assert not children.launched[0].directory.exists()


async def test_an_unload_that_raises_is_told_and_the_group_is_gone_all_the_same() -> None:
    async with replica_set(options={"mode": "raises"}) as (children, replicas):
        await replicas.load()
        group = children.launched[0].group
        await replicas.begin_unload(1)
        retired = await replicas.end_unload()
        assert retired.warnings == ["replica m-1: RuntimeError: no end"]
        assert (retired.leftovers, group_members({group})) == ([], [])


async def test_a_replica_whose_guardian_is_killed_while_it_is_unloaded_leaves_nothing() -> None:
    async with replica_set() as (children, replicas):
        await replicas.load()
        group = children.launched[0].group
        guardian = _parent(group)
        await replicas.begin_unload(1)
        os.kill(guardian, signal.SIGKILL)
        retired = await replicas.end_unload()
        assert (retired.leftovers, group_members({group})) == ([], [])
        assert not children.launched[0].directory.exists()


async def test_crashes_in_a_row_end_in_failure_with_the_last_lines() -> None:
    async with replica_set(options={"mode": "crashes"}, max_crashes=2) as (children, replicas):
        replicas.start()
        while replicas.state is not State.FAILED:  # noqa: ASYNC110 - the set is told, not the test
            await asyncio.sleep(0.01)
        assert len(children.launched) == 2
        assert (replicas.has_given_up, replicas.is_loaded) == (False, True)
        assert replicas.reason == (
            "2 replicas were lost within 300 s, the last: exited with status 3; the last lines of its "
            "log: its last words"
        )
        client = unavailable(replicas.route(1)).message
        assert client.endswith("the last: exited with status 3")
        replicas.reason = "reworded"
        assert unavailable(replicas.route(1)).message == client


async def test_a_model_that_lost_too_many_replicas_goes_on_trying_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater_server.supervisor.slot.SLOW_FIRST_S", 0.01)

    async with replica_set(options={"mode": "crashes"}, max_crashes=1) as (children, replicas):
        replicas.start()
        while replicas.state is not State.FAILED:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        assert len(children.launched) == 1
        failing = Deployment.model_validate({"model": "m:M", "options": {"mode": "fails"}, "max_crashes": 1})
        replicas.configure(failing)
        while "did not start: RuntimeError" not in replicas.reason:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        assert (replicas.slots.is_failing, replicas.has_given_up) == (True, False)
        replicas.configure(Deployment.model_validate({"model": "m:M", "max_crashes": 1}))
        while not replicas.ready:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        assert not replicas.slots.is_failing


async def test_replicas_that_end_with_one_keys_requests_count_against_that_key() -> None:
    async with replica_set(options={"mode": "crashes"}, max_crashes=2) as (children, replicas):
        for id in ("m-1", "m-2"):  # before they end, as a gateway worker's report may come
            replicas.crashes.note(ReplicaLoss("m", id, keys=["a"]), 2)
        replicas.start()
        while not replicas.route(1).barred:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        assert (list(replicas.route(1).barred), len(children.launched)) == (["a"], 2)
        assert replicas.state is not State.FAILED
        await replicas.begin_unload(0)
        await replicas.end_unload()
        replicas.configure(Deployment.model_validate({"model": "m:M", "max_crashes": 2}))
        await replicas.load()
        assert replicas.route(1).barred == {}


@pytest.mark.slow
async def test_crashes_that_are_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater_server.supervisor.crashes.CRASH_WINDOW_S", 0.3)

    async with replica_set(options={"mode": "crashes"}, max_crashes=2) as (children, replicas):
        replicas.start()
        while len(children.launched) < 3:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        assert replicas.state is not State.FAILED


async def test_what_cannot_change_by_trying_again_fails_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async with replica_set(options={"mode": "wrong"}) as (children, replicas):
        replicas.start()
        while replicas.state is not State.FAILED:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        assert (len(children.launched), replicas.has_given_up) == (1, True)
        assert replicas.reason == "model m:M: there is no module 'm'; looked in /srv/models"
        assert unavailable(replicas.route(1)).message == "model `m` is FAILED: there is no module 'm'"
        assert any("m-1: did not start (not tried again): model m:M" in text for text in caplog.messages)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lacks", "lacks threads"])
async def test_starts_for_which_the_machine_lacks_something_are_tried_again_without_end(
    mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headwater_server.supervisor.slot.FAILED_STARTS_LIMIT", 1)

    async with replica_set(options={"mode": mode}) as (children, replicas):
        replicas.start()
        while len(children.launched) < 3:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        assert replicas.state is State.LOADING
        assert ("space on a disk" if mode == "lacks" else "Resource temporarily unavailable") in replicas.reason
        assert any("m-2: did not start (tried again): " in text for text in caplog.messages)


@pytest.mark.slow
async def test_while_it_tries_again_operators_and_clients_are_told_why_it_failed() -> None:
    stages: list[tuple[str, str]] = []

    async with replica_set(options={"mode": "fails later"}) as (children, replicas):
        children.on_change = lambda: stages.append((replicas.reason, unavailable(replicas.route(1)).message))
        replicas.start()
        while len(children.launched) < 2 or not children.launched[1].ending.is_set():  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
    why = "model m:M: load() raised OSError: no weights at /srv/m.py:3"
    assert [reason for reason, _ in stages[:3]] == [
        "loading on cpu",
        f"trying again after: {why}",
        f"loading on cpu, trying again after: {why}",
    ]
    assert {client for _, client in stages[1:3]} == {"model `m` is LOADING: trying again after: OSError: no weights"}


async def test_a_load_that_fails_tells_clients_the_error_and_not_where() -> None:
    async with replica_set(options={"mode": "fails later"}) as (_children, replicas):
        with pytest.raises(CallableFailed, match=r"at /srv/m\.py:3"):
            await replicas.load()
        assert unavailable(replicas.route(1)).message == "model `m` is FAILED: OSError: no weights"


async def test_a_start_that_ends_without_a_word_is_told_with_the_last_lines() -> None:
    async with replica_set(options={"mode": "segfaults"}) as (_children, replicas):
        with pytest.raises(CallableFailed, match=r"killed by SIGSEGV; .*: Fatal Python error: Segmentation fault \| "):
            await replicas.load()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_what_cannot_be_listed_after_the_end_may_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptors(groups: Collection[int]) -> list[int]:
        raise OSError(24, "Too many open files")

    async with replica_set() as (_children, replicas):
        await replicas.load()
        monkeypatch.setattr("headwater_server.supervisor.replica_process.group_members", no_descriptors)
        await replicas.begin_unload(0)
        retired = await replicas.end_unload()
        assert retired.leftovers == ["perhaps processes, which can't be listed: [Errno 24] Too many open files"]
        assert replicas.state is State.FAILED
