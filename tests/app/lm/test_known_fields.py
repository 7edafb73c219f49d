"""Unknown fields of OpenAI's text routes: which are left out, and which are refused all the same."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from headwater_server.codecs.wording import structs_of
from headwater_server.errors import BadRequest
from headwater_server.lm.chat import ChatRequest, checked_variables
from headwater_server.lm.completion import CompletionRequest
from headwater_server.lm.known_fields import MAX_IGNORED, read_known
from headwater_server.lm.responses import ResponsesRequest
from headwater_server.lm.text_generate import GenerateRequest
from headwater_server.lm.tokenize_body import DetokenizeRequest, TokenizeRequest
from tests.app.lm.scripted import HELLO, LIMITS, Script, ScriptedDispatcher, ScriptedModels, serving, tiny_text

CHAT: dict[str, Any] = {"model": "m", "messages": HELLO}


def read(**fields: Any) -> tuple[ChatRequest, tuple[str, ...]]:
    return read_known(json.dumps({**CHAT, **fields}).encode(), ChatRequest)


def refused(**fields: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        read(**fields)
    return caught.value.message


def test_unknown_fields_are_left_out_and_named() -> None:
    request, ignored = read(
        enable_search=True, top_n=3, stream=True, stream_options={"include_usage": True, "chunk_size": 3}, x=None
    )
    assert ignored == ("enable_search", "top_n", "stream_options.chunk_size")
    assert request == read(stream=True, stream_options={"include_usage": True})[0]


def test_a_request_without_unknown_fields_is_read_as_it_is() -> None:
    request, ignored = read(temperature=0.5)
    assert (request.temperature, ignored) == (0.5, ())


def test_numbers_and_text_pass_as_they_are() -> None:
    body = b'{"model": "m", "unknown": 1, "messages": [{"role": "user", "content": "\\u00e9", "n": 1.50e400}]}'
    with pytest.raises(BadRequest, match="messages"):  # beyond a float, as without the unknown field
        read_known(body, ChatRequest)
    request, _ = read_known(body.replace(b"1.50e400", b"123456789012345678"), ChatRequest)
    assert request.messages == [{"role": "user", "content": "é", "n": 123456789012345678}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperatur": 1}, "temperatur: expected one of this request's fields, got 'temperatur'; did you mean `temp"),
        ({"max_token": 1}, "max_token: expected one of this request's fields, got 'max_token'; did you mean `max_tok"),
        ({"maxtokns": 1}, "maxtokns: expected one of this request's fields, got 'maxtokns'; did you mean `max_tokens"),
        ({"sed": 1}, "sed: expected one of this request's fields, got 'sed'; did you mean `seed`?"),
        ({"thread": {}}, "thread: not supported here: this server keeps nothing between requests; send the content"),
        ({"input": "x"}, "input: not supported here: it is content of another route's requests"),
        (
            {"guided_whitespace_pattern": " "},
            "guided_whitespace_pattern: not supported here: it would constrain the an",
        ),
        ({"unknown": 1, "temperature": 3}, "temperature: expected a number from 0 to 2, got 3"),
        ({"unknown": 1, "function_call": "auto"}, "function_call: this model does not support it; leave it out"),
        ({f"unknown_{n}": 1 for n in range(MAX_IGNORED + 1)}, "body: expected at most 100 unknown fields, got more"),
    ],
)
def test_what_is_refused_all_the_same(fields: dict[str, Any], message: str) -> None:
    assert refused(**fields).startswith(message)


@pytest.mark.parametrize("name", ["top_a", "top_n", "speed", "mode", "seeds"])
def test_fields_of_other_servers_are_no_misspelt_fields(name: str) -> None:
    assert read(**{name: 1})[1] == (name,)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": 1, "x": 1}'])
def test_other_faults_than_unknown_fields_are_told_as_ever(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        read_known(body, ChatRequest)
    with pytest.raises(BadRequest) as strict:
        ChatRequest.read(body)
    assert caught.value.message == strict.value.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"x": 1, "model": "m"', "body: expected JSON, got malformed JSON: Input data was truncated"),
        (b'{"x": \xff}', "body: expected JSON, got malformed JSON: invalid character (byte 6)"),
        (
            b'{"x": 1, "x": 2, "model": "m"}',
            "x: expected every key of an object once, got this key twice; remove one of the two",
        ),
    ],
)
def test_a_fault_of_the_json_is_told_before_an_unknown_field(body: bytes, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_known(body, ChatRequest)
    assert caught.value.message == message


@pytest.mark.parametrize("value", [None, False, "", []])
def test_empty_values_of_refused_fields_are_absent(value: Any) -> None:
    fields = dict.fromkeys(("mcp_servers", "documents", "thread", "guided_whitespace_pattern"), value)
    assert read(**fields) == read()
    assert refused(documents=0).startswith("documents: not supported here")


REQUIRED: dict[Any, dict[str, Any]] = {
    ChatRequest: {"model": "m", "messages": HELLO},
    CompletionRequest: {"model": "m", "prompt": "x"},
    ResponsesRequest: {"model": "m", "input": "x"},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [1]},
    GenerateRequest: {"text_input": "x"},
}
"""The fields of each text route's request that can't be null."""
WITHIN: dict[str, dict[str, Any]] = {
    "stream_options": {},
    "response_format": {"type": "json_object"},
    "response_format.json_schema": {"name": "n"},
    "structured_outputs": {"regex": "a"},
    "text": {},
    "text.format": {"type": "text"},
    "reasoning": {},
    "thinking": {"type": "adaptive"},
    "parameters": {},
    "parameters.structured_outputs": {"regex": "a"},
}
"""The same of each object within a request, by its path."""


def nullable() -> list[tuple[Any, str]]:
    """Each request with the path of each field that may be null, also within objects."""
    found: list[tuple[Any, str]] = []

    def add(kind: Any, struct: inspect.StructType, path: str, needed: dict[str, Any]) -> None:
        for field in struct.fields:
            name = field.encode_name
            if name not in needed:
                found.append((kind, f"{path}{name}"))
            for inner in structs_of(field.type):
                add(kind, inner, f"{path}{name}.", WITHIN[f"{path}{name}"])

    for kind, needed in REQUIRED.items():
        (struct,) = structs_of(kind)
        add(kind, struct, "", needed)
    return found


@pytest.mark.parametrize(("kind", "path"), nullable())
def test_null_is_absence_for_every_field_of_every_text_route(kind: Any, path: str) -> None:
    def body(last: dict[str, Any]) -> bytes:
        fields = dict(REQUIRED[kind])
        at = fields
        *outer, name = path.split(".")
        for n, step in enumerate(outer):
            at[step] = dict(WITHIN[".".join(outer[: n + 1])])
            at = at[step]
        at |= {name: last[name]} if last else {}
        return json.dumps(fields).encode()

    name = path.rpartition(".")[2]
    assert kind.read(body({name: None})) == kind.read(body({}))


def test_null_is_absence_within_labels_and_variables() -> None:
    request = ResponsesRequest.read(b'{"model": "m", "input": "x", "metadata": {"a": null, "b": "c"}}')
    assert request.metadata == {"a": None, "b": "c"}
    read(metadata={"a": None})
    assert checked_variables({"enable_thinking": None, "x": 1}) == {"x": 1}


NEUTRAL: dict[Any, dict[str, Any]] = {
    ChatRequest: {
        "store": False, "stream": False, "tool_choice": "auto", "tools": [], "verbosity": "medium", "n": 1,
        "logprobs": False, "top_logprobs": 0, "stream_options": {"include_usage": False}, "logit_bias": {}, "stop": [],
        "temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1,
        "top_k": -1, "min_p": 0, "modalities": ["text"], "service_tier": "auto", "parallel_tool_calls": True,
        "response_format": {"type": "text"}, "grammar": "", "prompt_cache_retention": "24h", "metadata": {},
        "add_generation_prompt": True, "continue_final_message": False, "skip_special_tokens": True,
    },
    CompletionRequest: {
        "suffix": "", "echo": False, "best_of": 1, "n": 1, "stream_options": {}, "response_format": {"type": "text"},
        "logit_bias": {}, "user": "",
    },
    ResponsesRequest: {
        "store": False, "background": False, "include": [], "tools": [], "tool_choice": "auto", "n": 1,
        "max_tool_calls": 5, "prompt_cache_retention": "in_memory", "context_management": [], "reasoning": {},
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "truncation": "disabled", "top_logprobs": 0,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", list(NEUTRAL))
def test_neutral_values_change_nothing(kind: Any) -> None:
    def plan(**fields: Any) -> Any:
        body = json.dumps({**REQUIRED[kind], **fields}).encode()
        request, ignored = read_known(body, kind)
        assert ignored == ()
        return request.plan(tiny_text(), LIMITS)

    assert plan(**NEUTRAL[kind]) == plan()


NAMES = st.text(min_size=12, max_size=20).map(lambda text: f"zz_{text}_zz")


@given(st.dictionaries(NAMES, st.none() | st.integers() | st.text() | st.lists(st.floats(allow_nan=False)), max_size=5))
def test_any_unknown_fields_change_nothing(unknown: dict[str, Any]) -> None:
    plain = {"model": "m", "input": "x", "reasoning": {"effort": "low"}}
    body = {**plain, **unknown, "reasoning": {**plain["reasoning"], **unknown}}  # type: ignore[dict-item]
    request, ignored = read_known(msgspec.json.encode(body), ResponsesRequest)
    assert request == ResponsesRequest.read(msgspec.json.encode(plain))
    assert len(ignored) == 2 * sum(value is not None for value in unknown.values())


def test_the_header_and_the_option() -> None:
    models = ScriptedModels(ScriptedDispatcher("tiny", Script()))
    body = {"model": "tiny", "messages": HELLO, "speed": "fast", "käse": 1, "reasoning_effort": "low"}
    with serving(models) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20)
        assert answer.status_code == 200
        assert answer.headers["headwater-ignored"] == "speed, k?se, reasoning_effort"
    with serving(models, unknown_fields="refuse") as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("speed: expected one of the fields")
        tool = {"type": "function", "function": {"name": "f", "cache_control": {}}}
        body = {"model": "tiny", "messages": HELLO, "tools": [tool]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20)
        assert answer.json()["error"]["message"] == "tools[0].function.cache_control: unknown field; leave it out"
