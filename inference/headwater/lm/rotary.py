"""Fixes rotary embeddings for which transformers chooses frequencies in each forward pass, by the pass's greatest
position.

With such a choice, a sequence's results depend on its neighbours and on how its prompt was cut into chunks, and the
cached keys of a sequence may have been rotated with two sets of frequencies.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from headwater.lm.transformers_parts import long_frequencies, rotary_types

__all__ = ["fix_frequencies", "switches_of"]


def fix_frequencies(model: PreTrainedModel, context_length: int) -> list[str]:
    """Choose the frequencies of a model's rotary embeddings once, for all positions.

    LongRoPE (Ding et al. 2024, arXiv:2402.13753) has two sets of frequencies: for lengths up to the original length,
    and for greater lengths. Here the context length determines the set, as in vLLM. Dynamic NTK scaling changes
    frequencies only beyond ``max_position_embeddings``, which no context exceeds.

    Args:
        model: changed in place.
        context_length: the most tokens of a prompt and its answer.

    Returns:
        Notes for the operator.
    """
    notes: dict[str, None] = {}
    for module in model.modules():
        for kind, rope_type in rotary_types(module).items():
            if rope_type == "longrope":
                notes |= dict.fromkeys(_fix_long(module, kind, context_length))
            elif "dynamic" in rope_type:
                _set_type(module, kind)
    return list(notes)


def switches_of(config: Any, context_length: int) -> list[int]:
    """The positions within a context at which a model's computation may change, as its configuration names them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    of_kinds = [entry for entry in parameters.values() if isinstance(entry, dict)]
    positions = {entry.get("original_max_position_embeddings") for entry in (parameters, *of_kinds)}
    positions |= {getattr(config, name, None) for name in ("original_max_position_embeddings", "floor_scale")}
    return sorted(
        {
            int(position)
            for position in positions
            if isinstance(position, (int, float)) and 0 < position < context_length
        }
    )


def _fix_long(module: Any, kind: str | None, context_length: int) -> list[str]:
    parameters = module.config.rope_parameters if kind is None else module.config.rope_parameters[kind]
    original = int(parameters["original_max_position_embeddings"])
    _set_type(module, kind)
    if context_length <= original:
        return []
    name = "inv_freq" if kind is None else f"{kind}_inv_freq"
    frequencies: torch.Tensor = getattr(module, name)
    long = long_frequencies(module, kind, original)
    setattr(module, name, long.to(device=frequencies.device, dtype=frequencies.dtype))
    return [
        f"LongRoPE: the long factors are used at all positions, because the context length {context_length} exceeds "
        f"the original {original}; for short prompts `options.context_length: {original}` is better"
    ]


def _set_type(module: Any, kind: str | None) -> None:
    """Have transformers leave a rotary embedding's frequencies as they are."""
    if kind is None:
        module.rope_type = "default"
    else:
        module.rope_type = {**module.rope_type, kind: "default"}
