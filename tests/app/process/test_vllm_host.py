"""vLLM's host under a real guardian, and a server with it, around a program that stands in for vLLM."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headwater.wire.handshake import ReplicaSpec
from headwater_server.config.vllm_options import VllmOptions
from headwater_server.process.vllm_host import LOOKS, EngineProgress, main
from tests.running import processes_of, wait_for
from tests.stand_in_vllm import environment

pytestmark = pytest.mark.slow
MAX_STEP_S = 1.0
"""More than the machine takes to schedule what is due."""


class TestProgress:
    """`EngineProgress`."""

    @pytest.mark.parametrize(
        ("looks", "hangs_at"),
        [
            ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], None),
            ([1] * 8, None),
            ([1] * 9, 8),
            ([1] * 8 + [2] * 8, None),
            ([1] + [2] * 9, 9),
            ([5, 4, 5, 4, 5, 4, 5, 4], None),
        ],
    )
    def test_counts_looks_without_a_change(self, looks: list[int], hangs_at: int | None) -> None:
        progress = EngineProgress()
        found = [progress.look((float(one),)) for one in looks]
        assert (found.index(True) if True in found else None) == hangs_at

    @pytest.mark.parametrize("freeze", range(100))
    def test_a_frozen_engine_is_noticed_after_the_longest_step(self, freeze: int) -> None:
        # Time in hundredths of an interval; the engine counts until it freezes.
        progress = EngineProgress()
        ended = next(look for look in range(20) if progress.look((float(min(look * 100, 300 + freeze)),))) * 100
        assert LOOKS * 100 <= ended - (300 + freeze) <= (LOOKS + 1) * 100


def prepared(folder: Path, directory: Path, options: dict[str, Any]) -> Path:
    """Make a model, and write the specification of its replica to the replica's folder. Returns the interpreter."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 512}')
    spec = ReplicaSpec(
        name="m", model=f"vllm:{model}", token="", user_paths=(), working_dir=str(folder),
        options=VllmOptions.model_validate(options).model_dump(mode="json"),
    )  # fmt: skip
    (directory / "spec.json").write_bytes(msgspec.json.encode(spec))
    return environment(folder / "env")


class Hosted:
    """A host under a guardian, and the test's ends of its pipes."""

    def __init__(self, folder: Path, faults: str, environ: dict[str, str], options: dict[str, Any]) -> None:
        self.directory = folder / "r1"
        self.directory.mkdir()
        self.log = folder / "log"
        self._status, status_write = os.pipe()
        command_read, self._command = os.pipe()
        python = prepared(folder, self.directory, options)
        with self.log.open("w") as log:
            self.guardian = subprocess.Popen(
                [
                    sys.executable, "-m", "headwater_server.process.guardian", "m", str(self.directory),
                    str(status_write), str(command_read), "0", "--",
                    sys.executable, "-m", "headwater_server.process.vllm_host", str(python), "m",
                    str(self.directory), str(status_write),
                ],
                pass_fds=(status_write, command_read),
                start_new_session=True,
                stdout=log,
                stderr=log,
                env={**os.environ, "STAND_IN": faults, **environ},
            )  # fmt: skip
        os.close(status_write)
        os.close(command_read)
        self._rest = b""
        self.seen: list[dict[str, Any]] = []

    def statuses(self, until: str, timeout_s: float = 20.0) -> dict[str, Any]:
        """Read status lines up to one with this event, and return that."""
        deadline = time.monotonic() + timeout_s
        while True:
            *lines, self._rest = self._rest.split(b"\n")
            for number, line in enumerate(lines):
                self.seen.append(json.loads(line))
                if self.seen[-1]["event"] == until:
                    self._rest = b"\n".join([*lines[number + 1 :], self._rest])
                    return self.seen[-1]
            assert select.select([self._status], [], [], max(0.0, deadline - time.monotonic()))[0], self.log.read_text()
            more = os.read(self._status, 65536)
            assert more, (self.seen, self.log.read_text())
            self._rest += more

    def file(self, name: str) -> str:
        """What the program wrote to a file in its folder."""
        path = self.directory / name
        return str(wait_for(lambda: path.exists() and path.read_text(), what=name))

    def set(self, name: str, text: str = "") -> None:
        """Let it go wrong."""
        (self.directory / name).write_text(text)

    def stop(self) -> None:
        """Ask for an orderly end."""
        os.write(self._command, b"stop\n")

    def close(self) -> None:
        """End it, whatever it does."""
        with contextlib.suppress(OSError):
            os.close(self._command)
        self.guardian.wait(20)
        os.close(self._status)


@contextlib.contextmanager
def hosting(
    tmp_path: Path, faults: str = "", environ: dict[str, str] | None = None, **options: Any
) -> Iterator[Hosted]:
    hosted = Hosted(tmp_path, faults, environ or {}, {"max_step_s": MAX_STEP_S, **options})
    segment = hosted.directory / "segment"
    worker = hosted.directory / "worker"
    name = pid = ""
    try:
        try:
            yield hosted
        finally:
            with contextlib.suppress(OSError):
                name, pid = segment.read_text(), worker.read_text()
            hosted.close()
    finally:
        assert not hosted.directory.exists()
        assert processes_of(hosted.directory) == {}
        assert not (pid and Path(f"/proc/{pid}").exists())
        assert not (name and Path(f"/dev/shm/{name}").exists())


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for sockets."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        yield Path(name)


def test_a_vllm_becomes_ready_and_ends_in_order(short: Path) -> None:
    with hosting(short, environ={"VLLM_ATTENTION_BACKEND": "X"}, max_num_seqs=7) as hosted:
        ready = hosted.statuses("ready")
        expected = {"max_sequences": 7, "context_length": 512, "cache_tokens": 1024, "version": "0.32.0+cpu"}
        more = {"max_lora_rank": 0, "max_requests": 1024, "embedding_length": 0}
        assert ready["signature"]["vllm"] == expected | more
        assert ready["facts"] == {"device": "cpu", "vllm": "0.32.0+cpu"}
        texts = [one["text"] for one in hosted.seen if one["event"] == "progress"]
        assert texts == ["looking for vLLM", "starting vLLM 0.32.0+cpu", "warming up"]
        seen = json.loads(hosted.file("seen.json"))
        assert seen["arguments"]["uds"] == str(hosted.directory / "h")
        assert seen["environment"]["VLLM_ATTENTION_BACKEND"] == "X"
        hosted.stop()
        assert hosted.statuses("ending")["text"] == "stopped"
        assert hosted.statuses("ended")["leftovers"] == []
        assert [one for one in hosted.seen if one["event"] == "unloaded"]


def test_a_model_that_pools_is_warmed_up_probed_and_reported_as_one(short: Path) -> None:
    with hosting(short, runner="pooling", max_num_queued_reqs=9) as hosted:
        signature = hosted.statuses("ready")["signature"]
        assert (signature["vllm"]["embedding_length"], signature["vllm"]["max_requests"]) == (2, 9)
        assert signature["outputs"][0]["shape"] == [2]
        with pytest.raises(AssertionError):  # nothing but probes is counted
            hosted.statuses("ending", timeout_s=3 * MAX_STEP_S)
        hosted.set("freeze")
        assert "no progress within options.max_step_s" in hosted.statuses("ending")["text"]


@pytest.mark.parametrize("runner", ["auto", "generate", "pooling"])
def test_a_model_that_does_neither_is_not_tried_again_and_the_option_is_named(short: Path, runner: str) -> None:
    with hosting(short, "classifies", runner=runner) as hosted:
        failed = hosted.statuses("failed")
        assert f"with options.runner = {runner} this model neither generates text nor" in failed["text"]
        assert failed["is_permanent"]


@pytest.mark.parametrize(
    ("faults", "text", "is_permanent"),
    [
        ("refuses-arguments", "exited with status 2 before it was ready: argument --dtype: invalid choice: 'x'", True),
        ("raises", "exited with status 1 before it was ready: KeyError: 'invalid tool call parser: x'", True),
        ("engine-raises", "exited with status 1 before it was ready: OutOfMemoryError: no memory", False),
    ],
)
def test_a_failed_start_says_vllms_own_error(short: Path, faults: str, text: str, is_permanent: bool) -> None:
    with hosting(short, faults) as hosted:
        failed = hosted.statuses("failed")
        assert failed["text"] == f"vLLM's server {text}"
        assert failed.get("is_permanent", False) == is_permanent
        assert failed["cause"] == f"vLLM ended before it was ready: {text.rpartition('ready: ')[2]}"


def test_a_failed_start_without_an_error_is_told_with_the_log(short: Path) -> None:
    with hosting(short, "ends-silently") as hosted:
        assert hosted.statuses("ending")["text"] == "vLLM's server exited with status 3 before it was ready"
        hosted.statuses("ended")
        assert "failed" not in {one["event"] for one in hosted.seen}
        assert "the last thing that it said" in hosted.log.read_text()


@pytest.mark.parametrize(
    ("flag", "error", "is_shortage", "text"),
    [
        ("-c", OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), True, "executed: the machine lacks processes or thr"),
        ("-m", OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), True, "the machine lacks processes or threads"),
        ("-m", RuntimeError("can't start new thread"), True, "the machine lacks processes or threads"),
        ("-m", OSError(errno.ENOENT, os.strerror(errno.ENOENT)), False, "FileNotFoundError: [Errno 2] No such file"),
    ],
)
def test_a_vllm_that_the_system_does_not_start_is_reported_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, error: Exception, is_shortage: bool, text: str
) -> None:
    popen = subprocess.Popen

    def start(command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
        if flag in command:
            raise error
        return popen(command, **settings)

    python = prepared(tmp_path, tmp_path, {})
    status_read, status_write = os.pipe()
    monkeypatch.setattr("headwater_server.process.vllm_host.subprocess.Popen", start)
    monkeypatch.setattr("headwater_server.process.vllm_host.signal.signal", lambda *_: None)
    monkeypatch.setattr("headwater_server.process.vllm_host.ctypes.CDLL", lambda _: SimpleNamespace(prctl=lambda *_: 0))
    monkeypatch.setattr(sys, "argv", ["vllm_host", str(python), "m", str(tmp_path), str(status_write)])
    with pytest.raises(SystemExit):
        main()
    os.close(status_write)
    with open(status_read, "rb") as statuses:
        *_, failed = map(json.loads, statuses)
    assert (failed["event"], failed.get("is_shortage", False)) == ("failed", is_shortage)
    assert text in failed["text"]
    assert not failed.get("is_permanent")


def test_an_engine_that_ends_in_the_warm_up(short: Path) -> None:
    with hosting(short, "dies-in-warm-up") as hosted:
        text = hosted.statuses("failed")["text"]
        assert text.startswith("a request before it was ready failed: ")
        assert text.endswith("OutOfMemoryError: no memory for the key/value cache")


def test_what_can_be_found_without_a_start_is_not_tried_again(short: Path) -> None:
    with hosting(short, max_model_len=513) as hosted:
        failed = hosted.statuses("failed")
        assert "options.max_model_len: expected at most 512" in failed["text"]
        assert failed["cause"].startswith("options.max_model_len")
        assert failed["is_permanent"]


def test_an_exit_that_nobody_asked_for_is_a_crash(short: Path) -> None:
    with hosting(short) as hosted:
        hosted.statuses("ready")
        hosted.set("exit")
        assert hosted.statuses("ending")["text"] == "vLLM's server exited with status 0 without a request to end"
        assert hosted.statuses("ended")["exit_status"] == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_ends_or_stops(short: Path, number: signal.Signals) -> None:
    with hosting(short) as hosted:
        hosted.statuses("ready")
        worker = int(hosted.file("worker"))
        os.kill(worker, number)
        wanted = f"its process VLLM::Worker ({worker}) " + ("has ended" if number == signal.SIGKILL else "is stopped")
        assert hosted.statuses("ending")["text"] == wanted


@pytest.mark.parametrize("text", ["", "metrics"])
def test_an_engine_that_hangs_is_noticed_after_max_step_s(short: Path, text: str) -> None:
    with hosting(short) as hosted:
        hosted.statuses("ready")
        hosted.set("freeze", text)
        began_s = time.monotonic()
        wanted = "its engine has made no progress within options.max_step_s = 1 s"
        assert hosted.statuses("ending")["text"] == wanted
        assert time.monotonic() - began_s >= MAX_STEP_S * (LOOKS - 1) / LOOKS


def test_a_server_that_is_stopped_is_noticed(short: Path) -> None:
    with hosting(short) as hosted:
        hosted.statuses("ready")
        server = next(pid for pid, command in processes_of(hosted.directory / "h").items() if "api_server" in command)
        os.kill(server, signal.SIGSTOP)
        assert "no progress within options.max_step_s" in hosted.statuses("ending")["text"]


def test_a_full_queue_does_not_hide_a_hang(short: Path) -> None:
    with hosting(short) as hosted:
        hosted.statuses("ready")
        hosted.set("full")
        assert "no progress within options.max_step_s" in hosted.statuses("ending")["text"]


def test_an_engine_that_reads_a_long_prompt_is_left_alone(short: Path) -> None:
    with hosting(short) as hosted:
        hosted.statuses("ready")
        hosted.set("prefill")
        with pytest.raises(AssertionError):
            hosted.statuses("ending", timeout_s=3 * MAX_STEP_S)


def test_an_idle_engine_is_left_alone(short: Path) -> None:
    with hosting(short) as hosted:
        hosted.statuses("ready")
        with pytest.raises(AssertionError):
            hosted.statuses("ending", timeout_s=3 * MAX_STEP_S)


def test_a_server_that_ignores_sigterm_is_killed(short: Path) -> None:
    with hosting(short, "ignores-sigterm") as hosted:
        hosted.statuses("ready")
        began_s = time.monotonic()
        hosted.stop()
        assert hosted.statuses("ending")["text"] == "stopped"
        assert time.monotonic() - began_s > 4
        assert "vLLM has not ended 5 s after SIGTERM" in hosted.log.read_text()
