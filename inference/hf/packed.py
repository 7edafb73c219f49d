"""BERT and its family on a CPU without padding: a batch's tokens stand one after the other, and each attends to its
own text's."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.nn.functional import gelu, scaled_dot_product_attention

from inference.hf import onednn
from inference.tuning import keep_freed_memory

__all__ = ["pack"]

FAMILY: Final = frozenset({"bert", "camembert", "electra", "roberta", "xlm-roberta"})
"""Types of models whose encoder reads no positions: their embeddings have added them."""
KEPT_BYTES: Final = 64 * 1024 * 1024
"""Of memory that a pass has freed; the next one takes it again."""
PASS_BYTES: Final = 24 * 1024 * 1024
"""Of a pass's widest states. A longer pass reads each weight for more tokens; more than `KEPT_BYTES` / 2 would be taken
from the kernel anew each time."""
_NAME: Final = "headwater_packed"


def pack(network: Any, reads_first: bool = False) -> int:
    """Have a network of transformers compute no padding, if it is of the family and on a CPU.

    On a CPU the process then also keeps the memory of its passes.

    Args:
        network: for inference only from now on.
        reads_first: whether of the encoder's states only those of each text's first token are read. The last layer
            then computes no others; they are 0.

    Returns:
        How many tokens it should compute at once; 0: it is left as it is.
    """
    config = network.config
    if network.device.type != "cpu":
        return 0
    keep_freed_memory(KEPT_BYTES, KEPT_BYTES // 2)
    if config.model_type not in FAMILY:
        return 0
    if getattr(config, "is_decoder", False) or config.output_hidden_states or config.output_attentions:
        return 0
    from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, flash_attention_mask)  # none, or whether each token is one: [n, width]
    network.set_attn_implementation(_NAME)
    encoder = network.base_model.encoder
    encoder.forward = functools.partial(_encoded, encoder.forward)
    if reads_first:
        last = encoder.layer[-1]
        last.forward = functools.partial(_first_states, last, last.forward)
    if onednn.is_there():
        for layer in encoder.layer:
            _fuse(layer)
    widest: int = config.intermediate_size
    return max(1, PASS_BYTES // (4 * widest))


def _fuse(layer: Any) -> None:
    """Have oneDNN compute a layer's products, each with the sum or GELU that follows it."""
    for part in list(layer.modules()):
        for name, child in list(part.named_children()):
            if type(child) is torch.nn.Linear and child.weight.dtype == torch.float32:
                setattr(part, name, onednn.Linear(child))
    for part in (layer.attention.output, layer.output):
        if isinstance(part.dense, onednn.Linear):
            part.forward = functools.partial(_added, part)
    part = layer.intermediate
    if isinstance(part.dense, onednn.Linear) and getattr(part.intermediate_act_fn, "act", None) is gelu:
        part.forward = part.dense.gelu


def _added(part: Any, states: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """What follows attention, and a layer's second product."""
    found: torch.Tensor = part.LayerNorm(part.dense.added(states, more))
    return found


def _encoded(
    forward: Callable[..., Any], states: torch.Tensor, attention_mask: torch.Tensor | None = None, **others: Any
) -> Any:
    """What the encoder's own ``forward`` makes of states, [n, width, size]; 0 where there is padding."""
    is_token = torch.ones(states.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if torch.compiler.is_compiling() or not bool(is_token[:, 0].all()):  # padded at the left, or without a token
        return forward(states, is_token[:, None, None], **others)
    places = is_token.nonzero(as_tuple=True)
    lengths = is_token.sum(dim=1).tolist()
    tokens = states[places]
    if more := -len(tokens) % onednn.ROWS:  # they attend to themselves
        tokens = torch.cat((tokens, tokens.new_zeros(more, tokens.shape[1])))
        lengths.append(more)
    output = forward(tokens[None], None, text_lengths=lengths, **others)
    found = torch.zeros_like(states)
    if output.last_hidden_state.shape[1] == len(tokens):
        found[places] = output.last_hidden_state[0, : len(places[0])]
    else:
        found[:, 0] = output.last_hidden_state[0, : len(states)]
    output.last_hidden_state = found
    return output


def _first_states(
    layer: Any,
    forward: Callable[..., Any],
    states: torch.Tensor,
    *arguments: Any,
    text_lengths: Sequence[int] | None = None,
    **others: Any,
) -> Any:
    """What a layer makes of each text's first token, [1, texts, size]."""
    if text_lengths is None:
        return forward(states, *arguments, **others)
    first = states[:, [0, *itertools.accumulate(text_lengths[:-1])]]
    attention = layer.attention.self
    parts = (attention.query(first), attention.key(states), attention.value(states))
    size = attention.attention_head_size
    query, key, value = (part.unflatten(2, (-1, size)).transpose(1, 2) for part in parts)
    found, _ = _attention(attention, query, key, value, None, text_lengths)
    return layer.feed_forward_chunk(layer.attention.output(found.flatten(2), first))


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
    """Attention of each text's tokens, or of its first alone, [1, heads, tokens or texts, size], to that text's; or any
    other, by its mask."""
    if text_lengths is None:
        found = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
        return found.transpose(1, 2), None
    _, heads, tokens, size = query.shape
    found = query.new_empty(tokens, heads, size)
    asked = begin = 0
    for length, equal in itertools.groupby(text_lengths):
        count = len(list(equal))
        end = begin + count * length
        asked_end = asked + count if tokens == len(text_lengths) else end
        q, k, v = (
            part.view(heads, count, -1, size).transpose(0, 1)
            for part in (query[0, :, asked:asked_end], key[0, :, begin:end], value[0, :, begin:end])
        )
        found[asked:asked_end] = scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2).flatten(0, 1)
        asked, begin = asked_end, end
    return found[None], None
