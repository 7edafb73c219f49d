"""vLLM's answers: cut into events, counted, and without what the client didn't ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater_server.errors import (
    BadRequest,
    CallableFailed,
    ContextTooLong,
    HeadwaterError,
    NotFound,
    QueueFull,
    ReplicaLost,
)
from headwater_server.lm.text_generate import GenerateAnswer
from headwater_server.telemetry.recorder import recorder
from headwater_server.vllm.answers import (
    DONE,
    ChunkAnswer,
    EmbeddingsAnswer,
    EventReader,
    GenerateRelay,
    TokenCount,
    refusal,
)
from tests.app.vllm.stand_in import chunk, completion, cuts, error, request, usage
from tests.counted import count_from_zero, counts_of

COUNTED = {"include_usage": True, "continuous_usage_stats": True}


def encoded(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def count(**more: Any) -> TokenCount:
    count_from_zero()
    return TokenCount(recorder().language_model("m"), **more)


def answer(**body: Any) -> ChunkAnswer:
    return ChunkAnswer(request(**body), count())


def events(form: Any, *bodies: Any) -> list[Any]:
    found = [event for body in bodies for event in form.events(b"", encoded(body))]
    form.count.end()
    return [json.loads(event) for event in found]


# Events

EVENTS = [
    (b"", b'{"a":"x y"}'),
    (b"response.delta", '{"größer":"漢字"}'.encode()),
    (b"", b"[DONE]"),
    (b"", b"y" * 3000),
]
RAW = b"".join((b"event: %b\n" % name if name else b"") + b"data: %b\n\n" % data for name, data in EVENTS)


@given(st.lists(st.integers(0, len(RAW)), max_size=20).map(sorted))
def test_events_are_the_same_however_their_bytes_are_cut(places: list[int]) -> None:
    reader = EventReader()
    assert [event for piece in cuts(RAW, places) for event in reader.take(piece)] == EVENTS


def test_comments_are_no_events() -> None:
    raw = b": ping\n\ndata: 1\n\n: ping\ndata: 2\n\nid: 7\nevent: e\ndata: 3\n\n\n\n"
    assert list(EventReader().take(raw)) == [(b"", b"1"), (b"", b"2"), (b"e", b"3")]


# Streams of chats and completions


def test_a_stream_has_no_usage_unless_it_was_asked_for() -> None:
    found = events(answer(), chunk("a", 1), chunk("b", 2, finish="stop"), usage(3, 2))
    assert [one["choices"][0]["text"] for one in found] == ["a", "b"]
    assert not any("usage" in one for one in found)
    assert set(found[0]) == {"id", "object", "created", "model", "choices"}


def test_a_streams_usage_is_in_its_last_chunk() -> None:
    told = {"stream_options": {"include_usage": True}}
    found = events(answer(**told), chunk("a", 1), chunk("b", 2, finish="stop"), usage(3, 2, 1))
    assert [one["usage"] for one in found] == [
        None,
        None,
        {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1},
         "completion_tokens_details": {"reasoning_tokens": 0}},
    ]  # fmt: skip
    assert found[-1]["choices"] == []


def test_every_chunk_has_the_usage_so_far_over_all_choices() -> None:
    told = {"stream_options": COUNTED, "n": 2}
    found = events(answer(**told), chunk("a", 1), chunk("b", 2, 1), chunk("c", 3), usage(3, 5))
    assert [one["usage"]["completion_tokens"] for one in found] == [1, 3, 5, 5]


def test_tokens_of_several_prompts_and_choices_are_counted_once_each() -> None:
    form = answer(prompt=["x", "y"], n=2)
    for tokens in (1, 2):
        for index in range(4):
            events(form, chunk("a", tokens, index, prompt=3 + index // 2))
    events(form, usage(7, 8, 2))
    assert form.count.usage == (7, 8, 2, 0)
    counts = counts_of("m")
    names = ("prompt_tokens", "cached_prompt_tokens", "generated_tokens")
    assert [counts.total(f"headwater_{name}") for name in names] == [7, 2, 8]
    assert counts.sum("headwater_time_to_first_token_seconds")[0] == 1
    assert counts.sum("headwater_inter_token_seconds")[0] == 4


def test_a_choice_is_known_by_its_index_wherever_that_stands() -> None:
    form = answer(n=2)
    swapped = chunk("a", 3)
    swapped["choices"] = [{"text": "a", "index": 1, "finish_reason": None}]
    events(form, swapped, chunk("b", 2))
    assert form.count.usage.completion_tokens == 5


def test_several_tokens_in_a_chunk_share_its_time() -> None:
    form = answer()
    events(form, chunk("a", 1), chunk("bcd", 4))
    assert counts_of("m").sum("headwater_inter_token_seconds")[0] == 3


def test_the_first_token_is_told_once() -> None:
    told: list[int] = []
    form = ChunkAnswer(request(n=2), count(on_first=lambda: told.append(1)))
    events(form, chunk("", 0), chunk("a", 1), chunk("b", 1, 1), chunk("c", 2))
    assert told == [1]


def test_tokens_are_spent_as_they_come() -> None:
    spent: list[int] = []
    form = ChunkAnswer(request(), count(spend=spent.append))
    events(form, chunk("a", 1), chunk("b", 3), usage(5, 4))
    assert spent == [1, 2, 5, 1]
    assert form.count.usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (error("EngineCore encountered an issue", 500), ReplicaLost),
        (error("Internal server error", 500), ReplicaLost),
        (error("The queue is full", 503), QueueFull),
        (error("wrong", 400, "stop"), BadRequest),
        (chunk("", 2, finish="abort"), ReplicaLost),
    ],
)
def test_an_event_that_says_that_the_request_failed_is_an_error(body: Any, kind: type[HeadwaterError]) -> None:
    with pytest.raises(kind) as caught:
        events(answer(), body)
    assert type(caught.value) is kind
    with pytest.raises(kind):
        events(GenerateRelay(GenerateAnswer("m"), count()), body)


def test_a_text_that_looks_like_an_end_is_none() -> None:
    text = '"finish_reason":"abort"'
    (found,) = events(answer(), chunk(text, 1))
    assert found["choices"][0]["text"] == text


def test_a_stream_ends_with_done_and_before_it_the_error_if_any() -> None:
    assert answer().end(None) == [DONE]
    first, last = answer().end(QueueFull("full", retry_after_s=1))
    assert isinstance(first, bytes)
    assert json.loads(first)["error"]["code"] == "rate_limit_exceeded"
    assert last == DONE


# Whole answers


def test_a_whole_answer_has_what_openais_api_has() -> None:
    form = ChunkAnswer(request(n=2), count())
    found = json.loads(form.whole(encoded(completion("a", "b"))))
    form.count.end()
    told = completion("a", "b")
    assert found["usage"] == told["usage"]
    assert found["choices"][1] == {
        "index": 1, "text": "b", "logprobs": None, "finish_reason": "stop", "stop_reason": None,
    }  # fmt: skip
    assert set(found) == {"id", "object", "created", "model", "choices", "usage", "service_tier"}
    counts = counts_of("m")
    names = ("prompt_tokens", "generated_tokens", "cached_prompt_tokens", "sequences")
    assert [counts.total(f"headwater_{name}") for name in names] == [3, 4, 1, 2]


def test_a_whole_chat_keeps_its_messages() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function"}]}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls", "token_ids": None}
    form = answer()
    found = json.loads(form.whole(encoded({**usage(3, 2), "choices": [choice]})))
    assert found["choices"][0] == {
        "index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls",
    }  # fmt: skip


def test_a_whole_answer_that_vllm_gave_up_is_lost() -> None:
    for form in (answer(), GenerateRelay(GenerateAnswer("m"), count())):
        with pytest.raises(ReplicaLost):
            form.whole(encoded(completion("a", finish="abort")))
        assert form.count.usage == (0, 0, 0, 0)


# The generate extension


def test_a_whole_answer_of_the_generate_extension() -> None:
    form = GenerateRelay(GenerateAnswer("m"), count())
    assert json.loads(form.whole(encoded(completion("a")))) == {
        "model_name": "m", "model_version": "1", "text_output": "a",
        "parameters": {"finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": 2},
    }  # fmt: skip


def test_a_stream_of_the_generate_extension() -> None:
    form = GenerateRelay(GenerateAnswer("m"), count())
    found = events(form, chunk("a", 1), chunk("b", 2, finish="length"), usage(3, 2))
    assert [one["text_output"] for one in found] == ["a", "b"]
    (last,) = form.end(None)
    assert json.loads(bytes(last))["final"] is True  # type: ignore[arg-type]
    assert json.loads(bytes(last))["finish_reason"] == "length"  # type: ignore[arg-type]


# Refusals


@pytest.mark.parametrize(
    ("status", "body", "kind", "field"),
    [
        (400, error("wrong", 400, "stop"), BadRequest, "stop"),
        (422, error("wrong", 422, "tools"), BadRequest, "tools"),
        (501, error("not implemented", 501), BadRequest, None),
        (400, error("This model's maximum context length is 64 tokens"), ContextTooLong, None),
        (404, error("The model `x` does not exist", 404), NotFound, "model"),
        (503, error("The queue is full", 503), QueueFull, None),
        (429, error("Too many", 429), QueueFull, None),
        (500, error("Internal server error", 500), CallableFailed, None),
        (500, error("EngineCore encountered an issue", 500), ReplicaLost, None),
        (500, {"detail": "?"}, CallableFailed, None),
        (400, {"error": "text"}, BadRequest, None),
    ],
)
def test_a_refusal_is_an_error_of_ours(status: int, body: Any, kind: type[HeadwaterError], field: str | None) -> None:
    found = refusal(status, encoded(body))
    assert type(found) is kind
    assert found.field == field
    if kind in (QueueFull, ReplicaLost):
        assert found.retry_after_s


@pytest.mark.parametrize("body", [b"upstream\xff", b'{"error": {"message": "upstream\xff"}}'])
def test_a_refusal_that_can_not_be_read_is_quoted(body: bytes) -> None:
    assert "upstream\ufffd" in refusal(500, body).message


def test_embeddings_of_several_answers_follow_each_other() -> None:
    form = EmbeddingsAnswer("m", count())
    vectors: list[list[Any]] = [[[1.5], "AAA="], [[2.0]]]
    for part in vectors:
        data = [{"index": n, "object": "embedding", "embedding": one} for n, one in enumerate(part)]
        assert form.whole(encoded({"data": data, "usage": {"prompt_tokens": 4, "completion_tokens": None}})) == b""
        form.count.end()
    found = json.loads(form.body())
    assert [(one["index"], one["embedding"]) for one in found["data"]] == [(0, [1.5]), (1, "AAA="), (2, [2.0])]
    assert found["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    counts = counts_of("m")
    assert (counts.total("headwater_sequences"), counts.total("headwater_prompt_tokens")) == (3, 8)


@pytest.mark.parametrize("bad", ["[null,1.0]", '"AADAfw=="', '"AACAfw=="'])  # base64: NaN, infinity
def test_an_embedding_that_is_not_finite_is_an_error(bad: str) -> None:
    form = EmbeddingsAnswer("m", count())
    form.whole(encoded({"data": [{"index": 0, "embedding": [1.0]}], "usage": {"prompt_tokens": 1}}))
    body = f'{{"data": [{{"index": 0, "embedding": {bad}}}], "usage": {{"prompt_tokens": 1}}}}'
    with pytest.raises(CallableFailed, match=r"input\[1\]: expected finite numbers in vLLM's embedding"):
        form.whole(body.encode())
