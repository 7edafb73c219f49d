"""BERT and its family on a CPU without padding: a batch's tokens stand one after the other, and each attends to its
own text's."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention

from inference.tuning import keep_freed_memory

__all__ = ["pack"]

FAMILY: Final = frozenset({"bert", "camembert", "electra", "roberta", "xlm-roberta"})
"""Types of models whose encoder reads no positions: their embeddings have added them."""
PASS_TOKENS: Final = 1024
"""At most so many tokens are computed at once, or one longer text: their states stay in the processor's caches."""
KEPT_BYTES: Final = 64 * 1024 * 1024
"""Of memory that a pass has freed; the next one takes it again."""
_NAME: Final = "headwater_packed"


def pack(network: Any) -> bool:
    """Have a network of transformers compute no padding, if it is of the family and on a CPU; whether it is.

    On a CPU the process then also keeps the memory of its passes.
    """
    config = network.config
    if network.device.type != "cpu":
        return False
    keep_freed_memory(KEPT_BYTES, KEPT_BYTES // 2)
    if config.model_type not in FAMILY:
        return False
    if getattr(config, "is_decoder", False) or config.output_hidden_states or config.output_attentions:
        return False
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, flash_attention_mask)  # none, or whether each token is one: [n, width]
    network.set_attn_implementation(_NAME)
    encoder = network.base_model.encoder
    encoder.forward = functools.partial(_encoded, encoder.forward)
    return True


def _encoded(
    forward: Callable[..., Any], states: torch.Tensor, attention_mask: torch.Tensor | None = None, **others: Any
) -> Any:
    """What the encoder's own ``forward`` makes of states, [n, width, size]; 0 where there is padding."""
    is_token = torch.ones(states.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if torch.compiler.is_compiling() or not bool(is_token[:, 0].all()):  # padded at the left, or without a token
        return forward(states, is_token[:, None, None], **others)
    lengths = is_token.sum(dim=1).tolist()
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    found, output = torch.zeros_like(states), None
    for rows in _passes(order, lengths):
        chosen = torch.tensor(rows)
        places = is_token[chosen].nonzero(as_tuple=True)
        texts, tokens = chosen[places[0]], places[1]
        text_lengths = [lengths[row] for row in rows]
        output = forward(states[texts, tokens][None], None, text_lengths=text_lengths, **others)
        found[texts, tokens] = output.last_hidden_state[0]
    assert output is not None
    output.last_hidden_state = found
    return output


def _passes(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """Texts that are computed at once."""
    passes: list[list[int]] = []
    tokens = PASS_TOKENS
    for row in order:
        if tokens + lengths[row] > PASS_TOKENS:
            passes.append([])
            tokens = 0
        passes[-1].append(row)
        tokens += lengths[row]
    return passes


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    text_lengths: Sequence[int] | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of each text's tokens, [1, heads, tokens, size], to that text's; or any other, by its mask."""
    if text_lengths is None:
        found = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
        return found.transpose(1, 2), None
    _, heads, tokens, size = query.shape
    found = query.new_empty(tokens, heads, size)
    begin = 0
    for length, equal in itertools.groupby(text_lengths):
        count = len(list(equal))
        end = begin + count * length
        q, k, v = (
            part[0, :, begin:end].view(heads, count, length, size).transpose(0, 1) for part in (query, key, value)
        )
        found[begin:end] = scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2).flatten(0, 1)
        begin = end
    return found[None], None
