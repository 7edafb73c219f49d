"""``/v1/messages`` and ``/v1/messages/count_tokens`` over HTTP, with a scripted model and with a stand-in for vLLM."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headwater_server.config.schema import Server
from headwater_server.errors import HeadwaterError, QueueFull, ReplicaLost, Unavailable
from headwater_server.gateway.app import create_app
from headwater_server.gateway.models import Models
from headwater_server.security.key_check import KeyRing
from headwater_server.security.keys import Key
from headwater_server.security.rate_limits import LimitFiles
from tests.app.gateway.routes.test_vllm_requests import Gateway as VllmGateway
from tests.app.gateway.routes.test_vllm_requests import picture_server, vllm_gateway, whole
from tests.app.lm.message_events import events_of, message_of
from tests.app.lm.scripted import Gateway, Script, ScriptedDispatcher, ScriptedModels
from tests.app.lm.scripted import serving as serving_scripted
from tests.app.lm.tool_text import CALL, tool_text
from tests.app.serving import serving, until
from tests.app.vllm.pictures import png_url
from tests.app.vllm.stand_in import SIGNATURE, Exchange, error, hangs
from tests.app.vllm.stand_in import Script as VllmScript
from tests.counted import counts_of
from tests.running import wait_for

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
ASKED: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 200}
TOOLS: Any = {**ASKED, "tools": [WEATHER]}

PNG = png_url(2, 2)


@pytest.fixture(scope="module")
def server() -> Iterator[Gateway]:
    tiny = ScriptedDispatcher("tiny", Script(), language_text=lambda: tool_text("reasoning"))
    models = ScriptedModels(tiny)
    with serving_scripted(models) as url:
        gateway = Gateway(url, models, tiny, tiny)
        yield gateway
        gateway.client.close()


@pytest.fixture
def gateway(server: Gateway) -> Iterator[Gateway]:
    server.tiny.script = Script("Hm.</think>So.")
    server.tiny.unavailable = None
    server.tiny.opened.clear()
    yield server
    wait_for(lambda: all(generation.is_closed for _, generation, _ in server.tiny.opened), 60, "all to be closed")
    wait_for(lambda: server.models.streams == 0, 60, "no stream to be counted")


def message(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    answer = gateway.post(PATH, **{**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(gateway: Gateway, **fields: Any) -> list[dict[str, Any]]:
    answer = gateway.post(PATH, **{**ASKED, **fields, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_of(answer.text)


def fault(answer: httpx.Response) -> tuple[int, str, str]:
    """The status of an error, its type and its message; its form is Anthropic's."""
    body = answer.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    return answer.status_code, body["error"]["type"], body["error"]["message"]


# The own engine


def test_a_message(gateway: Gateway) -> None:
    answer = message(gateway)
    assert answer["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": "headwater"}, {"type": "text", "text": "So."},
    ]  # fmt: skip
    assert (answer["model"], answer["stop_reason"], answer["stop_sequence"]) == ("tiny", "end_turn", None)
    prompt = len(gateway.tiny.opened[0][1].specs[0].prompt)
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
    chat = gateway.post("/v1/chat/completions", model="tiny", messages=HELLO, max_completion_tokens=200).json()["usage"]
    assert (prompt, usage["output_tokens"]) == (chat["prompt_tokens"], chat["completion_tokens"])
    thinking = chat["completion_tokens_details"]["reasoning_tokens"]
    assert usage.get("output_tokens_details", {"thinking_tokens": 0}) == {"thinking_tokens": thinking}


@pytest.mark.parametrize("script", ["Hm.</think>So.", f"Hm.</think>{CALL}", f"{CALL}{CALL}", "</think>", ""])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_stream_is_the_message_in_pieces(gateway: Gateway, script: str, chunk: int) -> None:
    gateway.says(text=script, chunk=chunk)
    whole, pieces = message(gateway, **TOOLS), message_of(events(gateway, **TOOLS))
    for part in (whole, pieces, *whole["content"], *pieces["content"]):
        part.pop("id", None)
    assert whole == pieces


def test_a_call(gateway: Gateway) -> None:
    gateway.says(text=f"Hm.</think>{CALL}")
    answer = message(gateway, **TOOLS)
    call = answer["content"][-1]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Köln", "days": 3})
    assert answer["stop_reason"] == "tool_use"


def test_the_stop_sequence_is_named(gateway: Gateway) -> None:
    gateway.says(text="</think>one END two")
    for answer in (message(gateway, stop_sequences=["x", "END"]), message_of(events(gateway, stop_sequences=["END"]))):
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
        assert answer["content"][-1] == {"type": "text", "text": "one "}


def test_the_limit_and_the_context_end_answers(gateway: Gateway) -> None:
    gateway.says(text="</think>a b c d e f g h i", stops=False)
    assert message(gateway, max_tokens=9)["stop_reason"] == "max_tokens"
    answer = message(gateway, max_tokens=32_000)
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"] == gateway.tiny.limits.context_length


def test_headers_and_the_query_have_no_effect(gateway: Gateway) -> None:
    headers = {"anthropic-version": "2030-01-01", "anthropic-beta": "one,two", "x-request-id": "mine"}
    answer = httpx.post(f"{gateway.url}{PATH}?beta=true", json=ASKED, headers=headers, timeout=20)
    assert answer.status_code == 200
    assert answer.headers["request-id"] == "mine"


def test_fields_without_effect_are_named(gateway: Gateway) -> None:
    fields = {"speed": "fast", "thinking": {"type": "enabled", "budget_tokens": 9}}
    answer = gateway.post(PATH, **{**ASKED, **fields})
    assert answer.headers["headwater-ignored"] == "speed, thinking.budget_tokens"


def test_tokens_are_counted_and_nothing_is_opened(gateway: Gateway) -> None:
    expected = message(gateway, **TOOLS)["usage"]["input_tokens"]
    gateway.tiny.opened.clear()
    for tools in ([WEATHER], [{**WEATHER, "cache_control": {"type": "ephemeral"}}]):
        answer = gateway.post(COUNT, model="tiny", messages=HELLO, tools=tools)
        assert (answer.status_code, answer.json()) == (200, {"input_tokens": expected})
        assert "request-id" in answer.headers
    assert gateway.post(COUNT, model="tiny", messages=HELLO, tools=[]).json()["input_tokens"] < expected
    assert gateway.tiny.opened == []


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_errors_have_anthropics_form(gateway: Gateway, path: str) -> None:
    def ask(**fields: Any) -> tuple[int, str, str]:
        body = {name: value for name, value in ASKED.items() if path == PATH or name != "max_tokens"}
        return fault(gateway.post(path, **{**body, **fields}))

    status, kind, text = ask(messages=[{"role": "user", "content": [{"type": "document"}]}])
    assert (status, kind) == (400, "invalid_request_error")
    assert text.startswith("messages[0].content[0].type: expected 'text'")
    assert ask(model="other")[:2] == (404, "not_found_error")
    gateway.tiny.unavailable = Unavailable("gone")
    assert ask()[:2] == (503, "overloaded_error")
    answer = httpx.post(f"{gateway.url}{path}", content=b"{", headers={"content-type": "application/json"})
    assert fault(answer)[:2] == (400, "invalid_request_error")
    answer = httpx.post(f"{gateway.url}{path}", content=b"{}", headers={"content-type": "text/html"})
    assert fault(answer)[:2] == (415, "invalid_request_error")
    assert fault(httpx.get(f"{gateway.url}{path}"))[:2] == (405, "invalid_request_error")


def test_a_prompt_that_is_too_long_says_so_in_the_words_that_clients_know(gateway: Gateway) -> None:
    status, kind, text = fault(gateway.post(PATH, **{**ASKED, "messages": [{"role": "user", "content": "a b " * 600}]}))
    assert (status, kind) == (400, "invalid_request_error")
    assert text.startswith("prompt is too long: messages: ")


def test_a_thread_is_refused_with_the_code_that_clients_know(gateway: Gateway) -> None:
    answer = gateway.post(PATH, **ASKED, thread={"type": "create"})
    assert fault(answer)[:2] == (400, "invalid_request_error")
    assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize(
    ("error", "kind"), [(ReplicaLost("lost"), "overloaded_error"), (QueueFull("full"), "rate_limit_error")]
)
def test_a_stream_that_fails_ends_with_the_error(gateway: Gateway, error: HeadwaterError, kind: str) -> None:
    gateway.says(text="</think>a b c d e f", fail_after=6, error=error)
    start, *_, last = events(gateway)
    assert start["type"] == "message_start"
    assert (last["type"], last["error"]["type"]) == ("error", kind)
    gateway.says(fail_after=0, error=error)
    assert fault(gateway.post(PATH, **ASKED, stream=True))[1] == kind


def test_other_routes_have_no_request_id_of_this_api(gateway: Gateway) -> None:
    assert "request-id" not in gateway.post("/v1/chat/completions", model="tiny", messages=HELLO).headers


async def test_requests_without_a_key_and_too_large_ones_have_anthropics_form(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"hw-secret").hexdigest()
    keys = KeyRing(lambda: [Key("client", digest, ("infer",)), Key("m", "0" * 64, ("metrics",))],
                   LimitFiles(tmp_path, 0, 1))  # fmt: skip
    app = create_app(Models(), Server(access_log=False, max_body_bytes=2000), keys=keys)
    async with serving(app) as server, httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        for path in (PATH, COUNT):
            assert fault(await client.post(path, json=ASKED))[:2] == (401, "authentication_error")
            for headers in ({"x-api-key": "hw-secret"}, {"authorization": "Bearer hw-secret"}):
                assert fault(await client.post(path, json=ASKED, headers=headers))[:2] == (404, "not_found_error")
            large = await client.post(path, json={**ASKED, "x": "y" * 2000}, headers={"x-api-key": "hw-secret"})
            assert fault(large)[:2] == (413, "request_too_large")


async def test_pages_of_other_origins_may_send_the_headers_of_anthropics_client() -> None:
    app = create_app(Models(), Server(access_log=False), cors_origins=["https://app.example"])
    headers = {
        "origin": "https://app.example", "access-control-request-method": "POST",
        "access-control-request-headers": "anthropic-version, anthropic-beta, x-api-key, content-type, "
        "anthropic-dangerous-direct-browser-access",
    }  # fmt: skip
    async with serving(app) as server, httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        assert (await client.options(PATH, headers=headers)).status_code == 200
        answer = await client.post(PATH, json=ASKED, headers={"origin": "https://app.example"})
        assert fault(answer)[:2] == (404, "not_found_error")
        assert "Request-Id" in answer.headers["access-control-expose-headers"]


# vLLM


def counted(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    details = {"prompt_tokens_details": {"cached_tokens": cached}} if cached else {}
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, **details}


def chat_answer(finish: str = "stop", stop: Any = None, **text: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **text}, "finish_reason": finish, "stop_reason": stop}
    return {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice], "usage": counted(7, 5, 4)}


def chat_chunk(tokens: int, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "chatcmpl-1", "choices": [choice], "usage": counted(7, tokens)}


def scripted(answer: Any, tokens: Any = None) -> VllmScript:
    """A script that answers requests for tokens with ``tokens``, and others with ``answer``, a body or events."""

    async def script(exchange: Exchange) -> None:
        if exchange.path == "/tokenize":
            exchange.whole(tokens) if "error" not in tokens else exchange.whole(tokens, 400)
        elif isinstance(answer, list):
            exchange.begin()
            for event in answer:
                exchange.event(event)
            exchange.end()
        else:
            exchange.whole(answer)

    return script


async def post(gateway: VllmGateway, path: str = PATH, **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": HELLO, **({"max_tokens": 9} if path == PATH else {}), **fields}
    return await gateway.client.post(path, json=body)


def roomy(context_length: int = 100_000) -> Any:
    """A signature of a model of vLLM with this context."""
    assert SIGNATURE.vllm is not None
    return msgspec.structs.replace(
        SIGNATURE, vllm=msgspec.structs.replace(SIGNATURE.vllm, context_length=context_length)
    )


CHAT_CALL: Any = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": 1}'}}


async def test_a_message_of_vllm() -> None:
    async with vllm_gateway(signature=roomy()) as gateway:
        gateway.replica.script = whole(
            chat_answer("tool_calls", reasoning="Hm.", content="So.", tool_calls=[CHAT_CALL])
        )
        image = {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": PNG.partition(",")[2]},
        }
        turns = [{"role": "user", "content": [image, {"type": "text", "text": "hi"}]}]
        answer = (await post(gateway, messages=turns, tools=[WEATHER], system="s", stop_sequences=["x"])).json()
        assert answer["content"] == [
            {"type": "thinking", "thinking": "Hm.", "signature": "headwater"}, {"type": "text", "text": "So."},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": 1}},
        ]  # fmt: skip
        assert (answer["model"], answer["stop_reason"]) == ("m", "tool_use")
        usage = answer["usage"]
        assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 4, 5)
        (exchange,) = gateway.replica.exchanges
        assert exchange.path == "/v1/chat/completions"
        assert exchange.body == {
            "model": "m", "max_completion_tokens": 9, "stream": False, "stop": ["x"],
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [
                    {"type": "image_url", "image_url": {"url": PNG}},
                    {"type": "text", "text": "hi"},
                ]},
            ],
            "tools": [{"type": "function", "function": {
                "name": "weather", "parameters": WEATHER["input_schema"],
            }}],
        }  # fmt: skip
        assert counts_of("m").total("headwater_generated_tokens") == 5


async def test_a_stream_of_vllm() -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": ""}}
    chunks = [
        chat_chunk(0, role="assistant", content=""),
        chat_chunk(1, reasoning="Hm."),
        chat_chunk(2, content="So."),
        chat_chunk(3, tool_calls=[call]),
        chat_chunk(4, tool_calls=[{"index": 0, "function": {"arguments": '{"city": 1}'}}]),
        chat_chunk(5, "tool_calls"),
        {"choices": [], "usage": counted(7, 5)},
    ]
    async with vllm_gateway(signature=roomy()) as gateway:
        gateway.replica.script = scripted(chunks)
        answer = message_of(events_of((await post(gateway, stream=True)).text))
        assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
        assert (answer["content"][2]["input"], answer["stop_reason"]) == ({"city": 1}, "tool_use")
        assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == (7, 5)


async def test_why_an_answer_of_vllm_ends() -> None:
    async with vllm_gateway(signature=roomy()) as gateway:
        for finish, stop, expected in (
            ("stop", "END", ("stop_sequence", "END")),
            ("stop", 7, ("end_turn", None)),
            ("length", None, ("model_context_window_exceeded", None)),
        ):
            gateway.replica.script = whole(chat_answer(finish, stop, content="a"))
            answer = (await post(gateway)).json()
            assert (answer["stop_reason"], answer["stop_sequence"]) == expected
        answer = (await post(gateway, max_tokens=5)).json()
        assert answer["stop_reason"] == "max_tokens"


async def test_an_answer_that_may_not_fit_is_shortened_by_the_prompts_tokens() -> None:
    async with vllm_gateway(signature=roomy(1000)) as gateway:
        gateway.replica.script = scripted(chat_answer(content="a"), {"count": 400, "tokens": []})
        assert (await post(gateway, max_tokens=32_000, output_config={"effort": "low"})).status_code == 200
        counting, asking = gateway.replica.exchanges
        assert counting.path == "/tokenize"
        assert counting.body == {
            "model": "m", "messages": HELLO,
            "chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": True},
        }  # fmt: skip
        assert asking.body["max_completion_tokens"] == 600
        await post(gateway, max_tokens=300)
        assert len(gateway.replica.exchanges) == 3  # it fits however many tokens the prompt has


LATER: Any = [*HELLO, {"role": "system", "content": "later"}]


@pytest.mark.parametrize(
    ("tokens", "keeps"),
    [
        ({"count": 3, "tokens": [], "token_strs": ["zqx", "system"] * 2}, True),
        ({"count": 3, "tokens": [], "token_strs": ["zqx", "system"]}, False),
        (error("System message must be at the beginning."), False),
    ],
)
async def test_a_later_system_message_for_vllm(tokens: Any, keeps: bool) -> None:
    async with vllm_gateway(signature=roomy()) as gateway:
        gateway.replica.script = scripted(chat_answer(content="a"), tokens)
        assert (await post(gateway, messages=LATER)).status_code == 200
        roles = [message["role"] for message in gateway.replica.exchanges[-1].body["messages"]]
        assert roles == (["user", "system"] if keeps else ["user"])


async def test_tokens_of_a_prompt_for_vllm_are_counted() -> None:
    async with vllm_gateway(signature=roomy()) as gateway:
        gateway.replica.script = scripted(None, {"count": 12, "tokens": [1] * 12})
        answer = await post(gateway, COUNT, tools=[WEATHER], system="s")
        assert answer.json() == {"input_tokens": 12}
        (exchange,) = gateway.replica.exchanges
        assert exchange.body.keys() == {"model", "messages", "tools"}
        text = "a" * (16 * 131_072)
        status, kind, message = fault(await post(gateway, COUNT, messages=[{"role": "user", "content": text}]))
        assert (status, kind) == (400, "invalid_request_error")
        assert message.startswith("messages: expected at most 2097152 bytes to count")
        assert len(gateway.replica.exchanges) == 1


async def test_an_image_is_fetched_for_vllm_before_tokens_are_counted() -> None:
    async with picture_server() as (url, _):
        image = {"type": "image", "source": {"type": "url", "url": url}}
        turns = [{"role": "user", "content": [image]}]
        async with vllm_gateway(signature=roomy(1000), media_hosts=(url.split("/")[2],)) as gateway:
            gateway.replica.script = scripted(chat_answer(content="a"), {"count": 400, "tokens": []})
            assert (await post(gateway, COUNT, messages=turns)).json() == {"input_tokens": 400}
            assert (await post(gateway, messages=turns, max_tokens=32_000)).status_code == 200
            paths = [exchange.path for exchange in gateway.replica.exchanges]
            assert paths == ["/tokenize", "/tokenize", "/v1/chat/completions"]
            for exchange in gateway.replica.exchanges:
                (part,) = exchange.body["messages"][0]["content"]
                assert part["image_url"]["url"].startswith("data:")


async def test_what_vllm_refuses_has_anthropics_form_and_the_clients_fields() -> None:
    async with vllm_gateway(signature=roomy()) as gateway:
        gateway.replica.script = whole(error("wrong", 400, "stop"), 400)
        assert fault(await post(gateway)) == (400, "invalid_request_error", "stop_sequences: wrong")
        gateway.replica.script = whole(error("This model's maximum context length is 9"), 400)
        assert fault(await post(gateway))[2].startswith("prompt is too long: ")
        gateway.replica.script = whole(error("full", 503), 503)
        assert fault(await post(gateway, stream=True))[:2] == (429, "rate_limit_error")
        gateway.replica.exchanges.clear()
        image = {"type": "image", "source": {"type": "url", "url": "http://10.0.0.1/x.png"}}
        turns = [*HELLO, {"role": "assistant", "content": "a"}, {"role": "user", "content": [image]}]
        status, _, message = fault(await post(gateway, messages=turns))
        assert status == 400
        assert message.startswith("messages[2].content[0]")
        assert gateway.replica.exchanges == []


async def test_deadlines_and_cancelling_hold() -> None:
    async with vllm_gateway(signature=roomy()) as gateway:
        gateway.replica.script = hangs
        assert fault(await post(gateway, timeout_s=0.1, stream=False))[:2] == (504, "timeout_error")
        gateway.replica.exchanges.clear()
        asked = asyncio.create_task(gateway.client.post(
            PATH, json={"model": "m", "messages": HELLO, "max_tokens": 9}, headers={"X-Request-Id": "mine"},
        ))  # fmt: skip
        await until(lambda: bool(gateway.replica.exchanges))
        assert (await gateway.client.post("/v2/requests/mine/cancel")).json()["cancelled"] == 1
        assert fault(await asked)[0] == 409
        await gateway.replica.exchanges[-1].left()
