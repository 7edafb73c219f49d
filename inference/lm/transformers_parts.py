"""All use of undocumented parts of transformers.

tests/inference/lm/test_transformers_parts.py names these parts, so that an incompatible upgrade fails there.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["Cache", "CacheLayerMixin", "attention_of", "causal_architectures", "is_causal_lm", "layers_of"]


def attention_of(config: PreTrainedConfig) -> str | None:
    """The attention implementation of a loaded model, such as ``sdpa``."""
    found: str | None = config._attn_implementation
    return found


def layers_of(config: PreTrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """Each layer's kind of attention, such as ``full_attention``, and the options of its cache."""
    kinds, options = get_layer_types_and_kwargs(config)
    return list(kinds), list(options)


def is_causal_lm(config: PreTrainedConfig) -> bool:
    """Whether `AutoModelForCausalLM` knows a model with this configuration."""
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def causal_architectures(model_type: str) -> tuple[str, ...] | str:
    """The class names of a ``model_type``'s causal language models, or the only one."""
    found: tuple[str, ...] | str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
    return found
