"""Tries the slot engine with a small copy of an architecture, before a model's weights are read.

Whether the engine can serve an architecture depends on its kinds of layers, not on its size: the copy has the same
configuration with fewer layers, heads and experts, a smaller vocabulary, and random weights.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from headwater.lm.model_folder import context_length_of
from headwater.lm.slot_engine import SlotEngine
from headwater.lm.transformers_parts import blank_model, layers_of

__all__ = ["rehearse", "small_copy"]

MAX_PARAMETERS: Final = 50_000_000
"""A larger copy isn't made: a part of the model, such as an image encoder, can't be made small."""
LAYERS: Final = 2
KEY_VALUE_HEADS: Final = 2
VOCABULARY: Final = 256
INNER_SIZE: Final = 64
EXPERTS: Final = 4
SPREAD: Final = 0.2
"""Standard deviation of the weights: with a smaller value, attention would hardly affect the logits."""

_INNER: Final = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size")
"""Endings of the names for the inner size of a feed-forward part."""
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_EXPERTS: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_TOKENS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
_NO_SIZES: Final = ("position", "window", "vocab", "length", "token")
"""Parts of the names of numbers that may equal the hidden size by chance."""


def rehearse(config: PreTrainedConfig, attention: str, context_length: int | None) -> None:
    """Have the slot engine check itself with a small copy of a model. Does nothing if such a copy can't be made, or
    fails even without the engine.

    Args:
        config: the folder's configuration.
        attention: the implementation, ``sdpa`` or ``eager``.
        context_length: the configured length; None for the model's length.

    Raises:
        ReplicaError: the engine can't serve the architecture.
    """
    auto: Any = AutoModelForCausalLM
    try:
        small = small_copy(config)
        if sum(parameter.numel() for parameter in blank_model(small, attention).parameters()) > MAX_PARAMETERS:
            return
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            model = auto.from_config(small, attn_implementation=attention, trust_remote_code=False).eval()
        with torch.inference_mode():
            model(torch.zeros((1, 4), dtype=torch.int64), use_cache=False)
    except Exception:
        return
    length = context_length_of(config.get_text_config(decoder=True), context_length)
    SlotEngine(model, max_sequences=1, context_length=length).check()


def small_copy(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same configuration with smaller numbers; the sizes of heads and all settings for positions stay the same."""
    small: Any = deepcopy(config)
    text: Any = small.get_text_config(decoder=True)
    kinds, _ = layers_of(text)
    layers = max(LAYERS, 1 + max(kinds.index(kind) for kind in set(kinds)))
    heads, hidden = text.num_attention_heads, text.hidden_size
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    fewer = min(key_value_heads, KEY_VALUE_HEADS)
    new_heads = heads // key_value_heads * fewer
    new_hidden = hidden * new_heads // heads
    for name, value in list(text.to_dict().items()):
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, name, value[:layers])
        elif isinstance(value, int) and not isinstance(value, bool):
            if name.endswith(_INNER):
                setattr(text, name, INNER_SIZE)
            elif name in _EXPERTS:
                setattr(text, name, min(value, EXPERTS))
            elif name in _CHOSEN_EXPERTS:
                setattr(text, name, min(value, EXPERTS // 2))
            elif name in ("n_group", "topk_group"):
                setattr(text, name, 1)
            elif value == hidden and not any(part in name for part in _NO_SIZES):
                setattr(text, name, new_hidden)
    text.num_hidden_layers = layers
    text.num_attention_heads = new_heads
    text.hidden_size = new_hidden
    if getattr(text, "num_key_value_heads", None):
        text.num_key_value_heads = fewer
    text.vocab_size = min(text.vocab_size, VOCABULARY)
    for name in _TOKENS:
        if getattr(text, name, None) is not None:
            setattr(text, name, 0)
    for part in (small, text):
        part.dtype = torch.float32
    if hasattr(text, "initializer_range"):
        text.initializer_range = SPREAD
    copied: PreTrainedConfig = small
    return copied
