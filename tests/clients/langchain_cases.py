"""langchain-openai: chat, completions, embeddings. To be added: tools, structured output."""

from __future__ import annotations

import asyncio
from typing import Any

from cases import URL, run
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

ABOUT: Any = {"base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0}
model = ChatOpenAI(model="tiny-lm", temperature=0, max_tokens=16, **ABOUT)
MESSAGES = [("system", "You write Python."), ("user", "def add(a, b):")]


def chat() -> None:
    answer = model.invoke(MESSAGES)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0


def chat_streamed() -> None:
    text = "".join(str(chunk.content) for chunk in model.stream(MESSAGES))
    assert text == model.invoke(MESSAGES).content


def chat_in_a_batch() -> None:
    assert len({answer.content for answer in model.batch([MESSAGES] * 4)}) == 1


def chat_asynchronously() -> None:
    assert asyncio.run(model.ainvoke(MESSAGES)).content


def completions() -> None:
    assert OpenAI(model="tiny-lm", temperature=0, max_tokens=16, **ABOUT).invoke("import os")


def embeddings_of_texts() -> None:
    embeddings = OpenAIEmbeddings(model="text", check_embedding_ctx_length=False, **ABOUT)
    one, two = embeddings.embed_documents(["one", "two"])
    assert len(one) == len(two) == 384
    assert abs(embeddings.embed_query("one")[0] - one[0]) < 1e-6


run(chat, chat_streamed, chat_in_a_batch, chat_asynchronously, completions, embeddings_of_texts)
