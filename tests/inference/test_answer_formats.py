"""How the formats of answers are found in chat templates."""

from __future__ import annotations

from typing import get_args

from headwater.answer_formats import (
    REASONING_FORMATS,
    TOOL_PARSERS,
    ReasoningName,
    ToolParser,
    found_reasoning,
    found_tool_parser,
)


def test_each_format_is_found_by_its_own_texts_unless_an_earlier_format_has_them() -> None:
    names = list(TOOL_PARSERS)
    for name, texts in TOOL_PARSERS.items():
        for text in texts:
            found = found_tool_parser(f"{{{{ '{text}' }}}}")
            assert found is not None
            assert names.index(found) <= names.index(name)
    for reasoning, marks in REASONING_FORMATS:
        assert found_reasoning(" ".join(marks)) == reasoning
    assert found_tool_parser("{{ messages }}") is None
    assert found_reasoning("{{ messages }}") is None


def test_tables_and_names_agree() -> None:
    assert set(TOOL_PARSERS) <= set(get_args(ToolParser))
    assert {name for name, _ in REASONING_FORMATS} == set(get_args(ReasoningName))
