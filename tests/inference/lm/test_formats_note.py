"""What the operator is told about the formats of a model's answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater.lm.formats_note import formats_note


@pytest.mark.parametrize(
    ("files", "note"),
    [
        ({}, ""),
        ({"tokenizer_config.json": "[]"}, ""),
        ({"chat_template.jinja": "<tool_call><think>"}, "reasoning: think; tool calls: hermes"),
        ({"chat_template.jinja": "{{ messages }}"}, "reasoning: none; tool calls: unknown"),
        ({"tokenizer_config.json": json.dumps({"chat_template": "｜DSML｜"})}, "reasoning: none; tool calls: dsml"),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {"chat_template": [{"name": "tool_use", "template": "[TOOL_CALLS]"}]}
                )
            },
            "reasoning: none; tool calls: mistral",
        ),
    ],
)
def test_the_formats_are_those_of_the_chat_templates(tmp_path: Path, files: dict[str, str], note: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert formats_note("model m", tmp_path, None, None) == note


def test_a_configured_format_counts(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("<tool_call><think>")
    assert formats_note("model m", tmp_path, "glm", "none") == "reasoning: none; tool calls: glm"
