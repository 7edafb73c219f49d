"""A server whose replicas host a vLLM, for which a program stands in: `tests/vllm` has a real one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater_server.config.deployment_kinds import VLLM
from headwater_server.process.sweep import process_stat
from headwater_server.supervisor.kind_programs import program_of
from tests.running import Running, in_background, leftovers, processes_of, segments_of, serve, wait_for
from tests.stand_in_vllm import NOT_OFFERED, NOT_OFFERED_BODY, environment

DRAIN_S = 1.0


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with what stands in for vLLM."""
    return environment(tmp_path_factory.mktemp("env"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text('{"max_position_embeddings": 512}')
    return folder


def configured(python: Path, model: Path, **fields: Any) -> dict[str, Any]:
    own = {"model": f"vllm:{model}", "python": str(python), "drain_timeout_s": DRAIN_S}
    return {"deployments": {"m": {**own, **fields}}, "server": {"allow_load": "any"}}


@pytest.fixture(scope="module")
def running(python: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server; every test leaves its model ready, with one replica."""
    theirs = tmp_path_factory.mktemp("theirs")
    (theirs / "msgspec.py").write_text("raise ImportError('a module for vLLM, not for its host')")
    environment = {"VLLM_OWN": "1", "CUDA_VISIBLE_DEVICES": "", "HOME": str(theirs), "PYTHONPATH": str(theirs)}
    fields = {"environment": environment, "options": {"max_step_s": 2}}
    os.environ["VLLM_INHERITED"] = "1"
    try:
        with serve(configured(python, model, **fields, max_crashes=100, replicas={"min": 1, "max": 2})) as running:
            yield running
            segments = segments_of(running.folder)
            assert running.stop() == 0
            assert leftovers(running.folder, segments) == []
    finally:
        del os.environ["VLLM_INHERITED"]


def command(running: Running, action: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    answer = running.client.post(f"{running.url}/v2/repository/models/m/{action}", json=body or {})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def completes(running: Running) -> None:
    body = {"model": "m", "prompt": "a", "max_tokens": 1}
    answer = running.client.post(f"{running.url}/v1/completions", json=body)
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "a"), answer.text


def read(running: Running, begun: list[int]) -> list[str]:
    """The data of a stream, to its end."""
    body = {"model": "m", "prompt": "a", "stream": True, "max_tokens": 400}
    found = []
    with running.client.stream("POST", f"{running.url}/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line:
                begun.append(1)
                found.append(line.removeprefix("data: "))
    return found


@contextlib.contextmanager
def streaming(running: Running) -> Iterator[list[Any]]:
    """A stream under way; at the block's end the list has what it gave."""
    begun: list[int] = []
    with in_background(lambda: read(running, begun)) as results:
        wait_for(lambda: begun, what="the stream's first event")
        yield results


def error_of(results: list[Any]) -> str:
    """The error with which a stream has ended."""
    events: list[str] = results[0]
    return next(one for one in events[-2:] if '"error"' in one)


def seen(running: Running) -> dict[str, Any]:
    """What the program was started with."""
    found: dict[str, Any] = json.loads((running.replica_folder("m") / "seen.json").read_text())
    return found


def processes(running: Running) -> dict[str, int]:
    """The newest replica's processes, by what they are."""
    folder = running.replica_folder("m")
    commands = processes_of(folder)
    found = {"host": running.replica_pid("m"), "worker": int((folder / "worker").read_text())}
    found["guardian"] = next(pid for pid, one in commands.items() if "headwater_server.process.guardian" in one)
    found["server"] = next(pid for pid, one in commands.items() if "--uds=" in one)
    return found


def have_ended(pids: dict[str, int]) -> bool:
    stats = [process_stat(pid) for pid in pids.values()]
    return all(one is None or one.state == "Z" for one in stats)


def test_the_deployments_environment_reaches_it_and_what_is_meant_for_another_vllm_does_not(running: Running) -> None:
    environ = seen(running)["environment"]
    assert environ["VLLM_OWN"] == "1"
    assert environ["VLLM_CACHE_ROOT"] == f"{environ['HOME']}/.cache/vllm"
    assert "VLLM_INHERITED" not in environ
    assert environ["TMPDIR"] == str(running.replica_folder("m") / "tmp")
    assert environ["VLLM_RPC_BASE_PATH"] == str(running.replica_folder("m"))


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the kernel has no autogroups")
def test_what_spins_comes_after_the_gateway(running: Running) -> None:
    session = Path(f"/proc/{running.replica_pid('m')}/autogroup")
    assert session.read_text().split()[-1] == str(program_of(VLLM).nice)


@pytest.mark.parametrize("path", NOT_OFFERED)
def test_vllms_other_routes_are_not_ours(running: Running, path: str) -> None:
    assert running.client.post(f"{running.url}{path}", json=NOT_OFFERED_BODY).status_code == 404


def test_unload_in_the_middle_of_a_stream_leaves_nothing(running: Running) -> None:
    folder = running.replica_folder("m")
    pids = processes(running)
    segment = (folder / "segment").read_text()
    with streaming(running) as results:
        told = command(running, "unload")
    assert "drain_timeout_s" in error_of(results)
    assert (told["drained"], told["ended"], told["leftovers"], told.get("warnings")) == (0, 1, [], None)
    assert told["freed"]["host_bytes"] > 10_000_000
    assert leftovers(folder, {segment}) == []
    assert have_ended(pids)
    assert command(running, "load")["state"] == "READY"
    completes(running)


@pytest.mark.parametrize("strategy", ["beside", "recreate"])
def test_reload_replaces_the_replica(running: Running, strategy: str) -> None:
    before = running.replica_folder("m")
    config = {"strategy": strategy, "options": {"max_step_s": 2, "max_num_seqs": 9}}
    told = command(running, "reload", {"parameters": {"config": json.dumps(config)}})
    assert (told["state"], told["leftovers"]) == ("READY", [])
    assert leftovers(before) == []
    assert seen(running)["arguments"]["max-num-seqs"] == "9"
    completes(running)


def test_a_reload_that_vllm_refuses_leaves_what_serves(running: Running) -> None:
    before = running.replica_folder("m")
    config = {"strategy": "beside", "environment": {"STAND_IN": "refuses-arguments"}}
    url = f"{running.url}/v2/repository/models/m/reload"
    answer = running.client.post(url, json={"parameters": {"config": json.dumps(config)}})
    assert answer.status_code >= 400
    assert "argument --dtype: invalid choice: 'x'" in answer.json()["error"]
    assert running.replica_folders("m") == [before]
    completes(running)


def test_scale_up_and_down(running: Running) -> None:
    assert command(running, "scale", {"replicas": 2})["replicas"]["ready"] == 2
    assert len(running.replica_folders("m")) == 2
    completes(running)
    assert command(running, "scale", {"min": 1, "max": 1})["leftovers"] == []
    (left,) = running.replica_folders("m")
    assert left.exists()
    completes(running)


@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("server", signal.SIGKILL),
        ("worker", signal.SIGKILL),
        ("worker", signal.SIGSTOP),
        ("host", signal.SIGKILL),
        ("guardian", signal.SIGKILL),
    ],
)
def test_a_process_that_dies_under_load(running: Running, what: str, number: signal.Signals) -> None:
    wait_for(lambda: running.is_ready("m"), 60, "the model")
    folder = running.replica_folder("m")
    pids = processes(running)
    segment = (folder / "segment").read_text()
    with streaming(running) as results:
        os.kill(pids[what], number)
    assert "the replica ended" in error_of(results)
    wait_for(lambda: leftovers(folder, {segment}) == [], what="the replica to be swept")
    wait_for(lambda: have_ended(pids), what="its processes to end")
    wait_for(lambda: running.is_ready("m"), 60, "another replica")
    completes(running)


def test_a_frozen_engine_is_replaced_and_its_streams_end(running: Running) -> None:
    wait_for(lambda: running.is_ready("m"), 60, "the model")
    folder = running.replica_folder("m")
    with streaming(running) as results:
        (folder / "freeze").touch()
    assert "the replica ended" in error_of(results)
    wait_for(lambda: running.is_ready("m") and running.replica_folder("m") != folder, 60, "another replica")
    assert "made no progress within options.max_step_s = 2 s" in running.log.read_text()
    completes(running)


def adapter(folder: Path, says: str) -> str:
    """A LoRA adapter's folder; the program answers with the text."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    (folder / "adapter_model.safetensors").write_text(says)
    return str(folder)


def says(running: Running, model: str) -> str:
    """The answer of a model or an adapter; the error's message if it is refused."""
    body = {"model": model, "prompt": "a", "max_tokens": 1}
    answer = running.client.post(f"{running.url}/v1/completions", json=body).json()
    return str(answer["choices"][0]["text"] if "choices" in answer else answer["error"]["message"])


class Listener:
    """A stream that a client reads until `leave`."""

    def __init__(self, running: Running, model: str) -> None:
        self.heard: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen, args=(running, model))
        self._thread.start()
        self.hears_more()

    def _listen(self, running: Running, model: str) -> None:
        body = {"model": model, "prompt": "a", "stream": True, "max_tokens": 400}
        with running.client.stream("POST", f"{running.url}/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line:
                    event = json.loads(line.removeprefix("data: "))
                    self.heard.append(event["choices"][0]["text"] if "choices" in event else line)
                if self._is_over.is_set():
                    return

    def hears_more(self) -> None:
        """Wait for further events."""
        count = len(self.heard)
        wait_for(lambda: len(self.heard) > count + 2, what="events of a stream")

    def leave(self) -> set[str]:
        """End the stream. Returns what it said."""
        self._is_over.set()
        self._thread.join()
        return set(self.heard)


def swap(running: Running, adapters: dict[str, str | None]) -> dict[str, Any]:
    return command(running, "reload", {"parameters": {"config": json.dumps({"options": {"adapters": adapters}})}})


def test_adapters_that_are_swapped_while_they_serve_mix_in_no_stream(python: Path, model: Path, tmp_path: Path) -> None:
    folders = {name: adapter(tmp_path / name, name.upper()) for name in ("first", "second", "third", "other")}
    options = {"adapters": {name: folders[name] for name in ("first", "second")}, "max_loras": 4}

    with serve(configured(python, model, options=options, drain_timeout_s=120)) as running:
        listeners = {name: Listener(running, name) for name in ("m", "first", "second")}
        with in_background(lambda: swap(running, {"first": None, "third": folders["third"]})) as results:
            wait_for(lambda: says(running, "third") == "THIRD" and "first" in says(running, "first"), what="the swap")
            for listener in listeners.values():
                listener.hears_more()
            assert not results[0]  # it waits for the stream of the adapter that goes
            assert listeners.pop("first").leave() == {"FIRST"}
        assert (results[0]["state"], results[0]["ended"]) == ("READY", 0)
        # A name that gets another folder: the replica is replaced, and its streams end with what they began.
        swapped: dict[str, str | None] = {"first": None, "second": folders["other"], "third": folders["third"]}
        with in_background(lambda: swap(running, swapped)) as results:
            wait_for(lambda: says(running, "second") == "OTHER", 60, "the other folder")
            for listener in listeners.values():
                listener.hears_more()
            heard = {name: listener.leave() for name, listener in listeners.items()}
        assert heard == {"m": {"a"}, "second": {"SECOND"}}
        assert (results[0]["state"], results[0]["ended"]) == ("READY", 0)
        assert [says(running, name) for name in ("m", "second", "third")] == ["a", "OTHER", "THIRD"]


def test_a_start_that_fails_for_good_is_not_tried_again_and_says_why(python: Path, model: Path) -> None:
    config = configured(python, model, environment={"STAND_IN": "raises"})
    with serve(config, ready=False) as running:
        assert running.popen.wait(60) != 0  # there is nothing else to serve
        log = running.log.read_text()
        assert "KeyError: 'invalid tool call parser: x'" in log
        assert log.count("vLLM ended before it was ready") <= 2


def test_nothing_survives_a_supervisor_that_is_killed_and_the_next_start_sweeps_the_rest(
    python: Path, model: Path
) -> None:
    with serve(configured(python, model)) as running:
        folder = running.replica_folder("m")
        pids = processes(running)
        segment = (folder / "segment").read_text()
        running.popen.kill()
        wait_for(lambda: leftovers(folder, {segment}) == [], what="the replica to be swept")
        wait_for(lambda: have_ended(pids), what="its processes to end")


def test_the_processes_of_a_replica_without_supervisor_and_guardian_end_with_the_next_start(
    python: Path, model: Path
) -> None:
    with serve(configured(python, model)) as running:
        pids = processes(running)
        segment = (running.replica_folder("m") / "segment").read_text()
        os.kill(pids["guardian"], signal.SIGSTOP)
        for pid in (running.pid, pids["guardian"], pids["host"], pids["server"]):
            os.kill(pid, signal.SIGKILL)
        worker = {"worker": pids.pop("worker")}
        wait_for(lambda: have_ended(pids), what="the others to end")
        assert not have_ended(worker)
        config = configured(python, model)
        with serve({**config, "server": {"runtime_dir": str(running.folder)}}) as following:
            assert have_ended(worker)
            assert following.stop() == 0
        assert leftovers(running.folder, {segment}) == []
