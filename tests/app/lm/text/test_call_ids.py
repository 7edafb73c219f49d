"""Ids of calls and results in the form of templates."""

from __future__ import annotations

import re
from typing import Any

from headwater_server.lm.text.call_ids import with_template_ids
from headwater_server.lm.text.chat_messages import checked_messages


def rendered(template: str, *turns: Any) -> list[Any]:
    """The ids of each turn: of a list of calls, or of a result."""
    messages: list[Any] = []
    for turn in turns:
        if isinstance(turn, list):
            calls: list[Any] = [{"id": id, "function": {"name": "f", "arguments": None}} for id in turn]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        else:
            messages.append({"role": "tool", "tool_call_id": turn, "content": "x"})
    changed = with_template_ids(checked_messages(messages, 100), template)
    return [
        [call["id"] for call in message["tool_calls"]] if "tool_calls" in message else message["tool_call_id"]
        for message in changed
    ]


def test_ids_of_clients_stay() -> None:
    assert rendered("", ["a", "b"], "b", "a", "unknown") == [["a", "b"], "b", "a", "unknown"]


def test_missing_ids_are_made() -> None:
    assert rendered("", [None, "b"], None, None, [None], None, None) == (
        [["call_0", "b"], "call_0", "b", ["call_2"], "call_2", "call_3"]
    )


def test_mistrals_ids_have_nine_letters_and_digits() -> None:
    (first, second), result, other, _ = rendered("[TOOL_CALLS]", ["abcDEF123", "call_of/x"], "call_of/x", "lost", None)
    assert first == "abcDEF123"
    assert second == result != other
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", id) for id in (second, other))
    assert rendered("[TOOL_CALLS]", ["call_of/x"]) == [[second]]


def test_kimis_ids_count_over_the_conversation() -> None:
    kimi = "<|tool_call_begin|>"
    assert rendered(kimi, ["x", "y"], "y", "x", ["x"], "x", "lost") == (
        [
            ["functions.f:0", "functions.f:1"],
            "functions.f:1",
            "functions.f:0",
            ["functions.f:2"],
            "functions.f:2",
            "lost",
        ]
    )
