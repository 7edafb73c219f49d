"""How much of a text is tokenized before it is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater_server.errors import ContextTooLong
from headwater_server.lm.completion import CompletionRequest
from headwater_server.lm.text_generate import GenerateRequest
from headwater_server.lm.text_plan import bounded_ids
from tests.app.lm.scripted import LIMITS, ids_of, tiny_text

WORDS = st.sampled_from(
    ["def f(x):\n", "    return ", "a", " ", "\n\n", "größer", "漢字", "🙂", "<|im_end|>", "  " * 40]
)
TEXTS = st.lists(WORDS, min_size=1, max_size=60).map(lambda parts: "".join(parts) * (4000 // len("".join(parts)) + 1))


@given(TEXTS, st.integers(20, 400))
def test_no_text_that_fits_is_refused(text: str, most: int) -> None:
    ids = bounded_ids(text, ids_of, most)
    whole = ids_of(text)
    assert ids == whole if ids is not None else len(whole) > most


@pytest.mark.parametrize("size", [100_000, 1_000_000])
def test_a_text_that_does_not_fit_is_tokenized_only_until_the_context_is_full(size: int) -> None:
    read: list[int] = []

    def encode(text: str) -> list[int]:
        read.append(len(text))
        return ids_of(text)

    assert bounded_ids("a b " * (size // 4), encode, 1000) is None
    assert sum(read) == 8000


def test_a_text_of_long_tokens_is_read_in_growing_parts() -> None:
    read: list[int] = []

    def encode(text: str) -> list[int]:
        read.append(len(text))
        return [1] * (len(text) // 100)

    ids = bounded_ids("a" * 100_000, encode, 1000)
    assert ids is not None
    assert (len(ids), read) == (1000, [8000, 32_000, 100_000])


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"model": "m", "prompt": ["x", "a b " * 3000]}),
        (CompletionRequest, {"model": "m", "prompt": [[1], [True] * 100_000]}),
        (GenerateRequest, {"text_input": "a b " * 3000}),
    ],
)
def test_a_prompt_that_does_not_fit_is_named(kind: Any, body: dict[str, Any]) -> None:
    with pytest.raises(
        ContextTooLong, match=r"expected at most 511 in the prompt, got (more|100000); shorten it"
    ) as caught:
        kind.read(json.dumps(body).encode()).plan(tiny_text(), LIMITS)
    assert caught.value.field == ("text_input" if "text_input" in body else "prompt[1]")
