"""The file from which the guardian calls a replica is written only if the replica answers the call."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.replica.probe_call import HTTP_SOCKET, PROBE_FILE, probe_request, write_probe
from headwater.signature import Signature, TensorSpec

PLAIN = Signature(name="m", inputs=(TensorSpec("x", "FP32", (2,)),), outputs=(TensorSpec("y", "FP32", (2,)),))


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hw-") as name:  # a socket's path must be short
        yield Path(name)


@contextlib.contextmanager
def answering(folder: Path, answer: bytes) -> Iterator[None]:
    """Answer one call, as Triton would."""
    request = probe_request(PLAIN, "secret")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(folder / HTTP_SOCKET))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(len(request), socket.MSG_WAITALL) == request
                connection.sendall(b"HTTP/1.1 " + answer + b"\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


@pytest.mark.parametrize(("answer", "is_written"), [(b"200 OK", True), (b"400 Bad Request", False)])
def test_only_a_request_that_is_answered_is_written(folder: Path, answer: bytes, is_written: bool) -> None:
    request = probe_request(PLAIN, "secret")
    with answering(folder, answer):
        write_probe(folder, PLAIN, "secret", 20)
    path = folder / PROBE_FILE
    assert path.exists() is is_written
    if is_written:
        assert path.read_bytes() == request
        assert path.stat().st_mode & 0o777 == 0o600


def test_the_guardian_never_finds_a_part_of_the_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def seen_before(path: Path, data: bytes) -> int:
        assert not (folder / PROBE_FILE).exists()
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", seen_before)
    with answering(folder, b"200 OK"):
        write_probe(folder, PLAIN, "secret", 20)
    assert [path.name for path in folder.iterdir() if path.is_file()] == [PROBE_FILE]


def test_a_replica_that_can_not_be_called_is_not_probed(folder: Path) -> None:
    write_probe(folder, PLAIN, "secret", 20)
    assert not (folder / PROBE_FILE).exists()
