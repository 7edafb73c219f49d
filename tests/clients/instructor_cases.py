"""instructor. To be added: response models, which need structured output or tools."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from cases import URL, run

client: Any = instructor.from_openai(
    openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=instructor.Mode.JSON
)


def chat_without_a_response_model() -> None:
    answer = client.chat.completions.create(
        model="tiny-lm", response_model=None, max_tokens=8, messages=[{"role": "user", "content": "def add(a, b):"}]
    )
    assert answer.choices[0].message.content


run(chat_without_a_response_model)
