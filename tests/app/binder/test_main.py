"""What a binder that can't bind says to its host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.wire.handshake import ReplicaStatus
from headwater.wire.link import Link


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "file", "reason", "fix"),
    [
        ("PYTHONPATH", "grpc.py", "built for another Python", "install Headwater anew there"),
        (
            "LD_LIBRARY_PATH",
            "libstdc++.so.6",
            "libstdc++.so.6: file too short",
            "start headwater without LD_LIBRARY_PATH",
        ),
    ],
)
def test_what_cannot_be_imported_names_headwaters_own_python(
    variable: str, file: str, reason: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / file).write_text("raise ImportError('built for another Python')")
    for name in ("LD_LIBRARY_PATH", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get(variable)]))
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        command = [sys.executable, "-m", "headwater_server.binder", str(fd)]
        environ = {**os.environ, variable: path}
        ended = subprocess.run(command, pass_fds=(fd,), env=environ, capture_output=True, text=True, timeout=60)
    link = Link(ours.detach())
    status = link.receive(ReplicaStatus)
    link.close()
    assert status.text.startswith(f"Headwater's own Python, {sys.executable}: PyTriton can't be imported: ")
    assert f"{reason}; {fix}" in status.text
    assert status.is_permanent
    assert "Traceback" not in ended.stderr
