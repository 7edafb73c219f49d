"""What a stream of ``/v1/responses`` says, checked against itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwater_server.lm.openai_answer import Event

__all__ = ["said", "told"]

_STEPS = {
    "message": ["output_item.added", "content_part.added", "output_text.delta", "output_text.done",
                "content_part.done", "output_item.done"],
    "function_call": ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
                      "output_item.done"],
}  # fmt: skip


def said(response: dict[str, Any]) -> list[tuple[str, ...]]:
    """The items of a response, without their ids."""
    return [
        ("message", item["content"][0]["text"], item["status"])
        if item["type"] == "message"
        else ("function_call", item["name"], item["arguments"], item["status"])
        for item in response["output"]
    ]


def told(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The response that ends the stream, of whose items each event is as the API has it.

    Args:
        events: the data of all events.
    """
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, running, *steps, last = events
    assert [event["type"] for event in (created, running)] == ["response.created", "response.in_progress"]
    response: dict[str, Any] = last["response"]
    assert last["type"] == f"response.{response['status']}"
    # One item after the other:
    assert [event["output_index"] for event in steps] == sorted(event["output_index"] for event in steps)
    for index, item in enumerate(response["output"]):
        of_item = [event for event in steps if event["output_index"] == index]
        assert {event["item_id"] if "item_id" in event else event["item"]["id"] for event in of_item} == {item["id"]}
        kinds = [event["type"].removeprefix("response.") for event in of_item]
        expected = [
            kind for step in _STEPS[item["type"]] for kind in [step] * (kinds.count(step) if "delta" in step else 1)
        ]
        assert kinds == expected
        text = "".join(event["delta"] for event in of_item if "delta" in event)
        nothing: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        assert of_item[0]["item"] == {**item, **nothing, "status": "in_progress"}
        assert of_item[-1]["item"] == item
        if item["type"] == "message":
            done, part_done = of_item[-3:-1]
            assert (text, [part_done["part"]]) == (done["text"], item["content"])
            assert text == item["content"][0]["text"]
        else:
            assert text == of_item[-2]["arguments"] == item["arguments"]
    assert {event["output_index"] for event in steps} == set(range(len(response["output"])))
    return response


def data(event: Event) -> bytes:
    return event if isinstance(event, bytes) else event[1]
