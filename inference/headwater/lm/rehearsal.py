"""Tries the slot engine with a small copy of an architecture, before a model's weights are read.

Whether the engine can serve an architecture depends on its kinds of layers, not on its size: the copy has the same
configuration with fewer layers, heads and experts, a smaller vocabulary, and random weights.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Final

import torch
from transformers import PreTrainedConfig

from headwater.errors import ReplicaError
from headwater.lm.model_folder import context_length_of
from headwater.lm.slot_engine import SlotEngine
from headwater.lm.transformers_parts import auto_class, blank_model, layers_of, takes_images
from headwater.runtime.failure_log import text_of

__all__ = ["rehearse", "small_copy"]

MAX_PARAMETERS: Final = 50_000_000
"""A larger copy isn't made: a part of the model, such as an image encoder, can't be made small."""
LAYERS: Final = 2
KEY_VALUE_HEADS: Final = 2
MAX_GROUP: Final = 8
"""With more heads for each head of keys and values, the copy has a single head of keys and values."""
VOCABULARY: Final = 256
INNER_SIZE: Final = 64
EXPERTS: Final = 4
SPREAD: Final = 0.2
"""Standard deviation of the weights: with a smaller value, attention would hardly affect the logits."""

_INNER: Final = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size")
"""Endings of the names for the inner size of a feed-forward part."""
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_EXPERTS: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_LAYERS: Final = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "depth")
"""Names of the number of layers in a part of the model."""
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
    model = None
    try:
        small = small_copy(config)
        if sum(parameter.numel() for parameter in blank_model(small, attention).parameters()) > MAX_PARAMETERS:
            return
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            model = auto_class(small).from_config(small, attn_implementation=attention, trust_remote_code=False).eval()
        with torch.inference_mode():
            model(torch.zeros((1, 4), dtype=torch.int64), use_cache=False)
    except Exception as error:
        if model is not None and takes_images(config):
            raise ReplicaError(f"model: {type(model).__name__} fails without an image: {text_of(error):.300}") from None
        return
    length = context_length_of(config.get_text_config(decoder=True), context_length)
    SlotEngine(model, max_sequences=1, context_length=length).check()


def small_copy(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same configuration with smaller numbers; the sizes of heads and all settings for positions stay the same."""
    small: Any = deepcopy(config)
    # Of an encoder and a decoder, transformers would give a copy.
    text: Any = small if small.is_encoder_decoder else small.get_text_config(decoder=True)
    for name in small.sub_configs:
        part = getattr(small, name, None)
        if part is not None and part is not text:
            for layers_name in _LAYERS:
                if isinstance(getattr(part, layers_name, None), int):
                    setattr(part, layers_name, 1)
    kinds, _ = layers_of(text)
    layers = max(LAYERS, 1 + max(kinds.index(kind) for kind in set(kinds)))
    heads, hidden = text.num_attention_heads, text.hidden_size
    key_value_heads = getattr(text, "num_key_value_heads", None) or heads
    fewer = min(key_value_heads, KEY_VALUE_HEADS if heads // key_value_heads <= MAX_GROUP else 1)
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
            elif name in _LAYERS:
                setattr(text, name, layers)
            elif name.startswith("vocab_size"):
                setattr(text, name, min(value, VOCABULARY))
            elif name.endswith("attention_heads") and value == heads:
                setattr(text, name, new_heads)
            elif value == hidden and not any(part in name for part in _NO_SIZES):
                setattr(text, name, new_hidden)
    text.num_hidden_layers = layers
    text.num_attention_heads = new_heads
    text.hidden_size = new_hidden
    if getattr(text, "num_key_value_heads", None):
        text.num_key_value_heads = fewer
    for name in _TOKENS:
        if getattr(text, name, None) is not None:
            setattr(text, name, 0)
    for part in (small, text):
        part.dtype = torch.float32
    if hasattr(text, "initializer_range"):
        text.initializer_range = SPREAD
    copied: PreTrainedConfig = small
    return copied
