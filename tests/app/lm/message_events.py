"""What a stream of ``/v1/messages`` says, checked against itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

__all__ = ["events_of", "message_of"]

_DELTAS = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of a stream's events, of which each has its type as its name."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def message_of(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message of a complete stream, as it would be whole: each event is as the API has it."""
    start, *steps, delta, stop = events
    assert (start["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message: dict[str, Any] = start["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    assert message["usage"]["output_tokens"] == 0
    for event in steps:
        kind, content = event["type"], message["content"]
        if kind == "content_block_start":
            assert event["index"] == len(content)
            content.append({**event["content_block"], "is_open": True, "json": ""})
            continue
        block = content[event["index"]]
        assert event["index"] == len(content) - 1
        assert block["is_open"]
        if kind == "content_block_stop":
            block["is_open"] = False
            continue
        assert kind == "content_block_delta"
        given = event["delta"]
        field = _DELTAS[block["type"]][given["type"]]
        assert given.keys() == {"type", field}
        place = "json" if field == "partial_json" else field
        block[place] += given[field]
    for block in message["content"]:
        assert not block.pop("is_open")
        text = block.pop("json")
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(text or "{}")
    assert delta["delta"].keys() == {"stop_reason", "stop_sequence"}
    assert delta["usage"]["input_tokens"] == message["usage"]["input_tokens"]
    return {**message, **delta["delta"], "usage": delta["usage"]}
