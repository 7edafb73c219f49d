"""How large a language model's key/value cache gets, from its configuration and options.

Layers × 2 (keys and values) × heads for keys and values × size of a head × bytes of a number, for each token that
memory is held for. How many these are is the rule of `inference.lm.slot_cache.SlotCache`, the built-in engine's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from app.config.schema import Deployment
from inference.reference import find_folder

__all__ = ["CacheShape", "cache_shape"]

CHUNK: Final = 256
"""Tokens by which the length of a `SlotCache` grows."""
NUMBER_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class CacheShape:
    """Of one language model."""

    token_bytes: int
    """For each token of each sequence."""
    context_length: int
    """Tokens of a prompt and its answer, at most."""
    cache_tokens: int | None = None
    """The budget that its options set; None: room for all sequences."""

    def size(self, sequences: int, length: int | None = None) -> int:
        """Bytes when so many sequences are computed at once, the longest of them of so many tokens.

        Args:
            sequences: at once.
            length: None: the longest that there may be.
        """
        budget = sequences * self.context_length if self.cache_tokens is None else self.cache_tokens
        longest = self.context_length if length is None else length
        rounded = -(-longest // CHUNK) * CHUNK
        held = max(longest, min(rounded, budget // sequences))
        # Where the budget is less than that, less sequences are computed at once.
        tokens = min(budget, sequences * held)
        return tokens * self.token_bytes


def cache_shape(deployment: Deployment, search: Sequence[str]) -> CacheShape | None:
    """Of a deployment of a language model; None if it has an engine of its own, whose cache is unknown.

    Args:
        deployment: whose ``model`` is ``lm:...``.
        search: as `inference.reference.find_folder`.

    Raises:
        LoadError: its folder isn't there.
    """
    options = deployment.options
    if options.get("engine") is not None:
        return None
    content = json.loads((find_folder(deployment.model or "", search) / "config.json").read_bytes())
    config = content.get("text_config") or content
    try:
        layers = int(config["num_hidden_layers"])
        heads = int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        context_length = int(options.get("context_length") or config["max_position_embeddings"])
    except (KeyError, TypeError, ValueError):
        return None  # a configuration of other names: its growth is fitted instead
    kept_heads = int(config.get("num_key_value_heads") or heads)
    number = _number_bytes(options, content, config)
    budget = options.get("cache_tokens")
    return CacheShape(
        2 * layers * kept_heads * head_dim * number, context_length, None if budget is None else int(budget)
    )


def _number_bytes(options: Mapping[str, Any], *configs: Mapping[str, Any]) -> int:
    wanted = options.get("dtype", "auto")
    if wanted == "auto":
        told = (config.get("dtype") or config.get("torch_dtype") for config in configs)
        wanted = next((one for one in told if one), "float32")
    return NUMBER_BYTES.get(str(wanted), 4)
