"""The unmodified ``openai`` client against language models: completions, chat completions and responses."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import openai
import pytest

from tests.app.lm.response_events import said, told
from tests.running import Running, wait_for
from tests.services.engines import AFTER, FAILURE
from tests.token_streams import figures, is_idle, open_stream, run, text_of, whole

PROMPT = "import os\n\n\ndef read("
CHAT: list[Any] = [{"role": "user", "content": "Complete this Python code:\ndef close(self):"}]
"""Its greedy answer ends by itself."""
PATHS = pytest.mark.parametrize("path", ["completions", "chat"])
FAILING = [14, 5, 6]
"""A prompt with which deployment `faulty` fails."""


@pytest.fixture(scope="module")
def client(lm: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{lm.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def asynchronously(lm: Running, ask: Callable[[openai.AsyncOpenAI], Any]) -> Any:
    """Await what asks with an asynchronous client."""

    async def main() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{lm.url}/v1", api_key="unused", max_retries=0) as client:
            return await ask(client)

    return run(main())


def create(client: Any, path: str, **fields: Any) -> Any:
    """Ask `tiny` for a greedy answer, one way or the other."""
    fields = {"model": "tiny", "temperature": 0, "max_tokens": 24, **fields}
    if path == "chat":
        return client.chat.completions.create(**{"messages": CHAT, **fields})
    return client.completions.create(**{"prompt": PROMPT, **fields})


def text(choice: Any) -> str:
    """Of a whole answer's choice, or a chunk's."""
    if hasattr(choice, "text"):
        return str(choice.text)
    return str((choice.delta if hasattr(choice, "delta") else choice.message).content or "")


def joined(chunks: Any, index: int = 0) -> tuple[str, list[str]]:
    """One choice's text in a stream, and why it ended."""
    found = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(map(text, found)), [choice.finish_reason for choice in found if choice.finish_reason]


@PATHS
class TestAnswers:
    def test_at_least_as_many_tokens_as_asked_for(self, client: openai.OpenAI, path: str) -> None:
        answer = create(client, path, max_tokens=200, extra_body={"min_tokens": 190})
        assert answer.usage.completion_tokens >= 190

    def test_a_whole_answer(self, client: openai.OpenAI, path: str) -> None:
        answer = create(client, path)
        assert (answer.model, len(answer.choices), answer.choices[0].index) == ("tiny", 1, 0)
        assert answer.object == ("chat.completion" if path == "chat" else "text_completion")
        assert text(answer.choices[0])
        assert answer.choices[0].finish_reason == "length"
        assert abs(answer.created - time.time()) < 60
        assert answer.id

    def test_a_stream_says_the_same_in_pieces(self, client: openai.OpenAI, path: str) -> None:
        chunks = list(create(client, path, stream=True))
        assert joined(chunks) == (text(create(client, path).choices[0]), ["length"])
        assert len(chunks) > 8
        assert len({chunk.id for chunk in chunks}) == 1
        assert {chunk.usage for chunk in chunks} == {None}
        if path == "chat":
            assert chunks[0].choices[0].delta.role == "assistant"

    def test_usage(self, client: openai.OpenAI, path: str) -> None:
        usage = create(client, path).usage
        assert usage.completion_tokens == 24
        assert usage.total_tokens == usage.prompt_tokens + 24
        usage = create(client, path).usage  # its prompt is in the prefix cache by now
        *_, last = create(client, path, stream=True, stream_options={"include_usage": True})
        assert (last.choices, last.usage) == ([], usage)

    def test_what_a_prompt_begins_with_is_computed_once(self, client: openai.OpenAI, path: str) -> None:
        long = "def add(a, b):\n    return a + b\n" * 8
        asked = {"messages": [{"role": "user", "content": long}]} if path == "chat" else {"prompt": long}
        first, again = (create(client, path, **asked).usage for _ in range(2))
        assert first.prompt_tokens_details.cached_tokens < again.prompt_tokens - 16
        assert again.prompt_tokens - 16 <= again.prompt_tokens_details.cached_tokens < again.prompt_tokens

    def test_a_seed_makes_it_repeatable(self, client: openai.OpenAI, path: str) -> None:
        answers = [
            text(create(client, path, temperature=1, seed=seed).choices[0]) for seed in (1, 1, 2)
        ]  # fmt: skip
        assert answers[0] == answers[1] != answers[2]
        unseeded = {"temperature": 1, "max_tokens": 48, "extra_body": {"ignore_eos": True}}
        assert len({text(create(client, path, **unseeded).choices[0]) for _ in range(3)}) > 1

    def test_several_choices(self, client: openai.OpenAI, path: str) -> None:
        sampled: dict[str, Any] = {"temperature": 1, "seed": 7, "extra_body": {"ignore_eos": True}}
        answer = create(client, path, n=3, **sampled)
        texts = [text(choice) for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert len(set(texts)) == 3
        assert answer.usage.completion_tokens == 3 * 24
        chunks = list(create(client, path, n=3, stream=True, **sampled))
        assert [joined(chunks, index) for index in range(3)] == [(one, ["length"]) for one in texts]
        # Choice i has the seed `seed + i`.
        assert text(create(client, path, **{**sampled, "seed": 9}).choices[0]) == texts[2]

    def test_stop_strings(self, client: openai.OpenAI, path: str) -> None:
        full = text(create(client, path, max_tokens=48).choices[0])
        # Stops that begin and end within tokens, wherever these are; the second never comes.
        for place in range(8, 20):
            stop = full[place : place + 5]
            expected = full[: full.index(stop)]
            answer = create(client, path, max_tokens=48, stop=[stop, "\u00a0never"])
            assert (text(answer.choices[0]), answer.choices[0].finish_reason) == (expected, "stop")
            assert joined(create(client, path, max_tokens=48, stop=stop, stream=True)) == (expected, ["stop"])

    def test_asynchronously_and_at_once(self, lm: Running, client: openai.OpenAI, path: str) -> None:
        expected = text(create(client, path).choices[0])

        async def streamed(client: openai.AsyncOpenAI) -> str:
            return joined([chunk async for chunk in await create(client, path, stream=True)])[0]

        async def whole(client: openai.AsyncOpenAI) -> str:
            return text((await create(client, path)).choices[0])

        async def ask(client: openai.AsyncOpenAI) -> list[str]:
            return await asyncio.gather(*[kind(client) for kind in (streamed, whole) for _ in range(8)])

        assert asynchronously(lm, ask) == [expected] * 16

    def test_a_stream_that_is_left_stops_computing(self, lm: Running, client: openai.OpenAI, path: str) -> None:
        fields = {"model": "slow", "max_tokens": 900, "extra_body": {"ignore_eos": True}}  # 45 s
        with create(client, path, stream=True, **fields) as stream:
            assert next(iter(stream))
        wait_for(lambda: is_idle(lm, "slow"), 20, "the stream's place")


class TestEnds:
    def test_a_chat_that_ends_by_itself(self, client: openai.OpenAI) -> None:
        answer = create(client, "chat", max_tokens=200)
        assert answer.choices[0].finish_reason == "stop"
        assert "<|im_end|>" not in text(answer.choices[0])
        assert answer.usage.completion_tokens < 200

    def test_max_completion_tokens(self, client: openai.OpenAI) -> None:
        answer = create(client, "chat", max_tokens=openai.omit, max_completion_tokens=5)
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (5, "length")

    def test_echo(self, client: openai.OpenAI) -> None:
        plain, echoed = (text(create(client, "completions", echo=echo).choices[0]) for echo in (False, True))
        assert echoed == PROMPT + plain
        assert joined(create(client, "completions", echo=True, stream=True))[0] == echoed

    def test_a_prompt_alone_has_its_log_probabilities(self, client: openai.OpenAI) -> None:
        options: Any = {"model": "tiny", "prompt": [PROMPT, "import os"], "echo": True, "logprobs": 1, "max_tokens": 0}
        whole = client.completions.create(**options).choices
        told: list[list[float | None]] = [[], []]
        for chunk in client.completions.create(**options, stream=True):
            for choice in chunk.choices:
                if choice.logprobs is not None:
                    told[choice.index] += choice.logprobs.token_logprobs or []
        assert [one.text for one in whole] == options["prompt"]
        for one, streamed in zip(whole, told, strict=True):
            assert one.logprobs is not None
            assert one.logprobs.token_logprobs is not None
            first, *rest = one.logprobs.token_logprobs
            assert first is None
            assert rest == pytest.approx(streamed[1:], abs=1e-4)
            assert all(-30 < logprob < 0 for logprob in rest)

    def test_several_prompts(self, client: openai.OpenAI) -> None:
        prompts = [PROMPT, "class A:\n", "import "]
        each = [create(client, "completions", prompt=one) for one in prompts]
        answer = client.completions.create(model="tiny", prompt=prompts, temperature=0, max_tokens=24)
        assert [one.text for one in answer.choices] == [one.choices[0].text for one in each]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in each)

    def test_logit_bias(self, client: openai.OpenAI) -> None:
        answer = create(client, "completions", logit_bias={"300": 100}, logprobs=0, max_tokens=6)
        assert len(set(answer.choices[0].logprobs.tokens)) == 1


class TestLogprobs:
    def test_of_completions(self, client: openai.OpenAI) -> None:
        answer = create(client, "completions", logprobs=3)
        found = answer.choices[0].logprobs
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 24
        assert "".join(found.tokens) == answer.choices[0].text
        assert [answer.choices[0].text[start:][:1] for start in found.text_offset] == [one[:1] for one in found.tokens]
        for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
            assert len(top) == 3
            assert top[token] == pytest.approx(logprob) == max(top.values())  # greedy
            assert all(value <= 0 for value in top.values())

    def test_of_chats(self, client: openai.OpenAI) -> None:
        answer = create(client, "chat", logprobs=True, top_logprobs=2)
        found = answer.choices[0].logprobs.content
        assert bytes(byte for one in found for byte in one.bytes).decode() == text(answer.choices[0])
        for one in found:
            assert one.top_logprobs[0].token == one.token
            assert one.top_logprobs[0].logprob == pytest.approx(one.logprob)
            assert one.top_logprobs[0].logprob >= one.top_logprobs[1].logprob

    def test_of_streams(self, client: openai.OpenAI) -> None:
        expected = create(client, "completions", logprobs=2).choices[0].logprobs
        chunks = list(create(client, "completions", logprobs=2, stream=True))
        found = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
        assert [token for one in found for token in one.tokens] == expected.tokens
        assert [offset for one in found for offset in one.text_offset] == expected.text_offset
        logprobs = [logprob for one in found for logprob in one.token_logprobs]
        assert logprobs == pytest.approx(expected.token_logprobs, abs=1e-4)


class TestResponses:
    """What a response says is what the same chat says."""

    ASKED: ClassVar[dict[str, Any]] = {"model": "tiny", "input": CHAT, "temperature": 0, "max_output_tokens": 24}
    ENDING: ClassVar[dict[str, Any]] = {**ASKED, "max_output_tokens": 200}

    def test_a_whole_response(self, client: openai.OpenAI) -> None:
        answer, same = client.responses.create(**self.ASKED), create(client, "chat")
        assert answer.output_text == text(same.choices[0])
        assert (answer.status, answer.model, answer.to_dict()["store"]) == ("incomplete", "tiny", False)
        assert answer.usage is not None
        assert (answer.usage.input_tokens, answer.usage.output_tokens) == (same.usage.prompt_tokens, 24)
        ended, same = client.responses.create(**self.ENDING), create(client, "chat", max_tokens=200)
        assert (ended.status, ended.output_text) == ("completed", text(same.choices[0]))

    def test_instructions_and_an_answer_sent_back(self, client: openai.OpenAI) -> None:
        asked = {**self.ASKED, "instructions": "Write Python."}
        first = client.responses.create(**asked)
        asked["input"] = [*CHAT, *first.output, {"role": "user", "content": "Go on."}]
        said = {"role": "assistant", "content": first.output_text}
        messages = [{"role": "system", "content": "Write Python."}, *CHAT, said, {"role": "user", "content": "Go on."}]
        same = create(client, "chat", messages=messages)
        assert client.responses.create(**asked).output_text == text(same.choices[0])

    def test_a_stream_says_the_same_in_pieces(self, client: openai.OpenAI) -> None:
        events = list(client.responses.create(**self.ASKED, stream=True))
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == client.responses.create(**self.ASKED).output_text
        assert len(deltas) > 8
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")

    def test_the_stream_helper_and_the_asynchronous_client(self, lm: Running, client: openai.OpenAI) -> None:
        with client.responses.stream(**self.ENDING) as stream:
            final = stream.get_final_response()
        assert (final.status, final.output_text) == ("completed", client.responses.create(**self.ENDING).output_text)

        async def streamed(client: openai.AsyncOpenAI) -> str:
            async with client.responses.stream(**self.ENDING) as stream:
                return (await stream.get_final_response()).output_text

        async def whole(client: openai.AsyncOpenAI) -> str:
            return str((await client.responses.create(**self.ENDING)).output_text)

        async def ask(client: openai.AsyncOpenAI) -> list[str]:
            return await asyncio.gather(*[kind(client) for kind in (streamed, whole) for _ in range(4)])

        assert asynchronously(lm, ask) == [final.output_text] * 8

    def test_a_stream_that_is_left_stops_computing(self, lm: Running, client: openai.OpenAI) -> None:
        asked = {**self.ASKED, "model": "slow", "max_output_tokens": 900, "extra_body": {"ignore_eos": True}}  # 45 s
        with client.responses.create(**asked, stream=True) as stream:
            assert next(iter(stream))
        wait_for(lambda: is_idle(lm, "slow"), 20, "the stream's place")

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("fields", "kind", "param"),
        [
            ({"model": "nope"}, openai.NotFoundError, "model"),
            ({"store": True}, openai.BadRequestError, "store"),
            ({"previous_response_id": "resp_1"}, openai.BadRequestError, "previous_response_id"),
            ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, openai.BadRequestError, "tools[0].type"),
            ({"max_output_tokens": 100_000}, openai.BadRequestError, "max_output_tokens"),
        ],
    )
    def test_what_is_refused(self, client: openai.OpenAI, stream: bool, fields: Any, kind: Any, param: str) -> None:
        with pytest.raises(kind) as caught:
            client.responses.create(**{**self.ASKED, **fields}, stream=stream)
        assert (caught.value.type, caught.value.param) == ("invalid_request_error", param)


class TestForms:
    """Tools and structured output: the model never learnt to call, so what holds it to calls are grammars."""

    PARAMETERS: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 3, 7]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    FUNCTION: ClassVar[dict[str, Any]] = {"name": "weather", "parameters": PARAMETERS}
    TOOL: ClassVar[dict[str, Any]] = {"type": "function", "function": FUNCTION}
    NAMED: ClassVar[dict[str, Any]] = {
        "max_tokens": 200, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }  # fmt: skip
    RESPONSE: ClassVar[dict[str, Any]] = {
        "model": "tiny", "input": CHAT, "temperature": 0, "max_output_tokens": 200,
        "tools": [{"type": "function", "strict": True, **FUNCTION}],
        "tool_choice": {"type": "function", "name": "weather"},
    }  # fmt: skip

    def check(self, arguments: str) -> None:
        value = json.loads(arguments)
        assert set(value) == {"city", "days"}
        assert len(value["city"]) <= 8
        assert value["days"] in (1, 3, 7)

    def test_a_named_tool_whole_and_streamed(self, client: openai.OpenAI) -> None:
        (choice,) = create(client, "chat", **self.NAMED).choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather"
        self.check(call.function.arguments)
        chunks = list(create(client, "chat", stream=True, **self.NAMED))
        parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
        assert [part.function.name for part in parts if part.function.name] == ["weather"]
        assert len(parts) > 4
        assert "".join(part.function.arguments for part in parts) == call.function.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"

    def test_a_json_schema(self, client: openai.OpenAI) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": self.PARAMETERS}}
        asked: dict[str, Any] = {"max_tokens": 200, "response_format": form}
        (choice,) = create(client, "chat", **asked).choices
        assert choice.finish_reason == "stop"
        self.check(text(choice))
        assert joined(create(client, "chat", stream=True, **asked)) == (text(choice), ["stop"])

    def test_a_response_with_tools(self, client: openai.OpenAI) -> None:
        response = client.responses.create(**self.RESPONSE)
        (call,) = response.output
        assert (call.type, call.name, call.status, response.status) == (
            "function_call", "weather", "completed", "completed",
        )  # fmt: skip
        self.check(call.arguments)
        assert (
            call.arguments == create(client, "chat", **self.NAMED).choices[0].message.tool_calls[0].function.arguments
        )
        streamed = told([event.to_dict() for event in client.responses.create(**self.RESPONSE, stream=True)])
        assert said(streamed) == said(response.to_dict())
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        again = {**self.RESPONSE, "input": [*CHAT, call, output], "tool_choice": "none", "max_output_tokens": 5}
        assert client.responses.create(**again).usage.output_tokens == 5


class TestErrors:
    @PATHS
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("fields", "kind", "param"),
        [
            ({"model": "nope"}, openai.NotFoundError, "model"),
            ({"temperature": -1}, openai.BadRequestError, "temperature"),
            ({"max_tokens": 100_000}, openai.BadRequestError, "max_tokens"),
            ({"extra_body": {"temperatur": 4}}, openai.BadRequestError, "temperatur"),
            ({"logit_bias": {"99999": 1}}, openai.BadRequestError, None),
        ],
    )
    def test_before_the_stream(
        self, client: openai.OpenAI, path: str, stream: bool, fields: Any, kind: Any, param: str | None
    ) -> None:
        with pytest.raises(kind) as caught:
            create(client, path, stream=stream, **fields)
        assert caught.value.type == "invalid_request_error"
        if param:
            assert caught.value.param == param
        assert caught.value.request_id

    def test_a_field_of_another_server_is_named(self, client: openai.OpenAI) -> None:
        raw = client.chat.completions.with_raw_response.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=1, extra_body={"beams": 4}
        )
        assert raw.headers["headwater-ignored"] == "beams"

    def test_fields_that_ask_for_nothing_are_no_errors(self, client: openai.OpenAI) -> None:
        answer = create(
            client, "chat", tools=[], tool_choice="none", parallel_tool_calls=True, store=False, metadata={"run": "7"},
            service_tier="auto", modalities=["text"], prompt_cache_key="k", safety_identifier="s", user="u",
            extra_body={"top_k": -1, "min_tokens": 0},
        )  # fmt: skip
        assert text(answer.choices[0]) == text(create(client, "chat").choices[0])
        assert text(create(client, "completions", suffix="").choices[0]) == text(
            create(client, "completions").choices[0]
        )

    def test_tools_are_refused_if_the_model_has_no_format_of_calls(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="tools"):
            create(client, "chat", model="null", tools=[{"type": "function", "function": {"name": "f"}}])

    def test_in_mid_stream(self, client: openai.OpenAI) -> None:
        chunks: list[Any] = []
        stream = client.completions.create(model="faulty", prompt=FAILING, max_tokens=20, stream=True)
        with pytest.raises(openai.APIError, match=FAILURE) as caught:
            chunks.extend(stream)
        assert not isinstance(caught.value, openai.APIStatusError)
        assert caught.value.type == "server_error"
        whole = client.completions.create(model="faulty", prompt=[1, 2], max_tokens=AFTER)
        assert joined(chunks) == (whole.choices[0].text, [])

    def test_of_a_whole_answer(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.InternalServerError, match=FAILURE):
            client.completions.create(model="faulty", prompt=FAILING, max_tokens=20)

    def test_in_mid_stream_asynchronously(self, lm: Running) -> None:
        chunks = []

        async def ask(client: openai.AsyncOpenAI) -> None:
            stream = await client.completions.create(model="faulty", prompt=FAILING, max_tokens=20, stream=True)
            async for chunk in stream:
                chunks.append(chunk)  # a comprehension would lose those before the error

        with pytest.raises(openai.APIError, match=FAILURE):
            asynchronously(lm, ask)
        assert chunks


class TestHeartbeats:
    """Deployment `slow` computes two sequences at once; a third one waits."""

    FIELDS: ClassVar[dict[str, Any]] = {"model": "slow", "prompt": [7, 8], "max_tokens": 4, "stream": True}

    @pytest.fixture
    def expected(self, client: openai.OpenAI) -> str:
        return client.completions.create(model="slow", prompt=[7, 8], max_tokens=4).choices[0].text

    async def while_others_run(self, lm: Running, ask: Callable[[], Any]) -> Any:
        others = {**self.FIELDS, "max_tokens": 30}
        async with open_stream(lm, "/v1/completions", others) as one, open_stream(lm, "/v1/completions", others) as two:
            result, *_ = await asyncio.gather(ask(), one.rest(), two.rest())
            return result

    def test_one_that_waits_is_answered_after_them(self, lm: Running, expected: str) -> None:
        # How often they come: tests/app/lm/test_routes_with_engine.py.
        found = run(self.while_others_run(lm, lambda: whole(lm, self.FIELDS)))
        assert (text_of(found.events), found.is_done) == (expected, True)

    def test_the_client_reads_over_them(self, lm: Running, client: openai.OpenAI, expected: str) -> None:
        def ask() -> tuple[str, list[str]]:
            return joined(client.completions.create(**self.FIELDS))

        assert run(self.while_others_run(lm, lambda: asyncio.to_thread(ask))) == (expected, ["length"])

    def test_the_asynchronous_client_does_too(self, lm: Running, expected: str) -> None:
        async def ask(client: openai.AsyncOpenAI) -> Any:
            async def stream() -> tuple[str, list[str]]:
                return joined([chunk async for chunk in await client.completions.create(**self.FIELDS)])

            return await self.while_others_run(lm, stream)

        assert asynchronously(lm, ask) == (expected, ["length"])


class TestCurl:
    def test_tokens_arrive_one_by_one(self, lm: Running) -> None:
        body = '{"model": "slow", "prompt": [5, 6], "max_tokens": 20, "stream": true}'
        command = ["curl", "-sN", f"{lm.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
        reads: list[tuple[float, bytes]] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE) as curl:
            assert curl.stdout is not None
            while data := os.read(curl.stdout.fileno(), 65536):
                reads.append((time.monotonic(), data))
        assert curl.returncode == 0
        told = [(when, data) for when, data in reads if b'"text":"' in data]
        assert len(told) >= 10
        # 20 tokens of 50 ms: had it been held back, they would have come together.
        assert told[-1][0] - told[0][0] > 0.5
        assert reads[-1][1].endswith(b"data: [DONE]\n\n")


def test_what_failed_is_counted(lm: Running, client: openai.OpenAI) -> None:
    before = figures(lm, "faulty")
    run(whole(lm, {"model": "faulty", "prompt": FAILING}))
    after = figures(lm, "faulty")
    assert after["failures"] == before["failures"] + 1
    assert after["contract_violations"] == before["contract_violations"]
