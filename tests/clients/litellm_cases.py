"""litellm: chat, completions, embeddings, its error classes. To be added: tools, structured output."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
from cases import URL, raised, run

ABOUT: Any = {"api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}
MESSAGES = [{"role": "user", "content": "def add(a, b):"}]
CHAT: Any = {"model": "openai/tiny-lm", "messages": MESSAGES, "temperature": 0, "max_tokens": 16, **ABOUT}


def chat() -> None:
    answer = litellm.completion(**CHAT)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


def chat_streamed() -> None:
    text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **CHAT))
    assert text == litellm.completion(**CHAT).choices[0].message.content


def chat_asynchronously() -> None:
    assert asyncio.run(litellm.acompletion(**CHAT)).choices[0].message.content


def completions() -> None:
    answer = litellm.text_completion(
        model="text-completion-openai/tiny-lm", prompt="import os", temperature=0, max_tokens=16, **ABOUT
    )
    assert answer.choices[0].text


def embeddings() -> None:
    answer = litellm.embedding(model="openai/text", input=["one", "two"], **ABOUT)
    assert [len(item["embedding"]) for item in answer.data] == [384, 384]


def a_prompt_that_is_too_long_has_its_own_class() -> None:
    raised(litellm.ContextWindowExceededError, litellm.completion, **{**CHAT, "max_tokens": 10**6})


run(chat, chat_streamed, chat_asynchronously, completions, embeddings, a_prompt_that_is_too_long_has_its_own_class)
