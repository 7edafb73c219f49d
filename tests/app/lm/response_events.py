"""What a stream of ``/v1/responses`` says, checked against itself and against the schema of OpenAI's client."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import cache
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from headwater_server.lm.openai_answer import Event

__all__ = ["check_fields", "checked_event", "checked_response", "data", "said", "told"]

_EXTRA = {
    ("Response", "frequency_penalty"), ("Response", "presence_penalty"), ("Response", "store"),
    ("ResponseCustomToolCall", "status"), ("Logprob", "bytes"), ("LogprobTopLogprob", "bytes"),
}  # fmt: skip
"""Fields of ours that the Open Responses specification has, or that OpenAI's other items have, but not the client's
classes."""
_SUMMARY = ["reasoning_summary_part.added", "reasoning_summary_text.delta", "reasoning_summary_text.done",
            "reasoning_summary_part.done"]  # fmt: skip

_STEPS = {
    "message": ["output_item.added", "content_part.added", "output_text.delta", "output_text.done",
                "content_part.done", "output_item.done"],
    "function_call": ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
                      "output_item.done"],
    "custom_tool_call": ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done",
                         "output_item.done"],
    "reasoning": ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
                  "content_part.done", "output_item.done"],
}  # fmt: skip


def said(response: dict[str, Any]) -> list[tuple[str, ...]]:
    """The items of a response, without their ids."""
    return [_said(item) for item in response["output"]]


def _said(item: dict[str, Any]) -> tuple[str, ...]:
    if item["type"] in ("message", "reasoning"):
        (part,) = item["content"]
        return item["type"], part["text"], item["status"]
    return item["type"], item["name"], item[_WRITTEN[item["type"]]], item["status"]


_WRITTEN = {"function_call": "arguments", "custom_tool_call": "input"}


@cache
def _events() -> TypeAdapter[Any]:
    return TypeAdapter(ResponseStreamEvent)


def checked_event(text: bytes) -> dict[str, Any]:
    """An event, which is exactly an event of the client's schema."""
    event = _events().validate_json(text, strict=True)
    check_fields(event, _EXTRA)
    shown: dict[str, Any] = event.to_dict(mode="python", exclude_unset=True)
    return shown


def checked_response(text: bytes | str) -> Response:
    """A whole answer, which is exactly a response of the client's schema."""
    response = Response.model_validate_json(text, strict=True)
    check_fields(response, _EXTRA)
    return response


def check_fields(value: object, extra: Set[tuple[str, str]]) -> None:
    """Check that no object has a field that its class doesn't have, except for ``extra``: names of class and field."""
    if isinstance(value, BaseModel):
        found = {(type(value).__name__, name) for name in value.model_extra or ()}
        assert found <= extra, found - extra
        for name in value.model_fields_set:
            check_fields(getattr(value, name), extra)
    elif isinstance(value, list):
        for item in value:
            check_fields(item, extra)


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
        summary = [event for event in of_item if event["type"].startswith("response.reasoning_summary")]
        _check_steps([event for event in of_item if event not in summary], _STEPS[item["type"]], item)
        if item.get("summary"):
            _check_steps(summary, _SUMMARY, item)
            added, *_, done, part_done = summary
            assert (added["part"], [part_done["part"]]) == ({"type": "summary_text", "text": ""}, item["summary"])
            assert done["text"] == item["summary"][0]["text"]
        else:
            assert not summary
    assert {event["output_index"] for event in steps} == set(range(len(response["output"])))
    return response


def _check_steps(events: Sequence[dict[str, Any]], steps: Sequence[str], item: dict[str, Any]) -> None:
    """Check the events of an item, or of its summary."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [kind for step in steps for kind in [step] * (kinds.count(step) if "delta" in step else 1)]
    text = "".join(event["delta"] for event in events if "delta" in event)
    if steps is _SUMMARY:
        assert text == item["summary"][0]["text"]
        return
    is_text = item["type"] in ("message", "reasoning")
    nothing: dict[str, Any] = {"content": []} if is_text else {_WRITTEN[item["type"]]: ""}
    nothing |= {"summary": []} if item["type"] == "reasoning" else {}
    whole = {name: value for name, value in item.items() if name != "encrypted_content"}
    assert events[0]["item"] == {**whole, **nothing, "status": "in_progress"}
    assert events[-1]["item"] == item
    if is_text:
        done, part_done = events[-3:-1]
        assert (text, [part_done["part"]]) == (done["text"], item["content"])
        assert text == item["content"][0]["text"]
    else:
        written = _WRITTEN[item["type"]]
        assert text == events[-2][written] == item[written]


def data(event: Event) -> bytes:
    return event if isinstance(event, bytes) else event[1]
