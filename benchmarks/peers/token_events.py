"""A token stream's events as every peer sends them: the token of index i is the text ``i`` and a space."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["END", "event_of", "last_event", "text_of", "token_count"]

END = "[DONE]"


def token_count(message: dict[str, Any]) -> int:
    """How many tokens a request asks for."""
    return int(message["max_tokens"])


def event_of(token: int, count: int) -> str:
    """The event of a token, of so many."""
    finish = "length" if token + 1 == count else None
    return json.dumps({"choices": [{"index": 0, "text": f"{token} ", "finish_reason": finish}]})


def last_event(count: int) -> str:
    """The event after all tokens."""
    return json.dumps({"choices": [], "usage": {"completion_tokens": count}})


def text_of(count: int) -> str:
    """What all tokens together say."""
    return "".join(f"{token} " for token in range(count))
