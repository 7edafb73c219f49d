"""Instances of a replica that start before the first of them listens."""

from __future__ import annotations

import importlib
import shutil
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from pytriton.proxy import communication

from inference.replica.patience import make_patient, patient
from inference.replica.triton import telling_lines

FAULTS = (ConnectionRefusedError("bound, not listening"), TimeoutError("not there"), ValueError("no JSON"))


class Answers:
    """Asked for a configuration, fails a few times first."""

    def __init__(self, *faults: Exception) -> None:
        self.faults = list(faults)

    def __call__(self, socket_path: object) -> dict[str, object]:
        if self.faults:
            raise self.faults.pop(0)
        return {"socket": socket_path}


def test_it_asks_again_after_each_way_to_be_too_early() -> None:
    assert patient(Answers(*FAULTS), pause_s=0)("s") == {"socket": "s"}


def test_it_gives_up_in_the_end_with_the_last_error() -> None:
    with pytest.raises(TimeoutError, match="not there"):
        patient(Answers(*[TimeoutError("not there")] * 1000), timeout_s=0, pause_s=0)("s")


def test_other_errors_are_told_at_once() -> None:
    with pytest.raises(ZeroDivisionError):
        patient(Answers(ZeroDivisionError()))("s")


def script(folder: Path) -> Any:
    """PyTriton's script as an instance runs it: one of a package, where it finds what lies beside it."""
    package = folder / "patient_scripts"
    package.mkdir()
    copy = package / "communication.py"
    shutil.copy(communication.__file__, copy)
    copy.chmod(0o444)  # as where packages are for reading only
    make_patient(copy)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("patient_scripts.communication")
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == package.name]:
            del sys.modules[name]


def test_an_instance_waits_for_a_socket_that_is_bound_and_does_not_listen_yet(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as first:
        first.bind(str(path))
        with pytest.raises(ConnectionRefusedError):
            communication.get_config_from_handshake_server(path)
        found: list[object] = []
        asks = script(tmp_path).get_config_from_handshake_server
        second = threading.Thread(target=lambda: found.append(asks(path)))
        second.start()
        first.listen()
        first.settimeout(30)
        connection, _ = first.accept()
        with connection:
            assert connection.recv(100) == b"get_config\n"
            connection.sendall((8).to_bytes(4, "big") + b'{"a": 1}')
            second.join(30)
    assert found == [{"a": 1}]


def test_of_a_log_the_lines_are_told_that_say_why() -> None:
    log = [
        'I1121 18:00:51.905306 16987 model_lifecycle.cc:472] "loading: m:1"',
        'E1121 18:00:51.904103 16987 server.cc:241] "CudaDriverHelper has not been initialized."',
        'E1121 18:00:56.264809 16987 backend_model.cc:692] "ERROR: Failed to create instance: no such thing"',
        *["| startup_models_0 | * |"] * 30,
        "error: creating server: Internal - failed to load all models",
    ]
    assert telling_lines(log) == [log[2], log[-1]]
    assert telling_lines(log[3:-1]) == log[3:18]
