"""The private parts of uvicorn that `headwater_server.gateway.http.bounded_connection` and
`headwater_server.gateway.http.exchange` rely on. After an upgrade, this fails first."""

from __future__ import annotations

import asyncio
import inspect
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

TESTED = "0.54.0"
OVERRIDDEN = {
    "connection_made": ["transport"],
    "connection_lost": ["exc"],
    "data_received": ["data"],
    "on_message_begin": [],
    "on_headers_complete": [],
    "on_body": ["body"],
    "on_message_complete": [],
    "on_response_complete": [],
    "send_400_response": ["msg"],
}
"""Methods of a connection that uvicorn or httptools calls, and what with."""
CONNECTION = (
    "access_log", "access_logger", "app", "app_state", "client", "cycle", "expect_100_continue", "flow", "headers",
    "logger", "loop", "pipeline", "scheme", "server", "server_state", "tasks", "timeout_keep_alive",
    "timeout_keep_alive_handler", "transport", "url",
)  # fmt: skip
"""What a connection has."""
CYCLE = (
    "body", "chunked_encoding", "default_headers", "disconnected", "flow", "keep_alive", "message_event", "more_body",
    "on_response", "response_complete", "response_started", "run_asgi", "scope", "transport",
    "waiting_for_100_continue",
)  # fmt: skip
"""What a request on it has."""
FLOW = ("_is_writable_event", "pause_reading", "resume_reading", "read_paused", "write_paused")


class Transport(asyncio.Transport):
    """Takes what is written, and nothing else."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.get_running_loop().create_future()


@pytest.fixture(scope="module")
def connection() -> HttpToolsProtocol:
    """One with a request under way."""

    async def made() -> HttpToolsProtocol:
        config = uvicorn.Config(_app, log_config=None, interface="asgi3", proxy_headers=False)
        config.load()
        found = HttpToolsProtocol(config=config, server_state=ServerState(), app_state={})
        found.connection_made(Transport())
        found.data_received(b"GET /first HTTP/1.1\r\nHost: a\r\n\r\n")
        for task in found.tasks:
            task.cancel()
        await asyncio.wait(found.tasks)
        return found

    return asyncio.run(made())


def test_the_version_is_the_one_that_was_tested_and_is_pinned() -> None:
    assert version("uvicorn") == TESTED
    assert f'"uvicorn=={TESTED}"' in (Path(__file__).parents[4] / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_method_that_a_connection_overrides_is_there_and_takes_the_same(name: str) -> None:
    method = getattr(HttpToolsProtocol, name, None)
    assert method is not None, f"connection.py overrides HttpToolsProtocol.{name}, which uvicorn calls no more"
    assert list(inspect.signature(method).parameters)[1:] == OVERRIDDEN[name]


@pytest.mark.parametrize("name", CONNECTION)
def test_an_attribute_of_a_connection_is_there(connection: HttpToolsProtocol, name: str) -> None:
    assert hasattr(connection, name), f"connection.py reads HttpToolsProtocol.{name}"


@pytest.mark.parametrize("name", CYCLE)
def test_an_attribute_of_a_request_is_there(connection: HttpToolsProtocol, name: str) -> None:
    assert hasattr(connection.cycle, name), f"connection.py or exchange.py reads RequestResponseCycle.{name}"


@pytest.mark.parametrize("name", FLOW)
def test_an_attribute_of_the_flow_is_there(connection: HttpToolsProtocol, name: str) -> None:
    assert hasattr(connection.flow, name), f"connection.py or exchange.py uses FlowControl.{name}"


def test_a_status_line_ends_itself() -> None:
    assert STATUS_LINE[200] == b"HTTP/1.1 200 OK\r\n"


def test_a_request_tells_its_connection_of_the_end_of_its_answer(connection: HttpToolsProtocol) -> None:
    cycle = connection.cycle
    assert cycle.on_response == connection.on_response_complete
    assert "total_requests" in vars(connection.server_state)
