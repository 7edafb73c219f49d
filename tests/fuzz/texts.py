"""Targets: requests to language models, and their answers as text and as server-sent events."""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import AsyncGenerator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from starlette.types import Message

from headwater_server.errors import BadRequest, CallableFailed, DeadlineExceeded, HeadwaterError, ReplicaLost
from headwater_server.gateway.http.event_stream import EventStream
from headwater_server.lm.chat import ChatAnswer, ChatRequest
from headwater_server.lm.completion import CompletionAnswer, CompletionRequest
from headwater_server.lm.openai_answer import AnswerForm, Event
from headwater_server.lm.responses import ResponsesRequest
from headwater_server.lm.responses_answer import ResponsesAnswer
from headwater_server.lm.sequence import Tokens
from headwater_server.lm.text.stop_automaton import StopAutomaton
from headwater_server.lm.text.token_texts import TokenTexts
from headwater_server.lm.text_generate import GenerateAnswer, GenerateRequest
from headwater_server.lm.text_plan import TextPlan
from headwater_server.lm.text_stream import TextPiece, TextStream, TokenLogprob, Usage
from tests.app.lm.scripted import LIMITS, tiny_text
from tests.app.lm.text.tokenizer_files import FAMILIES, decoder_json
from tests.fuzz.draw import Draw, body_of
from tests.fuzz.promises import check_refusal

__all__ = ["EventReader", "chat", "completion", "lm_generate", "responses", "sse", "text_stream"]

SEEDS: Final = Path(__file__).parent / "seeds"
NAMES: Final = tuple(FAMILIES)
STOPS: Final = ("a", "\n", " ", "the", "漢", "\ufffd", "🙂", "fox jumps", "e\u0301")


@cache
def _examples(target: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((SEEDS / target).glob("*.json"))]


@cache
def _texts(family: str) -> TokenTexts:
    return TokenTexts(FAMILIES[family], decoder_json(FAMILIES[family]))


def chat(data: bytes) -> bool:
    """``POST /v1/chat/completions``: refused, or sequences that the model can take."""
    return _is_answered("chat", ChatRequest, data)


def completion(data: bytes) -> bool:
    """``POST /v1/completions``: refused, or sequences that the model can take."""
    return _is_answered("completion", CompletionRequest, data)


def responses(data: bytes) -> bool:
    """``POST /v1/responses``: refused, or a sequence that the model can take."""
    return _is_answered("responses", ResponsesRequest, data)


def lm_generate(data: bytes) -> bool:
    """``POST /v2/models/{m}/generate`` of a language model: refused, or a sequence that the model can take."""
    return _is_answered("lm_generate", GenerateRequest, data)


def _is_answered(
    target: str, kind: type[ChatRequest | CompletionRequest | GenerateRequest | ResponsesRequest], data: bytes
) -> bool:
    try:
        request = kind.read(body_of(data, _examples(target)))
        plan = request.plan(tiny_text(), LIMITS)
    except HeadwaterError as error:
        check_refusal(error)
        return False
    if isinstance(request, GenerateRequest):
        _check_plan(plan, GenerateAnswer("m", request.id or ""))
    else:
        _check_plan(plan, request.answer_form(plan, tiny_text().tokenizer.texts))
    return True


def text_stream(data: bytes) -> bool:
    """The pieces of a text together are the whole decode's, however its tokens come; a stop string ends it."""
    draw = Draw(data)
    family = draw.choice(NAMES)
    tokenizer, texts = FAMILIES[family], _texts(family)
    size = tokenizer.get_vocab_size() + 3
    skips, includes, has_logprobs = draw.flag(), draw.flag(), draw.flag()
    stops = [draw.choice(STOPS) for _ in range(draw.below(3))]
    automaton = StopAutomaton(stops)
    finish = draw.choice(("length", "stop"))
    prompt = [draw.below(size) for _ in range(draw.below(8))]
    groups: list[list[int]] = [[]]
    while draw.has_more and sum(map(len, groups)) < 200:
        if draw.below(4) == 0:
            groups.append([])
        groups[-1].append(draw.below(size))
    ids = [token for group in groups for token in group]
    if not ids:
        finish = "length"  # there is no token that could have stopped it

    def run(groups: Sequence[Sequence[int]]) -> tuple[str, int, str | None, list[TokenLogprob]]:
        stream = TextStream(
            texts, prompt, stops=automaton, include_stop=includes, skip_special_tokens=skips, logprobs=has_logprobs
        )
        text, logprobs = "", list[TokenLogprob]()
        for n, group in enumerate(groups):
            end = finish if n == len(groups) - 1 else None
            piece = stream.take(Tokens(list(group), [-0.5] * len(group) if has_logprobs else None, None, end))
            text += piece.text
            logprobs += piece.logprobs
            if piece.finish is not None:
                break
        assert stream.finish is not None
        return text, stream.completion_tokens, stream.finish, logprobs

    text, count, why, logprobs = run(groups)
    one_by_one = [[token] for token in ids] or [[]]
    assert run(one_by_one) == (text, count, why, logprobs)
    shown = ids[:-1] if finish == "stop" and not includes else ids
    whole = _decoded(family, prompt, shown, skips)
    found = sorted((whole.find(stop) + len(stop), stop) for stop in stops if stop in whole)
    if not found:
        assert text == whole
        assert (count, why) == (len(ids), finish)
        assert len(logprobs) == (len(shown) if has_logprobs else 0)
    else:
        assert why == "stop"
        assert whole.startswith(text)
        assert any(text.endswith(stop) for stop in stops) if includes else not any(stop in text for stop in stops)
    return True


def sse(data: bytes) -> bool:
    """A stream of events, read by a parser of another make, has the texts, the end and the error that went in."""
    draw = Draw(data)
    texts = _texts(draw.choice(NAMES))
    kind = draw.below(4)
    form: AnswerForm
    if kind == 0:
        form = ChatAnswer("m\n", 2, texts, logprobs=True, includes_usage=draw.flag())
    elif kind == 1:
        form = CompletionAnswer("m\r", 2, texts, logprobs=True, includes_usage=draw.flag())
    elif kind == 2:
        form = GenerateAnswer("m\u2028", draw.text())
    else:
        form = ResponsesAnswer({"model": "m"}, texts)
    places = 2 if kind < 2 else 1
    failure = draw.choice((None, None, BadRequest, CallableFailed, DeadlineExceeded, ReplicaLost))
    error = None if failure is None else failure(draw.text() or "gone")
    cuts = [1 + draw.below(9) for _ in range(4)]
    sent = [""] * places
    events: list[Event] = list(form.begin())
    while draw.has_more and len(events) < 60:
        place, text = draw.below(places), draw.text()
        entries = [TokenLogprob(draw.below(400), -float(draw.below(20)), ((draw.below(400), -0.5),), 0)] * draw.below(2)
        events += form.piece(place, TextPiece(text, entries if kind != 2 else ()))
        sent[place] += text
    for place in range(places):
        events += form.piece(place, TextPiece("", (), "stop"))
    raw = _loop().run_until_complete(_streamed(events, error, form))
    reader = EventReader()
    read, at = [], 0
    while at < len(raw):
        size = cuts[at % len(cuts)] if at < 4000 else len(raw)
        read += reader.feed(raw[at : at + size])
        at += size
    got = [""] * places
    told = None
    for event in read:
        if event == "[DONE]":
            assert kind < 2
            continue
        fields = json.loads(event)
        if kind == 3:
            got[0] += fields.get("delta", "")
            response = fields.get("response", {"status": "in_progress"})
            if response["status"] != "in_progress":
                assert response["output"][0]["content"][0]["text"] == sent[0]
                told = response["error"] and response["error"]["message"]
        elif "error" in fields:
            told = fields["error"]["message"] if kind != 2 else fields["error"]
        elif kind == 2:
            got[0] += fields.get("text_output", "")
        else:
            for choice in fields["choices"]:
                got[choice["index"]] += choice["delta"].get("content", "") if kind == 0 else choice["text"]
    assert got == sent
    assert told == (None if error is None else error.message)
    assert (read[-1] == "[DONE]") == (kind < 2)
    assert kind != 2 or json.loads(read[-1])["final"] is True
    return True


class EventReader:
    """Reads a stream of server-sent events as the HTML standard says, whatever pieces it comes in."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._line = ""
        self._after_return = False
        self._data: list[str] = []

    def feed(self, raw: bytes) -> list[str]:
        """The data of the events that are complete with these bytes."""
        events = []
        for character in self._utf8.decode(raw):
            was_return, self._after_return = self._after_return, character == "\r"
            if character == "\n" and was_return:
                continue
            if character not in "\r\n":
                self._line += character
                continue
            line, self._line = self._line, ""
            if not line:
                if self._data:
                    events.append("\n".join(self._data))
                self._data = []
                continue
            field, _, value = line.partition(":")
            if field == "data":
                self._data.append(value.removeprefix(" "))
            elif field != "event":
                assert not field, f"a field that nobody sends: {line[:100]!r}"
        return events


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


async def _streamed(events: Sequence[Event], error: HeadwaterError | None, form: AnswerForm) -> bytes:
    """What the response sends."""

    async def given() -> AsyncGenerator[Event, None]:
        for event in events:
            yield event
        if error is not None:
            raise error

    sent: list[bytes] = []
    forever = asyncio.Event()

    async def receive() -> Message:
        await forever.wait()
        raise AssertionError("nobody sets it")

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            sent.append(message.get("body", b""))

    closed: list[bool] = []
    stream = EventStream(given(), lambda raised: form.end(Usage(1, 2), raised), lambda: closed.append(True))
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "state": {"request_id": "r"}}
    await stream(scope, receive, send)
    assert closed == [True]
    return b"".join(sent)


def _decoded(family: str, prompt: list[int], ids: list[int], skips: bool) -> str:
    """The whole decode by the library, without the prompt's."""
    tokenizer = FAMILIES[family]
    whole = tokenizer.decode([*prompt, *ids], skip_special_tokens=skips)
    of_prompt = tokenizer.decode(prompt, skip_special_tokens=skips)
    for n, (one, other) in enumerate(zip(whole, of_prompt, strict=False)):
        if one != other:
            return whole[n:]
    return whole[min(len(whole), len(of_prompt)) :]


def _check_plan(plan: TextPlan, form: AnswerForm) -> None:
    """See that a plan is within the model's limits, and that it can be answered."""
    assert 0 < len(plan.specs) <= LIMITS.max_sequences + LIMITS.max_waiting
    for spec in plan.specs:
        assert len(spec.prompt) > 0
        assert 0 <= spec.max_tokens <= LIMITS.context_length - len(spec.prompt)
        assert all(0 <= token < LIMITS.vocab_size for token in (*spec.prompt, *spec.stop_ids))
        assert all(0 <= token < LIMITS.vocab_size for token in spec.sampling.logit_bias)
        assert 0 <= spec.sampling.temperature <= 2
    assert plan.timeout_s is None or plan.timeout_s > 0
    pieces = []
    for spec, stream in zip(plan.specs, plan.streams(tiny_text().tokenizer.texts), strict=True):
        logprobs = [-0.5] if spec.sampling.logprobs is not None else None
        pieces.append(stream.take(Tokens([300], logprobs, None, "length")))
        assert pieces[-1].finish is not None
    assert json.loads(form.whole(pieces[:1] if isinstance(form, GenerateAnswer) else pieces, Usage(1, 1)))
