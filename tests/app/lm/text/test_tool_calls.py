"""The table of formats of tool calls, and how a chat template's format is found."""

from __future__ import annotations

import pytest

from headwater.answer_formats import ToolParser
from headwater_server.lm.text.tool_calls import FORMATS, call_format


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("<|start|>assistant<|channel|>analysis", "harmony"),
        ("<|open|>think<|sep|>", "kimi-k3"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi-k2"),
        ("<｜DSML｜function_calls>", "dsml"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek-v3"),
        ("<|tool_call>call:{{ name }}", "gemma4"),
        ("<start_function_call>call:", "functiongemma"),
        ("<tool_calls><tool_call>{{ name }}<tool_sep><arg_key>", "hy-v3"),
        ("<tool_call>{name}<arg_key>", "glm"),
        ("<seed:tool_call><function=example>", "seed-oss"),
        ("<tool_call>\\n<function=example>", "qwen-xml"),
        ("<minimax:tool_call><invoke name=", "minimax-m2"),
        ('{% if tools %}<tool_call>\\n{\\"name\\": ...', "hermes"),
        ("{{ '[TOOL_CALLS][' }}", "mistral"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral"),
        ("<|python_start|>", "llama4"),
        ("{{ '<|python_tag|>' + tool_call.name }}", "llama3"),
        ("""{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name""", "llama3"),
        ("<|tool_call_start|>", "lfm2"),
        ("<function_calls>", "olmo3"),
        ("<|tool_call|>", "granite3"),
        ("functools[", "phi4-mini"),
        ("<tool_calls>[", "jamba"),
        ("<TOOLCALL>[", "nemotron"),
        ("<|action_start|><|plugin|>", "internlm2"),
        ("<|im_start|>", None),
        ("", None),
    ],
)
def test_the_format_is_known_by_the_template(template: str, format: ToolParser | None) -> None:
    found = call_format(template)
    assert (None if found is None else found.name) == format


def test_each_format_can_be_configured() -> None:
    for name, row in FORMATS.items():
        found = call_format("[TOOL_CALLS]", name)
        assert found is not None
        assert found.name == row.name


@pytest.mark.parametrize(("template", "has_names"), [("[TOOL_CALLS][ARGS]", True), ("[TOOL_CALLS][", False)])
def test_mistrals_later_models_write_names_before_arguments(template: str, has_names: bool) -> None:
    found = call_format(template)
    assert found is not None
    assert found.has_names == has_names


def test_ids_are_of_the_form_that_templates_take() -> None:
    hermes, mistral = FORMATS["hermes"], FORMATS["mistral"]
    assert len({hermes.new_id() for _ in range(100)}) == 100
    assert hermes.new_id().startswith("call_")
    id = mistral.new_id()
    assert len(id) == 9
    assert id.isalnum()
