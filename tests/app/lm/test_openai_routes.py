"""The routes of language models over HTTP, driven by the unmodified openai client, and by httpx."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFailedEvent,
    ResponseIncompleteEvent,
    ResponseOutputMessage,
)

from headwater.engine import EngineLimits
from headwater_server.errors import Cancelled, ContractBroken, QueueFull, ReplicaLost, Unavailable
from headwater_server.lm.completion import CompletionAnswer, CompletionRequest
from headwater_server.lm.text.language import LanguageText
from headwater_server.lm.text_plan import TextPlan
from headwater_server.lm.text_stream import TextPiece, Usage
from tests.app.lm.scripted import (
    EOS,
    HELLO,
    Gateway,
    Script,
    ScriptedDispatcher,
    ScriptedModels,
    ids_of,
    serving,
    tiny_text,
)
from tests.app.lm.tool_text import CLOCK
from tests.running import wait_for

TEXT = Script().text
PROMPT_TOKENS = 11


@cache
def without_template() -> LanguageText:
    text = copy.copy(tiny_text())
    text.template = None
    return text


@pytest.fixture(scope="module")
def server() -> Iterator[Gateway]:
    tiny = ScriptedDispatcher("tiny", Script())
    plain = ScriptedDispatcher("plain", Script(), language_text=without_template)
    models = ScriptedModels(tiny, plain)
    with serving(models) as url:
        gateway = Gateway(url, models, tiny, plain)
        yield gateway
        gateway.client.close()


@pytest.fixture
def gateway(server: Gateway) -> Iterator[Gateway]:
    server.tiny.script = Script()
    server.tiny.unavailable = None
    server.tiny.opened.clear()
    yield server
    wait_for(lambda: all(generation.is_closed for _, generation, _ in server.tiny.opened), 60, "all to be closed")
    wait_for(lambda: server.models.streams == 0, 60, "no stream to be counted")


# Chat


def test_a_chat_answer(gateway: Gateway) -> None:
    answer = gateway.chat()
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert (choice.finish_reason, choice.index, choice.logprobs) == ("stop", 0, None)
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", answer.id)
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    assert answer.usage is not None
    count = len(ids_of(TEXT)) + 1
    prompt = len(gateway.tiny.opened[0][1].specs[0].prompt)
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count,
        "prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0},
    }  # fmt: skip
    assert prompt == PROMPT_TOKENS


def test_a_chat_stream_is_the_same_in_pieces(gateway: Gateway) -> None:
    first, *rest, last = gateway.chunks()
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == TEXT
    assert all(chunk.choices[0].delta.role is None and chunk.choices[0].finish_reason is None for chunk in rest)
    assert (last.choices[0].delta.content, last.choices[0].finish_reason) == (None, "stop")
    assert len({chunk.id for chunk in (first, *rest, last)}) == 1
    assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in (first, *rest, last))


def test_frames_are_as_openai_writes_them(gateway: Gateway) -> None:
    gateway.says(text="a", chunk=9)
    *frames, done = gateway.frames("/v1/chat/completions", model="tiny", messages=HELLO, stream=True)
    assert done == "[DONE]"
    about = {"object": "chat.completion.chunk", "model": "tiny"}
    decoded = [json.loads(frame) for frame in frames]
    for frame in decoded:
        assert frame.pop("id").startswith("chatcmpl-")
        assert isinstance(frame.pop("created"), int)
    rest = {"logprobs": None, "finish_reason": None}
    assert decoded == [
        {**about, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, **rest}]},
        {**about, "choices": [{"index": 0, "delta": {"content": "a"}, **rest}]},
        {**about, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]},
    ]


def test_usage_ends_a_stream_that_asks_for_it(gateway: Gateway) -> None:
    chunks = gateway.chunks(stream_options={"include_usage": True}, max_tokens=4)
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.completion_tokens, chunks[-1].usage.total_tokens) == (4, PROMPT_TOKENS + 4)
    body = {"model": "tiny", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    *frames, _, _ = gateway.frames("/v1/chat/completions", **body)
    assert all(json.loads(frame)["usage"] is None for frame in frames)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_chunk_has_the_usage_so_far_if_asked_for(gateway: Gateway, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    prompt = {"messages": HELLO} if "chat" in path else {"prompt": "x"}
    *frames, _ = gateway.frames(path, model="tiny", stream=True, stream_options=options, **prompt)
    counts = [json.loads(frame)["usage"]["completion_tokens"] for frame in frames]
    assert counts == sorted(counts)
    assert counts[0] == (0 if "chat" in path else 3)  # a chat's first chunk has no token yet
    *without, _ = gateway.frames(
        path, model="tiny", stream=True, stream_options={**options, "include_usage": False}, **prompt
    )
    assert [json.loads(frame)["usage"]["completion_tokens"] for frame in without] == counts[:-1]
    assert len(set(counts)) > 2
    assert counts[-1] == min(len(ids_of(TEXT)) + 1, 16 if "chat" not in path else 99)


def test_a_chunk_counts_no_tokens_of_chunks_after_it(gateway: Gateway) -> None:
    gateway.says(chunk=3)
    options = {"continuous_usage_stats": True}
    *frames, _ = gateway.frames(
        "/v1/completions", model="tiny", stream=True, stream_options=options, prompt="x", n=3, max_tokens=6
    )
    assert [json.loads(frame)["usage"]["completion_tokens"] for frame in frames] == [3, 6, 9, 12, 15, 18]


def test_max_tokens_end_a_text(gateway: Gateway) -> None:
    answer = gateway.chat(max_completion_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert gateway.chunks(max_tokens=3)[-1].choices[0].finish_reason == "length"


def test_choices_differ_with_a_seed_and_come_again(gateway: Gateway) -> None:
    def texts(answer: ChatCompletion) -> list[str | None]:
        return [choice.message.content for choice in answer.choices]

    first = gateway.chat(n=3, seed=7)
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts(first))) == 3
    assert texts(gateway.chat(n=3, seed=7)) == texts(first)
    streamed = ["", "", ""]
    chunks = gateway.chunks(n=3, seed=7)
    assert [chunk.choices[0].index for chunk in chunks[:3]] == [0, 1, 2]
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts(first)
    assert first.usage is not None
    assert first.usage.prompt_tokens == PROMPT_TOKENS


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_stop_string_ends_the_text_and_the_work(gateway: Gateway, chunk: int) -> None:
    gateway.says(stops=False, chunk=chunk)
    answer = gateway.chat(stop=["return", "nothing"], max_tokens=100)
    assert answer.choices[0].message.content == TEXT.partition("return")[0]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= len(ids_of(TEXT.partition("return")[0] + "return")) + 1
    pieces = gateway.chunks(stop="return", max_tokens=100)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == TEXT.partition("return")[0]
    assert [piece.choices[0].finish_reason for piece in pieces[-1:]] == ["stop"]
    if chunk < 100:
        assert [generation.dropped for _, generation, _ in gateway.tiny.opened] == [[0], [0]]
    shown = gateway.chat(stop="return", extra_body={"include_stop_str_in_output": True}, max_tokens=100)
    assert shown.choices[0].message.content == TEXT.partition("return")[0] + "return"


def test_logprobs_of_a_chat(gateway: Gateway) -> None:
    answer = gateway.chat(logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [round((-0.5 - entry.logprob) * 1000) for entry in logprobs.content] == ids_of(TEXT)
    raw = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert raw.decode() == TEXT
    assert all([round(top.logprob, 3) for top in entry.top_logprobs] == [0, -0.1] for entry in logprobs.content)
    streamed: list[Any] = []
    for piece in gateway.chunks(logprobs=True, top_logprobs=2):
        if (of_piece := piece.choices[0].logprobs) is not None:
            streamed += of_piece.content or []
    assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in logprobs.content]
    bare = gateway.chat(logprobs=True).choices[0].logprobs
    assert bare is not None
    assert bare.content is not None
    assert bare.content[0].top_logprobs == []


def test_special_tokens_are_shown_if_asked_for(gateway: Gateway) -> None:
    gateway.says(ids=[*ids_of("a"), EOS, *ids_of("b")])
    assert gateway.chat().choices[0].message.content == "ab"
    assert gateway.chat(extra_body={"skip_special_tokens": False}).choices[0].message.content == "a<|im_end|>b"


def test_chat_parameters_reach_the_engine(gateway: Gateway) -> None:
    extensions = {"top_k": 5, "ignore_eos": True, "stop_token_ids": [9], "timeout_s": 1.5}
    gateway.chat(temperature=0, logit_bias={"7": 3}, extra_body=extensions)
    ((_, generation, timeout_s),) = gateway.tiny.opened
    (spec,) = generation.specs
    assert (spec.sampling.temperature, spec.sampling.top_k, spec.sampling.logit_bias) == (0, 5, {7: 3})
    assert (spec.ignore_eos, spec.stop_ids, timeout_s) == (True, frozenset({9}), 1.5)


def test_the_clients_request_id_is_the_engines(gateway: Gateway) -> None:
    gateway.chat(extra_headers={"X-Request-Id": "mine"})
    assert gateway.tiny.opened[0][0] == "mine"


def test_the_async_client(gateway: Gateway) -> None:
    async def talk() -> tuple[str, str | None]:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            whole = await client.chat.completions.create(model="tiny", messages=HELLO)
            return streamed, whole.choices[0].message.content

    assert asyncio.run(talk()) == (TEXT, TEXT)


# Completions


def test_a_completion(gateway: Gateway) -> None:
    answer = gateway.completion(max_tokens=100)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (TEXT, "stop")
    assert (answer.object, answer.model, answer.id[:5]) == ("text_completion", "tiny", "cmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 1
    assert gateway.completion().choices[0].finish_reason == "length"


@pytest.mark.parametrize("options", [{}, {"stop": "b"}, {"echo": True}, {"logprobs": 2}])
def test_a_completion_stream_is_the_same_in_pieces(gateway: Gateway, options: dict[str, Any]) -> None:
    prompts = ["x = ", "y = "]
    whole = gateway.completion(prompts, n=2, max_tokens=100, **options)
    texts = [""] * 4
    finishes: list[str | None] = [None] * 4
    for chunk in gateway.completions(prompts, n=2, max_tokens=100, **options):
        (choice,) = chunk.choices
        assert finishes[choice.index] is None
        texts[choice.index] += choice.text
        finishes[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices] == ["stop"] * 4
    if "echo" in options:
        assert texts == [prompt + TEXT for prompt in prompts for _ in range(2)]


def test_logprobs_of_a_completion(gateway: Gateway) -> None:
    answer = gateway.completion(max_tokens=100, logprobs=2)
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.text_offset is not None
    assert told.token_logprobs == [-0.5 - token / 1000 for token in ids_of(TEXT)]
    for token, offset in zip(told.tokens, told.text_offset, strict=True):
        assert token.startswith("bytes:") or TEXT.startswith(token, offset)
    assert told.top_logprobs is not None
    assert all(told.tokens[n] in top and len(top) <= 3 for n, top in enumerate(told.top_logprobs))
    streamed: list[str] = []
    for chunk in gateway.completions(max_tokens=100, logprobs=2):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.tokens or []
    assert streamed == told.tokens
    alone = gateway.completion(max_tokens=1, logprobs=0).choices[0].logprobs
    assert alone is not None
    assert alone.top_logprobs == [{"def": -0.5 - ids_of("def")[0] / 1000}]


@pytest.mark.parametrize(("logprobs", "is_apart"), [(None, False), (4, False), (20, True)])
def test_an_answer_with_many_logprobs_is_made_in_a_thread(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, logprobs: int | None, is_apart: bool
) -> None:
    threads = []
    whole = CompletionAnswer.whole

    def noting(self: CompletionAnswer, texts: Sequence[TextPiece], usage: Usage) -> bytes:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            threads.append("apart")
        else:
            threads.append("loop")
        return whole(self, texts, usage)

    monkeypatch.setattr(CompletionAnswer, "whole", noting)
    gateway.says(stops=False)
    answer = gateway.completion(max_tokens=100, n=3, logprobs=logprobs)
    assert [len(choice.text) > 0 for choice in answer.choices] == [True] * 3
    assert threads == ["apart" if is_apart else "loop"]


def test_nothing_to_generate_echoes(gateway: Gateway) -> None:
    gateway.says(ids=[], stops=False)
    answer = gateway.completion("a b", max_tokens=0, echo=True)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("a b", "length")


def test_a_usage_chunk_of_completions(gateway: Gateway) -> None:
    *chunks, last = gateway.completions(max_tokens=2, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 2
    assert all(chunk.usage is None for chunk in chunks)


# What chats and completions have in common


BOTH = pytest.mark.parametrize(
    ("path", "asked"),
    [("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "x"})],
    ids=["chat", "completion"],
)


@BOTH
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.2},
        {"logit_bias": {"0": 0}},
        {"max_tokens": 10},
        {"min_tokens": 16},
        {"ignore_eos": True},
        {"n": 1},
        {"stop": "."},
        {"stop": []},
        {"stop": [".", ","]},
        {"stream": False},
    ],
    ids=str,
)
def test_a_field_by_itself_is_taken(gateway: Gateway, path: str, asked: Any, fields: Any) -> None:
    answer = gateway.post(path, model="tiny", **asked, **fields)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["message"]["content"] if "message" in choice else choice["text"]
    assert choice["logprobs"] is None


@BOTH
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.1),
        ("temperature", -0.1),
        ("top_p", 1.1),
        ("frequency_penalty", 3),
        ("frequency_penalty", -3),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("ignore_eos", 123),
        ("model", 123),
        ("model", None),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_a_value_that_can_not_be_is_refused(gateway: Gateway, path: str, asked: Any, field: str, value: Any) -> None:
    answer = gateway.post(path, **{"model": "tiny", **asked, field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert gateway.tiny.opened == []


@BOTH
def test_a_request_names_its_model_and_has_a_prompt(gateway: Gateway, path: str, asked: Any) -> None:
    for body, param in (({}, "model"), (asked, "model"), ({"model": "tiny"}, *asked)):
        answer = gateway.post(path, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    answer = gateway.post(path, model="", **asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


# Responses


def test_a_response(gateway: Gateway) -> None:
    answer = gateway.client.responses.create(
        model="tiny", input="hi", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, user="u"
    )
    assert (answer.output_text, answer.status) == (TEXT, "completed")
    assert (answer.error, answer.incomplete_details) == (None, None)
    (message,) = answer.output
    assert isinstance(message, ResponseOutputMessage)
    assert (message.role, message.status, len(message.content)) == ("assistant", "completed", 1)
    assert re.fullmatch(r"resp_[0-9a-f]{32}", answer.id)
    assert re.fullmatch(r"msg_[0-9a-f]{32}", message.id)
    assert (answer.object, answer.model, answer.instructions) == ("response", "tiny", "Be brief.")
    assert (answer.metadata, answer.temperature, answer.top_p, answer.user) == ({"a": "b"}, 0.5, 1, "u")
    assert (answer.tools, answer.tool_choice, answer.truncation) == ([], "auto", "disabled")
    assert answer.model_extra == {"store": False, "presence_penalty": 0, "frequency_penalty": 0}  # of Open Responses
    assert answer.usage is not None
    prompt, count = len(gateway.tiny.opened[0][1].specs[0].prompt), len(ids_of(TEXT)) + 1
    assert answer.usage.model_dump(exclude_none=True) == {
        "input_tokens": prompt, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": count, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt + count,
    }  # fmt: skip
    Response.model_validate_json(answer.to_json())  # the client itself checks nothing


def test_a_response_is_cut_where_the_client_says(gateway: Gateway) -> None:
    answer = gateway.client.responses.create(model="tiny", input="hi", max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 3
    assert answer.output[0].to_dict()["status"] == "incomplete"
    *_, last = gateway.client.responses.create(model="tiny", input="hi", max_output_tokens=3, stream=True)
    assert isinstance(last, ResponseIncompleteEvent)
    assert last.response.output_text == answer.output_text


def test_a_response_stream_is_the_same_in_pieces(gateway: Gateway) -> None:
    events = list(gateway.client.responses.create(model="tiny", input="hi", stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TEXT
    for event in events:
        type(event).model_validate_json(event.to_json())
    last = events[-1]
    assert isinstance(last, ResponseCompletedEvent)
    whole = gateway.client.responses.create(model="tiny", input="hi")
    assert (last.response.output_text, last.response.usage) == (TEXT, whole.usage)


def test_a_response_whose_prompt_is_too_long_fails_in_its_stream(gateway: Gateway) -> None:
    asked: Any = {"model": "tiny", "input": "word " * 600}
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client.responses.create(**asked)
    assert caught.value.code == "context_length_exceeded"
    created, begun, failed = gateway.client.responses.create(**asked, stream=True)
    assert (created.type, begun.type, failed.type) == ("response.created", "response.in_progress", "response.failed")
    assert failed.response.error is not None
    assert failed.response.error.code == "context_length_exceeded"
    assert caught.value.message.endswith(failed.response.error.message)
    with pytest.raises(openai.BadRequestError):  # every other fault has its status
        gateway.client.responses.create(model="tiny", input="hi", stream=True, top_p=2)


def test_the_clients_stream_helper_collects_a_response(gateway: Gateway) -> None:
    with gateway.client.responses.stream(model="tiny", input=[{"role": "user", "content": "hi"}]) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        assert snapshots[-1] == TEXT
        final = stream.get_final_response()
    assert (final.output_text, final.status) == (TEXT, "completed")
    # What it said may be sent back as it is.
    items: Any = [{"role": "user", "content": "hi"}, *final.output, {"role": "user", "content": "go on"}]
    assert gateway.client.responses.create(model="tiny", input=items).output_text == TEXT


def test_events_have_their_names_before_them(gateway: Gateway) -> None:
    text = gateway.post("/v1/responses", model="tiny", input="hi", stream=True).text
    assert text.endswith("\n\n")
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    assert "[DONE]" not in text


def test_logprobs_of_a_response(gateway: Gateway) -> None:
    asked: Any = {"model": "tiny", "input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = gateway.client.responses.create(**asked).output[0].to_dict()["content"][0]
    expected = gateway.chat(logprobs=True, top_logprobs=2).choices[0].logprobs
    assert expected is not None
    assert part["logprobs"] == [entry.model_dump() for entry in expected.content or []]
    streamed = []
    for event in gateway.client.responses.create(**asked, stream=True):
        if event.type == "response.output_text.delta":
            streamed += event.to_dict()["logprobs"]
    assert streamed == part["logprobs"]


def test_a_failure_within_a_response_is_an_event(gateway: Gateway) -> None:
    gateway.says(fail_after=6, error=ReplicaLost("the replica ended"))
    *_, last = gateway.client.responses.create(model="tiny", input="hi", stream=True)
    assert isinstance(last, ResponseFailedEvent)
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "the replica ended")
    assert TEXT.startswith(last.response.output_text)


def test_what_is_wrong_with_a_response_is_named(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client.responses.create(model="tiny", input="hi", store=True)
    assert caught.value.param == "store"
    with pytest.raises(openai.NotFoundError):
        gateway.client.responses.create(model="other", input="hi")
    with pytest.raises(openai.NotFoundError):
        gateway.client.responses.retrieve("resp_1")
    assert gateway.tiny.opened == []


# Generate


def test_generate(gateway: Gateway) -> None:
    body = {"text_input": "x", "id": "i", "parameters": {"max_tokens": 100}}
    answer = gateway.post("/v2/models/tiny/generate", **body).json()
    facts = {"finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": len(ids_of(TEXT)) + 1}
    named = {"model_name": "tiny", "model_version": "1", "id": "i"}
    assert answer == {**named, "text_output": TEXT, "parameters": facts}
    *pieces, last = [json.loads(frame) for frame in gateway.frames("/v2/models/tiny/generate_stream", **body)]
    assert "".join(piece.pop("text_output") for piece in pieces) == TEXT
    assert all(piece == named for piece in pieces)
    assert last == {**named, "text_output": "", "final": True, **facts}


@pytest.mark.parametrize("where", [{"details": True}, {"parameters": {"sampling_parameters": '{"details": "true"}'}}])
@pytest.mark.parametrize(
    ("end", "reason"), [({}, "eos_token"), ({"max_tokens": 2}, "length"), ({"stop": "a"}, "stop_sequence")]
)
def test_the_details_of_generate_are_those_of_the_protocols_file(
    gateway: Gateway, where: dict[str, Any], end: dict[str, Any], reason: str
) -> None:
    body = {"text_input": "x", "max_tokens": 100, **end, **where}
    answer = gateway.post("/v2/models/tiny/generate", **body).json()
    details = answer["details"]
    assert details.keys() == {"finish_reason", "logprobs"}
    assert details["finish_reason"] == reason
    assert answer["text_output"].startswith(details["logprobs"][0]["text"])
    assert [token["id"] for token in details["logprobs"]] == ids_of(TEXT)[: len(details["logprobs"])]
    assert {(type(token["logprob"]), token["special"]) for token in details["logprobs"]} == {(float, False)}
    *pieces, last = [json.loads(frame) for frame in gateway.frames("/v2/models/tiny/generate_stream", **body)]
    assert not any("details" in piece for piece in pieces)
    assert last["text_output"] == ""
    assert last["details"] == {**details, "token": details["logprobs"][-1]}


def test_generate_stops_at_strings_and_says_what_is_wrong(gateway: Gateway) -> None:
    answer = gateway.post("/v2/models/tiny/generate", text_input="x", stop="a", max_tokens=9).json()
    assert answer["text_output"] == TEXT.partition("a")[0]
    refused = gateway.post("/v2/models/tiny/generate_stream", text_input="x", temperature=3)
    assert (refused.status_code, refused.json()) == (
        400, {"error": "temperature: expected a number from 0 to 2, got 3.0"},
    )  # fmt: skip


def test_an_error_within_a_generate_stream_comes_before_the_end(gateway: Gateway) -> None:
    gateway.says(fail_after=4, error=ReplicaLost("the replica ended"))
    *_, error, last = [json.loads(frame) for frame in gateway.frames("/v2/models/tiny/generate_stream", text_input="x")]
    assert error == {"error": "the replica ended", "status": 503}
    assert (last["final"], last["finish_reason"]) == (True, "error")


# The tokenizer


def test_tokens_of_a_text_and_back(gateway: Gateway) -> None:
    answer = gateway.post("/tokenize", model="tiny", prompt=TEXT, return_token_strs=True).json()
    assert answer["tokens"] == ids_of(TEXT)
    assert (answer["count"], answer["max_model_len"]) == (len(ids_of(TEXT)), 512)
    assert answer["token_strs"][0] == "def"
    assert gateway.post("/detokenize", model="tiny", tokens=answer["tokens"]).json() == {"prompt": TEXT}
    assert gateway.post("/detokenize", model="tiny", tokens=[*ids_of("a"), EOS]).json() == {"prompt": "a<|im_end|>"}
    assert gateway.post("/tokenize", model="tiny", prompt="").json() == {
        "count": 0, "max_model_len": 512, "tokens": [], "token_strs": None,
    }  # fmt: skip


def test_the_only_language_model_need_not_be_named() -> None:
    with serving(ScriptedModels(ScriptedDispatcher("tiny", Script()))) as url:
        answer = httpx.post(f"{url}/tokenize", json={"prompt": "def f"}, timeout=20)
    assert answer.json()["tokens"] == ids_of("def f")


def test_tokens_of_a_conversation_are_those_of_its_prompt(gateway: Gateway) -> None:
    gateway.chat()
    prompt = gateway.tiny.opened[0][1].specs[0].prompt
    assert gateway.post("/tokenize", model="tiny", messages=HELLO).json()["tokens"] == prompt
    without = gateway.post("/tokenize", model="tiny", messages=HELLO, add_generation_prompt=False).json()["tokens"]
    assert len(without) < len(prompt)
    assert prompt[: len(without)] == without


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {"model": "tiny"}, "prompt: expected either prompt or messages, got neither"),
        (
            "/tokenize",
            {"model": "tiny", "prompt": "x", "messages": HELLO},
            "prompt: expected either prompt or messages",
        ),
        (
            "/tokenize",
            {"prompt": "x"},
            "model: expected the name of a language model, got none; this server has `tiny`",
        ),
        ("/tokenize", {"model": "tiny", "prompt": "x" * 131_073}, "prompt: this model's maximum context length is 512"),
        ("/tokenize", {"model": "plain", "messages": HELLO}, "messages: this model has no chat template"),
        ("/tokenize", {"model": "tiny", "prompt": "x", "continue_final_message": True}, "continue_final_message: "),
        ("/tokenize", {"model": "tiny", "messages": HELLO, "tools": [{}]}, "tools[0].type: expected 'function', the o"),
        ("/tokenize", {"model": "tiny", "prompt": "x", "tools": [CLOCK]}, "tools: expected them with messages only; "),
        ("/detokenize", {"model": "tiny", "tokens": [4096]}, "tokens[0]: expected a token id from 0 to 4095, got 4096"),
        (
            "/tokenize",
            {"model": "tiny", "prompt": "\u0621" * 131_072},
            "prompt: expected at most 131072 tokens, got 26214",
        ),
        (
            "/detokenize",
            {"model": "tiny", "tokens": [5] * 131_073},
            "tokens: expected at most 131072, got 131073; send",
        ),
        ("/detokenize", {"model": "tiny", "tokens": "x"}, "tokens: expected an array, got a string"),
    ],
)
def test_what_is_wrong_with_a_text_to_tokenize_is_named(gateway: Gateway, path: str, body: Any, message: str) -> None:
    answer = gateway.post(path, **body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(message)
    assert error["param"] == message.partition(": ")[0]


# Errors


def test_what_is_wrong_is_named(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.chat(modalities=["audio"])
    assert caught.value.body == {
        "message": "modalities[0]: expected 'text', got 'audio'",
        "type": "invalid_request_error", "param": "modalities[0]", "code": None,
    }  # fmt: skip
    with pytest.raises(openai.BadRequestError, match="max_tokens: this model's maximum context length"):
        gateway.chunks(max_tokens=10_000)
    with pytest.raises(openai.NotFoundError) as unknown:
        gateway.client.chat.completions.create(model="other", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    assert gateway.tiny.opened == []


def test_a_model_without_a_template_answers_completions_only(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match="/v1/completions"):
        gateway.client.chat.completions.create(model="plain", messages=HELLO)
    answer = gateway.client.completions.create(model="plain", prompt="x", max_tokens=100)
    assert answer.choices[0].text == TEXT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (QueueFull("the queue is full", retry_after_s=3), 429, "3"),
        (ReplicaLost("the replica ended"), 503, "2"),
        (ContractBroken("a token twice"), 500, None),
        (Cancelled("the request was cancelled"), 409, None),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_an_early_failure_has_its_true_status(
    gateway: Gateway, path: str, body: Any, error: Any, status: int, retry_after: str | None, stream: bool
) -> None:
    gateway.says(fail_after=0, error=error)
    answer = gateway.post(path, model="tiny", stream=stream, **body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == error.message
    assert answer.headers.get("retry-after") == retry_after


def test_a_failure_within_a_stream_is_a_frame_of_its_own(gateway: Gateway) -> None:
    gateway.says(fail_after=6, error=ReplicaLost("the replica ended"))
    *frames, error, done = gateway.frames("/v1/chat/completions", model="tiny", messages=HELLO, stream=True)
    assert len(frames) > 1
    assert done == "[DONE]"
    assert json.loads(error) == {
        "error": {"message": "the replica ended", "type": "server_error", "param": None, "code": "unavailable"}
    }
    with pytest.raises(openai.APIError, match="the replica ended"):
        gateway.chunks()


def test_a_deployment_that_is_not_ready(gateway: Gateway) -> None:
    gateway.tiny.unavailable = Unavailable("model `tiny` is LOADING", retry_after_s=5)
    for path in ("/v1/chat/completions", "/v1/completions", "/v2/models/tiny/generate"):
        body = {"text_input": "x"} if "v2" in path else {"model": "tiny"}
        body |= {"messages": HELLO} if "chat" in path else {"prompt": "x"} if "v1" in path else {}
        answer = gateway.post(path, **body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


# Clients that go away, and requests that are cancelled


def test_a_request_is_planned_anew_if_a_reload_comes_between_its_plan_and_its_start(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tiny_text(), copy.copy(tiny_text())
    planned: list[LanguageText] = []
    plan = CompletionRequest.plan

    def planning(request: CompletionRequest, text: LanguageText, limits: EngineLimits) -> TextPlan:
        planned.append(text)
        monkeypatch.setattr(gateway.tiny, "language_text", lambda: new)
        return plan(request, text, limits)

    monkeypatch.setattr(gateway.tiny, "language_text", lambda: old)
    monkeypatch.setattr(CompletionRequest, "plan", planning)
    gateway.completion()
    assert [text is new for text in planned] == [False, True]
    assert len(gateway.tiny.opened) == 1


def test_a_client_that_goes_away_ends_the_generation(gateway: Gateway) -> None:
    gateway.says(hangs=True)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{gateway.url}/v1/chat/completions", json={"model": "tiny", "messages": HELLO}, timeout=httpx.Timeout(1)
        )
    wait_for(lambda: gateway.tiny.opened[0][1].is_closed, 60, "the generation to be closed")


def test_a_client_that_leaves_a_stream_ends_the_generation(gateway: Gateway) -> None:
    gateway.says(hangs=True)
    body = {"model": "tiny", "messages": HELLO, "stream": True}
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=20) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert gateway.models.streams == 1
        assert not gateway.tiny.opened[0][1].is_closed
    wait_for(lambda: gateway.tiny.opened[0][1].is_closed, 60, "the generation to be closed")


def test_a_request_is_cancelled_by_its_id(gateway: Gateway) -> None:
    gateway.says(hangs=True)
    body = {"model": "tiny", "messages": HELLO, "stream": True, "n": 2}
    headers = {"X-Request-Id": "mine/1"}
    url = f"{gateway.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=20) as answer:
        lines = answer.iter_lines()  # to be kept: the response ends with it
        assert next(lines).startswith("data: ")
        told = httpx.post(f"{gateway.url}/v2/requests/mine%2F1/cancel")
        assert (told.status_code, told.json()) == (200, {"request_id": "mine/1", "cancelled": 2})
    wait_for(lambda: gateway.tiny.opened[0][1].is_closed, 60, "the generation to be closed")
    gone = httpx.post(f"{gateway.url}/v2/requests/mine%2F1/cancel")
    assert gone.status_code == 404
    assert gone.json()["error"].startswith("request 'mine/1': no running stream or language-model request")
    assert httpx.get(f"{gateway.url}/v2/requests/x/cancel").status_code == 405


# Documentation


def test_the_routes_are_documented(gateway: Gateway) -> None:
    schema = httpx.get(f"{gateway.url}/openapi.json").json()
    paths = schema["paths"]
    chat = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert chat["schema"]["properties"]["model"]["enum"] == ["tiny", "plain"]
    assert gateway.post("/v1/chat/completions", **chat["example"]).status_code == 200
    for route in ("/v1/completions", "/v1/responses"):
        text = paths[route]["post"]["requestBody"]["content"]["application/json"]
        assert gateway.post(route, **text["example"]).status_code == 200
    for route in ("generate", "generate_stream"):
        body = paths[f"/v2/models/tiny/{route}"]["post"]["requestBody"]["content"]["application/json"]
        assert gateway.post(f"/v2/models/tiny/{route}", **body["example"]).status_code == 200
    assert "/v2/models/tiny/infer" not in paths
    assert "409" in paths["/v1/completions"]["post"]["responses"]
    assert "/v2/requests/{request_id}/cancel" in paths
