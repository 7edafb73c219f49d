"""All reliance on parts of transformers that it doesn't document for others.

tests/inference/lm/test_transformers_parts.py names what is relied on, so that an upgrade fails there.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["Cache", "CacheLayerMixin", "attention_of", "causal_architectures", "is_causal_lm", "layers_of"]


def attention_of(config: PreTrainedConfig) -> str | None:
    """The implementation of attention that a loaded model computes with, such as ``sdpa``."""
    found: str | None = config._attn_implementation
    return found


def layers_of(config: PreTrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """How each layer attends, such as ``full_attention``, and what its cache would take besides."""
    kinds, options = get_layer_types_and_kwargs(config)
    return list(kinds), list(options)


def is_causal_lm(config: PreTrainedConfig) -> bool:
    """Whether `AutoModelForCausalLM` knows a model with such a configuration."""
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def causal_architectures(model_type: str) -> tuple[str, ...] | str:
    """The names of the causal language models of a ``model_type``, or the one name."""
    found: tuple[str, ...] | str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
    return found
