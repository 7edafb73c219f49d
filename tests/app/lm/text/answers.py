"""Reads answers with the reader of answers, for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from headwater.answer_formats import ReasoningName, ToolParser
from headwater_server.lm.text.answer_parts import SPECIAL, AnswerPart, CallPart, ReasoningPart
from headwater_server.lm.text.answer_reader import REASONING, AnswerReading
from headwater_server.lm.text.tool_calls import FORMATS, CallFormat, ToolUse

SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "when": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "dry": {"type": "boolean"},
        "places": {"type": "array"},
        "more": {"type": "object"},
    },
}
TOOLS: Mapping[str, Mapping[str, Any]] = {"weather": SCHEMA, "add-up": {}, "f": {}}


class Answer(NamedTuple):
    """An answer's parts."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]


def joined(parts: list[AnswerPart]) -> Answer:
    """The parts of an answer, joined."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if not isinstance(part, CallPart):
            continue
        if part.name:
            assert (part.number, part.arguments) == (len(calls), "")
            assert part.id
            calls.append((part.name, ""))
        else:
            name, arguments = calls[part.number]
            calls[part.number] = (name, arguments + part.arguments)
    content = "".join(part for part in parts if isinstance(part, str))
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    assert SPECIAL not in f"{content}{reasoning}{calls}"
    return Answer(content, reasoning, calls)


def reading(
    format: ToolParser | CallFormat | None,
    reasoning: ReasoningName | None = None,
    *,
    has_tokens: bool = False,
    is_open: bool = False,
    **use: bool,
) -> AnswerReading:
    """How answers in a format are read. With ``has_tokens``, all marks are tokens."""
    row = FORMATS[format] if isinstance(format, str) else format
    made = AnswerReading(
        None if row is None else ToolUse(row, TOOLS, **use),
        REASONING[reasoning] if reasoning else None,
        is_open=is_open,
    )
    added: Callable[[str], int | None] = dict.fromkeys(made.marks, 1).get
    return made.with_tokens(added) if has_tokens else made


def read(reading: AnswerReading, *pieces: str, finish: str = "stop") -> Answer:
    """Read an answer that arrives in these pieces."""
    reader = reading.reader()
    parts = [part for piece in pieces for part in reader.read(piece, None)]
    answer = joined(parts + reader.read("", finish))
    assert reader.has_calls == bool(answer.calls)
    return answer


def read_all_ways(reading: AnswerReading, text: str, finish: str = "stop") -> Answer:
    """Read an answer whole, in two pieces however it is cut, and character by character."""
    answer = read(reading, text, finish=finish)
    for cut in range(len(text)):
        assert read(reading, text[:cut], text[cut:], finish=finish) == answer
    assert read(reading, *text, finish=finish) == answer
    return answer
