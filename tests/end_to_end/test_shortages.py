"""What a replica needs to start is lacking: the reason says what, and the next start serves when there is enough."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from tests.running import serve, wait_for

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
            wait_for(lambda: running.log.read_text().count("did not start (tried again)") > 1, 50, "two failed starts")
            log = running.log.read_text()
            assert "Resource temporarily unavailable" in log or "lacks processes or threads" in log
            assert others.stdin is not None
            others.stdin.close()
            assert others.wait(30) == 0
            wait_for(lambda: running.is_ready("one"), 120, "the model to be ready")
            assert running.infer("one", [1.0], shape=[1, 1]).status_code == 200
            assert running.stop() == 0
