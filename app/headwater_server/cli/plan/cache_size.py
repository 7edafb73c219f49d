"""The size of a language model's key/value cache, computed from its configuration.

A token takes layers × 2 (keys and values) × key/value heads × head size × bytes per number. The number of tokens
follows `headwater.lm.slot_cache.SlotCache`, the cache of the built-in engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headwater.reference import find_folder
from headwater_server.config.schema import Deployment

__all__ = ["CacheShape", "cache_shape"]

CHUNK: Final = 256
"""Number of tokens by which the length of a `SlotCache` grows."""
KEPT_ROWS: Final = 32
"""Places for sequences that the engine may add to keep prefixes."""
NUMBER_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class CacheShape:
    """The values that determine the size of a language model's cache."""

    token_bytes: int
    """Bytes for each token of a sequence."""
    context_length: int
    """Maximum number of tokens of a prompt and its answer."""
    cache_tokens: int | None = None
    """The budget of tokens in the model's options; None: enough for all sequences."""
    keeps_prefixes: bool = True
    """Whether kept prefixes that no sequence uses may fill the rest of the budget."""

    def size(self, sequences: int, length: int | None = None) -> int:
        """Bytes for this many concurrent sequences. The longest has ``length`` tokens; None: the whole context
        length."""
        budget = sequences * self.context_length if self.cache_tokens is None else self.cache_tokens
        longest = self.context_length if length is None else length
        rounded = -(-longest // CHUNK) * CHUNK
        held = max(longest, min(rounded, budget // sequences))
        # With a smaller budget, fewer sequences are computed at once.
        return min(budget, sequences * held) * self.token_bytes

    def most(self, sequences: int) -> int:
        """Maximum number of bytes with this many concurrent sequences."""
        if self.cache_tokens is None or not self.keeps_prefixes:  # by default, all sequences need the budget
            return self.size(sequences)
        places = (sequences + KEPT_ROWS) * -(-self.context_length // CHUNK) * CHUNK
        return min(self.cache_tokens, places) * self.token_bytes


def cache_shape(deployment: Deployment, search: Sequence[str]) -> CacheShape | None:
    """The cache of a language model (``lm:...``); None if unknown, as with a user-defined engine.

    Args:
        deployment: the language model's deployment.
        search: folders to look in, as for `headwater.reference.find_folder`.

    Raises:
        LoadError: the model's folder doesn't exist.
        OSError, ValueError: the folder has no readable ``config.json``.
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
        return None  # the config.json uses other names: the growth is fitted instead
    kept_heads = int(config.get("num_key_value_heads") or heads)
    dtype = options.get("dtype", "auto")
    if dtype == "auto":
        dtypes = (section.get("dtype") or section.get("torch_dtype") for section in (content, config))
        dtype = next(filter(None, dtypes), "float32")
    token_bytes = 2 * layers * kept_heads * head_dim * NUMBER_BYTES.get(str(dtype), 4)
    budget = options.get("cache_tokens")
    keeps_prefixes = bool(options.get("prefix_cache", True))
    return CacheShape(token_bytes, context_length, None if budget is None else int(budget), keeps_prefixes)
