"""The same model on vLLM and on our engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.running import Running

pytestmark = [pytest.mark.heavy, pytest.mark.vllm]

PROMPTS = [
    "import os\n\n\ndef read(",
    "class Stack:\n    def push(self, item):\n",
    "for line in open(path):\n",
    "def fibonacci(n):\n",
    "try:\n    import json\nexcept",
    "from collections import",
    "if __name__ == ",
    "    def close(self):\n",
    "while True:\n",
    "return sorted(",
    '"""Read a file',
    "x = [",
]


def completion(running: Running, model: str, prompt: str) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 128, "logprobs": 1}
    answer = running.client.post(f"{running.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_answers_are_equal(vllm_server: Running, prompt: str) -> None:
    by_vllm, by_us = (completion(vllm_server, model, prompt) for model in ("tiny", "ours"))
    assert by_vllm["text"] == by_us["text"]
    assert by_vllm["finish_reason"] == by_us["finish_reason"]
    assert by_vllm["logprobs"]["tokens"] == by_us["logprobs"]["tokens"]
    theirs, own = by_vllm["logprobs"]["token_logprobs"], by_us["logprobs"]["token_logprobs"]
    assert theirs == pytest.approx(own, abs=1e-4)
