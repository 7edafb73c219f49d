"""Texts that arrive as BYTES, and their tokens, padded and computed in groups of similar length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

from headwater.errors import BadInput
from headwater.wire.arrays import Array

__all__ = ["as_rows", "computed", "counts", "filled", "ids_of", "padded", "similar", "texts_of"]

PASS_TOKENS: Final = 40
"""Overhead of a pass through a network on a CPU, as a number of tokens that take as long (measured with MiniLM)."""


def texts_of(name: str, array: Array) -> list[str]:
    """The rows of a BYTES [n, 1] input as strings; raises `BadInput` if a row is not UTF-8."""
    texts: list[str] = []
    for index, raw in enumerate(array[:, 0].tolist()):
        try:
            texts.append(raw.decode())
        except UnicodeDecodeError as error:
            # The replica calls again with the failing row alone; its index is then always 0.
            row = f", row {index}" if len(array) > 1 else ""
            raise BadInput(
                f"input {name!r}{row}: expected UTF-8, got byte 0x{raw[error.start]:02x} at position {error.start}"
            ) from error
    return texts


def ids_of(name: str, rows: torch.Tensor, vocab_size: int) -> list[list[int]]:
    """The token ids of an INT32 [n, -1] input, without the -1 after them; raises `BadInput` if a row has no ids, or ids
    that the network doesn't know."""
    lists: list[list[int]] = []
    for row in rows.tolist():
        ids = row[: row.index(-1)] if -1 in row else row
        if not ids or min(ids) < 0 or max(ids) >= vocab_size or set(row[len(ids) :]) - {-1}:
            wrong = next((id for id in [*ids, *row[len(ids) :]] if not 0 <= id < vocab_size and id != -1), -1)
            expected = f"expected ids of this model's tokenizer, from 0 to {vocab_size - 1}, and -1 only after them"
            raise BadInput(f"input {name!r}: {expected}, got {wrong}")
        lists.append(ids)
    return lists


def padded(rows: list[list[int]], pad_id: int) -> dict[str, torch.Tensor]:
    """The fields of a network for rows of token ids, padded at the end."""
    width = max(map(len, rows))
    mask = torch.arange(width) < torch.tensor([[len(row)] for row in rows])
    return {
        "input_ids": torch.tensor([row + [pad_id] * (width - len(row)) for row in rows]),
        "attention_mask": mask.long(),
    }


def as_rows(texts: list[str]) -> Array:
    """Strings as a BYTES [n, 1] output."""
    return np.array([[text.encode()] for text in texts], object).reshape(len(texts), 1)


def counts(mask: Any) -> Any:
    """The number of tokens of each text, INT32 [n, 1], from an attention mask."""
    return mask.sum(dim=1, keepdim=True).int()


def computed(
    compute: Callable[[dict[str, Any]], torch.Tensor], fields: Mapping[str, Any], packed_tokens: int = 0
) -> torch.Tensor:
    """The output of a network for padded texts, [n, ...]. On a CPU, texts of similar length are computed together,
    without most of the padding. A GPU computes all texts at once, because a pass with few tokens takes as long as a
    pass with many.

    Args:
        compute: the network; maps a tokenizer's fields to a tensor with a row for each text.
        fields: the tokenizer's fields of all texts, on the network's device.
        packed_tokens: how many tokens to compute at once in a network that computes no padding; 0: the network computes
            padding.
    """
    mask = fields.get("attention_mask")
    tensors = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
    if mask is None or mask.device.type != "cpu" or any(value.shape != mask.shape for value in tensors.values()):
        return compute(dict(fields))
    lengths = mask.sum(dim=1).numpy()
    groups = filled(lengths, packed_tokens) if packed_tokens else similar(lengths, PASS_TOKENS)
    if len(groups) == 1:
        return compute(dict(fields))
    is_padded_right = bool(mask[:, 0].sum() >= mask[:, -1].sum())
    outputs = []
    for group in groups:
        width = max(1, int(lengths[group[-1]]))
        cut = slice(0, width) if is_padded_right else slice(mask.shape[1] - width, None)
        outputs.append(compute({**fields, **{name: value[group, cut] for name, value in tensors.items()}}))
    order = np.argsort(np.concatenate(groups))
    return torch.cat(outputs)[order]


def similar(lengths: np.ndarray[Any, np.dtype[np.int64]], pass_tokens: int) -> list[np.ndarray[Any, Any]]:
    """Split texts into groups such that the fewest tokens are computed, padding included.

    Args:
        lengths: the lengths of the texts, in tokens, [n].
        pass_tokens: the overhead of a group, as a number of tokens.

    Returns:
        The indices of each group's texts, from the shortest text to the longest.
    """
    order = np.argsort(lengths, kind="stable")
    # best[k]: the cost of the k shortest texts; start[k]: where the last group of these texts begins.
    best, start = np.zeros(len(order) + 1, np.int64), np.zeros(len(order) + 1, np.int64)
    for count in range(1, len(order) + 1):
        sizes = np.arange(count, 0, -1)
        costs = best[:count] + sizes * lengths[order[count - 1]] + pass_tokens
        start[count] = costs.argmin()
        best[count] = costs[start[count]]
    groups, end = [], len(order)
    while end:
        groups.append(order[start[end] : end])
        end = int(start[end])
    return groups[::-1]


def filled(lengths: np.ndarray[Any, np.dtype[np.int64]], most_tokens: int) -> list[np.ndarray[Any, Any]]:
    """Split texts into groups of at most `most_tokens` tokens, padding excluded. A longer text is a group alone.

    Args:
        lengths: the lengths of the texts, in tokens, [n].
        most_tokens: the most tokens of a group.

    Returns:
        The indices of each group's texts, from the shortest text to the longest.
    """
    order = np.argsort(lengths, kind="stable")
    groups, tokens = [0], 0
    for place, length in enumerate(lengths[order].tolist()):
        if place and tokens + length > most_tokens:
            groups.append(place)
            tokens = 0
        tokens += length
    return np.split(order, groups[1:])
