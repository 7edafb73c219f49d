"""Attention on a CPU: the result for a token does not depend on other sequences, other queries or a chunk's limits.

torch's kernel multiplies matrices with sizes that follow from the numbers of queries and keys, and the sizes determine
the order of sums. Here queries and keys are padded to sizes for which a test on this CPU gave the same bits. Keys are
computed in blocks of `BLOCK_KEYS`, and the results of blocks are combined by their log-sum-exp.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from headwater.lm.invariant_products import elementwise

__all__ = ["KEYS", "NAME", "attend", "padded_keys"]

NAME: Final = "headwater_invariant"
"""The name under which transformers knows this attention."""
KEYS: Final = 128
"""A cache should offer keys in multiples of this number, so that no copy is needed to pad them."""
BLOCK_KEYS: Final = 256


class Shape(NamedTuple):
    """The sizes of the matrices that are multiplied."""

    multiple: int
    """Queries are padded to a multiple of this number."""
    most: int
    """The most queries in a multiplication."""
    keys: int
    """Keys of a block are padded to a multiple of this number."""


SHAPES: Final = (Shape(4, 128, KEYS), Shape(16, 128, KEYS), Shape(32, 32, BLOCK_KEYS), Shape(1, 1, BLOCK_KEYS))
"""Candidates from the fastest to the safest; the last is invariant by construction."""


def padded_keys(length: int) -> int:
    """`length` rounded up to a multiple of `KEYS`."""
    return -(-length // KEYS) * KEYS


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function for transformers.

    Args:
        module: the attention layer.
        query: [batch, heads, tokens, size].
        key: [batch, groups, keys, size]; each group serves heads / groups successive heads.
        value: shape as `key`.
        attention_mask: [batch or 1, 1, tokens, keys]: bool, or numbers that are added to the scores.
        scaling: factor of the scores; by default size ** -0.5.
        dropout: no effect.
        options: `softcap`, `s_aux` and `position_bias` must be None.

    Returns:
        The attention's output, [batch, tokens, heads, size].

    Raises:
        ValueError: the model needs a mask or an option that is not served.
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if unknown:
        raise ValueError(f"attention: {unknown[0]} is not served with batch_invariant")
    if attention_mask is None or attention_mask.shape[1] != 1:
        raise ValueError("attention: expected a mask that all heads share")
    batch, heads, tokens, size = query.shape
    groups = key.shape[1]
    shape = _shape(size, query.dtype, torch.get_num_threads())
    queries = query.reshape(batch, groups, -1, size)
    mask = _additive(attention_mask, query.dtype)
    mask = mask if tokens == 1 else mask.repeat(1, 1, heads // groups, 1)
    output = _padded(queries, key, value, mask, scaling, shape)
    return output.reshape(batch, heads, tokens, size).transpose(1, 2).contiguous(), None


def _mask(*args: Any, **options: Any) -> Tensor | None:
    """transformers' mask for `attend`. It is never left out, because `attend` needs it."""
    return sdpa_mask(*args, **{**options, "allow_is_causal_skip": False})


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _mask)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def _padded(queries: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, shape: Shape) -> Tensor:
    """Attention of queries [batch, groups, queries, size], with a mask [batch or 1, 1, queries or 1, keys]."""
    count = queries.shape[2]
    extra = -count % shape.multiple
    if extra:
        queries = pad(queries, (0, 0, 0, extra))
        mask = mask if mask.shape[2] == 1 else pad(mask, (0, 0, 0, extra))
    extra_keys = -key.shape[2] % shape.keys
    if extra_keys:
        key, value = pad(key, (0, 0, 0, extra_keys)), pad(value, (0, 0, 0, extra_keys))
        mask = pad(mask, (0, extra_keys), value=torch.finfo(mask.dtype).min)
    results = []
    for start in range(0, queries.shape[2], shape.most):
        masks = mask if mask.shape[2] == 1 else mask[:, :, start : start + shape.most]
        results.append(_over_blocks(queries[:, :, start : start + shape.most], key, value, masks, scaling))
    return (results[0] if len(results) == 1 else torch.cat(results, 2))[:, :, :count]


def _over_blocks(queries: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    outputs: list[Tensor] = []
    logs: list[Tensor] = []
    for start in range(0, key.shape[2], BLOCK_KEYS):
        keys = slice(start, start + BLOCK_KEYS)
        output, log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, key[:, :, keys], value[:, :, keys], attn_mask=mask[..., keys], scale=scaling
        )
        outputs.append(output)
        logs.append(log)
    if len(outputs) == 1:
        return outputs[0]
    # A block in which all keys are hidden has the weight 0, so blocks that only another sequence needs change no bit.
    greatest = functools.reduce(torch.maximum, logs)
    weights = [elementwise(torch.exp, log - greatest)[..., None] for log in logs]
    total = functools.reduce(torch.add, weights)
    mixed = functools.reduce(torch.add, [output * weight for output, weight in zip(outputs, weights, strict=True)])
    result: Tensor = mixed / total
    return result.to(queries.dtype)


@functools.cache
def _shape(size: int, dtype: torch.dtype, threads: int) -> Shape:
    """The first of `SHAPES` that torch accepts and that gives the same bits for a query alone, beside other queries,
    and with more keys.

    Args:
        size: size of a head.
        dtype: type of queries, keys and values.
        threads: torch's number of threads; it is only a key of this function's cache.
    """
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(1, 1, 2 * BLOCK_KEYS, size, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn(1, 1, 1, size, generator=generator).to(dtype)
    return next(shape for shape in SHAPES if _is_invariant(query, key, value, shape))


def _is_invariant(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> bool:
    if shape.most == 1:
        return True
    for visible in (1, 5, 63, 64, 100, 128, 200, 300, 400):
        expected: Tensor | None = None
        for count in (1, 2, 3, 5, 8, 17, 32, 33, 100, 130):
            for keys in sorted({padded_keys(visible), padded_keys(visible) + KEYS, BLOCK_KEYS, 2 * BLOCK_KEYS}):
                if keys < visible:
                    continue
                hidden = torch.arange(keys) >= visible
                mask = torch.zeros(1, 1, 1, keys, dtype=query.dtype).masked_fill_(hidden, torch.finfo(query.dtype).min)
                queries = query.repeat(1, 1, count, 1)
                try:
                    result = _padded(queries, key[:, :, :keys], value[:, :, :keys], mask, None, shape)
                except RuntimeError:  # with some values of ATEN_CPU_CAPABILITY torch refuses bfloat16 in these sizes
                    return False
                expected = result[:, :, :1] if expected is None else expected
                if not torch.equal(result, expected.expand_as(result)):
                    return False
    return True
