"""The reasoning before an answer that a grammar constrains, and grammars that limit the reasoning."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from msgspec import structs

from headwater.engine import Grammar
from headwater_server.lm.lark import marked, quoted
from headwater_server.lm.text.answer_reader import ReasoningFormat

if TYPE_CHECKING:
    from headwater_server.lm.text.token_texts import TokenTexts

__all__ = ["after_reasoning", "can_limit", "content_opening", "limited_reasoning"]

_TURNS: Final = {"harmony": "<|start|>assistant"}
"""By reasoning format, what the model writes between the reasoning and the rest of the answer."""
_CONTENTS: Final = {"harmony": "<|channel|>final<|message|>", "kimi-k3": "<|open|>response<|sep|>"}
"""By reasoning format, what the model writes before content."""
_OTHERS: Final = {"harmony": ("<|channel|>", "/final|commentary/"), "kimi-k3": ("<|open|>", "/response|tools/")}
"""By reasoning format, where the first mark of the reasoning has other uses: this mark, and what follows it there."""
_SPACE: Final = r"/\n{0,2}/"
_ANY: Final = "<[*]>*"
"""Any tokens."""


def content_opening(format: ReasoningFormat | None) -> str:
    """What a model with this format of reasoning writes before content."""
    return "" if format is None else _CONTENTS.get(format.name, "")


def can_limit(format: ReasoningFormat | None, texts: TokenTexts) -> bool:
    """Whether grammars can limit the number of tokens of the reasoning: its marks must begin with added tokens."""
    return format is not None and None not in (_first_id(format.opening, texts), _first_id(format.closing, texts))


def after_reasoning(
    grammar: Grammar,
    format: ReasoningFormat,
    texts: TokenTexts,
    *,
    is_open: bool,
    budget: int | None = None,
    opening: str = "",
) -> Grammar:
    """A grammar that lets the model reason before the text that follows the given grammar.

    Args:
        grammar: the grammar of the rest of the answer.
        format: how the model writes reasoning.
        texts: the texts of the tokenizer's ids.
        is_open: whether the prompt has opened the reasoning. If not, the model chooses whether it reasons.
        budget: the most tokens of the reasoning, without its marks; `None`: no limit. Without effect unless
            `can_limit`.
        opening: what the model writes before the rest of the answer.
    """
    thought, rules = _thought(format, texts, budget)
    begin = thought if is_open else f"({marked(format.opening, texts.added_id)} {thought})?"
    answer = f"{marked(opening, texts.added_id)} @answer".strip()
    return structs.replace(grammar, before="\n".join([f"start: {begin} {answer}", *rules]))


def limited_reasoning(format: ReasoningFormat, texts: TokenTexts, *, is_open: bool, budget: int, field: str) -> Grammar:
    """The grammar of an answer of any text whose reasoning has at most `budget` tokens; `can_limit` must hold. After
    the reasoning the model can't begin to reason again, unless its opening mark has other uses.

    Args:
        format, texts, is_open, budget: see `after_reasoning`.
        field: the request's field that sets the budget.
    """
    thought, rules = _thought(format, texts, budget)
    opening = marked(format.opening, texts.added_id)
    if format.name in _OTHERS:
        mark, word = _OTHERS[format.name]
        start = f"{thought} {_ANY}"
        if not is_open:
            start = f"({opening} {thought} | {marked(mark, texts.added_id)} {word}) {_ANY}"
    else:
        text = f"(<[^{_first_id(format.opening, texts)}]>)*"
        start = f"{thought} {text}" if is_open else f"{text} ({opening} {thought} {text})?"
    return Grammar("lark", "\n".join([f"start: {start}", *rules]), field)


def _thought(format: ReasoningFormat, texts: TokenTexts, budget: int | None) -> tuple[str, list[str]]:
    """The reasoning after its opening mark up to the rest of the answer, as an expression and its rules: tokens that
    are not special, and not the first token of the closing mark; or text, if this mark has no added token."""
    turn = marked(_TURNS.get(format.name, ""), texts.added_id) or _SPACE
    first = _first_id(format.closing, texts)
    if first is None:
        return f"thought {turn}", [f"thought[suffix={quoted(format.closing)}]: /(?s:.*)/"]
    limit = "*" if budget is None else f"{{0,{budget}}}"
    tokens = "" if budget == 0 else f"(<[^{_ranges(texts.special_ids | {first})}]>){limit} "
    return f"{tokens}{marked(format.closing, texts.added_id)} {turn}", []


def _first_id(mark: str, texts: TokenTexts) -> int | None:
    """The id of the added token with which a mark begins; `None` if it begins otherwise."""
    first = re.match(r"<\[(\d+)\]>", marked(mark, texts.added_id))
    return None if first is None else int(first[1])


def _ranges(tokens: Collection[int]) -> str:
    """Token ids as a list of ranges."""
    ranges: list[list[int]] = []
    for token in sorted(tokens):
        if ranges and token == ranges[-1][1] + 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    return ",".join(f"{first}-{last}" for first, last in ranges)
