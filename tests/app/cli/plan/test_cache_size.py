"""The size of a language model's key/value cache, against the cache itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headwater_server.cli.plan.cache_size import CacheShape, cache_shape
from headwater_server.config.schema import Deployment

LLAMA = {
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256, "head_dim": 64,
    "max_position_embeddings": 512, "dtype": "float32",
}  # fmt: skip


def shape_of(tmp_path: Path, config: dict[str, Any], **options: Any) -> CacheShape | None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return cache_shape(Deployment.model_validate({"model": f"lm:{tmp_path}", "options": options}), ())


def test_a_token_is_keys_and_values_of_all_layers(tmp_path: Path) -> None:
    assert shape_of(tmp_path, LLAMA) == CacheShape(2 * 4 * 2 * 64 * 4, 512)
    assert shape_of(tmp_path, LLAMA, dtype="bfloat16", context_length=128) == CacheShape(2 * 4 * 2 * 64 * 2, 128)
    small = {name: value for name, value in LLAMA.items() if name not in ("head_dim", "num_key_value_heads")}
    assert shape_of(tmp_path, {"text_config": {**small, "dtype": "float16"}}, cache_tokens=99) == CacheShape(
        2 * 4 * 4 * 64 * 2, 512, 99
    )


def test_of_an_engine_of_the_users_nothing_is_known(tmp_path: Path) -> None:
    assert shape_of(tmp_path, LLAMA, engine="mine:make") is None
    assert shape_of(tmp_path, {"n_layer": 4}) is None


@pytest.mark.parametrize(
    ("sequences", "length", "cache_tokens", "tokens"),
    [
        (8, 100, None, 8 * 256),
        (8, 300, None, 8 * 512),
        (8, None, None, 8 * 512),
        (8, None, 1000, 1000),  # the budget holds, so that less than eight are computed at once
        (8, 100, 1000, 8 * 125),
    ],
)
def test_as_many_tokens_as_the_cache_holds(
    sequences: int, length: int | None, cache_tokens: int | None, tokens: int
) -> None:
    assert CacheShape(10, 512, cache_tokens).size(sequences, length) == 10 * tokens


def test_kept_prefixes_may_fill_a_budget_that_was_set(tmp_path: Path) -> None:
    shape = CacheShape(10, 512, 100_000)
    assert [shape.most(sequences) for sequences in (1, 8)] == [10 * 33 * 512, 10 * 40 * 512]
    assert CacheShape(10, 512, 1000).most(8) == 10 * 1000
    assert CacheShape(10, 512).most(8) == 10 * 8 * 512
    without = shape_of(tmp_path, LLAMA, cache_tokens=100_000, prefix_cache=False)
    assert without is not None
    assert without.most(8) == without.size(8) == without.token_bytes * 8 * 512
