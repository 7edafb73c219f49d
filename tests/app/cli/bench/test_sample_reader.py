"""Streams of events, however they are cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater_server.cli.bench.sample_reader import EventParser, Fault, TokenReader

TEXTS = st.text(st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]), min_size=1, max_size=20)


def lines(*events: dict[str, Any] | str) -> bytes:
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(f"data: {text}\n\n" for text in texts).encode()


def read(mode: str, *events: dict[str, Any] | str) -> TokenReader:
    """A reader that got an event a second."""
    reader = TokenReader(mode)
    for when, event in enumerate(events):
        reader.feed(lines(event), float(when))
    return reader


@given(st.lists(TEXTS, max_size=8), st.data())
def test_events_are_the_same_wherever_the_bytes_are_cut(texts: list[str], data: st.DataObject) -> None:
    raw = b"".join(f": ping\ndata: {text}\n\n".encode() for text in texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=10)))
    parser = EventParser()
    got: list[bytes] = []
    for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        got += parser.feed(raw[begin:end])
    assert got == [text.encode() for text in texts]


def test_lines_may_end_as_in_windows_and_data_may_have_several() -> None:
    assert EventParser().feed(b"event: x\r\ndata: a\r\ndata:b\r\n\r\n") == [b"a\nb"]


def test_a_chat_is_told_by_its_deltas_and_its_usage() -> None:
    reader = read(
        "chat",
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "a"}}], "usage": None},
        {"choices": [{"delta": {"content": "bc"}}], "usage": None},
        {"choices": [{"delta": {}, "finish_reason": "length"}]},
        {"choices": [], "usage": {"completion_tokens": 3}},
        "[DONE]",
    )
    assert reader.end() is None
    assert reader.times_s == [1.0, 2.0]
    assert reader.tokens == 3


def test_without_usage_tokens_are_the_events_with_text() -> None:
    reader = read("completions", {"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}, "[DONE]")
    assert (reader.tokens, reader.end()) == (2, None)


def chat(reason: str | None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"delta": delta, "finish_reason": reason}]}


def call(index: int, arguments: str | None) -> dict[str, Any]:
    return {"index": index, "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("events", "ending"),
    [
        ([chat(None, content='{"a": '), chat("stop", content="1}")], "json"),
        ([chat("stop", content=f" [1{'0' * 5000}, 1e999]")], "json"),
        ([chat("length", content='{"a": 1}')], "cut"),
        ([chat(None, content="1")], "cut"),
        ([chat("stop", content="Once")], "other"),
        ([chat("stop")], "other"),
        ([chat("stop", content="[" * 100_000)], "other"),
        ([chat(None, tool_calls=[call(0, None), call(1, "{}")]), chat("tool_calls", tool_calls=[call(0, "{}")])],
         "calls"),
        ([chat(None, content="so:"), chat("stop", tool_calls=[call(0, "{}")])], "calls"),
        ([chat("tool_calls", tool_calls=[call(0, "{}"), call(1, '{"a"')])], "other"),
        ([chat("tool_calls", tool_calls=[call(0, "3")])], "other"),
        ([chat("length", tool_calls=[call(0, "{}")])], "cut"),
    ],
)  # fmt: skip
def test_how_a_chat_ended(events: list[dict[str, Any]], ending: str) -> None:
    assert read("chat", *events, "[DONE]").ending == ending


def test_parts_of_calls_are_events_with_text() -> None:
    reader = read("chat", chat(None, role="assistant"), chat(None, tool_calls=[call(0, "")]),
                  chat(None, tool_calls=[call(0, "{}")]), chat("tool_calls"), "[DONE]")  # fmt: skip
    assert (reader.times_s, reader.end()) == ([1.0, 2.0], None)


def test_a_language_model_tells_its_tokens_in_the_last_event_of_generate() -> None:
    reader = read("stream", {"text_output": "a"}, {"text_output": "bc"}, {"final": True, "completion_tokens": 3})
    assert (reader.tokens, reader.times_s, reader.end()) == (3, [0.0, 1.0], None)


def test_results_of_heads_count_like_tokens() -> None:
    reader = read("stream", {"head": "a", "status": "ok", "y": 1}, {"final": True, "heads": {"a": "ok"}})
    assert (reader.tokens, reader.end()) == (1, None)


@pytest.mark.parametrize(
    ("mode", "events", "fault"),
    [
        ("chat", [{"choices": [{"delta": {"content": "a"}}]}],
         Fault("bad answer", None, "the stream ended without its last event")),
        ("chat", [{"error": {"message": "it broke", "code": 500}}, "[DONE]"], Fault("stream", None, "it broke")),
        ("stream", [{"error": "it broke", "status": 503}, {"final": True}], Fault("stream", 503, "it broke")),
        ("stream", [{"head": "a", "status": "failed", "error": "no"}, {"final": True}],
         Fault("stream", None, "head a: failed")),
        ("stream", ["{"], Fault("bad answer", None, "invalid event: {")),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(mode: str, events: list[dict[str, Any] | str], fault: Fault) -> None:
    assert read(mode, *events).end() == fault
