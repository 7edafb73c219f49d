"""llama-index with a server that is like OpenAI's: chat, completions, embeddings. To be added: tools."""

from __future__ import annotations

import asyncio
from typing import Any

from cases import URL, run
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

ABOUT: Any = {"api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
LIMITS: Any = {"temperature": 0, "max_tokens": 16, "context_window": 512}
chats = OpenAILike(model="tiny-lm", is_chat_model=True, **LIMITS, **ABOUT)
completes = OpenAILike(model="tiny-lm", is_chat_model=False, **LIMITS, **ABOUT)
MESSAGES = [ChatMessage(role="user", content="def add(a, b):")]


def chat() -> None:
    assert chats.chat(MESSAGES).message.content


def chat_streamed() -> None:
    *_, last = chats.stream_chat(MESSAGES)
    assert last.message.content == chats.chat(MESSAGES).message.content


def chat_asynchronously() -> None:
    assert asyncio.run(chats.achat(MESSAGES)).message.content


def completions() -> None:
    assert completes.complete("import os").text


def completions_streamed() -> None:
    *_, last = completes.stream_complete("import os")
    assert last.text == completes.complete("import os").text


def embeddings() -> None:
    embedder = OpenAILikeEmbedding(model_name="text", **ABOUT)
    assert [len(vector) for vector in embedder.get_text_embedding_batch(["one", "two"])] == [384, 384]


run(chat, chat_streamed, chat_asynchronously, completions, completions_streamed, embeddings)
