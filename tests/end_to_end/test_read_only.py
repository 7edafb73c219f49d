"""A server on a read-only root file system, with a temporary folder as the only place to write."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.conftest import language_model
from tests.running import serve, wait_for

SCRIPT = 'mount --make-rprivate / && mount --bind "$0" "$0" && mount -o remount,ro,bind / && exec "$@"'
"""Makes the root read-only for a command, except for a folder (and the file systems of the kernel)."""


def _can_remount(folder: Path) -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    command = ["unshare", "--mount", "sh", "-c", SCRIPT, str(folder), "sh", "-c", "! touch /usr/written"]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_a_read_only_root_is_enough_to_start_infer_stream_and_reload(tmp_path_factory: pytest.TempPathFactory) -> None:
    written = Path(tmp_path_factory.getbasetemp().anchor) / "tmp"
    if not _can_remount(written):
        pytest.skip("needs root, and leave to remount the root read-only")
    models = {"trunk": {"model": "light:Trunk"}, "tiny": language_model()}
    prefix = ("unshare", "--mount", "sh", "-c", SCRIPT, str(written))
    with serve({"deployments": models}, prefix=prefix) as running:
        for _ in range(2):
            answer = running.infer("trunk", [1, 2, 3, 4], shape=[1, 4])
            assert answer.status_code == 200, answer.text
            body = {"model": "tiny", "prompt": "def", "max_tokens": 4, "stream": True}
            streamed = running.client.post(f"{running.url}/v1/completions", json=body)
            assert streamed.text.rstrip().endswith("data: [DONE]"), streamed.text
            for model in models:
                told = running.client.post(f"{running.url}/v2/repository/models/{model}/reload")
                assert (told.status_code, told.json()["state"]) == (200, "READY"), told.text
        assert wait_for(running.is_ready)
        assert running.stop() == 0
        assert '"level":"error"' not in running.log.read_text()
