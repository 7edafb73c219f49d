"""A real Triton says what `headwater.wire.triton_words` expects it to say."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import ReplicaError
from headwater.replica import callee
from headwater.runtime.call_loop import CallLoop
from headwater.signature import Signature, TensorSpec
from headwater.wire.bridge import socket_path
from headwater.wire.report import REPORT, RowReport, Status, encode_reports
from headwater_server.binder.embedded_triton import OUTPUT_FILE, EmbeddedTriton
from headwater_server.binder.environment import library_path
from headwater_server.codecs.tensors import InferRequest, OutputWish, RawTensor
from headwater_server.errors import CallableFailed, HeadwaterError, ReplicaLost, ReplicaUnreachable
from headwater_server.transport.batch import encode_batch
from headwater_server.transport.triton_http import TritonClient
from tests.running import processes_of
from tests.traces import remove_backend_folders

# PyTriton's client, which `stop` makes.
pytestmark = pytest.mark.filterwarnings("ignore:tritonclient.grpc doesn't support timeout")

TOKEN = "secret"
SIGNATURE = Signature("m", (TensorSpec("x", "UINT8", (1,)),), (TensorSpec("y", "UINT8", (1,)),), max_batch_size=4)


class Held:
    """A callable that answers when it may."""

    def __init__(self) -> None:
        self.has_call = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()

    async def __call__(self, requests: list[Any]) -> list[dict[str, Any]]:
        self.has_call.set()
        await asyncio.sleep(0)
        await asyncio.to_thread(self.may_answer.wait, 30)
        return [
            {"y": one.data["x"], REPORT: encode_reports([RowReport(Status.OK)] * len(one.data["x"]), 0)}
            for one in requests
        ]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short enough for the paths of sockets."""
    monkeypatch.setenv("LD_LIBRARY_PATH", library_path(os.environ))
    began_s = time.time()
    with tempfile.TemporaryDirectory(prefix="hw-", ignore_cleanup_errors=True) as name:
        yield Path(name)
    # A replica's guardian would sweep these.
    for segment in Path("/dev/shm").glob(f"headwater-{os.getpgrp()}-*"):
        segment.unlink()
    remove_backend_folders(began_s, time.time())


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def triton(folder: Path, held: Held) -> Iterator[EmbeddedTriton]:
    """One that serves a model."""
    found = EmbeddedTriton(folder, TOKEN)
    found.bind_signature(SIGNATURE)
    callee.start(socket_path(str(folder), 0), held, CallLoop())
    with launched(found) as pid:
        found.wait(pid, 60)
        yield found
        held.may_answer.set()


@contextlib.contextmanager
def launched(triton: EmbeddedTriton) -> Iterator[int]:
    """A process of a Triton, until it has removed what it made."""
    command, environment = triton.command()
    with (triton.directory / OUTPUT_FILE).open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def process(folder: Path, role: str) -> int:
    """A process of the Triton in a folder."""
    (pid,) = (pid for pid, command in processes_of(folder).items() if role in command and not command.startswith("sh "))
    return pid


async def call(client: TritonClient) -> dict[str, RawTensor]:
    request = InferRequest("", {"x": RawTensor("UINT8", (1, 1), b"\1")}, 1, [OutputWish("y", True)], {}, {})
    head, data, _ = encode_batch(SIGNATURE, [(request, request.inputs, 1)], is_alone=False, segments=None)
    return await client.infer(head, data)


def client_of(triton: EmbeddedTriton, model: str) -> contextlib.closing[TritonClient]:
    return contextlib.closing(TritonClient(model, f"unix:{triton.http_socket}", TOKEN))


async def test_a_model_that_is_gone_and_a_stub_that_is_gone(triton: EmbeddedTriton) -> None:
    with client_of(triton, "other") as client, pytest.raises(ReplicaUnreachable, match="is ending"):
        await call(client)
    with client_of(triton, "m") as client:
        assert bytes((await call(client))["y"].data) == b"\1"
        os.kill(process(triton.directory, "backend_stub"), signal.SIGKILL)
        with pytest.raises(ReplicaLost, match="ended while it had"):
            await call(client)


async def test_a_server_that_is_stopping_refuses_no_call_in_words_that_we_do_not_know(
    triton: EmbeddedTriton, held: Held
) -> None:
    with client_of(triton, "m") as client:
        held.may_answer.clear()
        first = asyncio.create_task(call(client))
        assert await asyncio.to_thread(held.has_call.wait, 30)
        os.kill(process(triton.directory, "bin/tritonserver"), signal.SIGTERM)
        error: HeadwaterError | None = None
        while error is None:  # until it has taken the signal in, it takes calls
            try:
                await asyncio.wait_for(call(client), 0.2)
            except asyncio.TimeoutError:
                pass
            except HeadwaterError as caught:
                error = caught
        assert not isinstance(error, CallableFailed), error.message
        held.may_answer.set()
        await asyncio.gather(first, return_exceptions=True)


def test_an_instance_that_does_not_start_is_tried_once(folder: Path) -> None:
    found = EmbeddedTriton(folder, TOKEN)
    found.bind_signature(SIGNATURE)
    (script,) = folder.glob("w/*/m/1/model.py")
    script.chmod(0o644)
    script.write_text(
        f"{script.read_text()}\ndef _fail(self, args):\n    raise RuntimeError('not today')\n\n"
        f"TritonPythonModel.initialize = _fail\nwith open({str(folder / 'starts')!r}, 'a') as starts:\n"
        "    starts.write('one ')\n"
    )
    with launched(found) as pid:
        with pytest.raises(ReplicaError, match=r"an instance failed[^$]*not today"):
            found.wait(pid, 60)
        assert (folder / "starts").read_text() == "one "  # not another one before, for Triton to ask its configuration
