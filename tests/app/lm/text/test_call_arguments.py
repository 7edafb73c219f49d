"""Arguments that clients send back."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater_server.lm.text.call_arguments import NumberText, decoded_arguments, number_writer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', {"a": 1}), ("", {}), ("  ", {}), ("null", {}), ("{}", {}),
        ('{"city": "Par', {"arguments": '{"city": "Par'}), ("[1]", {"arguments": "[1]"}), ("5", {"arguments": "5"}),
        ('{"a": "x\ny"}', {"a": "x\ny"}), ('{"a": 1, "a": 2}', {"a": 2}), ("[" * 9999, {"arguments": "[" * 9999}),
        ('{"a": 123456789012345678901}', {"a": 123456789012345678901}), ('{"a": 1.5}', {"a": 1.5}),
        ('{"a": "\\ud83d\\ude42"}', {"a": "🙂"}), ('{"a": "\\uD83D"}', {"arguments": '{"a": "\\uD83D"}'}),
        ('{"a": 1e9}', {"a": NumberText("1e9")}), ("1" * 5000, {"arguments": "1" * 5000}),
        (f'{{"a": {"1" * 5000}}}', {"a": NumberText("1" * 5000)}), ('{"a": 1} x', {"arguments": '{"a": 1} x'}),
    ],
)  # fmt: skip
def test_any_text_becomes_an_object(text: str, expected: Any) -> None:
    assert decoded_arguments(text) == expected


@given(st.text())
def test_no_text_is_refused(text: str) -> None:
    assert isinstance(decoded_arguments(text), dict)


def test_long_arguments_take_bounded_time() -> None:
    begin_s = time.thread_time()
    assert decoded_arguments(json.dumps({"a": "\\ud" * 3_000_000}))
    assert "arguments" in decoded_arguments('{"a": "' + "x" * 10_000_000)
    assert time.thread_time() - begin_s < 5


def test_numbers_of_their_own_text_are_written_into_json() -> None:
    default, finish = number_writer()
    value = {"b": [NumberText("1e9"), 1, NumberText("-0")], "a": "1e9"}
    assert finish(json.dumps(value, default=default, indent=1, sort_keys=True)) == (
        '{\n "a": "1e9",\n "b": [\n  1e9,\n  1,\n  -0\n ]\n}'
    )
    with pytest.raises(TypeError, match="Object of type object is not JSON serializable"):
        json.dumps(object(), default=default)
