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
def test_what_cannot_be_imported_names_headwaters_own_python(tmp_path: Path) -> None:
    (tmp_path / "grpc.py").write_text("raise ImportError('built for another Python')")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        command = [sys.executable, "-m", "headwater_server.binder", str(tmp_path), str(fd)]
        ended = subprocess.run(
            command, pass_fds=(fd,), env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
        )
    link = Link(ours.detach())
    status = link.receive(ReplicaStatus)
    link.close()
    assert status.text.startswith(
        f"Headwater's own Python, {sys.executable}: PyTriton can't be imported: built for another Python; install"
    )
    assert status.is_permanent
    assert "Traceback" not in ended.stderr
