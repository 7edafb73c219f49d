"""How much a model may think: what reaches the chat template, and what the answer says has no effect."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
import pytest

from headwater_server.errors import BadRequest
from headwater_server.lm.chat import ChatRequest
from headwater_server.lm.reasoning_fields import template_effort
from headwater_server.lm.responses import ResponsesRequest
from headwater_server.lm.text.answer_reader import reasoning_format
from headwater_server.lm.text.chat_template import ChatTemplate
from headwater_server.lm.text.language import LanguageText
from headwater_server.lm.text_plan import TextPlan
from tests.app.lm.scripted import HELLO, LIMITS, Gateway, Script, ScriptedDispatcher, ScriptedModels, serving
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


@pytest.mark.parametrize(
    ("effort", "levels", "expected"),
    [
        ("none", {"none", "high"}, ("none", True)), ("low", {"none", "high"}, ("high", True)),
        ("xhigh", {"low", "high", "max"}, ("high", True)), ("max", {"high", "max"}, ("max", True)),
        ("minimal", {"low", "medium", "high"}, ("low", True)), ("none", {"low", "high"}, ("low", False)),
        ("max", {"medium"}, ("high", True)),
    ],
)  # fmt: skip
def test_an_effort_is_the_nearest_level_that_a_template_names(effort: str, levels: set[str], expected: Any) -> None:
    values, is_honoured = template_effort(effort, {"reasoning_effort"}, levels)
    assert (values["reasoning_effort"], is_honoured) == expected


def shows(template: str, **fields: Any) -> tuple[str, tuple[str, ...]]:
    """What a template is given, and the fields without effect."""
    text = _with_template(template)
    text.reasoning_format = reasoning_format(template)
    request = ChatRequest.read(json.dumps({"model": "m", "messages": HELLO, **fields}).encode())
    plan = request.plan(text, LIMITS)
    return text.tokenizer.decode(plan.specs[0].prompt, skip_special_tokens=False), plan.ignored


SWITCH = "<think>{{ enable_thinking }}"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"enable_thinking": False}, "False"),
        ({"thinking": {"type": "disabled"}}, "False"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10**9}}, "True"),
        ({"thinking": {"type": "adaptive"}}, ""),
        ({"reasoning": {"enabled": False}}, "False"),
        ({"reasoning": {"effort": "none"}}, "False"),
        ({"reasoning": {"effort": "high"}}, "True"),
        ({"reasoning": {}, "thinking": None}, ""),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, "False"),
        ({"thinking": {"type": "enabled"}, "enable_thinking": True, "reasoning": {"enabled": True}}, "True"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": "mine"}}, "mine"),
    ],
)
def test_each_servers_switch_reaches_the_template(fields: dict[str, Any], expected: str) -> None:
    assert shows(SWITCH, **fields) == (f"<think>{expected}", ())


def test_further_variables_of_templates() -> None:
    template = "{{ thinking_budget }} {{ clear_thinking }} {{ thinking }}"
    thinking = {"type": "enabled", "budget_tokens": 512, "clear_thinking": False}
    assert shows(template, thinking=thinking) == ("512 False True", ())


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"enable_thinking": False}, ()),
        ({"thinking": {"type": "disabled"}}, ()),
        ({"thinking": {"type": "adaptive"}}, ()),
        ({"thinking": {"type": "enabled"}}, ("thinking.type",)),
        ({"reasoning": {"enabled": True, "effort": "low"}}, ("reasoning.effort", "reasoning.enabled")),
        ({"thinking": {"type": "adaptive", "clear_thinking": True}}, ("thinking.clear_thinking",)),
        ({"reasoning": {"max_tokens": 7}}, ("reasoning.max_tokens",)),
        ({"include_reasoning": False}, ()),
    ],
)
def test_what_a_model_without_reasoning_leaves_out_is_named(fields: dict[str, Any], ignored: tuple[str, ...]) -> None:
    assert chat("hermes", **fields).ignored == ignored


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"enable_thinking": True, "thinking": {"type": "disabled"}},
            "thinking.type: expected the same as enable_thinking, got true and false; leave one of them out",
        ),
        ({"thinking_budget": 1, "reasoning": {"max_tokens": 2}}, "reasoning.max_tokens: expected the same as thinking"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort: expected the same as"),
        ({"include_reasoning": True, "reasoning": {"exclude": True}}, "reasoning.exclude: expected the same as"),
        ({"max_reasoning_tokens": -1}, "max_reasoning_tokens: expected"),
        ({"thinking": {"type": "on"}}, "thinking.type: expected"),
    ],
)
def test_fields_that_disagree_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert caught.value.message.startswith(message)


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
    assert plan.ignored == ("truncation", "text.verbosity", "reasoning.effort", "reasoning.summary")


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


@pytest.fixture(scope="module")
def gateway() -> Any:
    tiny = ScriptedDispatcher("tiny", Script(), language_text=lambda: tool_text("reasoning"))
    plain = ScriptedDispatcher("plain", Script())
    models = ScriptedModels(tiny, plain)
    with serving(models) as url:
        gateway = Gateway(url, models, tiny, plain)
        yield gateway
        gateway.client.close()


@pytest.mark.parametrize("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}, {}])
def test_a_client_may_leave_the_reasoning_out(gateway: Gateway, fields: dict[str, Any]) -> None:
    for chunk in (1, 100):
        gateway.says(text="So be it.</think>Yes.", chunk=chunk)
        (choice,) = gateway.chat(extra_body=fields).choices
        said = choice.message.model_dump()
        assert (said["content"], said.get("reasoning_content")) == ("Yes.", None if fields else "So be it.")
        deltas = [chunk.choices[0].delta.model_dump() for chunk in gateway.chunks(extra_body=fields)]
        assert "".join(delta["content"] or "" for delta in deltas) == "Yes."
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == ("" if fields else "So be it.")
