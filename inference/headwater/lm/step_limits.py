"""How much a step of the slot engine computes, so that the device's memory suffices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from headwater.engine import EngineLimits
from headwater.lm.slot_rows import SlotRows
from headwater.lm.slot_sequence import SlotSequence
from headwater.runtime.capacity import Capacity
from headwater.runtime.device import free_memory

__all__ = ["StepLimits"]

logger = logging.getLogger(__name__)

SCORED_LOGITS: Final = 2**24
"""The most logits of a step that reports log probabilities of prompts: with a vocabulary of 128,000 tokens, the logits
of 131 prompt tokens."""
LEAST_CHUNK: Final = 16
"""The number of prompt tokens in a step is not halved below this when memory is short."""
NAME: Final = "the engine"
"""The engine's name in the messages of `Capacity`."""


class StepLimits:
    """The most sequences and prompt tokens in a step: fewer for a while after a step that ran out of memory.

    Args:
        limits: the engine's limits.
        prefill_chunk: the most prompt tokens per step.
        capacity: records how many sequences fit in the memory; no limit before a step runs out of memory, nor once a
            limit lapses.
    """

    def __init__(self, limits: EngineLimits, prefill_chunk: int, capacity: Capacity) -> None:
        self._limits = limits
        self._prefill_chunk = prefill_chunk
        self._capacity = capacity
        self._chunks = Capacity(lambda text, _: logger.warning("%s", text))
        """How many prompt tokens in a step fit in the memory; its limits begin and lapse as in `_capacity`."""

    @property
    def max_sequences(self) -> int:
        """The most sequences that may run."""
        return self._capacity.most(NAME) or self._limits.max_sequences

    def chunk(self, group: Sequence[SlotSequence]) -> int:
        """The most tokens of these sequences' prompts in a step."""
        limit = min(self._chunks.most(NAME) or self._prefill_chunk, self._prefill_chunk)
        if all(sequence.request.prompt_logprobs is None for sequence in group):
            return limit
        return min(limit, max(SCORED_LOGITS // self._limits.vocab_size, 1))

    def lower(self, rows: SlotRows, sequences: Sequence[SlotSequence]) -> list[SlotSequence] | None:
        """Take less memory from now on, after these sequences ran out of memory: `SlotEngine` describes the order of
        the measures.

        Returns:
            Sequences that lost their rows, by row, perhaps others than `sequences`. None: no measure is left, because
            no other sequence runs.
        """
        free_memory()
        running = rows.running
        are_prompts = sequences[0] in rows.prompts
        count, length = rows.cache.shape
        is_cached = count >= len(running) and length >= max(
            (len(sequence.prompt) for sequence in rows.prompts), default=0
        )
        chunk = min(self.chunk(sequences), max(len(sequence.prompt) - sequence.cached for sequence in sequences))
        if count > len(running):
            rows.keep_no_more()
        elif are_prompts and is_cached and chunk > LEAST_CHUNK:
            self._chunks.learn(NAME, chunk, max(chunk // 2, LEAST_CHUNK), what="prompt tokens")
        elif len(running) > 1:
            rest = [sequence for sequence in running if sequence not in sequences] if are_prompts else []
            retained = rest or running[: len(running) // 2]
            self._capacity.learn(NAME, len(running), len(retained), what="sequences")
            return rows.retain(retained)
        else:
            return None
        return []
