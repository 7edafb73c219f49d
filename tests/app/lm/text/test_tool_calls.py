"""Calls of tools in answers, however these are cut into pieces."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.lm.text.tool_calls import FORMATS, CallFinder, CallFormat, CallPart, ToolUse, call_format

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


PARTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", CALL, LLAMA_CALL, OTHER, "weather", "[",
    "]", "{", "}", '"', "\\", ",", ";", "<tool", "[TOOL", "\n", "  ", "a", '{"a": "b"}', '{"name": "weather",',
]  # fmt: skip
ANSWERS = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


@given(st.sampled_from(list(FORMATS.values())), ANSWERS, st.lists(st.integers(1, 9)), st.booleans(), st.booleans())
def test_cuts_do_not_matter(
    format: CallFormat, answer: str, sizes: list[int], is_constrained: bool, only_first: bool
) -> None:
    pieces, rest = [], answer
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    options = {"is_constrained": is_constrained, "only_first": only_first}
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
    assert events[begin] == [CallPart(0, "weather", ""), CallPart(0, "", "{")]
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


@pytest.mark.parametrize(
    "part", ['<tool_call>{\\"', "<tool_call>{", '<tool_call>{"a', "<tool_call>", "{" * 100, " ", "<"]
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
