"""A transformers model's forward passes over rows of a `SlotCache`, and the check that they are sound."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.errors import ReplicaError
from inference.lm.slot_cache import SlotCache, StepMask
from inference.lm.transformers_parts import attention_of
from inference.runtime.failure_log import text_of

__all__ = ["CachedModel"]

CHECK_LENGTHS: Final = (12, 4)
"""Prompt lengths of the check, in tokens."""


class CachedModel:
    """A model whose keys and values are in a `SlotCache`, which the caller has made large enough.

    Args:
        model: a causal language model, in eval mode, on its device.
        max_sequences: the most sequences computed together.

    Raises:
        ReplicaError: the cache can't serve the model.
    """

    def __init__(self, model: PreTrainedModel, max_sequences: int) -> None:
        config = model.config.get_text_config(decoder=True)
        attention = attention_of(model.config)
        if attention not in ("sdpa", "eager"):
            raise ReplicaError(f"attention: expected sdpa or eager, got {attention}")
        if "logits_to_keep" not in inspect.signature(model.forward).parameters:
            raise ReplicaError(f"model: expected a causal language model, got {type(model).__name__}")
        self.device = model.device
        self.vocab_size: int = config.vocab_size
        self.layers: int = config.num_hidden_layers
        self._model = model
        self._mask = StepMask(config, model.dtype, self.device)
        self._rows = torch.arange(max(max_sequences, len(CHECK_LENGTHS) + 1), device=self.device)

    def forward(
        self, cache: SlotCache, first: int, chunks: Sequence[Sequence[int]], start: int, *, keeps_all: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute parts of prompts in successive rows.

        Args:
            cache: the keys and values.
            first: the first chunk's row.
            chunks: the tokens of each row, behind `start` that it has.
            start: the same for all rows.
            keeps_all: whether all tokens' logits are wanted, and not only those of tokens that end a chunk.

        Returns:
            The logits that were kept, [rows, tokens, vocab], and those after each chunk's last token, [rows, vocab].
        """
        lengths = [len(chunk) for chunk in chunks]
        width = max(lengths)
        cache.aim(slice(first, first + len(chunks)), start)
        # Padded on the right: no token sees a later one, and the padding in the cache is overwritten before it is seen.
        ids = torch.tensor([[*chunk, *[0] * (width - len(chunk))] for chunk in chunks], device=self.device)
        positions = torch.arange(start, start + width, device=self.device).expand(len(chunks), width)
        ends = list(range(1, width + 1)) if keeps_all else sorted(set(lengths))
        logits: Tensor = self._model(
            input_ids=ids,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.tensor(ends, device=self.device) - 1,
        ).logits
        return logits, logits[range(len(chunks)), [ends.index(length) for length in lengths]]

    def forward_each(self, cache: SlotCache, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Logits [rows, vocab] after one more token in each of the first rows, each at its own position."""
        count, longest = len(tokens), max(positions)
        ids = torch.tensor(tokens, device=self.device)[:, None]
        at = torch.tensor(positions, device=self.device)
        mask = None
        if min(positions) == longest:
            cache.aim(slice(0, count), longest)
        else:
            cache.aim_each(self._rows[:count], at, longest=longest)
            mask = self._mask(at[:, None], longest=longest)
        logits: Tensor = self._model(
            input_ids=ids,
            position_ids=at[:, None],
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1]

    @torch.inference_mode()
    def check(self) -> None:
        """Compare the model's logits with and without cache, masks and copies of prefixes.

        Raises:
            ReplicaError: the logits differ, or the model fails.
        """
        prompts = [
            [(5 * place + row) % self.vocab_size for place in range(length)] for row, length in enumerate(CHECK_LENGTHS)
        ]
        prompts.append(prompts[0])  # its beginning is copied
        longest = max(CHECK_LENGTHS)
        cache = SlotCache(self.layers, max_rows=len(prompts), max_tokens=len(prompts) * longest, chunk=longest)
        try:
            inputs = [torch.tensor([ids], device=self.device) for ids in prompts]
            expected = torch.cat([self._model(ids, use_cache=False).logits[:, -1] for ids in inputs])
            for row, ids in enumerate(prompts):
                cache.fit(row + 1, len(ids))
                if row < len(CHECK_LENGTHS):
                    self.forward(cache, row, [ids[:2]], 0)
                else:
                    cache.copy(({row: 0}, 2))
                self.forward(cache, row, [ids[2:-1]], 2)
            cache.fit(len(prompts), longest)
            got = self.forward_each(cache, [ids[-1] for ids in prompts], [len(ids) - 1 for ids in prompts])
        except Exception as error:
            reason = f"{type(error).__name__}: {text_of(error)}"
            raise ReplicaError(f"model: fails in the slot engine: {reason}") from error
        scale = float(expected.float().std())
        difference = float((got - expected).abs().max())
        dtype = self._model.dtype
        allowed = (0.01 if dtype == torch.float32 else 0.2) * scale
        if not difference <= allowed:
            raise ReplicaError(
                f"model: {type(self._model).__name__} gives other logits with the slot engine's cache: they differ by "
                f"{difference:.2g}, expected at most {allowed:.2g}; the engine does not support its kind of attention"
            )
