"""OpenAI's own client, sync and async."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from cases import URL, raised, run

BASE = f"{URL}/v1"
client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
HELLO: Any = [{"role": "system", "content": "You write Python."}, {"role": "user", "content": "def add(a, b):"}]
GREEDY: Any = {"model": "tiny-lm", "temperature": 0, "max_tokens": 16}


def models() -> None:
    assert {"tiny-lm", "text"} <= {model.id for model in client.models.list()}


def chat() -> None:
    answer = client.chat.completions.create(messages=HELLO, **GREEDY)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def chat_streamed_is_chat_whole() -> None:
    whole = client.chat.completions.create(messages=HELLO, **GREEDY).choices[0].message.content
    stream = client.chat.completions.create(
        messages=HELLO, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks: list[Any] = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole
    assert chunks[-1].usage.completion_tokens > 0


def chat_with_logprobs() -> None:
    answer = client.chat.completions.create(messages=HELLO, logprobs=True, top_logprobs=3, **GREEDY)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert all(len(token.top_logprobs) == 3 for token in logprobs.content)


def chat_with_fields_that_ask_for_nothing() -> None:
    client.chat.completions.create(
        messages=HELLO, tools=[], tool_choice="none", parallel_tool_calls=True, store=False, metadata={"a": "b"},
        service_tier="auto", modalities=["text"], user="u", **GREEDY,
    )  # fmt: skip


def completions_of_every_form() -> None:
    for prompt in ("import os", ["import os", "def f"], [5, 6], [[5, 6], [7]]):
        answer = client.completions.create(prompt=prompt, **GREEDY)
        assert len(answer.choices) == (2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1)


def completions_streamed() -> None:
    stream: Any = client.completions.create(prompt="import os", stream=True, **GREEDY)
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == client.completions.create(prompt="import os", **GREEDY).choices[0].text


def embeddings_of_texts_and_token_ids() -> None:
    for given in ("one", ["one", "two"], [101, 2028, 102], [[101, 2028, 102]]):
        answer = client.embeddings.create(model="text", input=given)
        assert all(len(item.embedding) == 384 for item in answer.data)


def errors() -> None:
    unknown = raised(openai.NotFoundError, client.chat.completions.create, model="nobody", messages=HELLO)
    assert unknown.code == "model_not_found"
    fields = {**GREEDY, "max_tokens": 10**6}
    too_long = raised(openai.BadRequestError, client.chat.completions.create, messages=HELLO, **fields)
    assert too_long.code == "context_length_exceeded"


def asynchronously() -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0) as asker:
            asks = [asker.chat.completions.create(messages=HELLO, **GREEDY) for _ in range(8)]
            answers = await asyncio.gather(*asks)
            assert len({answer.choices[0].message.content for answer in answers}) == 1
            text = ""
            async for chunk in await asker.chat.completions.create(messages=HELLO, stream=True, **GREEDY):
                text += chunk.choices[0].delta.content or ""
            assert text == answers[0].choices[0].message.content
            assert (await asker.embeddings.create(model="text", input="one")).data

    asyncio.run(main())


run(
    models, chat, chat_streamed_is_chat_whole, chat_with_logprobs, chat_with_fields_that_ask_for_nothing,
    completions_of_every_form, completions_streamed, embeddings_of_texts_and_token_ids, errors, asynchronously,
)  # fmt: skip
