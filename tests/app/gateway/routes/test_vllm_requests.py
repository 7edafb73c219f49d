"""The routes of a model that vLLM computes, over HTTP, with a stand-in for vLLM."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from headwater_server.config.schema import Server
from headwater_server.control.routing import RoutingTable
from headwater_server.gateway.app import create_app
from headwater_server.gateway.http.entry import RequestRecords
from headwater_server.gateway.http.event_stream import StreamLimits
from headwater_server.gateway.models import Models
from headwater_server.security.key_check import KeyRing
from headwater_server.security.keys import Key
from headwater_server.security.rate_limits import LimitFiles
from tests.app.lm.message_events import events_of
from tests.app.serving import connect, serving, until, until_closed
from tests.app.vllm.pictures import data_url, png, png_url
from tests.app.vllm.stand_in import (
    POOLING,
    Exchange,
    StandIn,
    chunk,
    completion,
    embeddings,
    error,
    hangs,
    route_of,
    says,
    stand_ins,
)
from tests.counted import count_from_zero, counts_of

SECRET = "hw-secret"


class Gateway:
    """A server with the model ``m`` on stand-ins, most often one."""

    def __init__(self, client: httpx.AsyncClient, port: int, replicas: dict[str, StandIn], models: Models) -> None:
        self.client = client
        self.port = port
        self.replicas = replicas
        self.replica = replicas["a"]
        self.models = models

    async def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        asked = {} if path.startswith("/v2") else {"model": "m", "prompt": "x"}
        return await self.client.post(path, json={**asked, **body})

    async def events(self, path: str = "/v1/completions", **body: Any) -> list[str]:
        answer = await self.post(path, **({} if path.startswith("/v2") else {"stream": True}), **body)
        assert answer.status_code == 200, answer.text
        return answer.text.removesuffix("\n\n").split("\n\n")


@contextlib.asynccontextmanager
async def vllm_gateway(keys: KeyRing | None = None, names: str = "a", **fields: Any) -> AsyncIterator[Gateway]:
    count_from_zero()
    async with stand_ins(*names) as replicas:
        models = Models()
        models.update(RoutingTable((route_of(replicas, **fields),)))
        options = Server(access_log=False)
        records = RequestRecords(None, StreamLimits(write_timeout_s=0.5))
        app = create_app(models, options, keys=keys, records=records)
        async with serving(app) as server:
            url = f"http://127.0.0.1:{server.port}"
            async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
                yield Gateway(client, server.port, replicas, models)
            await until(lambda: models.is_idle)
        models.close()


async def endless(exchange: Exchange) -> None:
    exchange.begin()
    for number in range(1, 1_000_000):
        if exchange.is_left:
            return
        exchange.event(chunk("x" * 20_000, number))
        await exchange.writer.drain()
        await asyncio.sleep(0)


def whole(body: Any, status: int = 200) -> Any:
    async def script(exchange: Exchange) -> None:
        exchange.whole(body, status)

    return script


async def test_whole_answers_of_each_route() -> None:
    async with vllm_gateway() as gateway:
        gateway.replica.script = whole(completion("a"))
        assert (await gateway.post()).json()["choices"][0]["text"] == "a"
        answer = await gateway.post("/v2/models/m/generate", text_input="x")
        assert answer.json()["text_output"] == "a"
        assert [one.path for one in gateway.replica.exchanges] == ["/v1/completions"] * 2
        await gateway.client.post("/v1/chat/completions", json={"model": "m", "messages": []})
        assert gateway.replica.exchanges[-1].path == "/v1/chat/completions"
        for body, path in (({"messages": []}, "/v1/chat/completions"), ({"prompt": "x"}, "/v1/completions")):
            await gateway.client.post("/invocations", json={"model": "m", **body})
            assert gateway.replica.exchanges[-1].path == path
        assert counts_of("m").total("headwater_generated_tokens") == 10


async def test_streams_of_each_route() -> None:
    async with vllm_gateway() as gateway:
        *texts, done = await gateway.events()
        assert [json.loads(one[6:])["choices"][0]["text"] for one in texts] == ["a", "b"]
        assert done == "data: [DONE]"
        *pieces, last = await gateway.events("/v2/models/m/generate_stream", text_input="x")
        assert [json.loads(one[6:])["text_output"] for one in pieces] == ["a", "b"]
        assert json.loads(last[6:])["final"] is True


def chat_answer(content: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    counted = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": counted}


async def test_responses_are_vllms_chats() -> None:
    body = {"model": "m", "input": "x", "tools": [{"type": "web_search"}], "repetition": 1}
    async with vllm_gateway() as gateway:
        gateway.replica.script = whole(chat_answer("Yes."))
        answer = await gateway.client.post("/v1/responses", json=body)
        assert answer.json()["output"][0]["content"][0]["text"] == "Yes."
        assert answer.headers["headwater-ignored"] == "repetition, tools[0]"
        assert gateway.replica.exchanges[-1].path == "/v1/chat/completions"
        pieces = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in ("Ye", "s.")]
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
        gateway.replica.script = says(*pieces, end)
        answer = await gateway.client.post("/v1/responses", json={**body, "stream": True})
        names = [block.split("\n")[0] for block in answer.text.removesuffix("\n\n").split("\n\n")]
        assert (names[0], names[-1]) == ("event: response.created", "event: response.incomplete")
        assert names.count("event: response.output_text.delta") == 2
        gateway.replica.script = whole(error("wrong", 400, "max_completion_tokens"), 400)
        answer = await gateway.client.post("/v1/responses", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_output_tokens")
        gateway.replica.script = whole(error("This model's maximum context length is 9", 400), 400)
        answer = await gateway.client.post("/v1/responses", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        answer = await gateway.client.post("/v1/responses", json={**body, "stream": True})
        *_, failed = events_of(answer.text)
        assert (answer.status_code, failed["type"]) == (200, "response.failed")
        assert failed["response"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("status", "body", "expected", "param"),
    [
        (400, error("wrong", 400, "stop"), 400, "stop"),
        (404, error("The model `m` does not exist", 404), 404, "model"),
        (503, error("full", 503), 429, None),
        (500, error("broken", 500), 500, None),
    ],
)
async def test_what_vllm_refuses(status: int, body: Any, expected: int, param: str | None, streams: bool) -> None:
    async with vllm_gateway() as gateway:
        gateway.replica.script = whole(body, status)
        answer = await gateway.post(stream=streams)
        assert answer.status_code == expected
        assert answer.json()["error"]["param"] == param
        assert ("retry-after" in answer.headers) == (expected == 429)


async def test_a_field_of_ours_is_checked_before_vllm_is_asked() -> None:
    async with vllm_gateway() as gateway:
        answer = await gateway.post(temprature=1)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "temprature"
        assert "did you mean `temperature`?" in answer.json()["error"]["message"]
        answer = await gateway.client.post("/v1/completions", content=b'{"model": "m", "prompt": }')
        assert answer.status_code == 400
        assert gateway.replica.exchanges == []


async def test_a_stream_that_fails_at_once_has_its_status_and_later_an_event() -> None:
    async with vllm_gateway() as gateway:
        gateway.replica.script = says(error("full", 503))
        assert (await gateway.post(stream=True)).status_code == 429

        async def breaks(exchange: Exchange) -> None:
            exchange.begin()
            exchange.event(chunk("a", 1))
            exchange.lose()

        gateway.replica.script = breaks
        *_, failed, done = await gateway.events()
        assert json.loads(failed[6:])["error"]["code"] == "unavailable"
        assert done == "data: [DONE]"


async def test_deadlines_have_their_status() -> None:
    async with vllm_gateway(timeout_s=0.5) as gateway:
        gateway.replica.script = hangs
        assert (await gateway.post(timeout_s=0.1)).status_code == 504
        *_, failed, _ = await gateway.events()
        assert json.loads(failed[6:])["error"]["code"] == "timeout"


async def test_a_request_is_cancelled_by_its_id() -> None:
    async with vllm_gateway() as gateway:
        gateway.replica.script = hangs
        asked = asyncio.create_task(
            gateway.client.post("/v1/completions", json={"model": "m", "prompt": "x"}, headers={"X-Request-Id": "mine"})
        )
        await until(lambda: bool(gateway.replica.exchanges))
        answer = await gateway.client.post("/v2/requests/mine/cancel")
        assert answer.json() == {"request_id": "mine", "cancelled": 1}
        assert (await asked).status_code == 409
        await gateway.replica.exchanges[0].left()
        assert (await gateway.client.post("/v2/requests/mine/cancel")).status_code == 404


def head(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    line = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    return line.encode() + content


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_goes_away_ends_its_request(streams: bool) -> None:
    async with vllm_gateway() as gateway:
        gateway.replica.script = hangs
        reader, writer = await connect(gateway.port)
        writer.write(head({"model": "m", "prompt": "x", "stream": streams}))
        if streams:
            await reader.readuntil(b'"text":"a"')
        await until(lambda: bool(gateway.replica.exchanges))
        writer.transport.abort()
        await gateway.replica.exchanges[0].left()


async def test_a_client_that_reads_nothing_stops_vllm_and_is_cut_off_and_costs_its_neighbour_nothing() -> None:
    async with vllm_gateway() as gateway:
        gateway.replica.script = endless
        reader, writer = await connect(gateway.port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(head({"model": "m", "prompt": "x", "stream": True}))
        await until(lambda: bool(gateway.replica.exchanges))
        gateway.replica.script = says(*(chunk("b", number + 1) for number in range(50)))
        for _ in range(10):
            assert len(await gateway.events()) == 51
        await gateway.replica.exchanges[0].left()
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert b"[DONE]" not in await until_closed(reader)
        writer.close()


async def test_tokens_count_for_the_keys_limit(tmp_path: Path) -> None:
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    key = Key("thrifty", digest, ("infer",), tokens_per_minute=4)

    async with vllm_gateway(keys=KeyRing(lambda: [key], LimitFiles(tmp_path, 0, 1))) as gateway:
        gateway.client.headers["authorization"] = f"Bearer {SECRET}"
        assert len(await gateway.events()) == 3
        answer = await gateway.post()
        assert answer.status_code == 429
        assert "tokens_per_minute" in answer.text
        (exchange,) = gateway.replica.exchanges
        assert len(exchange.body["cache_salt"]) == 64


# Images and the like


def chat(*urls: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


@contextlib.asynccontextmanager
async def picture_server(silent: bool = False) -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """A server on the loopback interface: its URL, and its connections. ``silent``: it never answers."""
    open: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        picture = png(4, 3)
        if not silent:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(picture), picture))
        await reader.read()
        writer.close()
        open.remove(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a.png?secret", open
    server.close()
    await until(lambda: not open)


async def test_images_go_to_vllm() -> None:
    async with vllm_gateway() as gateway:
        gateway.replica.script = whole(completion("a"))
        large = data_url(png(4, 3) + bytes(300_000))  # read in a thread
        for url in (png_url(4, 3), large):
            answer = await gateway.client.post("/v1/chat/completions", json=chat(url))
            assert answer.status_code == 200, answer.text
            assert gateway.replica.exchanges[-1].body["messages"] == chat(url)["messages"]
        for url in (data_url(b"<svg/>" + bytes(300_000)), "https://host/a.png?secret"):
            answer = await gateway.client.post("/v1/chat/completions", json=chat(url))
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "messages[0].content[0].image_url.url"
            assert "secret" not in answer.text
        assert len(gateway.replica.exchanges) == 2


@pytest.mark.parametrize("streams", [False, True])
async def test_an_image_is_fetched_for_vllm(streams: bool) -> None:
    async with picture_server() as (url, _):
        host = url.split("/")[2]
        async with vllm_gateway(media_hosts=(host,)) as gateway:
            if not streams:
                gateway.replica.script = whole(completion("a"))
            answer = await gateway.client.post("/v1/chat/completions", json=chat(url, stream=streams))
            assert answer.status_code == 200, answer.text
            (exchange,) = gateway.replica.exchanges
            fetched = data_url(png(4, 3), "application/octet-stream")
            assert exchange.body["messages"] == chat(fetched)["messages"]
            item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
            gateway.replica.script = whole(chat_answer("Yes."))
            answer = await gateway.client.post("/v1/responses", json={"model": "m", "input": [item]})
            assert answer.status_code == 200, answer.text
            assert gateway.replica.exchanges[-1].body["messages"] == chat(fetched)["messages"]
            answer = await gateway.client.post("/v1/chat/completions", json=chat(url, url.replace("127.0.0.1", "x")))
            assert answer.json()["error"]["param"] == "messages[0].content[1].image_url.url"
            assert "secret" not in answer.text


async def test_a_fetch_ends_with_the_requests_deadline() -> None:
    async with (
        picture_server(silent=True) as (url, open),
        vllm_gateway(media_hosts=(url.split("/")[2],)) as gateway,
    ):
        answer = await gateway.client.post("/v1/chat/completions", json=chat(url, timeout_s=0.1))
        assert answer.status_code == 504
        assert "the deadline of 0.1 s passed" in answer.text
        await until(lambda: not open)
        assert gateway.replica.exchanges == []


async def test_the_time_of_a_fetch_counts_for_the_deadline() -> None:
    async with picture_server() as (url, _), vllm_gateway(media_hosts=(url.split("/")[2],)) as gateway:
        gateway.replica.script = hangs
        began_s = asyncio.get_running_loop().time()
        answer = await gateway.client.post("/v1/chat/completions", json=chat(url, timeout_s=0.3))
        assert answer.status_code == 504
        assert "the deadline of 0.3 s passed" in answer.text
        assert asyncio.get_running_loop().time() - began_s >= 0.3


async def test_a_client_that_goes_away_ends_its_fetch() -> None:
    async with (
        picture_server(silent=True) as (url, open),
        vllm_gateway(media_hosts=(url.split("/")[2],)) as gateway,
    ):
        _, writer = await connect(gateway.port)
        writer.write(head(chat(url), "/v1/chat/completions"))
        await until(lambda: bool(open))
        writer.transport.abort()
        await until(lambda: not open)
        assert gateway.replica.exchanges == []


# Embeddings


async def embeds(exchange: Exchange) -> None:
    exchange.whole(embeddings(exchange))


@contextlib.asynccontextmanager
async def embedding_gateway(**options: Any) -> AsyncIterator[Gateway]:
    async with vllm_gateway(signature=POOLING, **options) as gateway:
        for one in gateway.replicas.values():
            one.script = embeds
        yield gateway


async def embed(gateway: Gateway, inputs: Any, **more: Any) -> httpx.Response:
    return await gateway.client.post("/v1/embeddings", json={"model": "m", "input": inputs, **more})


@pytest.mark.parametrize(
    ("inputs", "lengths"),
    [("abc", [3]), (["a", "bcd", ""], [1, 3, 0]), ([4, 5], [9]), ([[4, 5], [6]], [9, 6])],
)
async def test_embeddings_of_each_form_of_input(inputs: Any, lengths: list[int]) -> None:
    async with embedding_gateway() as gateway:
        answer = (await embed(gateway, inputs, user="me", encoding_format="float")).json()
        assert answer == {
            "object": "list",
            "data": [{"index": n, "object": "embedding", "embedding": [one, 0.5]} for n, one in enumerate(lengths)],
            "model": "m",
            "usage": {"prompt_tokens": len(lengths), "total_tokens": len(lengths)},
        }
        (exchange,) = gateway.replica.exchanges
        assert exchange.path == "/v1/embeddings"
        sent = inputs if isinstance(inputs, list) and not isinstance(inputs[0], int) else [inputs]
        assert exchange.body == {"model": "m", "input": sent, "encoding_format": "float"}
        counts = counts_of("m")
        assert counts.total("headwater_prompt_tokens") == counts.total("headwater_sequences") == len(lengths)
        assert counts.total("headwater_generated_tokens") == 0


async def test_no_input_is_answered_without_vllm() -> None:
    async with embedding_gateway() as gateway:
        answer = (await embed(gateway, [])).json()
        assert (answer["data"], answer["usage"]) == ([], {"prompt_tokens": 0, "total_tokens": 0})
        assert gateway.replica.exchanges == []


async def vectors(exchange: Exchange) -> None:
    """Answers with vectors in base64, as vLLM does if asked."""
    assert exchange.body["encoding_format"] == "base64"
    data = [
        {"index": n, "embedding": base64.b64encode(np.array([len(text), 1], "<f4").tobytes()).decode()}
        for n, text in enumerate(exchange.body["input"])
    ]
    exchange.whole({"data": data, "usage": {"prompt_tokens": len(data)}})


async def test_clients_of_cohere_and_tei_are_answered_by_vllm() -> None:
    async with embedding_gateway() as gateway:
        gateway.replica.script = vectors
        body = {"model": "m", "texts": ["abc"], "input_type": "search_query", "output_dimension": 8}
        answer = (await gateway.client.post("/v2/embed", json=body)).json()
        assert answer["embeddings"] == {"float": [[3, 1]]}
        assert answer["meta"]["billed_units"] == {"input_tokens": 1}
        body = {"model": "m", "inputs": ["abc"], "truncate": True, "normalize": False}
        assert (await gateway.client.post("/embed", json=body)).json() == [[3, 1]]
        sent = [exchange.body for exchange in gateway.replica.exchanges]
        form = {"model": "m", "input": ["abc"], "encoding_format": "base64", "truncate_prompt_tokens": -1}
        assert sent == [{**form, "dimensions": 8}, form]
        answer = await gateway.client.post("/embed", json={"model": "m", "inputs": "x", "prompt_name": "query"})
        assert answer.json() == {"error": "prompt_name: model `m` has no prompts to choose; leave it out"}


async def test_more_inputs_than_the_queue_holds_go_in_parts() -> None:
    async with embedding_gateway() as gateway:
        answer = (await embed(gateway, ["x" * n for n in range(23)])).json()
        assert [(one["index"], one["embedding"][0]) for one in answer["data"]] == [(n, n) for n in range(23)]
        assert answer["usage"]["prompt_tokens"] == 23
        assert [len(one.body["input"]) for one in gateway.replica.exchanges] == [5, 5, 5, 5, 3]
        await embed(gateway, ["x"] * 10)
        assert len(gateway.replica.exchanges[-1].body["input"]) == 10


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "x", "stream": True}, "stream"),
        ({"input": "x", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "x", "encoding_format": "bytes"}, "encoding_format"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [-1]}, "input[0]"),
    ],
)
async def test_fields_of_embeddings_are_checked_before_vllm_is_asked(fields: dict[str, Any], param: str) -> None:
    async with embedding_gateway() as gateway:
        answer = await gateway.client.post("/v1/embeddings", json={"model": "m", **fields})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
        assert gateway.replica.exchanges == []


@pytest.mark.parametrize(
    ("status", "message", "expected", "param"),
    [
        (400, "does not support Matryoshka embeddings; dimensions must be unset", 400, "dimensions"),
        (400, "This model's maximum context length is 256 tokens.", 400, "input"),
        (503, "busy", 429, None),
        (500, "broken", 500, None),
    ],
)
async def test_what_vllm_refuses_to_embed(status: int, message: str, expected: int, param: str | None) -> None:
    async with embedding_gateway() as gateway:
        gateway.replica.script = whole(error(message, status, "input_tokens"), status)
        answer = await embed(gateway, "x", dimensions=8)
        assert answer.status_code == expected
        assert answer.json()["error"]["param"] == param
        assert ("retry-after" in answer.headers) == (expected == 429)


async def never(exchange: Exchange) -> None:
    await exchange.left()


@pytest.mark.slow
async def test_embeddings_have_the_deployments_deadline() -> None:
    async with embedding_gateway(timeout_s=1) as gateway:

        async def only_the_first(exchange: Exchange) -> None:
            await (never if gateway.replica.exchanges[1:] else embeds)(exchange)

        gateway.replica.script = only_the_first
        answer = await embed(gateway, ["x"] * 11)
        assert answer.status_code == 504
        assert "the deadline of 1 s passed" in answer.text
        assert len(gateway.replica.exchanges) == 2
        await gateway.replica.exchanges[1].left()


async def test_embeddings_are_cancelled_by_their_id_and_when_the_client_leaves() -> None:
    async with embedding_gateway() as gateway:
        gateway.replica.script = never
        body = {"model": "m", "input": "x"}
        asked = asyncio.create_task(gateway.client.post("/v1/embeddings", json=body, headers={"X-Request-Id": "mine"}))
        await until(lambda: bool(gateway.replica.exchanges))
        assert (await gateway.client.post("/v2/requests/mine/cancel")).json()["cancelled"] == 1
        assert (await asked).status_code == 409
        _, writer = await connect(gateway.port)
        writer.write(head(body, "/v1/embeddings"))
        await until(lambda: len(gateway.replica.exchanges) == 2)
        writer.transport.abort()
        await gateway.replica.exchanges[1].left()


async def test_embeddings_of_a_lost_replica_are_asked_of_another() -> None:
    async with embedding_gateway(names="ab") as gateway:

        async def loses(exchange: Exchange) -> None:
            exchange.lose()

        gateway.replicas["a"].script = loses
        for _ in range(2):
            assert (await embed(gateway, "abc")).json()["data"][0]["embedding"] == [3, 0.5]
        assert len(gateway.replicas["a"].exchanges) == 1
        assert len(gateway.replicas["b"].exchanges) == 2
        assert counts_of("m").total("headwater_prompt_tokens") == 2


async def test_embeddings_count_for_the_keys_limit(tmp_path: Path) -> None:
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    key = Key("thrifty", digest, ("infer",), tokens_per_minute=4)

    async with embedding_gateway(keys=KeyRing(lambda: [key], LimitFiles(tmp_path, 0, 1))) as gateway:
        gateway.client.headers["authorization"] = f"Bearer {SECRET}"
        assert (await embed(gateway, ["x"] * 5)).status_code == 200
        answer = await embed(gateway, "x")
        assert answer.status_code == 429
        assert "tokens_per_minute" in answer.text
        assert len(gateway.replica.exchanges) == 1


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v2/models/m/generate",
        "/v2/models/m/generate_stream",
        "/v2/models/m/infer",
    ],
)
async def test_an_embedding_model_generates_nothing_and_says_where_to_ask(path: str) -> None:
    async with embedding_gateway() as gateway:
        answer = await gateway.client.post(path, json={"model": "m", "prompt": "x"})
        assert answer.status_code == 400
        assert "model: `m` serves only embeddings: POST to /v1/embeddings" in answer.text
        assert gateway.replica.exchanges == []


# What is said of the model


async def test_the_model_is_described() -> None:
    async with vllm_gateway() as gateway:

        async def got(path: str) -> Any:
            return (await gateway.client.get(path)).json()

        (listed,) = (await got("/v1/models"))["data"]
        assert listed["id"] == "m"
        assert (await got("/v2/models/m"))["platform"] == "vllm"
        config = await got("/v2/models/m/config")
        assert config["backend"] == "vllm"
        assert config["model_transaction_policy"] == {"decoupled": True}
        await gateway.events()
        (stats,) = (await got("/v2/models/m/stats"))["model_stats"]
        told = stats["language_model"]
        assert told["limits"] == {"max_sequences": 8, "context_length": 64, "cache_tokens": 1000}
        assert (told["prompt_tokens"], told["generated_tokens"], told["requests"]) == (3, 2, 1)
        assert stats["inference_count"] == 1


async def test_the_openapi_schema_has_its_routes_and_fields() -> None:
    async with vllm_gateway() as gateway:
        paths = (await gateway.client.get("/openapi.json")).json()["paths"]
        assert {"/v2/models/m/generate", "/v2/models/m/generate_stream", "/v1/chat/completions"} <= set(paths)
        assert not {"/v2/models/m/infer", "/tokenize"} & set(paths)
        content = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
        schema = content["schema"]
        assert schema["properties"]["model"]["enum"] == ["m"]
        assert {"structured_outputs", "stream", "timeout_s", "prompt"} <= set(schema["properties"])
        assert schema["required"] == ["model", "prompt"]
        assert content["example"]["model"] == "m"


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/tokenize", "/v1/embeddings"])
async def test_what_the_model_does_not_do_is_refused(path: str) -> None:
    async with vllm_gateway() as gateway:
        asked: dict[str, Any] = {"model": "m", "prompt": "x"}
        if path.endswith("infer"):
            asked = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["x"]}]}
        if path.endswith("embeddings"):
            asked = {"model": "m", "input": "x"}
        answer = await gateway.client.post(path, json=asked)
        assert answer.status_code == 400, answer.text
        assert ("`options.runner: pooling`" in answer.text) == path.endswith("embeddings")
        assert gateway.replica.exchanges == []
