"""``python -m tests.clients.harmony_reader``: reads answers of gpt-oss with the reader of chat, responses and messages.

A line of the input is an answer: a list of pieces, each a text and whether it is a special token. A line of the output
is what was read: reasoning, content, and each call's name and arguments.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Final

from headwater_server.lm.text.answer_parts import SPECIAL, CallPart, ReasoningPart
from headwater_server.lm.text.answer_reader import REASONING, AnswerReading
from headwater_server.lm.text.tool_calls import FORMATS, ToolUse

__all__: list[str] = []

MARKS: Final = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")
READING: Final = (
    AnswerReading(ToolUse(FORMATS["harmony"], {name: {} for name in ("add", "a.b", "x-y_z")}), REASONING["harmony"])
    .with_tokens({mark: n for n, mark in enumerate(MARKS)}.get)
    .after("<|start|>assistant")
)


def read(pieces: Sequence[tuple[str, bool]]) -> tuple[str, str, list[tuple[str, str]]]:
    """An answer's reasoning, its content, and its calls."""
    reader = READING.reader()
    parts = [part for text, is_special in pieces for part in reader.read(SPECIAL * is_special + text, None)]
    parts += reader.read("", "stop")
    calls: list[Any] = []
    for part in parts:
        if isinstance(part, CallPart):
            calls += [[part.name, ""]] if part.name else []
            calls[part.number][1] += part.arguments
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    return reasoning, "".join(part for part in parts if isinstance(part, str)), calls


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(read(json.loads(line))))
