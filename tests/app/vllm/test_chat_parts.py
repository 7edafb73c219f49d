"""vLLM's chat answers as parts, with an answer of ``/v1/responses`` as the form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from headwater_server.errors import HeadwaterError, ReplicaLost
from headwater_server.lm.openai_answer import Event
from headwater_server.lm.parts_answer import PartsAnswer
from headwater_server.lm.text.answer_parts import AnswerPart, CallPart, ReasoningPart
from headwater_server.lm.text_stream import TokenLogprob, Usage
from headwater_server.telemetry.recorder import recorder
from headwater_server.vllm.answers import TokenCount
from headwater_server.vllm.chat_parts import PartsRelay


class Noting(PartsAnswer):
    """Notes what it gets."""

    counts_usage = True

    def __init__(self) -> None:
        super().__init__(None)
        self.added: list[tuple[list[AnswerPart], str | None, str | None]] = []
        self.counted_usages: list[Usage] = []
        self.ended: list[tuple[Usage, HeadwaterError | None]] = []

    def body(self, usage: Usage) -> bytes:
        return b"%d+%d" % (usage.prompt_tokens, usage.completion_tokens)

    def begin(self) -> list[Event]:
        return [b"begin"]

    def count(self, usage: Usage) -> None:
        self.counted_usages.append(usage)

    def add(
        self,
        parts: Sequence[AnswerPart],
        finish: str | None,
        stop: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> list[Event]:
        self.added.append((list(parts), finish, stop))
        return [b"parts"] * len(parts)

    def end(self, usage: Usage, error: HeadwaterError | None) -> list[Event]:
        self.ended.append((usage, error))
        return [b"end"]


def relay() -> tuple[PartsRelay, Noting]:
    form = Noting()
    return PartsRelay(form, TokenCount(recorder().language_model("m"))), form


def counted(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    details = {"prompt_tokens_details": {"cached_tokens": cached}} if cached else {}
    return {"prompt_tokens": prompt, "completion_tokens": completion, **details}


def chunk(finish: str | None = None, stop: object = None, usage: Any = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "stop_reason": stop}
    return json.dumps({"choices": [choice], "usage": usage}).encode()


def call(arguments: str | None, name: str | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def test_a_whole_answer() -> None:
    answer, form = relay()
    message = {
        "role": "assistant", "content": "So.", "reasoning": "Hm.", "refusal": None,
        "tool_calls": [call('{"a": 1}', "f", id="c1"), call("", "g", id="c2")],
    }  # fmt: skip
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "stop_reason": None}
    body = {"id": "x", "choices": [choice], "usage": counted(7, 5, cached=4)}
    assert answer.whole(json.dumps(body).encode()) == b"7+5"
    parts = [
        ReasoningPart("Hm."),
        "So.",
        CallPart(0, "f", "", "c1"),
        CallPart(0, "", '{"a": 1}'),
        CallPart(1, "g", "", "c2"),
    ]
    assert form.added == [(parts, "stop", None)]
    assert answer.count.usage == Usage(7, 5, 4)


def test_the_events_of_a_stream() -> None:
    answer, form = relay()
    pieces = [
        chunk(role="assistant", content="", usage=counted(7, 0)),
        chunk(reasoning_content="Hm.", usage=counted(7, 1)),
        chunk(content="So.", usage=counted(7, 2)),
        chunk(tool_calls=[call("", "f", index=0, id="c1")], usage=counted(7, 3)),
        chunk(tool_calls=[call('{"a":', index=0)], usage=counted(7, 4)),
        chunk("tool_calls", tool_calls=[call("1}", index=0)], usage=counted(7, 5)),
    ]
    events = [list(answer.events(b"", piece)) for piece in pieces]
    assert events == [[b"begin"], [b"parts"], [b"parts"], [b"parts"], [b"parts"], [b"parts"]]
    assert answer.events(b"", json.dumps({"choices": [], "usage": counted(7, 5, cached=4)}).encode()) == ()
    assert answer.end(None) == [b"end"]
    assert [part for parts, _, _ in form.added for part in parts] == [
        ReasoningPart("Hm."), "So.", CallPart(0, "f", "", "c1"), CallPart(0, "", '{"a":'), CallPart(0, "", "1}"),
    ]  # fmt: skip
    assert [finish for _, finish, _ in form.added] == [None] * 5 + ["stop"]
    assert [usage.completion_tokens for usage in form.counted_usages] == [0, 1, 2, 3, 4, 5]
    assert {usage.prompt_tokens for usage in form.counted_usages} == {7}
    assert form.ended == [(Usage(7, 5, 4), None)]


@pytest.mark.parametrize(
    ("finish", "stop", "expected"),
    [("stop", None, ("stop", None)), ("stop", "END", ("stop", "END")), ("stop", 7, ("stop", None)),
     ("length", None, ("length", None)), ("tool_calls", None, ("stop", None)), (None, None, (None, None))],
)  # fmt: skip
def test_why_an_answer_ends(finish: str | None, stop: object, expected: tuple[str | None, str | None]) -> None:
    answer, form = relay()
    answer.events(b"", chunk(finish, stop))
    assert form.added == [([], *expected)]


def test_a_call_without_an_id_gets_an_id_of_its_own() -> None:
    answer, form = relay()
    answer.events(b"", chunk(tool_calls=[call("{}", "f", index=0), call("{}", "f", index=1)]))
    ids = [part.id for part in form.added[0][0] if isinstance(part, CallPart) and part.name]
    assert len(set(ids)) == 2
    assert all(ids)


def test_an_aborted_answer_is_lost() -> None:
    answer, _ = relay()
    with pytest.raises(ReplicaLost):
        answer.events(b"", chunk("abort"))
    with pytest.raises(ReplicaLost):
        answer.whole(b'{"choices": [{"message": {"content": "a"}, "finish_reason": "abort"}]}')


def test_an_error_within_a_stream() -> None:
    answer, _ = relay()
    with pytest.raises(HeadwaterError, match="too long"):
        answer.events(b"", b'{"error": {"message": "too long", "code": 400}}')


def test_an_answer_without_its_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="unpack"):
        relay()[0].whole(b'{"id": "x"}')
