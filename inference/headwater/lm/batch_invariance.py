"""Makes a model's arithmetic for a sequence independent of other sequences."""

from __future__ import annotations

from transformers import PreTrainedModel

from headwater.errors import ReplicaError
from headwater.lm.invariant_attention import KEYS
from headwater.lm.invariant_attention import NAME as INVARIANT
from headwater.lm.invariant_products import make_layers_invariant
from headwater.lm.transformers_parts import attention_of

__all__ = ["INVARIANT", "KEYS", "make_invariant"]


def make_invariant(model: PreTrainedModel) -> None:
    """Replace a model's attention, linear layers and activations, in place.

    Raises:
        ReplicaError: the model is on a GPU, or its attention has no replacement.
    """
    if model.device.type != "cpu":
        raise ReplicaError(f"options.batch_invariant: expected a model on a CPU, got {model.device}; leave it out")
    attention = attention_of(model.config)
    if attention == INVARIANT:
        return
    if attention != "sdpa":
        reason = f"expected attention: sdpa, got {attention}"
        raise ReplicaError(f"options.batch_invariant: {reason}; leave it out")
    model.set_attn_implementation(INVARIANT)
    make_layers_invariant(model)
