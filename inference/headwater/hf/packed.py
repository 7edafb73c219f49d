"""Computes BERT and its family on a CPU without padding: the tokens of a batch are concatenated, and each token attends
to the tokens of its text."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import torch
from torch.nn.functional import gelu, scaled_dot_product_attention

from headwater.hf.amx import AmxLinear
from headwater.hf.onednn import ROW_MULTIPLE, OneDnnLinear
from headwater.tuning import keep_freed_memory

__all__ = ["pack"]

FAMILY: Final = frozenset({"bert", "camembert", "electra", "roberta", "xlm-roberta"})
"""Model types with an encoder that reads no positions, because their embeddings already include positions."""
KEPT_BYTES: Final = 64 * 1024 * 1024
"""Memory that the process keeps when a pass frees it, for the next pass."""
PASS_BYTES: Final = 24 * 1024 * 1024
"""Size of the widest states of a pass. A larger pass uses each weight that it reads for more tokens, but an allocation
of more than `KEPT_BYTES` / 2 would be requested from the kernel in each pass."""
TRIED_ROWS: Final = 256
"""Rows of the products that are timed to find the fastest implementation."""
TRIES: Final = 4
"""How often each implementation is timed. The least time counts, since the first run includes code generation."""
_NAME: Final = "headwater_packed"


def pack(network: Any, reads_first: bool = False, *, precision: Literal["highest", "high"] = "highest") -> int:
    """Have a transformers network compute no padding, if its type is in `FAMILY`, it is an encoder on a CPU, and its
    configuration asks for neither all hidden states nor attention weights; linear layers may be replaced.

    On a CPU, the process also keeps freed memory for later passes, even if the network is not in `FAMILY`.

    Args:
        network: the network, changed in place; afterwards it can be used only for inference.
        reads_first: whether only the encoder's states of each text's first token are read. The last layer then computes
            no other states; they are 0.
        precision: precision of FP32 products, named as in ``torch.set_float32_matmul_precision``: with ``high`` each
            factor may be the sum of two bfloat16 numbers.

    Returns:
        The number of tokens to compute in a pass; 0 if the network was left unchanged.
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
    AttentionMaskInterface.register(_NAME, flash_attention_mask)  # None, or a mask [n, width]
    network.set_attn_implementation(_NAME)
    encoder = network.base_model.encoder
    # torch.compile would split the encoder into so many graphs that it would be slower.
    encoder.forward = torch.compiler.disable(functools.partial(_encoded, encoder.forward))  # type: ignore[no-untyped-call]
    layer_class = None
    if all(_is_plain(part) for part in encoder.layer.modules() if isinstance(part, torch.nn.Linear)):
        classes = (AmxLinear, OneDnnLinear) if precision == "high" else (OneDnnLinear,)
        layer_class = _fastest(classes, encoder.layer[0])
    for layer in encoder.layer:
        is_first_only = reads_first and layer is encoder.layer[-1]
        if layer_class is not None:
            _fuse(layer, layer_class, joins=not is_first_only)
        if is_first_only:
            layer.forward = functools.partial(_first_states, layer, layer.forward)
    widest: int = config.intermediate_size
    return max(1, PASS_BYTES // (4 * widest))


def _fastest(classes: Sequence[Any], layer: Any) -> Any:
    """The class of the fastest linear layers on this CPU, measured with a layer's feed-forward part; None: torch's
    layers are the fastest."""
    first, second = layer.intermediate.dense, layer.output.dense
    rows = torch.linspace(-1, 1, TRIED_ROWS * first.in_features).view(TRIED_ROWS, -1)
    with torch.inference_mode():
        least_s, fastest = _took_s(_fed_forward_by_torch, first, second, rows), None
        for layer_class in filter(_is_right, classes):
            took_s = _took_s(layer_class.fed_forward, layer_class(first), layer_class(second), rows)
            if took_s < least_s:
                least_s, fastest = took_s, layer_class
    return fastest


def _took_s(fed_forward: Callable[..., torch.Tensor], first: Any, second: Any, rows: torch.Tensor) -> float:
    """The least CPU time that this thread takes in `TRIES` runs. Wall time would include the time of other
    processes."""
    times_s = []
    for _ in range(TRIES):
        began_s = time.thread_time()
        fed_forward(first, second, rows)
        times_s.append(time.thread_time() - began_s)
    return min(times_s)


def _fed_forward_by_torch(first: torch.nn.Linear, second: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    return torch.add(second(gelu(first(rows))), rows)


def _is_plain(part: Any) -> bool:
    """Whether a linear layer is exactly a `torch.nn.Linear`, in FP32."""
    return type(part) is torch.nn.Linear and part.weight.dtype == torch.float32


def _is_right(layer_class: Any) -> bool:
    """Whether a class of linear layers works with this CPU and this torch."""
    layer = torch.nn.Linear(16, 16)
    rows, more = torch.linspace(-1, 1, 2 * ROW_MULTIPLE * 16).view(2, ROW_MULTIPLE, 16)
    try:
        with torch.inference_mode():
            sums = layer_class(layer).added(rows, more)
            return bool(torch.allclose(sums, layer(rows) + more, atol=1e-4))
    except (AttributeError, OSError, RuntimeError, TypeError):
        return False


def _fuse(layer: Any, layer_class: Any, joins: bool) -> None:
    """Replace the linear layers of a layer by layers of another class, and fuse products with the operations after
    them. If `joins`, the products for query, key and value become a single product."""
    attention = layer.attention.self
    if joins:
        joined = _joined(attention.query, attention.key, attention.value)
        attention.forward = functools.partial(_attended, attention, layer_class(joined))
        del attention.query, attention.key, attention.value
    for part in list(layer.modules()):
        for name, child in list(part.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(part, name, layer_class(child))
    for part in (layer.attention.output, layer.output):
        part.forward = functools.partial(_added, part)
    if getattr(layer.intermediate.intermediate_act_fn, "act", None) is gelu:
        layer.feed_forward_chunk = functools.partial(_fed_forward, layer, layer_class.fed_forward)


def _joined(*layers: torch.nn.Linear) -> torch.nn.Linear:
    """A linear layer that returns the concatenated results of these layers, which read the same states and have
    biases."""
    joined = torch.nn.Linear(layers[0].in_features, sum(layer.out_features for layer in layers), device="meta")
    joined.weight = torch.nn.Parameter(torch.cat([layer.weight for layer in layers]))
    joined.bias = torch.nn.Parameter(torch.cat([layer.bias for layer in layers]))
    return joined


def _attended(
    part: Any,
    joined: Callable[[torch.Tensor], torch.Tensor],
    states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    text_lengths: Sequence[int] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The output of self-attention for states, with query, key and value computed in a single product."""
    split = torch.unflatten(joined(states), 2, (3, -1, part.attention_head_size))
    query, key, value = split.permute(2, 0, 3, 1, 4)
    output, _ = _attention(part, query, key, value, attention_mask, text_lengths, part.scaling)
    return output.flatten(2), None


def _added(part: Any, states: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """The last part of an attention block or of a layer: a product, the sum with `more`, and LayerNorm."""
    output: torch.Tensor = part.LayerNorm(part.dense.added(states, more))
    return output


def _fed_forward(layer: Any, fed_forward: Callable[..., torch.Tensor], states: torch.Tensor) -> torch.Tensor:
    """The feed-forward part of a layer, which follows attention."""
    output: torch.Tensor = layer.output.LayerNorm(fed_forward(layer.intermediate.dense, layer.output.dense, states))
    return output


def _encoded(
    forward: Callable[..., Any], states: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any
) -> Any:
    """The output of the encoder's ``forward`` for states [n, width, size], computed without padding; 0 where there is
    padding, and where `_first_states` computes no state. If a text is padded on the left or has no tokens, padding is
    computed."""
    is_token = torch.ones(states.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    if not bool(is_token[:, 0].all()):
        return forward(states, is_token[:, None, None], **options)
    places = is_token.nonzero(as_tuple=True)
    lengths = is_token.sum(dim=1).tolist()
    tokens = states[places]
    if more := -len(tokens) % ROW_MULTIPLE:  # the added rows form another text
        tokens = torch.cat((tokens, tokens.new_zeros(more, tokens.shape[1])))
        lengths.append(more)
    output = forward(tokens[None], None, text_lengths=lengths, **options)
    padded = torch.zeros_like(states)
    if output.last_hidden_state.shape[1] == len(tokens):
        padded[places] = output.last_hidden_state[0, : len(places[0])]
    else:
        padded[:, 0] = output.last_hidden_state[0, : len(states)]
    output.last_hidden_state = padded
    return output


def _first_states(
    layer: Any,
    forward: Callable[..., Any],
    states: torch.Tensor,
    *arguments: Any,
    text_lengths: Sequence[int] | None = None,
    **options: Any,
) -> Any:
    """A layer's output for the first token of each text, [1, texts, size]; without `text_lengths`, for all tokens."""
    if text_lengths is None:
        return forward(states, *arguments, **options)
    first = states[:, [0, *itertools.accumulate(text_lengths[:-1])]]
    attention = layer.attention.self
    parts = (attention.query(first), attention.key(states), attention.value(states))
    size = attention.attention_head_size
    query, key, value = (part.unflatten(2, (-1, size)).transpose(1, 2) for part in parts)
    output, _ = _attention(attention, query, key, value, None, text_lengths)
    return layer.feed_forward_chunk(layer.attention.output(output.flatten(2), first))


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    text_lengths: Sequence[int] | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each text, [1, heads, tokens or texts, size]: of all its tokens, or of its first token alone.
    Without `text_lengths`, attention with a mask."""
    if text_lengths is None:
        output = scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
        return output.transpose(1, 2), None
    _, heads, tokens, size = query.shape
    output = query.new_empty(tokens, heads, size)
    query_begin = begin = 0
    for length, equal in itertools.groupby(text_lengths):
        count = len(list(equal))
        end = begin + count * length
        query_end = query_begin + count if tokens == len(text_lengths) else end
        q, k, v = (
            part.view(heads, count, -1, size).transpose(0, 1)
            for part in (query[0, :, query_begin:query_end], key[0, :, begin:end], value[0, :, begin:end])
        )
        output[query_begin:query_end] = (
            scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2).flatten(0, 1)
        )
        query_begin, begin = query_end, end
    return output[None], None
