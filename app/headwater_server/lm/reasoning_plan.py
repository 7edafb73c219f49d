"""Whether and how long the model reasons before its answer, in the prompt and in the answer's grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from headwater.engine import EngineLimits, Grammar
from headwater_server.lm.reasoning_grammar import after_reasoning, can_limit, content_opening, limited_reasoning
from headwater_server.lm.text.answer_reader import AnswerReading, ReasoningFormat
from headwater_server.lm.text.call_source import SPACE

if TYPE_CHECKING:
    from headwater_server.lm.text.language import LanguageText

__all__ = ["ReasoningPlan", "reasoning_plan"]


class ReasoningPlan(NamedTuple):
    """The reasoning of a request's answers."""

    prompt: str
    """The rendered prompt, whose reasoning may be closed at once."""
    format: ReasoningFormat | None
    """The format of the answers' reasoning; `None` if they have no reasoning."""
    grammar: Grammar | None
    """The grammar of the answers with their reasoning; `None` if they may be any text."""
    ignored: tuple[str, ...] = ()
    """Paths of the request's fields without effect."""


def reasoning_plan(
    text: LanguageText,
    limits: EngineLimits,
    prompt: str,
    budget: tuple[str, int] | None,
    grammar: Grammar | None,
    *,
    is_off: bool = False,
) -> ReasoningPlan:
    """Plan the reasoning of the answers to a prompt.

    Args:
        text: the model's tokenizer and chat template.
        limits: the engine's limits.
        prompt: the rendered prompt.
        budget: the request's field that limits the reasoning, and the most tokens of the reasoning; `None`: no limit.
        grammar: the grammar of the answers after their reasoning, if any.
        is_off: whether the request turns the reasoning off.
    """
    format, texts = text.reasoning_format, text.tokenizer.texts
    field, most = budget or ("", None)
    unheld = (field,) if field and not (text.template and "thinking_budget" in text.template.variables) else ()
    if format is None:
        return ReasoningPlan(prompt, None, grammar, unheld)
    is_open = AnswerReading(None, format).after(prompt).is_open
    if is_open and most == 0:
        prompt, is_open = f"{prompt.rstrip(SPACE)}\n{format.closing}\n\n", False
    is_closed = prompt.rstrip(SPACE).endswith(format.closing)
    has_grammars = "lark" in limits.grammars
    if is_closed or (most is not None and most >= limits.context_length):
        most = None
    can_hold = has_grammars and can_limit(format, texts)
    ignored = unheld if most is not None and not can_hold else ()
    most = most if can_hold else None
    if grammar is None:
        if most is not None:
            grammar = limited_reasoning(format, texts, is_open=is_open, budget=most, field=field)
        return ReasoningPlan(prompt, format, grammar, ignored)
    opening = "" if grammar.field == "tools" else content_opening(format)
    if not has_grammars or ((is_closed or is_off) and not is_open and not opening):
        return ReasoningPlan(prompt, None, grammar, ignored)
    return ReasoningPlan(
        prompt,
        format,
        after_reasoning(grammar, format, texts, is_open=is_open, budget=most, opening=opening),
        ignored,
    )
