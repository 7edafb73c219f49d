"""The ids of calls and results, in the form that chat templates expect. Clients never see these ids."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

__all__ = ["with_template_ids"]

_NINE: Final = re.compile(r"[a-zA-Z0-9]{9}")


def with_template_ids(messages: Sequence[Mapping[str, Any]], template: str) -> list[Mapping[str, Any]]:
    """The messages with ids of calls and results in the template's form: Mistral's templates take nine letters and
    digits only, Kimi's models know a call by ``functions.NAME:INDEX``, where the index counts over the conversation.
    Other templates get the clients' ids. A call without an id gets a new one, a result without an id the id of the
    first call that has no result yet.

    Args:
        messages: the result of `headwater_server.lm.text.chat_messages.checked_messages`.
        template: the source of the chat template, or of all templates.
    """
    form: Callable[[str, str, int], str] = _plain
    if "[TOOL_CALLS]" in template:
        form = _nine
    elif "<|tool_call_begin|>" in template:
        form = _kimi
    count = 0
    ids: dict[str, str] = {}
    open_ids: dict[str, None] = {}
    changed: list[Mapping[str, Any]] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            numbered = []
            for call in calls:
                new = form(call["id"], call["function"]["name"], count)
                ids[call["id"]] = new
                open_ids[new] = None
                numbered.append({**call, "id": new})
                count += 1
            message = {**message, "tool_calls": numbered}
        elif message["role"] == "tool":
            known = message.get("tool_call_id") or ""
            new = (ids.get(known) if known else next(iter(open_ids), None)) or form(known, "", count)
            open_ids.pop(new, None)
            message = {**message, "tool_call_id": new}
        changed.append(message)
    return changed


def _plain(id: str, name: str, number: int) -> str:
    return id or f"call_{number}"


def _nine(id: str, name: str, number: int) -> str:
    return (
        id if _NINE.fullmatch(id) else hashlib.sha256((id or f"call_{number}").encode(errors="replace")).hexdigest()[:9]
    )


def _kimi(id: str, name: str, number: int) -> str:
    return f"functions.{name}:{number}" if name else id
