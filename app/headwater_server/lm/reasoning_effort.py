"""How much a model may think: OpenAI's effort, as variables of the model's chat template.

Source: OpenAI's API reference (``reasoning_effort``, ``reasoning.effort``), and the templates of Qwen, GLM, Granite,
DeepSeek, Kimi and gpt-oss.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta

__all__ = ["Effort", "template_effort"]

Effort: TypeAlias = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    Meta(description="How much the model thinks, if its chat template has a variable for it"),
]
_LEVELS: Final = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""The level of templates, which know low, medium and high, for OpenAI's other levels."""
_SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables of templates that turn thinking on or off."""


def template_effort(effort: str, variables: Collection[str]) -> tuple[dict[str, Any], bool]:
    """The values of a chat template's variables for an effort, and whether the template can honour the effort.

    Args:
        effort: a value of `Effort`.
        variables: the names of the template's variables.
    """
    values: dict[str, Any] = {name: effort != "none" for name in _SWITCHES if name in variables}
    if "reasoning_effort" in variables:
        values["reasoning_effort"] = _LEVELS.get(effort, effort)
    can_switch = any(name in values for name in _SWITCHES)
    return values, can_switch if effort == "none" else bool(values)
