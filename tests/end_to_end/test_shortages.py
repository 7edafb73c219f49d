"""What a replica needs to start is lacking: the reason says what, and the next start serves when there is enough."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.running import in_mount_namespace, processes_of, serve, wait_for

ONE: dict[str, Any] = {"deployments": {"one": {"model": "faulty:Faulty", "warmup_batch_sizes": [1]}}}
CAPABILITY = "+dac_override"
"""To read and write what belongs to root, without the rest of what root may."""
PROCESSES = 400
HOG = """
import sys, threading
for _ in range(int(sys.argv[1]) - 1):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print("up", flush=True)
sys.stdin.read()
"""


def as_another_user(user: int) -> tuple[str, ...]:
    """A command that runs another as a user who may have `PROCESSES` processes and threads."""
    if os.geteuid() or shutil.which("setpriv") is None or shutil.which("prlimit") is None:
        pytest.skip("needs root, setpriv and prlimit")
    capabilities = (f"--inh-caps={CAPABILITY}", f"--ambient-caps={CAPABILITY}")
    command = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *capabilities)
    if subprocess.run([*command, "true"], check=False, capture_output=True, timeout=30).returncode:
        pytest.skip("this system lets nobody become another user")
    return ("prlimit", f"--nproc={PROCESSES}:{resource.getrlimit(resource.RLIMIT_NPROC)[1]}", *command)


@pytest.mark.parametrize("left", [8, 45])
def test_a_start_that_meets_a_process_limit_says_so_soon_and_the_next_one_serves(left: int) -> None:
    """8: the replica's process can't be started, or no thread of numpy's; 45: Triton waits for a thread of its own."""
    user = 1_000_000 + os.getpid()
    prefix = as_another_user(user)
    hog = [*prefix, sys.executable, "-c", HOG, str(PROCESSES - left)]
    with (
        tempfile.TemporaryDirectory(prefix="hw-") as folder,
        subprocess.Popen(hog, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as others,
    ):
        os.chown(folder, user, user)
        assert others.stdout is not None
        assert others.stdout.readline() == "up\n"
        with serve({**ONE, "server": {"runtime_dir": folder}}, ready=False, prefix=prefix) as running:
            wait_for(lambda: running.log.read_text().count("did not start (tried again)") > 1, 100, "two failed starts")
            log = running.log.read_text()
            assert "Resource temporarily unavailable" in log or "lacks processes or threads" in log
            assert others.stdin is not None
            others.stdin.close()
            assert others.wait(30) == 0
            wait_for(lambda: running.is_ready("one"), 120, "the model to be ready")
            assert running.infer("one", [1.0], shape=[1, 1]).status_code == 200
            assert running.stop() == 0


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """A context in which the folder's disk is full, whatever becomes free."""
    stop = threading.Event()

    def fill() -> None:
        with open(folder / "fill", "ab", buffering=0) as file:
            while not stop.is_set():
                try:
                    file.write(bytes(4096))
                except OSError:
                    has_begun.set()
                    stop.wait(0.001)

    has_begun = threading.Event()
    thread = threading.Thread(target=fill)
    thread.start()
    try:
        assert has_begun.wait(30)
        yield
    finally:
        stop.set()
        thread.join()
        (folder / "fill").unlink()


def test_workers_and_replicas_that_end_while_the_runtime_folder_is_full_are_replaced() -> None:
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        mount = f"mount -t tmpfs -o size=80m none {name}"
        with serve({**ONE, "server": {"runtime_dir": name, "workers": 1}}, prefix=in_mount_namespace(mount)) as running:
            seen_from_here = Path(f"/proc/{running.pid}/root{name}")

            def answer() -> httpx.Response:
                return running.infer("one", [1.0], shape=[1, 1])

            def answers() -> int:
                line = r'^headwater_requests_total\{.*deployment="one".*outcome="ok".*\} (\d+)'
                return sum(map(int, re.findall(line, running.get("/metrics").text, re.MULTILINE)))

            with filled(seen_from_here):
                (worker,) = running.workers()
                os.kill(worker, signal.SIGKILL)
                assert answer().status_code == 200
                wait_for(answers, what="the answer to be counted")  # which comes after it is sent
                (worker,) = running.workers()
                os.kill(worker, signal.SIGKILL)
                assert answer().status_code == 200
                assert running.get("/metrics").status_code == 200
                commands = processes_of(Path(name))
                (host,) = (
                    pid for pid, command in commands.items() if command.split()[1:3] == ["-m", "headwater.replica"]
                )
                os.kill(host, signal.SIGKILL)
                wait_for(lambda: not running.is_ready(), what="the replica's end to be noticed")
                wait_for(lambda: "No space left on device" in answer().text, 60, "a failed start's reason")
                refused = answer()
                assert refused.status_code == 503
                assert not running.is_ready()
                wait_for(lambda: running.log.read_text().count("No space left on device") > 1, 60, "the log")
            wait_for(running.is_ready, 120, "the model to be ready again")
            assert answer().status_code == 200
            assert answers() >= 3  # with those of workers that counted in memory
            assert running.stop() == 0
