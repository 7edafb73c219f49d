"""Reasoning before constrained answers, and its budget: over an engine with random weights, which hardly ever end their
reasoning by themselves."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headwater.engine import Engine, EngineLimits, SequenceRequest
from headwater.lm.loading import plan_language_model
from headwater_server.lm.chat import ChatRequest
from headwater_server.lm.reasoning_grammar import can_limit
from headwater_server.lm.text.answer_reader import ReasoningFormat
from headwater_server.lm.text.language import LanguageText
from headwater_server.lm.text_plan import TextPlan
from tests.app.lm.scripted import HELLO
from tests.app.lm.tool_text import TOOLS, VOCAB_SIZE, tool_folder

pytestmark = pytest.mark.heavy
OPEN, CLOSE, EOS = 4102, 4103, 2
SCHEMA: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "a",
        "schema": {
            "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False,
        },
    },
}  # fmt: skip
LIMITS = EngineLimits(
    8, 16, 1024, 4096, VOCAB_SIZE, grammars=frozenset({"lark", "json_schema", "regex"})
)  # fmt: skip


@functools.cache
def folder() -> Path:
    return tool_folder(Path(mkdtemp()) / "model", "reasoning", has_marks=True)


@functools.cache
def text(*, is_open: bool = True) -> LanguageText:
    """The text of a model that reasons; its template opens the reasoning, or leaves that to the model."""
    if is_open:
        return LanguageText(folder())
    text = copy.copy(LanguageText(folder()))
    text.template = LanguageText(tool_folder(Path(mkdtemp()) / "model", "hermes", has_marks=True)).template
    return text


@functools.cache
def engine() -> Engine:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=0, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder())
    return plan_language_model(f"lm:{folder()}", {"max_sequences": 8, "cache_tokens": 8192}).load("cpu", pytest.fail)


def planned(*, is_open: bool = True, limits: EngineLimits = LIMITS, **fields: Any) -> TextPlan:
    body = {"model": "m", "messages": HELLO, "max_tokens": 80, "seed": 1, **fields}
    return ChatRequest.read(json.dumps(body).encode()).plan(text(is_open=is_open), limits)


def answer(plan: TextPlan) -> list[int]:
    """The tokens of the answer, without the token that ended it."""
    (spec,) = plan.specs
    engine().submit(
        SequenceRequest("a", spec.prompt, spec.max_tokens, spec.sampling, spec.stop_ids, grammar=spec.grammar)
    )
    tokens: list[int] = []
    while engine().has_work:
        for event in engine().step():
            assert event.finish in (None, "stop", "length"), event.error
            if event.token is not None:
                tokens.append(event.token)
    return tokens[:-1] if tokens[-1] == EOS else tokens


def decoded(tokens: list[int]) -> str:
    return text().tokenizer.decode(tokens, skip_special_tokens=False)


@pytest.mark.parametrize("budget", [1, 7, 30])
@pytest.mark.parametrize(
    "fields", [{}, {"response_format": SCHEMA}, {"tools": TOOLS, "tool_choice": "required"}],
    ids=["free", "schema", "required"],
)  # fmt: skip
@pytest.mark.parametrize("is_open", [True, False])
def test_a_budget_ends_the_reasoning_exactly(budget: int, fields: dict[str, Any], is_open: bool) -> None:
    fields = {**fields, "max_reasoning_tokens": budget}
    if not is_open:
        fields["logit_bias"] = {str(OPEN): 100}
    plan = planned(is_open=is_open, **fields)
    assert plan.ignored == ()
    assert plan.reading is not None
    assert plan.reading.is_open == is_open
    tokens = answer(plan)
    if not is_open:
        assert tokens.pop(0) == OPEN
    assert tokens.index(CLOSE) == budget
    assert OPEN not in tokens
    rest = decoded(tokens[budget + 1 :]).strip()
    if "response_format" in fields:
        assert json.loads(rest) in ({"a": 1}, {"a": 2})
    elif "tools" in fields:
        assert rest.startswith("<tool_call>\n{")


def test_the_model_may_leave_the_reasoning_out() -> None:
    bias = {str(OPEN): -100}
    assert json.loads(decoded(answer(planned(is_open=False, response_format=SCHEMA, logit_bias=bias))))["a"] in (1, 2)
    tokens = answer(planned(is_open=False, max_reasoning_tokens=2, logit_bias=bias))
    assert len(tokens) == 80
    assert OPEN not in tokens


def test_without_a_budget_the_model_reasons_as_long_as_it_likes() -> None:
    assert CLOSE not in answer(planned(response_format=SCHEMA))
    tokens = answer(planned(response_format=SCHEMA, logit_bias={str(CLOSE): 9}))
    assert json.loads(decoded(tokens[tokens.index(CLOSE) + 1 :]))["a"] in (1, 2)


def test_a_budget_of_nothing_closes_the_reasoning_in_the_prompt() -> None:
    plan = planned(max_reasoning_tokens=0, limits=EngineLimits(8, 16, 1024, 4096, VOCAB_SIZE))
    assert decoded(plan.specs[0].prompt).endswith("assistant\n<think>\n</think>\n\n")
    assert (plan.specs[0].grammar, plan.ignored) == (None, ())
    assert plan.reading is not None
    assert not plan.reading.is_open
    (first, *_) = answer(planned(is_open=False, max_reasoning_tokens=0, logit_bias={str(OPEN): 100}))[1:]
    assert first == CLOSE


def test_a_budget_beyond_the_context_has_no_effect() -> None:
    plan = planned(max_reasoning_tokens=10**9)
    assert (plan.specs[0].grammar, plan.ignored) == (None, ())


def test_reasoning_that_is_off_comes_before_no_answer() -> None:
    plan = planned(response_format=SCHEMA, enable_thinking=False)
    assert plan.specs[0].grammar is not None
    assert plan.specs[0].grammar.before == ""


def test_a_budget_that_cannot_be_held_is_named() -> None:
    assert planned(thinking_budget=5, limits=EngineLimits(8, 16, 1024, 4096, VOCAB_SIZE)).ignored == (
        "thinking_budget",
    )
    plain = copy.copy(text())
    plain.reasoning_format = None
    body = {"model": "m", "messages": HELLO, "thinking": {"type": "enabled", "budget_tokens": 5}}
    assert ChatRequest.read(json.dumps(body).encode()).plan(plain, LIMITS).ignored == ("thinking.budget_tokens",)


def test_marks_that_are_no_tokens() -> None:
    """The reasoning ends before any text of the closing mark; its tokens can't be counted."""
    plain = copy.copy(text())
    plain.reasoning_format = ReasoningFormat("think", "<think>", "</spelt>")
    assert not can_limit(plain.reasoning_format, plain.tokenizer.texts)
    body = {
        "model": "m", "messages": HELLO, "max_tokens": 400, "response_format": SCHEMA, "max_reasoning_tokens": 3,
        "logit_bias": {str(token): 14 for token in plain.tokenizer.encode("</spelt>", add_special_tokens=False)},
    }  # fmt: skip
    plan = ChatRequest.read(json.dumps(body).encode()).plan(plain, LIMITS)
    assert plan.ignored == ("max_reasoning_tokens",)
    thought, mark, rest = decoded(answer(plan)).partition("</spelt>")
    assert len(thought) > 3
    assert not mark or json.loads(rest)["a"] in (1, 2)
