"""Request fields for a model's reasoning: whether it reasons, how much, and whether the answer shows it.

Sources: OpenAI's API reference (``reasoning_effort``, ``reasoning.effort``), OpenRouter's (``reasoning``), Anthropic's
and Z.ai's (``thinking``), Qwen's (``enable_thinking``, ``thinking_budget``), vLLM's (``thinking_token_budget``,
``include_reasoning``), and the chat templates of Qwen, GLM, Granite, DeepSeek, Kimi, Seed, Mistral and gpt-oss.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from headwater_server.codecs.faults import at, shown
from headwater_server.lm.sampling_fields import Flag, StreamFields

if TYPE_CHECKING:
    from headwater_server.lm.text.chat_template import ChatTemplate

__all__ = [
    "SWITCHES",
    "Effort",
    "ReasoningFields",
    "ReasoningOptions",
    "ReasoningWish",
    "Thinking",
    "is_off",
    "template_effort",
    "template_variables",
]

Effort: TypeAlias = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    Meta(description="How much the model thinks, if its chat template has a variable for it"),
]
Budget: TypeAlias = Annotated[int, Meta(ge=0, description="Most tokens of the reasoning")]
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_LEVELS: Final = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""The level of templates that don't say which levels they know: most know low, medium and high."""
SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables of templates that turn thinking on or off."""
_Value = TypeVar("_Value")


class ReasoningOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenRouter's ``reasoning``."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Budget | None = None
    exclude: Annotated[bool | None, Meta(description="true: the answer doesn't show the reasoning")] = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Anthropic's ``thinking``, which other servers take in chats, too. All types but ``enabled`` and ``disabled``
    leave the choice to the model."""

    type: Literal["enabled", "disabled", "adaptive", "auto", "between_tools"]
    budget_tokens: Budget | None = None
    clear_thinking: Annotated[bool | None, Meta(description="Whether earlier reasoning is left out")] = None


class ReasoningFields(StreamFields, kw_only=True):
    """The fields. Where several say the same, they must agree."""

    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    max_reasoning_tokens: Budget | None = None
    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = None
    include_reasoning: Annotated[Flag | None, Meta(extra_json_schema={"default": True})] = None

    def reasoning_wish(self) -> ReasoningWish:
        """What the fields ask for.

        Raises:
            BadRequest: two fields that say the same have different values.
        """
        reasoning, thinking = self.reasoning or ReasoningOptions(), self.thinking
        types = {"enabled": True, "disabled": False}
        switch = _agreed(
            {
                "enable_thinking": self.enable_thinking,
                "thinking.type": None if thinking is None else types.get(thinking.type),
                "reasoning.enabled": reasoning.enabled,
            }
        )
        effort = _agreed({"reasoning_effort": self.reasoning_effort, "reasoning.effort": reasoning.effort})
        budget = _agreed(
            {
                "max_reasoning_tokens": self.max_reasoning_tokens,
                "thinking_budget": self.thinking_budget,
                "thinking_token_budget": self.thinking_token_budget,
                "thinking.budget_tokens": None if thinking is None else thinking.budget_tokens,
                "reasoning.max_tokens": reasoning.max_tokens,
            }
        )
        is_shown = _agreed(
            {
                "include_reasoning": self.include_reasoning,
                "reasoning.exclude": None if reasoning.exclude is None else not reasoning.exclude,
            }
        )
        clears = None if thinking is None else thinking.clear_thinking
        return ReasoningWish(switch, effort, budget, clears, is_shown is None or is_shown[1])


class ReasoningWish(NamedTuple):
    """What a request asks for; a field is `None` if the request leaves it to the model. A tuple has the path of the
    request's field and its value."""

    switch: tuple[str, bool] | None = None
    """Whether the model reasons."""
    effort: tuple[str, str] | None = None
    budget: tuple[str, int] | None = None
    """Most tokens of the reasoning, without its marks."""
    clears: bool | None = None
    """Whether the reasoning of earlier turns is left out of the prompt."""
    is_shown: bool = True
    """Whether the answer shows the reasoning."""


def template_variables(
    wish: ReasoningWish, template: ChatTemplate, *, can_reason: bool
) -> tuple[dict[str, Any], list[str]]:
    """The values of a chat template's variables for a wish, and the paths of the request's fields that the template
    can't honour. A budget is honoured without the template.

    Args:
        wish: what the request asks for.
        template: the chat template.
        can_reason: whether the model's reasoning has a known format: without a switch it reasons as it likes. A model
            without such a format never reasons.
    """
    variables, levels = template.variables, template.words & set(EFFORTS)
    values: dict[str, Any] = {}
    ignored: list[str] = []
    if wish.effort is not None:
        path, effort = wish.effort
        values, is_honoured = template_effort(effort, variables, levels)
        ignored += [] if is_honoured else [path]
    if wish.switch is not None:
        path, is_on = wish.switch
        values |= {name: is_on for name in SWITCHES if name in variables}
        is_honoured = any(name in variables for name in SWITCHES) or is_on is can_reason
        if "reasoning_effort" in variables and not is_on:
            values["reasoning_effort"], is_exact = _level("none", levels)
            is_honoured = is_honoured or is_exact
        ignored += [] if is_honoured else [path]
    if wish.budget is not None and "thinking_budget" in variables:
        values["thinking_budget"] = wish.budget[1]
    if wish.clears is not None:
        if "clear_thinking" in variables:
            values["clear_thinking"] = wish.clears
        else:
            ignored.append("thinking.clear_thinking")
    return values, ignored


def is_off(variables: Mapping[str, Any]) -> bool:
    """Whether the variables of a chat template turn thinking off."""
    return any(variables.get(name) is False for name in SWITCHES)


def template_effort(
    effort: str, variables: Collection[str], levels: Collection[str] = ()
) -> tuple[dict[str, Any], bool]:
    """The values of a chat template's variables for an effort, and whether the template can honour the effort.

    Args:
        effort: a value of `Effort`.
        variables: the names of the template's variables.
        levels: the values of `EFFORTS` that the template mentions.
    """
    values: dict[str, Any] = {name: effort != "none" for name in SWITCHES if name in variables}
    is_honoured = bool(values)
    if "reasoning_effort" in variables:
        values["reasoning_effort"], is_exact = _level(effort, levels)
        is_honoured = is_honoured or effort != "none" or is_exact
    return values, is_honoured


def _level(effort: str, levels: Collection[str]) -> tuple[str, bool]:
    """The level of a template that is nearest to an effort, and whether it is the same."""
    if len(levels) < 2:  # a single level is the template's default
        level = _LEVELS.get(effort, effort)
    elif effort in levels:
        level = effort
    else:
        place = EFFORTS.index(effort)
        known = [level for level in EFFORTS if level in levels and level != "none"] or ["none"]
        level = min(known, key=lambda level: abs(EFFORTS.index(level) - place))
    return level, level == effort


def _agreed(fields: Mapping[str, _Value | None]) -> tuple[str, _Value] | None:
    """The first of the fields that is set, with its path; `None` if no field is set.

    Raises:
        BadRequest: another field has another value.
    """
    given = [(path, value) for path, value in fields.items() if value is not None]
    for path, value in given[1:]:
        if value != given[0][1]:
            expected = f"expected the same as {given[0][0]}, got {shown(given[0][1])} and {shown(value)}"
            raise at(path, None, f"{expected}; leave one of them out")
    return given[0] if given else None
