"""Answers in a form that the request asks for: the routes over the tiny model's own engine."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import httpx
import msgspec
import pytest

from headwater.engine import MAX_GRAMMAR, Engine
from headwater.lm.grammars import KINDS
from headwater.lm.loading import plan_language_model
from headwater.lm.null_engine import NullEngine
from headwater_server.errors import BadRequest
from headwater_server.lm.chat import ChatRequest
from tests.app.lm.app_with_engine import app_with_engine
from tests.app.lm.scripted import FOLDER, LIMITS
from tests.app.lm.tool_text import tool_text

pytestmark = pytest.mark.heavy
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
CHAT: dict[str, Any] = {"model": "lm", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "seed": 1}


@functools.cache
def engine() -> Engine:
    return plan_language_model(f"lm:{FOLDER}", {}).load("cpu", pytest.fail)


def schema_format(schema: object, **rest: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, **rest}}


async def asked(path: str, of: Engine | None = None, **fields: Any) -> httpx.Response:
    async with app_with_engine(of or engine()) as (ask, _dispatcher):
        return await ask(path, **fields)


async def chat(**fields: Any) -> Any:
    return (await asked("/v1/chat/completions", **{**CHAT, **fields})).json()


async def refused(of: Engine | None = None, **fields: Any) -> tuple[str, str]:
    """The field that the answer names, and the message."""
    answer = await asked("/v1/chat/completions", of, **{**CHAT, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    return error["param"], error["message"]


async def test_every_choice_follows_the_schema() -> None:
    answer = await chat(n=4, response_format=schema_format(SCHEMA, strict=True), logprobs=True, top_logprobs=2)
    assert len({choice["message"]["content"] for choice in answer["choices"]}) > 1
    for choice in answer["choices"]:
        value = json.loads(choice["message"]["content"])
        assert set(value) == {"name", "size"}
        assert len(value["name"]) <= 8
        assert value["size"] in range(1, 10)
        assert choice["finish_reason"] == "stop"
        assert "".join(one["token"] for one in choice["logprobs"]["content"]) == choice["message"]["content"]


async def test_a_stream_is_the_whole_answer_in_pieces() -> None:
    fields: dict[str, Any] = {"response_format": schema_format(SCHEMA), "stop": ["\n\n\n\n\n\n\n\n"]}
    whole = (await chat(**fields))["choices"][0]
    streamed = (await asked("/v1/chat/completions", **CHAT, stream=True, **fields)).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks) == whole["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


async def test_an_answer_that_max_tokens_cuts_says_so() -> None:
    (choice,) = (await chat(response_format=schema_format(SCHEMA), max_tokens=3))["choices"]
    assert choice["finish_reason"] == "length"


async def test_json_object() -> None:
    for seed in range(3):
        (choice,) = (await chat(response_format={"type": "json_object"}, seed=seed))["choices"]
        text = choice["message"]["content"]
        assert text.startswith("{")
        assert choice["finish_reason"] == "length" or isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"regex": "[a-f]{4}-[0-9]{2}"}, "[a-f]{4}-[0-9]{2}"),
        ({"choice": ["yes", 'a "quoted" no', "naïve\n"]}, 'yes|a "quoted" no|naïve\n'),
        ({"grammar": 'start: "<" /[0-9]{2}/ ">"'}, "<[0-9]{2}>"),
        ({"json": {"type": "boolean"}}, "true|false"),
        ({"json": '{"enum": [1, null]}', "regex": None}, "1|null"),
    ],
)
async def test_vllms_structured_outputs_at_every_route(given: dict[str, Any], pattern: str) -> None:
    parameters: dict[str, Any] = {"max_tokens": 99, "structured_outputs": given}
    completion = await asked("/v1/completions", model="lm", prompt="hi", **parameters)
    generated = await asked("/v2/models/lm/generate", text_input="hi", parameters=parameters)
    texts = [
        (await chat(structured_outputs=given))["choices"][0]["message"]["content"],
        completion.json()["choices"][0]["text"],
        generated.json()["text_output"],
    ]
    for text in texts:
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize(("count", "length"), [(200, 10), (800, 11), (8, 1000)])
async def test_many_labels_are_one_choice(count: int, length: int) -> None:
    labels = [f"{n:03}{chr(97 + n % 26) * (length - 3)}" for n in range(count)]
    answer = await chat(structured_outputs={"choice": labels}, n=2, max_tokens=400)
    assert all(
        choice["message"]["content"] in labels or choice["finish_reason"] == "length" for choice in answer["choices"]
    )
    prefixes = await chat(structured_outputs={"choice": ["a", "ab", "abc", "abc"]}, n=8, temperature=2)
    assert {choice["message"]["content"] for choice in prefixes["choices"]} <= {"a", "ab", "abc"}


def properties(count: int, **rest: Any) -> dict[str, Any]:
    names = [f"p{n}" for n in range(count)]
    return {
        "type": "object",
        "properties": {name: {"type": "null"} for name in names},
        "additionalProperties": False,
        **rest,
    }


async def test_an_object_may_have_many_optional_properties() -> None:
    for schema in (properties(500), properties(600, required=[f"p{n}" for n in range(100)])):
        (choice,) = (await chat(response_format=schema_format(schema), max_tokens=20))["choices"]
        assert choice["message"]["content"].startswith("{")


TOO_MANY: list[Any] = [
    (
        {"structured_outputs": {"choice": [f"{n:04}" * 20 for n in range(600)]}},
        "structured_outputs.choice",
        "expected labels with at most 9000",
    ),
    (
        {"response_format": schema_format(properties(501))},
        "response_format.json_schema.schema",
        "expected objects with at most 500 optional",
    ),
    (
        {"structured_outputs": {"json": json.dumps({"items": properties(501)})}},
        "structured_outputs.json.items",
        "got 501; require more of them",
    ),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": properties(501)}}],
            "tool_choice": "required",
        },
        "tools[0].function.parameters",
        "at most 500 optional properties, got 501",
    ),
]


@pytest.mark.parametrize(("fields", "field", "message"), TOO_MANY)
def test_what_can_not_be_followed_to_its_end_is_refused_before_the_answer(
    fields: dict[str, Any], field: str, message: str
) -> None:
    body = {"model": "m", "messages": CHAT["messages"], **fields}
    limits = msgspec.structs.replace(LIMITS, grammars=KINDS)
    with pytest.raises(BadRequest) as caught:
        ChatRequest.read(json.dumps(body).encode()).plan(tool_text("hermes"), limits)
    assert caught.value.field == field
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        (
            {"response_format": schema_format({"type": "integer", "minimum": 2, "maximum": 1})},
            "response_format.json_schema",
            "expected a JSON schema that answers can be held to, but Unsatisfiable schema: minimum (2) is greater than",
        ),
        (
            {"response_format": schema_format({"x": "y" * MAX_GRAMMAR})},
            "response_format.json_schema",
            f"expected at most {MAX_GRAMMAR} characters, got {MAX_GRAMMAR + 8}; shorten it",
        ),
        ({"response_format": schema_format([])}, "response_format.json_schema.schema", "expected an object, got an"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "expected 'grammar' or 'json' or 'json_object'"),
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex", "expected a regular expression that"),
        ({"structured_outputs": {}}, "structured_outputs", "expected one of json, regex, choice, grammar, json_object"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "got regex and json"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag", "expected JSON, got"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "expected it without response_format; leave one of them out",
        ),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named(fields: dict[str, Any], field: str, message: str) -> None:
    named, said = await refused(**fields)
    assert named == field
    assert said.startswith(f"{field}: ")
    assert message in said


async def test_an_engine_that_supports_no_grammar_is_not_asked() -> None:
    expected = ("response_format", "response_format: this model does not support it; leave it out")
    assert await refused(NullEngine(), response_format={"type": "json_object"}) == expected
