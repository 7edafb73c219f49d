"""A transformers model's forward passes over rows of a `SlotCache`, and a check of their results."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Final, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwater.errors import ReplicaError
from headwater.lm.batch_invariance import INVARIANT, make_invariant
from headwater.lm.decode_graphs import DecodeGraphs, StepInputs, recorder_of
from headwater.lm.rotary import switches_of
from headwater.lm.slot_cache import AttentionMask, SlotCache, StepMask
from headwater.lm.transformers_parts import attention_of, first_logits
from headwater.runtime.failure_log import text_of

__all__ = ["CachedModel"]

CHECK_LENGTHS: Final = (12, 6)
"""Prompt lengths of the check, in tokens."""
CHECK_STEPS: Final = 3
"""Decode steps of the check. With CUDA graphs, the first runs kernel by kernel, the second is recorded as a graph, the
third repeats the graph at other positions."""
CHECK_WINDOW: Final = 5
"""The sliding window during the check, in tokens; all prompts of the check are longer."""


class _Probe(NamedTuple):
    """A prompt of the self-check."""

    ids: list[int]
    first: int
    """The position of the first token; the cache holds no tokens of earlier positions."""
    group: int = 0
    """Prompts of the same group are computed together, as the engine does with short prompts."""


class CachedModel:
    """A model with its keys and values in a `SlotCache`. Before each pass the caller makes the cache large enough.

    Args:
        model: a causal language model, in eval mode, on its device.
        max_sequences: the most sequences computed together.
        batch_invariant: whether a sequence's logits must not depend on other sequences, or on how a prompt is cut into
            chunks; the model's layers are replaced.
        cuda_graphs: whether decode steps are recorded as CUDA graphs, on a GPU.

    Raises:
        ReplicaError: the model is no causal language model, the cache doesn't support its kind of attention, or
            `make_invariant` refuses it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        max_sequences: int,
        *,
        batch_invariant: bool = False,
        cuda_graphs: bool = True,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        if batch_invariant:
            make_invariant(model)
        attention = attention_of(model.config)
        if attention not in ("sdpa", "eager", INVARIANT):
            raise ReplicaError(f"attention: expected sdpa or eager, got {attention}")
        self.batch_invariant = batch_invariant
        if "logits_to_keep" not in inspect.signature(model.forward).parameters:
            raise ReplicaError(f"model: expected a causal language model, got {type(model).__name__}")
        self.device = model.device
        self.vocab_size: int = config.vocab_size
        self.layers: int = config.num_hidden_layers
        self._model = model
        self._config = config
        self._mask = StepMask(config, model.dtype, self.device)
        if "past_key_values" not in inspect.signature(type(model).forward).parameters:
            raise ReplicaError(
                f"model: expected keys and values in transformers' cache; {type(model).__name__} has none"
            )
        self._rows = torch.arange(max_sequences, device=self.device)
        recorder = recorder_of(self.device) if cuda_graphs and not batch_invariant else None
        self._graphs = None if recorder is None else DecodeGraphs(self._step, recorder, self.device)

    @property
    def needs_spare(self) -> bool:
        """Whether the model's cache must have a spare token."""
        return self._graphs is not None

    def forward(
        self,
        cache: SlotCache,
        first: int,
        chunks: Sequence[Sequence[int]],
        start: int,
        *,
        keeps_all: bool = False,
        offset: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Compute parts of prompts in successive rows.

        Args:
            cache: the keys and values.
            first: the first chunk's row.
            chunks: the new tokens of each row, which follow its `start` cached tokens.
            start: number of cached tokens, the same for all rows.
            keeps_all: whether to keep the logits of all tokens, rather than only of tokens that end a chunk.
            offset: the position of each row's first token.

        Returns:
            The kept logits, [rows, tokens, vocab], and the logits after each chunk's last token, [rows, vocab].
        """
        lengths = [len(chunk) for chunk in chunks]
        width = max(lengths)
        cache.aim(slice(first, first + len(chunks)), start)
        # Padded on the right: no token attends to a later token, and padding in the cache is overwritten before any
        # token attends to it.
        ids = torch.tensor([[*chunk, *[0] * (width - len(chunk))] for chunk in chunks], device=self.device)
        positions = offset + torch.arange(start, start + width, device=self.device).expand(len(chunks), width)
        mask = None
        if self.batch_invariant:
            mask = self._mask(positions[:1] - offset, length=cache.window_length(start + width))
        ends = list(range(1, width + 1)) if keeps_all else sorted(set(lengths))
        logits: Tensor = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.tensor(ends, device=self.device) - 1,
        ).logits
        return logits, logits[range(len(chunks)), [ends.index(length) for length in lengths]]

    def forward_each(
        self, cache: SlotCache, tokens: Sequence[int], positions: Sequence[int], offsets: Sequence[int] = ()
    ) -> Tensor:
        """Logits [rows, vocab] after another token in each of the first rows; the next call may overwrite the logits.

        Args:
            cache: the keys and values.
            tokens: the new token of each row.
            positions: each row's number of cached tokens.
            offsets: the position of each row's first token; empty if the position is 0 in all rows.
        """
        model_positions = [sum(pair) for pair in zip(positions, offsets, strict=True)] if offsets else positions
        if self._graphs is not None:
            recorded = self._graphs.run(cache, tokens, positions, model_positions)
            if recorded is not None:
                return recorded
        count, longest = len(tokens), max(positions)
        columns = [torch.tensor(column, device=self.device) for column in (tokens, positions, model_positions)]
        inputs = StepInputs(self._rows[:count], *columns)
        if self.batch_invariant or min(positions) != longest:
            return self._step(cache, inputs, cache.window_length(longest + 1))
        cache.aim(slice(0, count), longest)
        return self._logits(cache, inputs, None)

    def _step(self, cache: SlotCache, inputs: StepInputs, length: int) -> Tensor:
        """Logits [rows, vocab] of a step in which rows may have different positions and read `length` tokens."""
        cache.aim_each(inputs.rows, inputs.cached, longest=length - 1)
        return self._logits(cache, inputs, self._mask(inputs.cached[:, None], length=length))

    def _logits(self, cache: SlotCache, inputs: StepInputs, mask: AttentionMask | None) -> Tensor:
        logits: Tensor = self._model(
            input_ids=inputs.tokens[:, None],
            position_ids=inputs.positions[:, None],
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1]

    @torch.inference_mode()
    def check(self, context_length: int) -> None:
        """Compare the logits of prompts that are computed together, in chunks and from copied rows, with the logits of
        each prompt computed alone and without a cache. The prompts are at the beginning and the end of the context, on
        both sides of the positions at which the configuration may change the computation, and longer than a sliding
        window.

        Args:
            context_length: the most tokens of a prompt and its answer.

        Raises:
            ReplicaError: the logits differ by more than rounding, or are not finite, or the model fails.
        """
        try:
            with self._narrow_window():
                expected, got = self._compare(self._probes(context_length))
        except Exception as error:
            reason = f"{type(error).__name__}: {text_of(error)}"
            raise ReplicaError(f"model: fails in the slot engine: {reason}") from error
        name = type(self._model).__name__
        if not bool(expected.isfinite().all()):
            raise ReplicaError(
                f"model: expected finite logits of {name}, got NaN or infinities; copy the weights again"
            )
        scale = float(expected.float().std())
        difference = float((got - expected).abs().max())
        dtype = self._model.dtype
        allowed = (0.01 if dtype == torch.float32 else 0.2) * scale
        if not difference <= allowed:
            switches = switches_of(self._config, context_length)
            cause = "the engine does not support its kind of attention"
            if switches:
                cause += f"; or, if it computes long prompts otherwise, set `options.context_length: {switches[0]}`"
            raise ReplicaError(
                f"model: {name} gives other logits with the slot engine's cache: they differ by "
                f"{difference:.2g}, expected at most {allowed:.2g}; {cause}"
            )

    def _probes(self, context_length: int) -> list[_Probe]:
        """The prompts of the check. The last prompt equals the first; its beginning is copied from the first prompt's
        row."""
        longest, shortest = CHECK_LENGTHS
        places = [(longest, 0), (shortest, 0)]
        if context_length > longest:
            places.append((longest, context_length - longest))
        groups = list(range(len(places)))
        for switch in switches_of(self._config, context_length - longest // 2 + 1):
            first = max(switch - longest // 2, 0)
            places += [(longest, first), (longest, first), (shortest, first)]
            groups += [len(places), len(places) + 1, len(places) + 1]
        probes = [
            _Probe([(5 * place + row) % self.vocab_size for place in range(length)], first, group)
            for row, ((length, first), group) in enumerate(zip(places, groups, strict=True))
        ]
        return [*probes, probes[0]]

    def _compare(self, probes: Sequence[_Probe]) -> tuple[Tensor, Tensor]:
        """Logits [probes, vocab] after the last token of each prompt: without the cache, and with it."""
        longest = max(CHECK_LENGTHS)
        if len(self._rows) < len(probes):
            self._rows = torch.arange(len(probes), device=self.device)
        cache = SlotCache(
            self.layers,
            max_rows=len(probes),
            max_tokens=len(probes) * longest,
            chunk=longest,
            has_spare=self.needs_spare,
        )
        expected = torch.cat([self._alone(probe) for probe in probes])
        cache.fit(len(probes), longest)
        row = 0
        for (_, first), equals in groupby(probes[:-1], key=lambda probe: (probe.group, probe.first)):
            group = list(equals)
            self.forward(cache, row, [probe.ids[:2] for probe in group], 0, offset=first)
            self.forward(cache, row, [probe.ids[2:-CHECK_STEPS] for probe in group], 2, offset=first)
            row += len(group)
        cache.copy(({row: 0}, 2))
        self.forward(cache, row, [probes[-1].ids[2:-CHECK_STEPS]], 2, offset=probes[-1].first)
        for behind in range(CHECK_STEPS, 0, -1):
            tokens, positions = [probe.ids[-behind] for probe in probes], [len(probe.ids) - behind for probe in probes]
            logits = self.forward_each(cache, tokens, positions, [probe.first for probe in probes])
        return expected, logits

    def _alone(self, probe: _Probe) -> Tensor:
        """Logits [1, vocab] after a prompt's last token; of a prompt at the context's beginning, as transformers'
        `generate` computes them."""
        positions = probe.first + torch.arange(len(probe.ids), device=self.device)
        ids = torch.tensor([probe.ids], device=self.device)
        if not probe.first:
            return first_logits(self._model, ids)
        logits: Tensor = self._model(ids, position_ids=positions[None], use_cache=False).logits
        return logits[:, -1]

    @contextmanager
    def _narrow_window(self) -> Iterator[None]:
        """Have sliding layers see only a few tokens, so that a short prompt exceeds the window as a long prompt
        would."""
        window = getattr(self._config, "sliding_window", None)
        if not self._mask.window or window != self._mask.window or window <= CHECK_WINDOW:
            yield
            return
        self._config.sliding_window = CHECK_WINDOW
        mask, self._mask = self._mask, StepMask(self._config, self._model.dtype, self.device)
        try:
            yield
        finally:
            self._config.sliding_window = window
            self._mask = mask
