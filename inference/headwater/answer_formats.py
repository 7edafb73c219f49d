"""The formats in which language models write reasoning and tool calls, as their chat templates show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

__all__ = ["REASONING_FORMATS", "TOOL_PARSERS", "ReasoningName", "ToolParser", "found_reasoning", "found_tool_parser"]

ToolParser: TypeAlias = Literal[
    "harmony", "kimi-k3", "kimi-k2", "dsml", "deepseek-v3", "gemma4", "functiongemma", "hy-v3", "glm", "seed-oss",
    "qwen-xml", "minimax-m2", "hermes", "mistral", "llama4", "llama3", "lfm2", "olmo3", "granite3", "phi4-mini",
    "jamba", "hunyuan-a13b", "nemotron", "internlm2", "xlam",
]  # fmt: skip
"""The formats in which language models write tool calls; `headwater_server.lm.text.tool_calls` reads them."""
ReasoningName: TypeAlias = Literal[
    "harmony", "kimi-k3", "gemma4", "mistral", "seed-oss", "granite", "hunyuan", "think"
]  # fmt: skip
"""The formats in which language models write reasoning; `headwater_server.lm.text.answer_reader` reads them."""

TOOL_PARSERS: Final[Mapping[ToolParser, tuple[str, ...]]] = {
    "harmony": ("<|channel|>",),
    "kimi-k3": ("<|open|>",),
    "kimi-k2": ("<|tool_calls_section_begin|>",),
    "dsml": ("｜DSML｜",),
    "deepseek-v3": ("<｜tool▁calls▁begin｜>",),
    "gemma4": ("<|tool_call>",),
    "functiongemma": ("<start_function_call>",),
    "hy-v3": ("<tool_sep>",),
    "glm": ("<arg_key>",),
    "seed-oss": ("<seed:tool_call>",),
    "qwen-xml": ("<function=",),
    "minimax-m2": ("<minimax:tool_call>",),
    "hermes": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "llama4": ("<|python_start|>",),
    "llama3": ("<|python_tag|>", '"parameters": dictionary of argument'),
    "lfm2": ("<|tool_call_start|>",),
    "olmo3": ("<function_calls>",),
    "granite3": ("<|tool_call|>",),
    "phi4-mini": ("functools",),
    "jamba": ("<tool_calls>",),
    "nemotron": ("<TOOLCALL>",),
    "internlm2": ("<|plugin|>",),
}
"""Texts of which a chat template has one if the model writes calls in the format. The first format that fits counts;
formats that are missing here can only be configured."""
REASONING_FORMATS: Final[tuple[tuple[ReasoningName, tuple[str, ...]], ...]] = (
    ("harmony", ("<|channel|>",)),
    ("kimi-k3", ("<|open|>",)),
    ("gemma4", ("<|channel>",)),
    ("mistral", ("[THINK]",)),
    ("seed-oss", ("<seed:think>",)),
    ("granite", ("<think>", "<response>")),
    ("hunyuan", ("<think>", "<answer>")),
    ("think", ("<think>",)),
    ("think", ("</think>",)),
)
"""Texts that a chat template has if the model writes reasoning in the format. The first format that fits counts."""


def found_tool_parser(template: str) -> ToolParser | None:
    """The format in which a chat template writes calls; `None` if it is no known format."""
    return next((name for name, texts in TOOL_PARSERS.items() if any(text in template for text in texts)), None)


def found_reasoning(template: str) -> ReasoningName | None:
    """The format in which a chat template writes reasoning; `None` if it is no known format."""
    return next((name for name, texts in REASONING_FORMATS if all(text in template for text in texts)), None)
