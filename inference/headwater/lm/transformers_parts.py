"""Functions that use undocumented parts of transformers. `slot_cache`, `invariant_attention` and `invariant_products`
use further parts directly.

`headwater.lm.transformers_versions` lists all these parts, and refuses a version that lacks a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.activations import ACT2CLS
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.quantizers.auto import get_hf_quantizer
from transformers.utils import logging
from transformers.utils.generic import ContextManagers

__all__ = [
    "Cache",
    "CacheLayerMixin",
    "activation_classes",
    "attention_of",
    "auto_class",
    "blank_model",
    "causal_architectures",
    "check_quantization",
    "first_logits",
    "is_causal_lm",
    "layers_of",
    "load_report",
    "long_frequencies",
    "rotary_types",
    "supports_sdpa",
    "takes_images",
]


def attention_of(config: PreTrainedConfig) -> str | None:
    """The attention implementation of a loaded model, such as ``sdpa``."""
    attention: str | None = config._attn_implementation
    return attention


def activation_classes() -> tuple[type[nn.Module], ...]:
    """The classes of the activation functions that a configuration can name."""
    entries: list[Any] = list(ACT2CLS.values())
    return tuple({entry[0] if isinstance(entry, tuple) else entry for entry in entries})


def layers_of(config: PreTrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """Each layer's kind of attention, such as ``full_attention``, and the options of its cache."""
    kinds, options = get_layer_types_and_kwargs(config)
    return list(kinds), list(options)


def is_causal_lm(config: PreTrainedConfig) -> bool:
    """Whether transformers has a model with this configuration that continues a text: a causal language model, or
    such a model with an encoder of images, whose tokens are part of the text."""
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or takes_images(config)


def takes_images(config: PreTrainedConfig) -> bool:
    """Whether a model has an encoder of images before its language model."""
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not config.is_encoder_decoder


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that makes the model of a configuration for which `is_causal_lm` is true."""
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def causal_architectures(model_type: str) -> frozenset[str]:
    """The class names of a ``model_type``'s models for which `is_causal_lm` is true."""
    names: set[str] = set()
    for classes in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        architectures: tuple[str, ...] | str = classes.get(model_type, ())
        names |= {architectures} if isinstance(architectures, str) else set(architectures)
    return frozenset(names)


def supports_sdpa(config: PreTrainedConfig) -> bool:
    """Whether the language model of a configuration can compute attention with torch's
    `scaled_dot_product_attention`."""
    return bool(_class_of(config)._supports_sdpa)


def blank_model(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """The language model of a configuration, without memory for its weights."""
    with ContextManagers(PreTrainedModel.get_init_context(torch.get_default_dtype(), False, False, None)):
        model: Any = auto_class(config).from_config(
            deepcopy(config), attn_implementation=attention, trust_remote_code=False
        )
    blank: PreTrainedModel = model.eval()
    return blank


def check_quantization(config: PreTrainedConfig) -> bool:
    """Whether weights are quantized; raises transformers' exception if it can't load such weights here."""
    make: Any = get_hf_quantizer
    quantizer, *_ = make(deepcopy(config), None, None, True, {})
    return quantizer is not None


def load_report(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The report that `from_pretrained` with ``output_loading_info`` would give, from tensors without content.

    Args:
        model: a model from `blank_model`; its parameters are replaced.
        tensors: on torch's device ``meta``, by their name in the file.
    """
    parts: Any = model
    names: Any = get_model_conversion_mapping(model, None, None)
    how = LoadStateDictConfig(
        device_map={"": torch.device("meta")}, dtype=torch.get_default_dtype(), weight_mapping=names
    )
    logs: Any = logging
    logs.disable_progress_bar()
    report, _ = convert_and_load_state_dict_in_model(model, dict(tensors), how)
    parts.mark_tied_weights_as_initialized(report)
    parts.tie_weights(missing_keys=report.missing_keys, recompute_mapping=False)
    parts._adjust_missing_and_unexpected_keys(report)
    fields = "missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs", "conversion_errors"
    return {name: getattr(report, name) for name in fields}


def first_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits [1, vocab] of the first token that `generate` would choose after a prompt, int64 [1, tokens]."""
    generating: Any = model
    options: Any = GenerationConfig
    output = generating.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=options(
            max_new_tokens=1, do_sample=False, use_cache=False, output_logits=True, return_dict_in_generate=True,
            pad_token_id=0,
        ),
    )  # fmt: skip
    logits: Tensor = output.logits[0]
    return logits


def rotary_types(module: Any) -> dict[str | None, str]:
    """The ``rope_type`` of a rotary embedding, by the kind of layer that it is for (None: all); empty for other
    modules."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        return {None: kinds}
    return dict(kinds) if isinstance(kinds, dict) else {}


def long_frequencies(module: Any, layer_kind: str | None, original_length: int) -> Tensor:
    """The frequencies [head size / 2] that a LongRoPE embedding has beyond the original length."""
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
        module.config, torch.device("cpu"), seq_len=original_length + 1, layer_type=layer_kind
    )
    return frequencies


def _class_of(config: PreTrainedConfig) -> Any:
    choose: Any = _get_model_class
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return choose(config, MODEL_FOR_CAUSAL_LM_MAPPING if is_causal else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
