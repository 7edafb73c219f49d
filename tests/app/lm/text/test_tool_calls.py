"""Calls of tools in answers, however these are cut into pieces."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater_server.lm.text.answer_parts import CallPart
from headwater_server.lm.text.tool_calls import FORMATS, CallFinder, CallFormat, ToolUse, call_format

NAMES = frozenset({"weather", "add-up"})
HERMES, LLAMA3, MISTRAL = FORMATS["hermes"], FORMATS["llama3"], FORMATS["mistral"]
ARGUMENTS = '{"city": "Köln \\"{]\\\\", "days": [1, {"a": null}]}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
LLAMA_CALL = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
OTHER = '{"name": "add-up", "arguments": {}}'
BOTH = [("weather", ARGUMENTS), ("add-up", "{}")]


def joined(found: list[str | CallPart]) -> tuple[str, list[tuple[str, str]]]:
    """The content, and the calls."""
    content = "".join(one for one in found if isinstance(one, str))
    calls: list[tuple[str, str]] = []
    for one in found:
        if isinstance(one, str):
            continue
        if one.name:
            assert (one.number, one.arguments) == (len(calls), "")
            calls.append((one.name, ""))
        else:
            name, arguments = calls[one.number]
            calls[one.number] = (name, arguments + one.arguments)
    return content, calls


def read(format: CallFormat, *pieces: str, **options: Any) -> tuple[str, list[tuple[str, str]]]:
    finder = CallFinder(ToolUse(format, NAMES, **options))
    found = [one for piece in pieces for one in finder.push(piece)]
    content, calls = joined(found + finder.finish())
    assert finder.has_calls == bool(calls)
    return content, calls


SOUND = [
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", BOTH[:1]),
    (HERMES, f"Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>\n", "Let me see.", BOTH),
    (HERMES, f"a\n<tool_call>{OTHER}</tool_call>\nb\n", "a\n\nb\n", BOTH[1:]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "weather"}', "", [("weather", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "weather"}</tool_', "", [("weather", "{}")]),
    (HERMES, 'a </tool_call> < "<tool_ca', 'a </tool_call> < "<tool_ca', []),
    (HERMES, " \n ", " \n ", []),
    (LLAMA3, LLAMA_CALL, "", BOTH[:1]),
    (LLAMA3, f"\n {LLAMA_CALL}; {OTHER}\n", "", BOTH),
    (LLAMA3, f"<|python_tag|>{LLAMA_CALL};{OTHER}", "", BOTH),
    (LLAMA3, f"So: <|python_tag|>{CALL}", "So:", BOTH[:1]),
    (LLAMA3, f"So: {CALL}", f"So: {CALL}", []),
    (LLAMA3, f"{OTHER}; and more", "; and more", BOTH[1:]),
    (MISTRAL, f"[TOOL_CALLS][{CALL}, {OTHER}]", "", BOTH),
    (MISTRAL, f"So:\n[TOOL_CALLS] [{CALL},{OTHER}", "So:", BOTH),
    (MISTRAL, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]add-up[CALL_ID]a1B2c3D4e[ARGS]{{}}", "", BOTH),
    (MISTRAL, f"[TOOL_CALLS]weather{ARGUMENTS}\n[TOOL_CALLS] add-up {{}}", "", BOTH),
    (MISTRAL, f"[TOOL_CALLS]{OTHER}", "", BOTH[1:]),
]
MALFORMED = [
    (HERMES, "<tool_call>"),
    (HERMES, "<tool_call>weather</tool_call>"),
    (HERMES, f"<tool_call>{CALL[:-1]}"),
    (HERMES, f"<tool_call>{CALL} more</tool_call>"),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"a": 1,}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"a": "1\n2"}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "weather", "arguments": "{}"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "weather", "arguments": {"a": "\\ud800"}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "weather", "arguments": ' + '{"a":' * 200 + "1" + "}" * 200 + "}</tool_call>"),
    (HERMES, '<tool_call>{"name": "weather\\'),
    (LLAMA3, '{"name": "Ada", "parameters": {}}'),
    (LLAMA3, '{"answer": 42}'),
    (LLAMA3, "<|python_tag|>print(1)"),
    (LLAMA3, "{]}; {}"),
    (MISTRAL, "[TOOL_CALLS][]"),
    (MISTRAL, "[TOOL_CALLS]no name{}"),
    (MISTRAL, "[TOOL_CALLS]unknown[ARGS]{}"),
    (MISTRAL, "[TOOL_CALLS]weather[ARGS]{1}"),
    (MISTRAL, "[TOOL_CALLS]" + "x" * 300 + "{}"),
]


@pytest.mark.parametrize(("format", "answer", "content", "calls"), SOUND)
def test_calls_are_found(format: CallFormat, answer: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(format, answer) == (content, calls)
    assert read(format, *answer) == (content, calls)


@pytest.mark.parametrize(("format", "answer"), MALFORMED)
def test_what_is_no_call_is_content(format: CallFormat, answer: str) -> None:
    assert read(format, answer) == (answer, [])
    assert read(format, *answer) == (answer, [])


THOUGHT = f"<think>Call it?\n<tool_call>{CALL}</tool_call>"
THINKING = MISTRAL._replace(reasoning=("[THINK]", "[/THINK]"))
THOUGHTS = [
    (HERMES, f"{THOUGHT} No.</think>\nRain.", f"{THOUGHT} No.</think>\nRain.", []),
    (HERMES, f"{THOUGHT}</think>\n\n<tool_call>{OTHER}</tool_call>", f"{THOUGHT}</think>", BOTH[1:]),
    (HERMES, f"{THOUGHT}<tool_call>{OTHER}</tool_call>", f"{THOUGHT}<tool_call>{OTHER}</tool_call>", []),
    (HERMES, f"So: {THOUGHT}</think>.", f"So: {THOUGHT}</think>.", []),
    (HERMES, f"<tool_call>{OTHER}</tool_call>{THOUGHT}</think>", f"{THOUGHT}</think>", BOTH[1:]),
    (HERMES, f"<tool_call>{{<think>}}<tool_call>{OTHER}</tool_call>", None, []),
    (HERMES, f"<tool_call>{{</think><think>}}</think><tool_call>{OTHER}</tool_call>", None, BOTH[1:]),
    (HERMES, f"</think><tool_call>{OTHER}</tool_call>", "</think>", BOTH[1:]),
    (
        HERMES,
        '<tool_call>{"name": "weather", "arguments": {"city": "<think>"}}</tool_call>',
        "",
        [("weather", '{"city": "<think>"}')],
    ),
    (LLAMA3, f"<think>{LLAMA_CALL}</think>\n{OTHER}", f"<think>{LLAMA_CALL}</think>", BOTH[1:]),
    (LLAMA3, f"<think><|python_tag|>{LLAMA_CALL}</think>So: {OTHER}", None, []),
    (LLAMA3, f"\n<think>{LLAMA_CALL}", f"\n<think>{LLAMA_CALL}", []),
    (THINKING, f"[THINK][TOOL_CALLS][{CALL}][/THINK]", f"[THINK][TOOL_CALLS][{CALL}][/THINK]", []),
    (THINKING, "[THINK]a[/THINK][TOOL_CALLS]add-up[ARGS]{}", "[THINK]a[/THINK]", BOTH[1:]),
    (THINKING, f"[TOOL_CALLS][THINK][TOOL_CALLS][{CALL}][/THINK]", None, []),
]


@pytest.mark.parametrize(("format", "answer", "content", "calls"), THOUGHTS)
def test_a_call_that_is_only_thought_of_is_content(
    format: CallFormat, answer: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    expected = answer.removesuffix(f"<tool_call>{OTHER}</tool_call>" * bool(calls)) if content is None else content
    assert read(format, answer) == (expected, calls)
    for cut in range(len(answer)):
        assert read(format, answer[:cut], answer[cut:]) == (expected, calls)
    assert read(format, *answer) == (expected, calls)


def test_an_answer_may_begin_within_the_reasoning() -> None:
    thought = f"Call it?<tool_call>{CALL}</tool_call></think>"
    for pieces in ([f"{thought}\n<tool_call>{OTHER}</tool_call>"], list(f"{thought}\n<tool_call>{OTHER}</tool_call>")):
        assert read(HERMES, *pieces, is_reasoning=True) == (thought, BOTH[1:])
    assert read(HERMES, thought[:-8], is_reasoning=True) == (thought[:-8], [])
    assert read(LLAMA3, f"{LLAMA_CALL}</think>{OTHER}", is_reasoning=True) == (f"{LLAMA_CALL}</think>", BOTH[1:])


@pytest.mark.parametrize(
    ("prompt", "is_reasoning"),
    [("user: hi\nassistant: <think>\n", True), ("assistant: <think>\n\n</think>\n\n", False), ("say <think> x", False)],
)
def test_some_prompts_begin_the_reasoning(prompt: str, is_reasoning: bool) -> None:
    assert ToolUse(HERMES, NAMES).after(prompt).is_reasoning == is_reasoning


def test_reasoning_comes_at_once() -> None:
    finder = CallFinder(ToolUse(HERMES, NAMES))
    assert finder.push("<thi") == []
    assert finder.push("nk>Hm <tool_call>") == ["<think>Hm <tool_call>"]
    assert finder.push(" {</th") == [" {"]
    assert finder.push("is") == ["</this"]


PARTS = [
    "<think>", "</think>", "[THINK]", "[/THINK]", "<thi", "nk>",
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", CALL, LLAMA_CALL, OTHER, "weather", "[",
    "]", "{", "}", '"', "\\", ",", ";", "<tool", "[TOOL", "\n", "  ", "a", '{"a": "b"}', '{"name": "weather",',
]  # fmt: skip
ANSWERS = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


@given(
    st.sampled_from([*FORMATS.values(), THINKING]), ANSWERS, st.lists(st.integers(1, 9)), st.booleans(), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_cuts_do_not_matter(
    format: CallFormat, answer: str, sizes: list[int], is_constrained: bool, only_first: bool, is_reasoning: bool
) -> None:
    pieces, rest = [], answer
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    options = {
        "is_constrained": is_constrained, "only_first": only_first,
        "is_reasoning": is_reasoning and not is_constrained,
    }  # fmt: skip
    assert read(format, *pieces, rest, **options) == read(format, answer, **options)


@given(st.sampled_from(list(FORMATS.values())), ANSWERS)
def test_calls_parse_and_nothing_else_is_lost(format: CallFormat, answer: str) -> None:
    content, calls = read(format, answer)
    for name, arguments in calls:
        assert name in NAMES
        assert isinstance(json.loads(arguments), dict)
        assert arguments == "{}" or arguments in answer
    if not calls:
        assert content == answer


def test_content_comes_at_once() -> None:
    finder = CallFinder(ToolUse(HERMES, NAMES))
    assert finder.push("Let me <see> ") == ["Let me <see>"]
    assert finder.push("first <") == [" first"]
    assert finder.push("b>") == [" <b>"]


@pytest.mark.parametrize(
    ("format", "answer"),
    [
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>"),
        (LLAMA3, LLAMA_CALL),
        (MISTRAL, f"[TOOL_CALLS][{CALL}]"),
        (MISTRAL, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"),
    ],
)
def test_arguments_come_as_they_are_written_where_a_grammar_makes_them_sound(format: CallFormat, answer: str) -> None:
    finder = CallFinder(ToolUse(format, NAMES, is_constrained=True))
    events = [finder.push(one) for one in answer]
    begin = answer.index(ARGUMENTS)
    assert [part[:3] for part in events[begin]] == [(0, "weather", ""), (0, "", "{")]
    assert [event for event in events[begin + 1 :] if event] == [[CallPart(0, "", one)] for one in ARGUMENTS[1:]]
    assert finder.finish() == []


def test_what_the_length_cut_is_a_part_of_a_call_where_a_grammar_made_it() -> None:
    answer = f"<tool_call>{CALL}</tool_call>"
    for end in range(len(answer) + 1):
        content, calls = read(HERMES, answer[:end], is_constrained=True)
        assert ("".join(call[1] for call in calls)) == ARGUMENTS[: max(end - answer.index(ARGUMENTS), 0)]
        assert content == ""


def test_further_calls_can_be_left_out() -> None:
    answer = f"<tool_call>{CALL}</tool_call><tool_call>{OTHER}</tool_call>"
    assert read(HERMES, answer, only_first=True) == ("", BOTH[:1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        '<tool_call>{\\"',
        "<tool_call>{",
        '<tool_call>{"a',
        "<tool_call>",
        "{" * 100,
        " ",
        "<",
        "<think></think>",
        "<think>",
    ],
)
def test_no_answer_takes_long(part: str) -> None:
    for pieces in ([part * 20_000], [part] * 20_000):
        started_s = time.thread_time()
        read(HERMES, *pieces)
        assert time.thread_time() - started_s < 5


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ('{% if tools %}<tool_call>\\n{\\"name\\": ...', HERMES),
        ("{{ '<|python_tag|>' + tool_call.name }}", LLAMA3),
        (
            """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and""",
            LLAMA3,
        ),
        ("{{ '[TOOL_CALLS][' }}", MISTRAL),
        ("[TOOL_CALLS]{{ name }}[ARGS]", MISTRAL._replace(has_names=True)),
        ("[THINK]{{ thought }}[/THINK][TOOL_CALLS]", MISTRAL._replace(reasoning=("[THINK]", "[/THINK]"))),
        ("<tool_call>\\n<function=example>", None),
        ("<tool_call>{name}<arg_key>", None),
        ("<|im_start|>", None),
        ("", None),
    ],
)
def test_the_format_is_known_by_the_template(template: str, format: CallFormat | None) -> None:
    assert call_format(template) == format


def test_ids_are_of_the_form_that_templates_take() -> None:
    assert len({HERMES.new_id() for _ in range(100)}) == 100
    assert HERMES.new_id().startswith("call_")
    id = MISTRAL.new_id()
    assert len(id) == 9
    assert id.isalnum()
