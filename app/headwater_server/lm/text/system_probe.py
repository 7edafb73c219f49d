"""A conversation that shows whether a chat template keeps system messages after the first message."""

from __future__ import annotations

from typing import Final

__all__ = ["SYSTEM_PROBE", "keeps_system_messages"]

_MARK: Final = "zqxsystem"
SYSTEM_PROBE: Final = [
    {"role": "system", "content": "first"},
    {"role": "user", "content": "a"},
    {"role": "system", "content": _MARK},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "system", "content": _MARK},
]
"""A conversation with system messages after users' messages, as today's agents send them. Some chat templates refuse
such messages, or leave them out."""


def keeps_system_messages(text: str) -> bool:
    """Whether a chat template that renders `SYSTEM_PROBE` as this text keeps its later system messages."""
    return text.count(_MARK) == sum(message["content"] == _MARK for message in SYSTEM_PROBE)
