"""The slot engine's key/value cache, with a row for each sequence, and the attention mask of a step over it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from headwater.errors import ReplicaError
from headwater.lm.transformers_parts import layers_of
from headwater.runtime.device import free_memory

__all__ = ["AttentionMask", "SlotCache", "StepMask"]


class _Window:
    """The part of the cache that the present forward pass writes and reads; all layers share it."""

    def __init__(self, multiple: int, spare: int) -> None:
        self.multiple = multiple
        """The number of tokens that are read of a row is a multiple of this."""
        self.spare = spare
        """Tokens of each row that are never read."""
        self.rows = slice(0, 0)
        self.start = 0
        """Number of cached tokens of each row; if the rows differ, at least the number of the longest row."""
        self.each: tuple[Tensor, Tensor] | None = None
        """If the rows differ: their indices and the position of each row's new token, int64 [rows]."""

    def padded(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers' hook for subclasses
    """A layer's keys and values, [rows, heads, length, head size] each; allocated at the first write."""

    def __init__(self, window: _Window) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._window = window
        self.shape = (0, 0)
        """Rows and length, without the rounding to `multiple` and the spare token."""
        self.keys: Tensor
        self.values: Tensor

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._blank(key_states, self.shape)
        self.values = self._blank(value_states, self.shape)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens, [rows, heads, tokens, head size]; return the window's keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self._window
        end = window.start + key_states.shape[2]
        if window.each is None:
            self.keys[window.rows, :, window.start : end] = key_states
            self.values[window.rows, :, window.start : end] = value_states
        else:
            rows, positions = window.each
            self.keys[rows, :, positions] = key_states[:, :, 0]
            self.values[rows, :, positions] = value_states[:, :, 0]
        end = window.padded(end)
        return self.keys[window.rows, :, :end], self.values[window.rows, :, :end]

    def resize(self, shape: tuple[int, int]) -> None:
        """Reallocate for this many rows and tokens, keeping the content that fits."""
        if self.is_initialized and shape != self.shape:
            keys, values = self._blank(self.keys, shape), self._blank(self.values, shape)
            rows, length = min(self.shape[0], shape[0]), min(self.shape[1], shape[1])
            keys[:rows, :, :length] = self.keys[:rows, :, :length]
            values[:rows, :, :length] = self.values[:rows, :, :length]
            self.keys, self.values = keys, values
        self.shape = shape

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._window.start + query_length, 0

    def get_seq_length(self) -> int:
        return self._window.start

    def get_max_length(self) -> int:
        return -1

    def _blank(self, like: Tensor, shape: tuple[int, int]) -> Tensor:
        # Zeros, because masked values are multiplied by 0, and uninitialized memory may hold NaN.
        length = self._window.padded(shape[1]) + self._window.spare
        size = shape[0], like.shape[1], length, like.shape[3]
        return torch.zeros(size, dtype=like.dtype, device=like.device)


class SlotCache(Cache):
    """Rows of keys and values, for transformers' models.

    The sequences that generate are always in the first rows, so attention reads a view of the cache. When a
    sequence ends, `copy` fills its row with another sequence: a copy per ended sequence instead of a copy of all
    sequences at each step. The length grows in chunks, the rows by doubling, never beyond the budget. The content of
    rows behind the first rows is kept as long as the budget allows.

    Args:
        layers: number of the model's layers.
        max_rows: the most sequences; only `widen` makes more rows.
        max_tokens: the budget: rows × length.
        chunk: tokens by which the length grows.
        multiple: a forward pass reads a multiple of this number of tokens of each row; the memory for the rounding is
            in addition to the budget.
        has_spare: whether each row has memory for `spare_token`.
    """

    def __init__(
        self,
        layers: int,
        *,
        max_rows: int,
        max_tokens: int,
        chunk: int = 256,
        multiple: int = 1,
        has_spare: bool = False,
    ) -> None:
        self._window = _Window(multiple, int(has_spare))
        self._slots = [_SlotLayer(self._window) for _ in range(layers)]
        super().__init__(layers=list(self._slots))
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._chunk = chunk
        self.shape = (0, 0)
        """Rows and length, without rounding and spare token; allocated at the first write."""
        self.buffers = object()
        """Identifies the allocated memory: a new object after each reallocation."""

    @property
    def spare_token(self) -> int:
        """With `has_spare`: the index in each row of a token that may be written and is never read."""
        return self._window.padded(self.shape[1])

    def fit(self, rows: int, length: int) -> None:
        """Grow to at least this many rows of this length; rows × length must be within the budget. If the budget
        requires it, rows beyond `rows` and tokens beyond `length` are dropped."""
        if rows <= self.shape[0] and length <= self.shape[1]:
            return
        new_rows, new_length = self.shape
        if rows > new_rows:
            new_rows = min(max(rows, 2 * new_rows), self._max_rows)
        if length > new_length:
            new_length = -(-length // self._chunk) * self._chunk
        if new_rows * new_length > self._max_tokens:
            new_rows = max(rows, min(self.shape[0], self._max_tokens // max(length, self.shape[1])))
            new_length = max(length, min(new_length, self._max_tokens // new_rows))
        self._resize((new_rows, new_length))

    def widen(self, max_rows: int, max_tokens: int) -> bool:
        """Double the number of rows, or add as many as `max_rows`, `max_tokens` and the budget allow. Returns False if
        they allow no more rows."""
        rows, length = self.shape
        wider = min(2 * rows, max_rows, min(max_tokens, self._max_tokens) // max(length, 1))
        if wider <= rows:
            return False
        self._resize((wider, length))
        return True

    def shrink(self, rows: int, length: int) -> None:
        """Free the memory beyond this many rows of this length."""
        self._resize((min(rows, self.shape[0]), min(length, self.shape[1])))

    def _resize(self, shape: tuple[int, int]) -> None:
        before = self.shape
        try:
            for layer in self._slots:
                layer.resize(shape)
        finally:  # if memory ran out half-way, the shape that all layers have
            all_rows, lengths = zip(*[layer.shape for layer in self._slots], strict=True)
            self.shape = min(all_rows), min(lengths)
            self.buffers = object()
        if self.shape != before:
            free_memory()  # torch can't join the freed blocks into larger blocks, which are needed next

    def aim(self, rows: slice, start: int) -> None:
        """Have the next forward pass add tokens to rows that all have `start` tokens."""
        self._window.rows, self._window.start, self._window.each = rows, start, None

    def aim_each(self, rows: Tensor, positions: Tensor, *, longest: int) -> None:
        """Have the next forward pass add a token to each of the first rows.

        Args:
            rows: int64 [sequences], 0, 1, 2, ...
            positions: int64 [sequences], each row's number of tokens; `spare_token` for a row without a sequence.
            longest: at least the greatest number of tokens; attention reads `longest` + 1 tokens of each row, rounded
                up to `multiple`.
        """
        self._window.rows, self._window.start, self._window.each = slice(0, len(rows)), longest, (rows, positions)

    def window_length(self, length: int) -> int:
        """How many tokens of each row are read by a forward pass that fills the rows up to `length`."""
        return self._window.padded(length)

    def copy(self, *copies: tuple[Mapping[int, int], int]) -> None:
        """Copy rows. Each item maps target rows to their sources, and says how many tokens to copy from the beginning.
        All sources are read before any target is written, so rows can be swapped."""
        batches = [(list(row_map), list(row_map.values()), length) for row_map, length in copies if row_map]
        for layer in self._slots if batches else ():
            if layer.is_initialized:
                for tensor in (layer.keys, layer.values):
                    taken = [tensor[sources, :, :length] for _, sources, length in batches]
                    for (targets, _, length), content in zip(batches, taken, strict=True):
                        tensor[targets, :, :length] = content

    def wipe(self, row: int) -> None:
        """Overwrite a row that holds NaN or infinities with zeros."""
        for layer in self._slots:
            if layer.is_initialized:
                layer.keys[row] = 0
                layer.values[row] = 0


AttentionMask: TypeAlias = Tensor | dict[str, Tensor]
"""A mask for all layers, or a mask for each kind of layer."""

FULL, SLIDING = "full_attention", "sliding_attention"
SHARED = "dummy"
"""transformers' name of a layer without keys and values: it reads those of an earlier layer, or has no attention."""


class StepMask:
    """Makes the attention mask of a step in which sequences may add tokens at different positions.

    transformers makes masks only for rows at equal positions, but passes on a given mask of four dimensions.

    Args:
        config: the model's configuration.
        dtype: the type of the model's activations.
        device: the model's device.

    Raises:
        ReplicaError: a layer has neither full nor sliding attention, or sliding layers differ in their window.
    """

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        kinds, options = layers_of(config)
        for layer, kind in enumerate(kinds):
            if kind not in (FULL, SLIDING, SHARED):
                raise ReplicaError(
                    f"model: expected layers of {FULL} or {SLIDING}, got {kind} in layer {layer}; "
                    "the slot engine can't cache such a layer"
                )
        windows = {layer_options["sliding_window"] for layer_options in options if "sliding_window" in layer_options}
        if len(windows) > 1:
            raise ReplicaError(f"model: expected sliding layers with one window size, got {sorted(windows)}")
        self.window: int = windows.pop() if windows else 0
        """The number of tokens that a sliding layer sees; 0 if there is no such layer."""
        self._kinds = {*kinds} - {SHARED}
        self._dtype = dtype
        self._device = device

    def __call__(self, positions: Tensor, *, length: int) -> AttentionMask:
        """Make the mask.

        Args:
            positions: int64 [sequences, tokens], the positions of the new tokens.
            length: the number of tokens of each row that attention reads, including the new tokens.

        Returns:
            The numbers to add to attention scores, [sequences, 1, tokens, length]: 0 where a sequence sees a token, the
            type's least number otherwise. If the model mixes kinds of layers, a mask for each kind.
        """
        cached = torch.arange(length, device=self._device)
        positions = positions[..., None]
        hidden = cached > positions
        masks = {}
        for kind in self._kinds:
            hides = hidden | (cached <= positions - self.window) if kind == SLIDING else hidden
            mask = torch.zeros(hides.shape, dtype=self._dtype, device=self._device)
            masks[kind] = mask.masked_fill_(hides, torch.finfo(self._dtype).min)[:, None]
        return masks if len(masks) > 1 else masks.popitem()[1]
