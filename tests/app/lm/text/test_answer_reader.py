"""How answers are divided into reasoning, content and calls."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.answer_formats import ReasoningName, ToolParser
from headwater_server.lm.text.answer_parts import SPECIAL, ReasoningPart
from headwater_server.lm.text.answer_reader import REASONING, AnswerReading, reasoning_format
from headwater_server.lm.text.tool_calls import FORMATS
from tests.app.lm.text.answers import TOOLS, joined, read, read_all_ways, reading
from tests.app.lm.text.test_call_reader import CALL, OTHER, SOUND

MADE = [("add-up", "{}")]
HERMES = f"<tool_call>{OTHER}</tool_call>"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|channel|>analysis", "harmony"),
        ("<|open|>think", "kimi-k3"),
        ("<|channel>thought", "gemma4"),
        ("[THINK]", "mistral"),
        ("<seed:think>", "seed-oss"),
        ("<think></think><response>", "granite"),
        ("<think>\n</think>\n<answer>", "hunyuan"),
        ("<think>\n", "think"),
        ("content.split('</think>')", "think"),
        ("<tool_call>", None),
    ],
)
def test_the_format_of_reasoning_is_known_by_the_template(template: str, name: str | None) -> None:
    found = reasoning_format(template)
    assert (None if found is None else found.name) == name


@pytest.mark.parametrize(
    ("name", "prompt", "is_open"),
    [
        ("think", "user: hi\nassistant: <think>\n", True),
        ("think", "assistant: <think>\n\n</think>\n\n", False),
        ("think", "say <think> x", False),
        ("gemma4", "<|turn>model\n<|channel>thought\n", True),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("kimi-k3", "<|open|>think<|sep|>", True),
        ("mistral", "[/INST]", False),
    ],
)
def test_some_prompts_begin_the_reasoning(name: ReasoningName, prompt: str, is_open: bool) -> None:
    assert AnswerReading(None, REASONING[name]).after(prompt).is_open == is_open


@pytest.mark.parametrize(
    ("name", "answer", "reasoning", "content"),
    [
        ("think", "<think>\na\n\nb\n</think>\n\nc\n", "a\n\nb", "c\n"),
        ("think", "\n<think></think>c", "", "c"),
        ("think", "<think>a<think>b</think>c</think>", "a<think>b", "c</think>"),
        ("think", "<think>`</think>` ends it</think>c", "`</think>` ends it", "c"),
        ("think", "c <think>a</think>", "", "c <think>a</think>"),
        ("think", "<think>a", "a", ""),
        ("think", "<thin", "", "<thin"),
        ("mistral", "[THINK]a[/THINK]c", "a", "c"),
        ("gemma4", "<|channel>thought\na\n<channel|>c", "a", "c"),
        ("seed-oss", "<seed:think>a</seed:think>c", "a", "c"),
        ("granite", "<think>a</think>\n<response>c</response>", "a", "c"),
        ("hunyuan", "<think>\na\n</think>\n<answer>\nc</answer>", "a", "c"),
        (
            "kimi-k3", "<|open|>think<|sep|> a <|close|>think<|sep|><|open|>response<|sep|> c<|close|>response<|sep|>",
            " a ", " c",
        ),
    ],
)  # fmt: skip
def test_reasoning_is_no_content(name: ReasoningName, answer: str, reasoning: str, content: str) -> None:
    assert read_all_ways(reading(None, name), answer) == (content, reasoning, [])
    assert read_all_ways(reading("hermes", name), answer) == (content, reasoning, [])


def test_reasoning_that_the_prompt_began_ends_in_the_answer() -> None:
    for finish in ("stop", "length"):
        assert read_all_ways(reading(None, "think", is_open=True), "\na\n</think>\n\nc", finish) == ("c", "a", [])
        assert read_all_ways(reading(None, "think", is_open=True), "a </thin", finish) == ("", "a </thin", [])
    k3 = reading(None, "kimi-k3", is_open=True)
    assert read_all_ways(k3, "<|open|>response<|sep|>c<|close|>response<|sep|>") == ("c", "", [])


def test_a_mark_that_is_a_token_ends_reasoning_and_its_spelling_does_not() -> None:
    way = reading(None, "think", has_tokens=True)
    answer = f"{SPECIAL}<think>a </think> b{SPECIAL}</think>c <think> {SPECIAL}</think>d"
    assert read_all_ways(way, answer) == ("c <think> d", "a </think> b", [])


@pytest.mark.parametrize("is_open", [False, True])
def test_a_call_within_reasoning_is_made_only_if_the_reasoning_has_no_end(is_open: bool) -> None:
    way, opening = reading("hermes", "think", is_open=is_open), "" if is_open else "<think>"
    thought = f"Shall I?\n{HERMES}\nNo."
    assert read_all_ways(way, f"{opening}{thought}</think>Rain.") == ("Rain.", thought, [])
    assert read_all_ways(way, f"{opening}{thought}</think>\n{HERMES}") == ("", thought, MADE)
    assert read_all_ways(way, f"{opening}I shall.\n{HERMES}\n") == ("", "I shall.", MADE)
    assert read_all_ways(way, f"{opening}{HERMES}{HERMES}") == ("", "", MADE * 2)
    assert read_all_ways(way, f"{opening}{thought}", "length") == ("", thought, [])
    assert read_all_ways(way, f"{opening}<tool_call>{{</think>{HERMES}") == ("", "<tool_call>{", MADE)
    assert read_all_ways(way, f"{opening}a <tool_call>") == ("", "a <tool_call>", [])


def test_a_constrained_answer_may_begin_with_reasoning() -> None:
    way = reading("hermes", "think", is_open=True, is_constrained=True)
    assert read_all_ways(way, f"a</think>\n\n{HERMES}") == ("", "a", MADE)


def test_a_call_without_a_mark_may_follow_reasoning() -> None:
    assert read_all_ways(reading("llama3", "think"), f"<think>{OTHER}</think>\n{OTHER}") == ("", OTHER, MADE)


def test_parts_come_at_once() -> None:
    reader = reading("hermes", "think").reader()
    assert reader.read("<thi", None) == []
    assert reader.read("nk>Hm ", None) == [ReasoningPart("Hm ")]
    assert reader.read("</th", None) == []
    assert reader.read("is", None) == [ReasoningPart("</this")]
    assert reader.read("</think>Let me <see> ", None) == ["Let me <see>"]
    assert reader.read("first <", None) == [" first"]
    assert reader.read("b>", None) == [" <b>"]


@pytest.mark.parametrize(
    ("pieces", "is_open", "count"),
    [
        ((f"{SPECIAL}<think>", "a", " b", f"{SPECIAL}</think>", "c", " d"), False, 4),
        (("a", " b", f"{SPECIAL}</think>", "\n\n", "c"), True, 3),
        (("a", " b"), True, 2),
        (("c", " d"), False, 0),
        (("a", HERMES), True, 1),
    ],
)
@pytest.mark.parametrize("is_whole", [False, True])
def test_tokens_of_reasoning_are_counted(pieces: tuple[str, ...], is_open: bool, count: int, is_whole: bool) -> None:
    way = reading("hermes", "think", is_open=is_open)._replace(specials=frozenset({"<think>", "</think>"}))
    reader = way.reader()
    ends = [len("".join(pieces[: n + 1])) for n in range(len(pieces))]
    if is_whole:
        reader.read("".join(pieces), "stop", ends)
    else:
        for piece, end in zip(pieces, ends, strict=True):
            reader.read(piece, None, [end])
        reader.read("", "stop")
    assert reader.reasoning_tokens == count


MARKS = sorted({mark for name in FORMATS for mark in reading(name).marks} | {"<think>", "</think>", "[THINK]"})
PARTS = [
    *MARKS, CALL, OTHER, "weather", "call:f{", "[", "]", "{", "}", '"', "\\", ",", ";", "<tool", "[TOOL", "\n", "  ",
    "a", '{"a": "b"}', '{"name": "weather",', "`", "```", "<function=f>", "</function>", "<parameter=a>",
    "</parameter>", "functions.f", "f(a='", "')", *(row[1] for row in SOUND),
]  # fmt: skip


@st.composite
def answers(draw: st.DrawFn) -> str:
    """Text with marks, of which some are tokens."""
    return "".join(
        SPECIAL + part if part in MARKS and draw(st.booleans()) else part
        for part in draw(st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=5)), max_size=10))
    )


@given(
    st.sampled_from(list(FORMATS)), st.sampled_from([None, *REASONING]), answers(), st.lists(st.integers(1, 9)),
    st.booleans(), st.booleans(), st.sampled_from(["stop", "length"]), st.booleans(),
)  # fmt: skip
def test_cuts_do_not_matter(
    format: ToolParser, reasoning: ReasoningName | None, answer: str, sizes: list[int], has_tokens: bool, is_open: bool,
    finish: str, is_constrained: bool,
) -> None:  # fmt: skip
    way = reading(
        format,
        reasoning,
        has_tokens=has_tokens,
        is_open=is_open and reasoning is not None,
        is_constrained=is_constrained,
    )
    pieces, rest = [], answer
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    whole = read(way, answer, finish=finish)
    assert read(way, *pieces, rest, finish=finish) == whole
    assert read(way, *answer, finish=finish) == whole
    for name, arguments in () if is_constrained else whole.calls:
        assert name in TOOLS
        assert isinstance(json.loads(arguments), dict)


@given(st.sampled_from(list(FORMATS)), st.lists(st.sampled_from([*PARTS, "x y", "ü"]), max_size=8).map("".join))
def test_nothing_is_lost_of_an_answer_without_calls(format: ToolParser, answer: str) -> None:
    content, reasoning, calls = read(reading(format), answer)
    if not calls and format not in ("harmony", "kimi-k3") and not any(mark in answer for mark in MARKS):
        assert (content, reasoning) == (answer, "")


@pytest.mark.slow
@pytest.mark.parametrize("format", ["hermes", "glm", "qwen-xml", "kimi-k2", "gemma4", "llama4", "harmony", "kimi-k3"])
@pytest.mark.parametrize(
    "part", ["<think></think>", "<think>", " ", "<", "{" * 100, '{\\"', "`", "\n</think>", "opening"]
)
def test_no_answer_takes_long(format: ToolParser, part: str) -> None:
    opening = FORMATS[format].tokens[0]
    for text in (part, opening + part) if part != "opening" else (opening, f"{opening}{{", f'{opening}{{"a'):
        for pieces in ([text * 20_000], [text] * 20_000):
            started_s = time.thread_time()
            read(reading(format, "think"), *pieces)
            assert time.thread_time() - started_s < 5


@pytest.mark.slow
def test_ten_megabytes_of_arguments_in_pieces_take_seconds() -> None:
    calls: dict[ToolParser, tuple[str, str]] = {
        "hermes": ('<tool_call>{"name": "f", "arguments": {"a": "', '"}}</tool_call>'),
        "glm": ("<tool_call>f<arg_key>a</arg_key><arg_value>", "</arg_value></tool_call>"),
        "qwen-xml": ("<tool_call>\n<function=f>\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>"),
        "llama4": ("[f(a='", "')]"),
        "gemma4": ('<|tool_call>call:f{a:<|"|>', '<|"|>}<tool_call|>'),
    }
    for format, (begin, end) in calls.items():
        reader = reading(format).reader()
        parts, started_s = reader.read(begin, None), time.thread_time()
        for _ in range(100_000):
            parts += reader.read("0123456789" * 10, None)
        parts += reader.read(end, "stop")
        assert len(joined(parts).calls[0][1]) == 10_000_000 + len('{"a": ""}')
        assert time.thread_time() - started_s < 60
