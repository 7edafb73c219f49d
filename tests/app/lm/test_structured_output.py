"""Answers in a form that the request asks for: the routes over the tiny model's own engine."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from app.lm.dispatcher import LmDispatcher
from inference.engine import Engine
from inference.lm.loading import plan_language_model
from tests.app.lm.scripted import FOLDER
from tests.app.lm.test_routes_with_engine import Ask, run

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


def chat(**fields: Any) -> Any:
    """The answer to a chat request: its JSON, or the chunks of its stream."""
    answers = []

    async def scenario(ask: Ask, dispatcher: LmDispatcher) -> None:
        answers.append(await ask("/v1/chat/completions", **{**CHAT, **fields}))

    run(engine(), scenario)
    if not fields.get("stream"):
        return answers[0].json()
    return [json.loads(line[6:]) for line in answers[0].text.split("\n\n")[:-2]]


def test_every_choice_follows_the_schema() -> None:
    answer = chat(n=4, response_format=schema_format(SCHEMA, strict=True), logprobs=True, top_logprobs=2)
    assert len({choice["message"]["content"] for choice in answer["choices"]}) > 1
    for choice in answer["choices"]:
        value = json.loads(choice["message"]["content"])
        assert set(value) == {"name", "size"}
        assert len(value["name"]) <= 8
        assert value["size"] in range(1, 10)
        assert choice["finish_reason"] == "stop"
        assert "".join(one["token"] for one in choice["logprobs"]["content"]) == choice["message"]["content"]
