"""Tells the operator in which formats a language model's reasoning and tool calls are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from headwater.answer_formats import ReasoningName, ToolParser, found_reasoning, found_tool_parser
from headwater.hf.json_files import checked_json

__all__ = ["formats_note"]

_TOKENIZER_CONFIG: Final = "tokenizer_config.json"


def formats_note(
    title: str, folder: Path, tool_parser: ToolParser | None, reasoning: ReasoningName | Literal["none"] | None
) -> str:
    """The formats of a model's reasoning and tool calls, as configured or as its chat templates show them; an empty
    string if it has no chat template.

    Args:
        title: what the folder is, for errors.
        folder: the model's Hugging Face folder.
        tool_parser: the configured format of calls, if any.
        reasoning: the configured format of reasoning, if any.

    Raises:
        LoadError: ``tokenizer_config.json`` is no JSON.
    """
    template = _templates(title, folder)
    if not template:
        return ""
    tools = tool_parser or found_tool_parser(template) or "unknown"
    return f"reasoning: {reasoning or found_reasoning(template) or 'none'}; tool calls: {tools}"


def _templates(title: str, folder: Path) -> str:
    """The source of all chat templates."""
    paths = [folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    files = [path.read_text(errors="replace") for path in paths if path.is_file()]
    if files or not (folder / _TOKENIZER_CONFIG).is_file():
        return "\n".join(files)
    config: Any = checked_json(title, folder, _TOKENIZER_CONFIG, "the tokenizer's configuration")
    setting = config.get("chat_template") if isinstance(config, dict) else None
    entries = setting if isinstance(setting, list) else [{"template": setting}]
    return "\n".join(str(entry.get("template") or "") for entry in entries if isinstance(entry, dict))
