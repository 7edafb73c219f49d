"""The API key of the command line's side."""

from __future__ import annotations

import httpx
import pytest

from headwater_server.cli.server_client import ServerClient
from headwater_server.errors import CommandError


def asked_with(environment: dict[str, str], answer: httpx.Response) -> httpx.Request:
    """The request that a client with this environment sends."""
    asked: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return answer

    ServerClient("http://127.0.0.1:8000", httpx.MockTransport(handle), environment).index()
    return asked[0]


def test_it_comes_from_the_environment() -> None:
    request = asked_with({"HEADWATER_KEY": " hw_text\n"}, httpx.Response(200, json=[]))
    assert request.headers["authorization"] == "Bearer hw_text"


def test_without_one_nothing_is_sent() -> None:
    for environment in ({}, {"HEADWATER_KEY": ""}):
        assert "authorization" not in asked_with(environment, httpx.Response(200, json=[])).headers


def test_a_server_that_asks_for_one_is_told_about() -> None:
    with pytest.raises(CommandError, match="HEADWATER_KEY"):
        asked_with({}, httpx.Response(401, json={"error": "API key: expected"}))


@pytest.mark.parametrize("text", ["clé", "two\nlines"])
def test_what_cannot_be_one_is_refused_without_being_quoted(text: str) -> None:
    with pytest.raises(CommandError, match="HEADWATER_KEY") as caught:
        asked_with({"HEADWATER_KEY": text}, httpx.Response(200, json=[]))
    assert text not in str(caught.value)
