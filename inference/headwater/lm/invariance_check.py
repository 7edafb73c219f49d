"""Checks that a sequence's logits are the same to the bit alone and beside other sequences."""

from __future__ import annotations

from typing import Final

import torch

from headwater.errors import ReplicaError
from headwater.lm.batch_invariance import KEYS
from headwater.lm.cached_model import CachedModel
from headwater.lm.slot_cache import SlotCache

__all__ = ["check_invariance"]

CHECK_LENGTHS: Final = (21, 3, 9, 14, 1)
"""Prompt lengths of the check, in tokens; the first prompt is compared."""
CHECK_CHUNKS: Final = (4, 17)
"""Where the compared prompt is cut into chunks."""


@torch.inference_mode()
def check_invariance(model: CachedModel) -> None:
    """Compare the logits after a prompt computed whole and alone with its logits when computed in chunks, and when its
    last token is computed in a step together with tokens of other prompts.

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
    """A cache with these prompts in its first rows, and an empty row after them."""
    rows, longest = len(prompts) + 1, max(CHECK_LENGTHS) + 1
    cache = SlotCache(model.layers, max_rows=rows, max_tokens=rows * longest, multiple=KEYS)
    cache.fit(rows, longest)
    for row, prompt in enumerate(prompts):
        model.forward(cache, row, [prompt], 0)
    return cache
