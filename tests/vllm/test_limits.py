"""Too many requests, deadlines, clients that don't read or go away, and what of vLLM can't be reached."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable
from typing import Any

import httpx
import psutil
import pytest

from tests.running import Running, processes_of, wait_for
from tests.stand_in_vllm import NOT_OFFERED, NOT_OFFERED_BODY
from tests.token_streams import figures, is_idle, open_stream, run, whole
from tests.vllm.conftest import AT_ONCE

pytestmark = [pytest.mark.heavy, pytest.mark.vllm]

LONG: dict[str, Any] = {
    "model": "tiny", "prompt": "x = [", "max_tokens": 2000, "ignore_eos": True, "temperature": 0, "stream": True,
}  # fmt: skip


@pytest.fixture(autouse=True)
def idle(vllm_server: Running) -> None:
    wait_for(lambda: is_idle(vllm_server, "tiny"), 30, "tiny to be idle")


async def wait_until_counted(vllm_server: Running, sequences: int) -> None:
    """Wait until the statistics count these sequences.

    The gateway asks vLLM for its metrics once a second. A test that leaves its streams earlier would let the next test
    see the state before them, and take it for idle.
    """

    def are_counted() -> bool:
        counts = figures(vllm_server, "tiny")["sequences"]
        return bool(counts["active"] + counts["waiting"] == sequences)

    await asyncio.to_thread(wait_for, are_counted, 10, f"{sequences} sequences to be counted")


async def test_more_requests_than_fit_are_refused_with_429(vllm_server: Running) -> None:
    def ask(body: dict[str, Any]) -> Awaitable[httpx.Response]:
        return asyncio.to_thread(vllm_server.client.post, f"{vllm_server.url}/v1/completions", json=body)

    held = [open_stream(vllm_server, "/v1/completions", LONG) for _ in range(AT_ONCE)]
    streams = await asyncio.gather(*(one.__aenter__() for one in held))
    assert [stream.status for stream in streams] == [200] * AT_ONCE
    while (refused := await ask({**LONG, "stream": False, "timeout_s": 1})).status_code == 504:
        pass  # those before it are not there yet
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "queue is full" in refused.json()["error"]["message"]
    await wait_until_counted(vllm_server, AT_ONCE)
    for one in held:
        await one.__aexit__(None, None, None)


def test_a_client_that_goes_away_frees_its_sequence(vllm_server: Running) -> None:
    async def scenario() -> None:
        async with open_stream(vllm_server, "/v1/completions", LONG) as stream:
            await stream.read(3)
            await wait_until_counted(vllm_server, 1)

    run(scenario())
    wait_for(lambda: is_idle(vllm_server, "tiny"), 10, "its sequence to be freed")


@pytest.mark.parametrize("streams", [True, False])
def test_a_deadline_ends_the_request(vllm_server: Running, streams: bool) -> None:
    body = {**LONG, "timeout_s": 1, "n": 4, "temperature": 1}
    if streams:
        stream = run(whole(vllm_server, body))
        # On a busy machine nothing may have come in that time: then the answer has the status.
        assert stream.status == 504 or (stream.error is not None and stream.error["code"] == "timeout")
    else:
        answer = vllm_server.client.post(f"{vllm_server.url}/v1/completions", json={**body, "stream": False})
        assert answer.status_code == 504
        assert "1 s" in answer.json()["error"]["message"]
    wait_for(lambda: is_idle(vllm_server, "tiny"), 10, "its sequence to be freed")


async def test_a_request_is_cancelled_by_its_id(vllm_server: Running) -> None:
    async with open_stream(vllm_server, "/v1/completions", LONG, request_id="mine") as stream:
        await stream.read(2)
        path = f"{vllm_server.url}/v2/requests/mine/cancel"
        answer = await asyncio.to_thread(vllm_server.client.post, path)
        assert answer.json() == {"request_id": "mine", "cancelled": 1}
        await stream.rest()
        assert stream.error is not None
        assert stream.error["code"] == "cancelled"


async def test_a_client_that_reads_nothing_is_cut_off_and_costs_its_neighbours_nothing(vllm_server: Running) -> None:
    # Many log probabilities fill the buffers on the way.
    more = {"logprobs": 20, "n": 4, "temperature": 1}
    async with open_stream(vllm_server, "/v1/completions", {**LONG, **more}) as unread:
        unread.pause()
        told = {"include_usage": True}
        neighbour = await whole(vllm_server, {**LONG, "max_tokens": 200, "stream_options": told})
        assert neighbour.error is None
        assert neighbour.is_done
        assert neighbour.usage is not None
        assert neighbour.usage["completion_tokens"] == 200
        await asyncio.to_thread(
            wait_for, lambda: "cut off" in vllm_server.log.read_text(), 60, "the client to be cut off"
        )


def test_tokens_are_counted(vllm_server: Running) -> None:
    before = figures(vllm_server, "tiny")
    run(whole(vllm_server, {**LONG, "max_tokens": 10}))
    after = wait_for(
        lambda: (found := figures(vllm_server, "tiny"))["requests"] > before["requests"] and found, 10, "the count"
    )
    assert after["generated_tokens"] - before["generated_tokens"] == 10
    assert after["first_token"]["count"] - before["first_token"]["count"] == 1
    assert after["limits"]["context_length"] == 2048


# What can't be reached


@pytest.mark.parametrize("path", NOT_OFFERED)
def test_vllms_other_routes_are_not_ours(vllm_server: Running, path: str) -> None:
    assert vllm_server.client.post(f"{vllm_server.url}{path}", json=NOT_OFFERED_BODY).status_code == 404


def test_a_route_of_ours_is_not_answered_by_vllm(vllm_server: Running) -> None:
    body = {"model": "tiny", "query": "x", "documents": ["x"]}
    answer = vllm_server.client.post(f"{vllm_server.url}/rerank", json=body)
    assert (answer.status_code, "`tiny` does not rank documents" in answer.text) == (400, True), answer.text


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_vllms_tokenizer_is_not_offered(vllm_server: Running, path: str) -> None:
    body = {"model": "tiny", "prompt": "x"} if path == "/tokenize" else {"model": "tiny", "tokens": [5]}
    answer = vllm_server.client.post(f"{vllm_server.url}{path}", json=body)
    assert answer.status_code == 400
    assert "not offered" in answer.text


def test_vllms_socket_is_its_owners_only_and_it_listens_on_no_port(vllm_server: Running) -> None:
    folder = vllm_server.replica_folder("tiny")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.getuid()
    assert stat.S_ISSOCK((folder / "h").stat().st_mode)
    (server,) = [pid for pid, command in processes_of(folder).items() if "openai.api_server" in command]
    listening = [one for one in psutil.Process(server).net_connections("inet") if one.status == psutil.CONN_LISTEN]
    assert all(one.laddr.ip == "127.0.0.1" for one in listening)


def test_an_image_is_not_fetched(vllm_server: Running) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": [part]}]}
    answer = vllm_server.client.post(f"{vllm_server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].image_url.url"
