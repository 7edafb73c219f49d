"""How much a model may think: what reaches the chat template, and what the answer says has no effect."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
import pytest

from headwater_server.lm.chat import ChatRequest
from headwater_server.lm.reasoning_effort import template_effort
from headwater_server.lm.responses import ResponsesRequest
from headwater_server.lm.text.chat_template import ChatTemplate
from headwater_server.lm.text.language import LanguageText
from headwater_server.lm.text_plan import TextPlan
from tests.app.lm.scripted import HELLO, LIMITS, Script, ScriptedDispatcher, ScriptedModels, serving
from tests.app.lm.tool_text import tool_text

SWITCHED_OFF = "</think>"


def chat(template: str = "reasoning", **fields: Any) -> TextPlan:
    body = {"model": "m", "messages": HELLO, **fields}
    return ChatRequest.read(json.dumps(body).encode()).plan(tool_text(template), LIMITS)


def response(template: str = "reasoning", **fields: Any) -> TextPlan:
    body = {"model": "m", "input": HELLO, **fields}
    return ResponsesRequest.read(json.dumps(body).encode()).plan(tool_text(template), LIMITS)


def prompt(plan: TextPlan) -> str:
    return tool_text("reasoning").tokenizer.decode(plan.specs[0].prompt, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("effort", "variables", "expected"),
    [
        ("high", {"enable_thinking"}, ({"enable_thinking": True}, True)),
        ("none", {"enable_thinking", "messages"}, ({"enable_thinking": False}, True)),
        ("none", {"thinking"}, ({"thinking": False}, True)),
        ("medium", {"reasoning_effort"}, ({"reasoning_effort": "medium"}, True)),
        ("minimal", {"reasoning_effort"}, ({"reasoning_effort": "low"}, True)),
        ("max", {"reasoning_effort", "thinking"}, ({"reasoning_effort": "high", "thinking": True}, True)),
        ("none", {"reasoning_effort"}, ({"reasoning_effort": "low"}, False)),
        ("low", {"messages"}, ({}, False)),
    ],
)
def test_an_effort_in_the_words_of_a_template(effort: str, variables: set[str], expected: Any) -> None:
    assert template_effort(effort, variables) == expected


def test_an_effort_reaches_the_template() -> None:
    for plan in (chat(reasoning_effort="none"), response(reasoning={"effort": "none"})):
        assert SWITCHED_OFF in prompt(plan)
        assert plan.ignored == ()
    for plan in (chat(reasoning_effort="high"), response(reasoning={"effort": "high"}), response(reasoning={})):
        assert SWITCHED_OFF not in prompt(plan)
        assert plan.ignored == ()


def test_a_variable_of_the_request_comes_first() -> None:
    plan = chat(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False})
    assert SWITCHED_OFF in prompt(plan)


def test_what_has_no_effect_is_named() -> None:
    assert chat("hermes", reasoning_effort="low", verbosity="low").ignored == ("verbosity", "reasoning_effort")
    assert chat("hermes", verbosity="medium").ignored == ()
    plan = response(
        "hermes",
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "high"},
        truncation="auto",
        client_metadata={"a": "b"},
    )
    assert plan.ignored == ("text.verbosity", "reasoning.effort", "reasoning.summary", "truncation")


def test_earlier_reasoning_goes_back_to_the_template() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "So."}]}
    summed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Sum."}], "content": None}
    empty = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    said = {"role": "assistant", "content": "Yes."}
    template = "{% for message in messages %}{{ message.role }}:{{ message.reasoning_content }};{% endfor %}"
    for item, expected in ((thought, "So."), (summed, "Sum."), (empty, "")):
        request = ResponsesRequest.read(
            json.dumps({"model": "m", "input": [*HELLO, item, said, item, *HELLO]}).encode()
        )
        text = _with_template(template)
        plan = request.plan(text, LIMITS)
        rendered = text.tokenizer.decode(plan.specs[0].prompt, skip_special_tokens=False)
        assert rendered == f"user:;assistant:{expected};user:;"


def _with_template(template: str) -> LanguageText:
    text = copy.copy(tool_text("hermes"))
    text.template = ChatTemplate({"default": template}, {})
    return text


def test_the_answers_header_names_fields_without_effect() -> None:
    body = {"model": "tiny", "messages": HELLO}
    with serving(ScriptedModels(ScriptedDispatcher("tiny", Script()))) as url:

        def asked(**fields: Any) -> httpx.Response:
            answer = httpx.post(f"{url}/v1/chat/completions", json={**body, **fields}, timeout=20)
            assert answer.status_code == 200
            return answer

        for stream in (False, True):
            assert asked(reasoning_effort="low", stream=stream).headers["headwater-ignored"] == "reasoning_effort"
        assert "headwater-ignored" not in asked().headers
