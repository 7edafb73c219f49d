"""Calls are read as they were written, in each format, however the answer arrives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.answer_formats import ToolParser
from headwater_server.lm.text.python_literals import NUMBER
from headwater_server.lm.text.tool_calls import FORMATS
from tests.app.lm.text.answers import Answer, read, reading
from tests.app.lm.text.written_calls import HIDDEN, SINGLE, WRITERS, Call, Digits, as_json, written

NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70).map(str), st.from_regex(NUMBER, fullmatch=True).filter(lambda text: len(text) < 30)
).map(Digits)  # fmt: skip
PARTS = [
    "<", ">", "</", "\n", " ", '"', "'", "\\", "\\u0041", "`", "```", "{", "}", "[", "]", "(", ")", ",", ":", "=", ";",
    "null", "02139", "</x>", "&amp;", "name", "🙂",
]  # fmt: skip


def texts(*marks: str) -> st.SearchStrategy[str]:
    """Strings, also of characters that syntaxes use, perhaps with these marks."""
    letters = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="".join(HIDDEN.values())), max_size=4)
    return st.lists(st.one_of(letters, st.sampled_from([*PARTS, *marks])), max_size=5).map("".join)


def values(strings: st.SearchStrategy[str], keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Values of JSON."""
    return st.recursive(
        st.one_of(strings, NUMBERS, st.booleans(), st.none()),
        lambda each: st.one_of(st.lists(each, max_size=3), st.dictionaries(keys, each, max_size=3)),
        max_leaves=6,
    )


@st.composite
def calls_of(draw: st.DrawFn, format: ToolParser, *, has_tokens: bool) -> list[Call]:
    """Calls that can be written in a format, with arguments of their tools' schemas."""
    row = FORMATS[format]
    has_marks = row.kind not in ("pairs", "keys") or (has_tokens and not row.has_lines and format != "minimax-m2")
    strings = texts(*(row.tokens if has_marks else ()))
    keys = st.from_regex(r"[a-z]([a-z _.-]{0,6}[a-z])?", fullmatch=True) if row.kind == "keys" else strings
    value = values(strings, keys)
    arguments = st.fixed_dictionaries(
        {},
        optional={
            "city": strings.map(lambda text: text.strip("\n")) if format == "seed-oss" else strings,
            "days": st.integers(-(2**70), 2**70).map(lambda number: Digits(number)),
            "when": st.one_of(NUMBERS, st.none()),
            "dry": st.booleans(),
            "places": st.lists(value, max_size=3),
            "more": st.dictionaries(keys, value, max_size=3),
        },
    )
    call: st.SearchStrategy[Call] = st.one_of(st.tuples(st.just("weather"), arguments), st.just(("add-up", {})))
    return draw(st.lists(call, min_size=1, max_size=1 if format in SINGLE else 3))


def exact(arguments: str) -> Any:
    """JSON with the texts of its numbers."""
    return json.loads(arguments, parse_int=lambda text: ("number", text), parse_float=lambda text: ("number", text))


def parsed(answer: Answer) -> Any:
    return [(name, exact(arguments)) for name, arguments in answer.calls]


def in_pieces(text: str, sizes: list[int]) -> list[str]:
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=20)
@given(st.data(), st.booleans(), st.lists(st.integers(1, 30), max_size=20))
def test_written_calls_are_read_however_they_arrive(
    format: ToolParser, data: st.DataObject, has_tokens: bool, sizes: list[int]
) -> None:
    way = reading(format, has_tokens=has_tokens)
    calls = data.draw(calls_of(format, has_tokens=has_tokens))
    text = written(data.draw(st.sampled_from(WRITERS[format])), calls, way.specials)
    answer = read(way, text)
    assert parsed(answer) == [(name, exact(as_json(arguments))) for name, arguments in calls]
    assert (answer.content, answer.reasoning) == ("", "")
    for pieces in (in_pieces(text, sizes), list(text)):
        assert read(way, *pieces) == answer


@pytest.mark.parametrize("number", ["1e400", "-0", "9" * 400, "0.1E+999"])
@pytest.mark.parametrize("format", FORMATS)
def test_numbers_beyond_a_double_keep_their_texts(format: ToolParser, number: str) -> None:
    calls: list[Call] = [("weather", {"when": Digits(number), "places": [Digits(number)]})]
    for write in WRITERS[format]:
        assert parsed(read(reading(format), written(write, calls))) == [("weather", exact(as_json(calls[0][1])))]


def test_a_forgotten_tag_is_text_where_a_grammar_writes_the_tags() -> None:
    city = "a\n</function>\n</tool_call>"
    text = written(WRITERS["qwen-xml"][0], [("weather", {"city": city})])
    answer = read(reading("qwen-xml", is_constrained=True), text)
    assert parsed(answer) == [("weather", {"city": city})]


def test_every_format_is_written() -> None:
    assert set(WRITERS) == set(FORMATS)
