"""The input of responses requests as messages."""

from __future__ import annotations

from typing import Any

import pytest

from headwater_server.errors import BadRequest
from headwater_server.lm.response_input import conversation

USER = {"role": "user", "content": "hi"}
SAID: dict[str, Any] = {"type": "message", "id": "msg_1", "role": "assistant", "content": "Yes."}
CALL: dict[str, Any] = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"}


def thought(**fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], **fields}


def part(text: str) -> list[dict[str, str]]:
    return [{"type": "reasoning_text", "text": text}]


@pytest.mark.parametrize("item", [SAID, CALL])
@pytest.mark.parametrize(
    ("items", "reasoning"),
    [
        ([thought(content=part("a"), encrypted_content="headwater:b", summary=part("c"))], "a"),
        ([thought(content=None, encrypted_content="headwater:b\n:", summary=part("c"))], "b\n:"),
        ([thought(encrypted_content="gAAAA", summary=part("c"))], "c"),
        ([thought(content=[], encrypted_content=None, summary=[*part("c"), *part("d")])], "c\nd"),
        ([thought(summary=part("c")), thought(summary=part("d"))], "c\nd"),
        ([thought(encrypted_content="gAAAA")], None),
        ([thought(summary=part("c")), USER], None),
    ],
)
def test_reasoning_belongs_to_the_item_after_it(items: list[Any], reasoning: str | None, item: dict[str, Any]) -> None:
    messages, _ = conversation([*items, item], None)
    assert messages[-1].get("reasoning_content") == reasoning


def test_a_reference_to_an_item_of_the_input_says_nothing_new() -> None:
    reference = {"type": "item_reference", "id": "msg_1"}
    assert conversation([USER, SAID, reference], None) == conversation([USER, SAID], None)


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"type": "item_reference", "id": "msg_2"}, "input[1].id"),
        ({"type": "item_reference", "id": ["msg_1"]}, "input[1].id"),
        ({"type": "item_reference"}, "input[1].id"),
        (thought(encrypted_content=1), "input[1].encrypted_content"),
        (thought(content="a"), "input[1].content"),
        (thought(summary=["a"]), "input[1].summary[0]"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f", "input": {}}, "input[1].input"),
        ({"type": "compaction", "encrypted_content": "x"}, "input[1].type"),
        (
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_image", "image_url": "data:,"}],
            },
            "input[1].output[0].type",
        ),
    ],
)
def test_a_wrong_item_is_named(item: Any, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        conversation([SAID, item], None)
    assert caught.value.field == field


def test_an_answers_refusal_is_text() -> None:
    content = [{"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
    messages, _ = conversation([{**SAID, "content": content}], None)
    assert messages[0]["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_media_are_parts_of_chats_where_the_model_takes_them() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low", "file_id": None}
    audio = {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}
    file = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,AA=="}
    result = {"type": "function_call_output", "call_id": "c", "output": [image]}
    messages, _ = conversation([{**USER, "content": [image, audio, file]}, CALL, result], None, takes_media=True)
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}}
    assert messages[0]["content"] == [
        shown, audio,
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AA=="}},
    ]  # fmt: skip
    assert messages[2]["content"] == [shown]
    kept = {"type": "input_image", "file_id": "file-1"}
    with pytest.raises(BadRequest, match="keeps no files") as caught:
        conversation([{**USER, "content": [kept]}], None, takes_media=True)
    assert caught.value.field == "input[0].content[0].file_id"
