"""The forms of answers, where the openai client does not look: nulls, extremes, and the constant parts of chunks."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater_server.errors import BadRequest, QueueFull
from headwater_server.lm.chat import ChatAnswer
from headwater_server.lm.completion import CompletionAnswer
from headwater_server.lm.openai_answer import AnswerForm
from headwater_server.lm.responses_answer import ResponsesAnswer
from headwater_server.lm.text_generate import GenerateAnswer
from headwater_server.lm.text_stream import TextPiece, TokenLogprob, Usage
from tests.app.lm.response_events import data
from tests.app.lm.scripted import ids_of, tiny_text

TEXTS = tiny_text().tokenizer.texts
USAGE = Usage(2, 3)


def forms(**options: Any) -> list[AnswerForm]:
    name = 'a "quoted" model \u2028'
    return [
        ChatAnswer(name, 2, TEXTS, logprobs=False, **options),
        CompletionAnswer(name, 2, TEXTS, logprobs=False, **options),
        GenerateAnswer(name, 'an "id"'),
        ResponsesAnswer({"model": name}, TEXTS),
    ]


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_text_is_sound_json_on_one_line(text: str) -> None:
    for form in forms():
        event = data(form.piece(0, TextPiece(text))[-1])
        assert b"\n" not in event
        assert b"\r" not in event
        said = json.loads(event)
        choice = said["choices"][0] if "choices" in said else said
        (shown,) = (choice[key] for key in ("delta", "text", "text_output") if key in choice)
        assert (shown["content"] if isinstance(shown, dict) else shown) == text


def test_nothing_to_tell_is_no_event() -> None:
    for form in forms(includes_usage=True)[:2] + forms()[2:]:
        assert form.piece(0, TextPiece("")) == []


@pytest.mark.parametrize("kind", [ChatAnswer, CompletionAnswer])
def test_chunks_have_the_same_fields_wherever_they_come_from(kind: Any) -> None:
    form = kind("m", 2, TEXTS, logprobs=True, includes_usage=True)
    entry = TokenLogprob(ids_of("a")[0], -1.0, (), 0)
    pieces = [TextPiece("a"), TextPiece("a", [entry]), TextPiece("", (), "stop"), TextPiece("", [entry], "length")]
    chunks = [json.loads(event) for piece in pieces for event in form.piece(1, piece)]
    chunks += [json.loads(event) for event in form.begin()]
    assert len({tuple(chunk) for chunk in chunks}) == 1
    assert len({tuple(chunk["choices"][0]) for chunk in chunks}) == 1
    assert all(chunk["usage"] is None for chunk in chunks)
    usage, done = form.end(USAGE, None)
    assert json.loads(usage)["usage"] == USAGE.as_json()
    assert (json.loads(usage)["choices"], done) == ([], b"[DONE]")


def test_minus_infinity_has_a_number() -> None:
    piece = TextPiece("a", [TokenLogprob(ids_of("a")[0], -math.inf, ((ids_of("b")[0], -math.inf),), 0)], "stop")
    chat = json.loads(ChatAnswer("m", 1, TEXTS, logprobs=True).whole([piece], USAGE))
    (entry,) = chat["choices"][0]["logprobs"]["content"]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
    text = json.loads(CompletionAnswer("m", 1, TEXTS, logprobs=True).whole([piece], USAGE))
    assert text["choices"][0]["logprobs"]["top_logprobs"] == [{"b": -9999.0, "a": -9999.0}]


def test_a_token_within_a_character_is_shown_by_its_bytes() -> None:
    first, *_ = ids_of("🙂")
    piece = TextPiece("🙂", [TokenLogprob(first, -1.0, (), 0)], "stop")
    chat = json.loads(ChatAnswer("m", 1, TEXTS, logprobs=True).whole([piece], USAGE))
    entry = chat["choices"][0]["logprobs"]["content"][0]
    assert entry["token"].startswith("bytes:\\xf0")
    assert bytes(entry["bytes"]) == "🙂".encode()[: len(entry["bytes"])]


def test_errors_end_a_stream_in_each_apis_form() -> None:
    error = BadRequest("n: wrong", field="n")
    for form in forms(includes_usage=True)[:2]:
        failure, done = map(data, form.end(USAGE, error))
        assert json.loads(failure)["error"] == {
            "message": "n: wrong", "type": "invalid_request_error", "param": "n", "code": None,
        }  # fmt: skip
        assert done == b"[DONE]"
    failure, last = GenerateAnswer("m").end(USAGE, error)
    assert json.loads(failure) == {"error": "n: wrong", "status": 400}
    assert json.loads(last) == {
        "model_name": "m", "model_version": "1", "text_output": "", "final": True, "finish_reason": "error",
        "prompt_tokens": 2, "completion_tokens": 3,
    }  # fmt: skip


def test_events_of_a_response_say_their_name_twice_and_are_numbered() -> None:
    form = ResponsesAnswer({"model": "m"}, TEXTS)
    events = [*form.begin(), *form.piece(0, TextPiece("a")), *form.piece(0, TextPiece("", (), "length"))]
    events += form.end(USAGE, None)
    assert all(isinstance(event, tuple) and json.loads(event[1])["type"].encode() == event[0] for event in events)
    assert [json.loads(data(event))["sequence_number"] for event in events] == list(range(len(events)))
    last = json.loads(data(events[-1]))["response"]
    whole = json.loads(ResponsesAnswer({"model": "m"}, TEXTS).whole([TextPiece("a", (), "length")], USAGE))
    assert last["output"][0].pop("id") != whole["output"][0].pop("id")
    assert {**whole, "id": last["id"], "created_at": last["created_at"]} == last


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_response_that_fails_says_so_after_its_beginning(has_begun: bool) -> None:
    form = ResponsesAnswer({"model": "m"}, TEXTS)
    events = [*form.begin(), *form.piece(0, TextPiece("a"))] if has_begun else []
    events += form.end(USAGE, QueueFull("too many"))
    said = [json.loads(data(event)) for event in events]
    assert [one["sequence_number"] for one in said] == list(range(len(said)))
    assert [one["type"] for one in said[:2]] == ["response.created", "response.in_progress"]
    assert (len(said), said[-1]["type"]) == (6 if has_begun else 3, "response.failed")
    response = said[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "rate_limit_exceeded", "message": "too many", "param": None}
    assert [item["content"][0]["text"] for item in response["output"]] == ["a"] * has_begun
