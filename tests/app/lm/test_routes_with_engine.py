"""The routes over true `Models`, dispatcher and `EngineHost`, without the processes between."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest
import torch

from headwater.engine import EngineLimits, Sampling, SequenceRequest, TokenEvent
from headwater.lm.causal_lm import load_causal_lm
from headwater.lm.null_engine import NullEngine
from headwater.lm.slot_engine import SlotEngine
from tests.app.lm.app_with_engine import app_with_engine
from tests.app.lm.scripted import FOLDER, tiny_text
from tests.app.lm.stand_in import until
from tests.counted import count_from_zero, counts_of

pytestmark = pytest.mark.heavy
LIMITS = EngineLimits(max_sequences=4, max_waiting=2, context_length=100_000, cache_tokens=1_000_000, vocab_size=4096)


def text_of(answer: httpx.Response) -> str:
    lines = answer.text.split("\n")  # on a busy machine with pings between them
    frames = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert frames[-1] == "[DONE]"
    return "".join(json.loads(frame)["choices"][0]["text"] for frame in frames[:-1])


async def test_tokens_come_through_as_text() -> None:
    count_from_zero()

    async with app_with_engine(NullEngine(LIMITS)) as (ask, _dispatcher):
        expected = tiny_text().tokenizer.decode(range(600), skip_special_tokens=True)
        asked: dict[str, Any] = {"model": "lm", "prompt": "x", "max_tokens": 600}
        answers = await asyncio.gather(*(ask("/v1/completions", stream=n % 2 == 1, **asked) for n in range(4)))
        for n, answer in enumerate(answers):
            text = text_of(answer) if n % 2 else answer.json()["choices"][0]["text"]
            assert text == expected
        assert counts_of("lm").total("headwater_generated_tokens") == 4 * 600


class CachingEngine(NullEngine):
    """Says of each sequence that as many tokens of its prompt were cached as sequences came before it."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.requests: list[SequenceRequest] = []

    def submit(self, request: SequenceRequest) -> None:
        """As `Engine.submit`."""
        super().submit(request)
        self.requests.append(request)

    def step(self) -> list[TokenEvent]:
        """As `Engine.step`."""
        numbers = {request.id: number for number, request in enumerate(self.requests)}
        return [
            msgspec.structs.replace(one, cached=0 if one.index else numbers[one.id]) for one in super().step()
        ]  # fmt: skip


async def test_what_the_prefix_cache_had_is_in_the_usage_and_counted() -> None:
    count_from_zero()

    async with app_with_engine(CachingEngine()) as (ask, _dispatcher):
        asked: dict[str, Any] = {"model": "lm", "max_tokens": 3}
        cached = {"cached_tokens": 0}
        whole = (await ask("/v1/completions", prompt="def f(x, y, z):", **asked)).json()["usage"]
        assert whole["prompt_tokens_details"] == cached
        # Of two choices of a prompt the first counts: 1 of 1 and 2, and then 3 of 3 and 4.
        prompts = ["def f(x, y, z):", "def g(x, y, z):"]
        whole = (await ask("/v1/completions", prompt=prompts, n=2, **asked)).json()["usage"]
        assert whole["prompt_tokens_details"] == {"cached_tokens": 1 + 3}
        messages = [{"role": "user", "content": "x"}]
        answer = await ask(
            "/v1/chat/completions", messages=messages, stream=True, stream_options={"include_usage": True}, **asked
        )
        *_, usage, _ = answer.text.strip().split("\n\n")
        assert json.loads(usage.removeprefix("data: "))["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}
        assert counts_of("lm").total("headwater_cached_prompt_tokens") == sum(range(6))


async def test_prefixes_are_shared_by_the_requests_of_a_key_only() -> None:
    engine = CachingEngine()

    async with app_with_engine(engine) as (ask, _dispatcher):
        for ask.key in ("", "alice", "bob"):
            assert (await ask("/v1/completions", model="lm", prompt="def f(x):", max_tokens=1)).status_code == 200
        assert [request.cache_scope for request in engine.requests] == ["", "alice", "bob"]


async def test_a_stop_string_frees_the_engine() -> None:
    engine = NullEngine(LIMITS)

    async with app_with_engine(engine) as (ask, dispatcher):
        stop = tiny_text().tokenizer.decode([500, 501], skip_special_tokens=True)
        answer = await ask("/v1/completions", model="lm", prompt="x", max_tokens=90_000, stop=stop, stream=True)
        assert text_of(answer) == tiny_text().tokenizer.decode(range(500), skip_special_tokens=True).partition(stop)[0]
        await until(lambda: not engine.active)
        assert dispatcher.in_flight == 0


async def test_a_cancelled_request_is_told_so() -> None:
    engine = NullEngine(LIMITS, step_s=0.001)

    async with app_with_engine(engine) as (ask, _dispatcher):
        asked: dict[str, Any] = {"model": "lm", "prompt": "x", "max_tokens": 90_000, "n": 2}
        whole = asyncio.create_task(ask("/v1/completions", "whole", **asked))
        stream = asyncio.create_task(ask("/v1/completions", "stream", stream=True, **asked))
        await until(lambda: engine.active == 4)
        await until(lambda: b"data: " in ask.sent)
        for id in ("whole", "stream"):
            assert (await ask(f"/v2/requests/{id}/cancel")).json() == {"request_id": id, "cancelled": 2}
        assert (await whole).status_code == 409
        assert (await whole).json()["error"]["type"] == "invalid_request_error"
        *_, error, done = (await stream).text.strip().split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "cancelled"
        assert done == "data: [DONE]"
        assert (await ask("/v2/requests/whole/cancel")).status_code == 404
        await until(lambda: not engine.active)


async def test_a_full_queue_is_told_by_its_status() -> None:
    engine = NullEngine(LIMITS, step_s=0.001)

    async with app_with_engine(engine) as (ask, _dispatcher):
        asked: dict[str, Any] = {"model": "lm", "prompt": "x", "max_tokens": 90_000}
        running = asyncio.create_task(ask("/v1/completions", "running", n=6, **asked))
        await until(lambda: engine.active == 4 and engine.waiting == 2)
        for stream in (False, True):
            refused = await ask("/v1/completions", stream=stream, **asked)
            assert refused.status_code == 429
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert "retry-after" in refused.headers
        assert (await ask("/v2/requests/running/cancel")).json()["cancelled"] == 6
        assert (await running).status_code == 409


async def test_a_stream_that_waits_for_its_turn_gets_heartbeats() -> None:
    engine = NullEngine(LIMITS, step_s=0.001)

    async with app_with_engine(engine) as (ask, _dispatcher):
        asked: dict[str, Any] = {"model": "lm", "prompt": "x"}
        others = asyncio.create_task(ask("/v1/completions", "others", n=4, max_tokens=90_000, **asked))
        await until(lambda: engine.active == 4)
        waiting = asyncio.create_task(ask("/v1/completions", max_tokens=3, stream=True, **asked))
        await until(lambda: ask.sent.count(b": ping\n") >= 2)
        assert engine.waiting == 1
        await ask("/v2/requests/others/cancel")
        answer = await waiting
        frames = [frame for frame in answer.text.splitlines() if frame and frame != ": ping"]
        assert frames[-1] == "data: [DONE]"
        assert all(frame.startswith("data: ") for frame in frames)
        assert (await others).status_code == 409


async def test_a_request_may_have_a_deadline_of_its_own() -> None:
    async with app_with_engine(NullEngine(LIMITS, step_s=0.001)) as (ask, _dispatcher):
        answer = await ask("/v2/models/lm/generate", text_input="x", max_tokens=90_000, timeout=200_000)
        assert answer.status_code == 504
        assert "0.2 s" in answer.json()["error"]


def tiny_engine(**options: Any) -> SlotEngine:
    loaded = load_causal_lm(FOLDER)
    return SlotEngine(loaded.model, eos_ids=loaded.eos_ids, max_sequences=4, prefill_chunk=16, **options)


PROMPTS = ["def größer(a, b):\n    return a > b  # 漢字", "import os\n\nfor name in os.listdir():"]


@torch.inference_mode()
def checked_prompt(told: dict[str, Any], prompt: str, model: Any, most: int) -> int:
    """Check a choice's log probabilities of its prompt against a plain pass; the number of its tokens."""
    text = tiny_text()
    ids = text.encode_text(prompt)
    expected = model(torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(dim=-1)
    assert told["tokens"][: len(ids)] == [text.tokenizer.texts.shown(token)[0] for token in ids]
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    for place, token in enumerate(ids[1:], 1):
        logprob, top = told["token_logprobs"][place], told["top_logprobs"][place]
        assert abs(logprob - float(expected[place - 1, token])) < 1e-4
        assert top[told["tokens"][place]] == logprob
        assert abs(max(top.values()) - float(expected[place - 1].max())) < 1e-4
        assert min(most, 1) <= len(top) <= most + 1
    return len(ids)


async def test_prompts_are_scored_as_lm_evaluation_harness_asks_for_it() -> None:
    model = load_causal_lm(FOLDER).model

    async with app_with_engine(tiny_engine()) as (ask, _dispatcher):
        asked: dict[str, Any] = {"model": "lm", "echo": True, "logprobs": 5, "temperature": 0}
        ids = [tiny_text().encode_text(prompt) for prompt in PROMPTS]
        for max_tokens in 0, 1:
            for prompt in PROMPTS, ids:
                answer = (await ask("/v1/completions", prompt=prompt, max_tokens=max_tokens, **asked)).json()
                for choice, given in zip(answer["choices"], PROMPTS, strict=True):
                    told = choice["logprobs"]
                    count = checked_prompt(told, given, model, 5)
                    assert {len(entries) for entries in told.values()} == {count + max_tokens}
                    assert choice["text"].startswith(given)
                    assert (choice["text"] == given) == (max_tokens == 0)
                    spans = zip(told["tokens"], told["text_offset"], [*told["text_offset"][1:], None], strict=True)
                    assert all(
                        choice["text"][begin:end] == token
                        for token, begin, end in spans
                        if not token.startswith("bytes:") and begin != end
                    )
                usage = answer["usage"]
                assert usage["prompt_tokens"] == sum(map(len, ids))
                assert usage["completion_tokens"] == max_tokens * len(PROMPTS)
                assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_what_is_streamed_of_a_prompt_is_what_the_whole_answer_has() -> None:
    model = load_causal_lm(FOLDER).model

    async with app_with_engine(tiny_engine()) as (ask, _dispatcher):
        asked: dict[str, Any] = {"model": "lm", "echo": True, "logprobs": 2, "temperature": 0, "n": 2}
        for max_tokens in 0, 1, 9:
            prompts: dict[str, Any] = {"prompt": PROMPTS, "max_tokens": max_tokens, **asked}
            whole = (await ask("/v1/completions", **prompts)).json()["choices"]
            assert [choice["index"] for choice in whole] == [0, 1, 2, 3]
            streamed = await ask("/v1/completions", stream=True, **prompts)
            texts: list[str] = [""] * 4
            told: list[dict[str, Any]] = [{key: [] for key in choice["logprobs"]} for choice in whole]
            frames = [line for line in streamed.text.splitlines() if line.startswith("data: {")]
            for frame in frames:
                (choice,) = json.loads(frame.removeprefix("data: "))["choices"]
                place = choice["index"]
                texts[place] += choice["text"]
                for key, entries in (choice["logprobs"] or {}).items():
                    told[place][key] += entries
            assert texts == [choice["text"] for choice in whole]
            for choice, got in zip(whole, told, strict=True):
                assert got["tokens"] == choice["logprobs"]["tokens"]
                assert got["text_offset"] == choice["logprobs"]["text_offset"]
                checked_prompt(got, PROMPTS[choice["index"] // 2], model, 2)


async def test_an_engine_that_can_not_score_prompts_says_so() -> None:
    async with app_with_engine(NullEngine(LIMITS)) as (ask, _dispatcher):
        answer = await ask("/v1/completions", model="lm", prompt="x", echo=True, logprobs=1)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "logprobs"
        assert answer.json()["error"]["message"].startswith("logprobs: this model has no log probabilities of prompts")


async def test_requests_that_say_nothing_of_it_are_sampled_as_the_folder_says() -> None:
    loaded = load_causal_lm(FOLDER)
    engine = SlotEngine(loaded.model, eos_ids=loaded.eos_ids, max_sequences=8)

    async with app_with_engine(engine, sampling=Sampling(top_k=1, temperature=0.9)) as (ask, _dispatcher):
        asked: dict[str, Any] = {"model": "lm", "prompt": "def fibonacci(n):", "max_tokens": 12}
        answers = [await ask("/v1/completions", **asked) for _ in range(3)]
        best = await ask("/v1/completions", **asked, temperature=0)
        assert {answer.json()["choices"][0]["text"] for answer in (*answers, best)} == {
            best.json()["choices"][0]["text"]
        }
        others = await asyncio.gather(*(ask("/v1/completions", **asked, top_k=0, seed=seed) for seed in range(4)))
        assert len({answer.json()["choices"][0]["text"] for answer in others}) > 1
        said = await ask("/v1/responses", model="lm", input="hi", max_output_tokens=1)
        assert (said.json()["temperature"], said.json()["top_p"]) == (0.9, 1.0)
