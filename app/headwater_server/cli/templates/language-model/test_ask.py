"""What is read of the server's answers."""

from __future__ import annotations

import pytest

from ask import pieces


def test_the_texts_of_events_are_the_answer() -> None:
    events = ['data: {"choices": [{"text": "re"}]}', 'data: {"choices": [{"text": "turn"}]}', "data: [DONE]"]
    lines = [*events[:1], "", ": ping", *events[1:]]
    assert "".join(pieces(lines)) == "return"


def test_an_error_is_no_answer() -> None:
    with pytest.raises(RuntimeError, match="too slow"):
        list(pieces(['data: {"error": {"message": "too slow"}}', "data: [DONE]"]))
