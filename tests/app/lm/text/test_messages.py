"""OpenAI's messages on their way into a chat template."""

from __future__ import annotations

import pytest

from app.errors import BadRequest
from app.lm.text.messages import ROLES, checked_messages


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "Look:"}, {"type": "text", "text": "here"}]
    assert checked_messages([{"role": "user", "content": parts}], 10) == [{"role": "user", "content": "Look:\nhere"}]


def test_other_messages_stay_as_they_are() -> None:
    messages = [
        {"role": "user", "content": "Hi", "name": "Ada"},
        {"role": "assistant", "content": "", "tool_calls": None},
    ]
    assert checked_messages(messages, 10) == messages


TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ({}, "messages: expected an array of messages, got an object"),
        ([], "messages: expected at least one message, got an empty array"),
        (["Hi"], "messages[0]: expected an object with 'role' and 'content', got 'Hi'"),
        ([{"content": "Hi"}], f"messages[0].role: expected one of {', '.join(ROLES)}, got null"),
        ([{"role": "user"}], "messages[0].content: expected a string or an array of text parts, got null"),
        ([{"role": "user", "content": 1}], "messages[0].content: expected a string or an array of text parts, got 1"),
        (
            [{"role": "user", "content": "a"}, {"role": "user", "content": [TEXT, {"type": "image_url"}]}],
            "messages[1].content[1].type: expected 'text', the only kind of content this model takes, got 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text: expected a string, got null"),
        (
            [{"role": "user", "content": ["a"]}],
            'messages[0].content[0]: expected a content part like {"type": "text", "text": "..."}, got \'a\'',
        ),
    ],
)
def test_a_wrong_message_is_named(messages: object, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        checked_messages(messages, 10)
    assert caught.value.message == message
    assert caught.value.field == message.partition(": ")[0]
