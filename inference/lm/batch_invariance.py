"""Makes a model's arithmetic for a sequence independent of other sequences, and checks that it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from transformers import PreTrainedModel

from inference.errors import ReplicaError
from inference.lm.invariant_attention import KEYS
from inference.lm.invariant_attention import NAME as INVARIANT
from inference.lm.invariant_products import make_layers_invariant
from inference.lm.slot_cache import SlotCache
from inference.lm.transformers_parts import attention_of

if TYPE_CHECKING:
    from inference.lm.cached_model import CachedModel

__all__ = ["INVARIANT", "KEYS", "check_invariance", "make_invariant"]

CHECK_LENGTHS: Final = (21, 3, 9, 14, 1)
"""Prompt lengths of the check, in tokens; the first prompt is compared."""
CHECK_CHUNKS: Final = (4, 17)
"""Where the compared prompt is cut into chunks."""


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


@torch.inference_mode()
def check_invariance(model: CachedModel) -> None:
    """Compare the logits of a prompt computed whole and alone with those of the prompt in chunks beside others.

    Raises:
        ReplicaError: any bit differs.
    """
    prompts = [
        [(7 * place + 3 * row) % model.vocab_size for place in range(length)]
        for row, length in enumerate(CHECK_LENGTHS)
    ]
    whole = _filled(model, [])
    _, expected = model.forward(whole, 0, [prompts[0]], 0)
    chunked = _filled(model, prompts[1:])
    first = len(prompts) - 1
    for start, end in zip((0, *CHECK_CHUNKS), (*CHECK_CHUNKS, len(prompts[0])), strict=True):
        _, in_chunks = model.forward(chunked, first, [prompts[0][start:end]], start)
    stepped = _filled(model, [*prompts[1:], prompts[0][:-1]])
    positions = [*map(len, prompts[1:]), len(prompts[0]) - 1]
    in_step = model.forward_each(stepped, [*[0] * first, prompts[0][-1]], positions)[first:]
    if not (torch.equal(in_chunks, expected) and torch.equal(in_step, expected)):
        reason = "the model has layers whose result for a sequence depends on other sequences"
        raise ReplicaError(f"options.batch_invariant: {reason}; leave it out")


def _filled(model: CachedModel, prompts: list[list[int]]) -> SlotCache:
    """A cache with these prompts in its first rows, and a row more."""
    rows, longest = len(prompts) + 1, max(CHECK_LENGTHS) + 1
    cache = SlotCache(model.layers, max_rows=rows, max_tokens=rows * longest, multiple=KEYS)
    cache.fit(rows, longest)
    for row, prompt in enumerate(prompts):
        model.forward(cache, row, [prompt], 0)
    return cache
