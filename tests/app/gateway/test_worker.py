"""A gateway worker's process, and what it does beside answering."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from headwater_server.config.schema import Server
from headwater_server.control.control_server import ControlServer
from headwater_server.control.messages import WorkerSettings
from headwater_server.control.routing import RoutingTable
from headwater_server.gateway.worker import serve_beside


async def test_a_background_task_that_fails_is_logged_and_ends_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    stopped: list[str] = []

    async def fails() -> None:
        raise ValueError("a date that there is not")

    async def goes_on() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            stopped.append("cancelled")

    ended = asyncio.Event()

    async def serve() -> None:
        await ended.wait()

    with caplog.at_level(logging.ERROR):
        reason = await asyncio.wait_for(serve_beside(serve, [fails, goes_on], ended.set), 10)
    assert reason == "a background task failed: ValueError: a date that there is not"
    assert stopped == ["cancelled"]
    assert "a date that there is not" in caplog.text


async def test_background_tasks_end_with_the_server(caplog: pytest.LogCaptureFixture) -> None:
    async def ends() -> None:
        await asyncio.sleep(0)

    async def goes_on() -> None:
        await asyncio.sleep(600)

    async def serve() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    assert await asyncio.wait_for(serve_beside(serve, [ends, goes_on], lambda: None), 10) == ""
    assert not caplog.records


@pytest.mark.slow
async def test_a_request_that_the_end_cuts_off_is_in_the_access_log() -> None:
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        folder = Path(name)
        control = ControlServer(None)
        await control.start(folder / "control")
        control.publish(RoutingTable(()))
        settings = WorkerSettings(str(folder / "control"), Server(log_format="json").model_dump(mode="json"))
        (folder / "settings.json").write_bytes(msgspec.json.encode(settings))
        with socket.create_server(("127.0.0.1", 0)) as listener, (folder / "settings.json").open() as file:
            descriptors = file.fileno(), listener.fileno()
            worker = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "headwater_server.gateway.worker", settings.control, *map(str, descriptors), "2",
                pass_fds=descriptors, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            try:
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                head = b"Host: a\r\nContent-Length: 99\r\nExpect: 100-continue\r\nX-Request-Id: cut-off\r\n\r\n"
                writer.write(b"POST /v2/repository/index HTTP/1.1\r\n" + head)
                assert (await reader.readline()).startswith(b"HTTP/1.1 100")
                await control.close()
                assert worker.stderr is not None
                log = await worker.stderr.read()
                assert await worker.wait() == 0
                writer.close()
            finally:
                if worker.returncode is None:
                    worker.kill()
    (line,) = [line for line in map(json.loads, log.splitlines()) if line.get("request_id") == "cut-off"]
    assert (line["path"], line["status"]) == ("/v2/repository/index", 499)
