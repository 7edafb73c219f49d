"""The forward passes of the slot engine's step over the rows of its cache, and the choice of the next tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headwater.engine import TokenEvent
from headwater.lm.cached_model import CachedModel
from headwater.lm.grammars import Grammars
from headwater.lm.sampling import Choice, choose, logprobs_of
from headwater.lm.slot_rows import SlotRows
from headwater.lm.slot_sequence import SlotSequence

__all__ = ["ForwardPasses"]


class ForwardPasses:
    """Computes the next tokens of sequences.

    Args:
        model: the model.
        rows: the sequences in the rows of the model's cache.
        grammars: the grammars that sequences follow; None if no sequence has a grammar.
    """

    def __init__(self, model: CachedModel, rows: SlotRows, grammars: Grammars | None) -> None:
        self._model = model
        self._rows = rows
        self._grammars = grammars

    def decode(self) -> list[Choice | None]:
        """Compute the next token of each sequence that generates. Returns choices as `prefill`."""
        rows = self._rows
        sequences = rows.generating
        positions = [sequence.cached for sequence in sequences]
        rows.fit(len(sequences), max(positions) + 1)
        logits = self._model.forward_each(rows.cache, [sequence.answer[-1] for sequence in sequences], positions)
        choices = self._choose(logits, sequences)
        for sequence, choice in zip(sequences, choices, strict=True):
            sequence.cached += choice is not None
        return choices

    def prefill(
        self, group: Sequence[SlotSequence], start: int, end: int, events: list[TokenEvent]
    ) -> list[Choice | None]:
        """Compute prompts, which have the next rows, from the token `start` up to `end`.

        Returns:
            The answers' next tokens if the prompts are complete, otherwise an empty list. A token is None if its
            grammar's mask is not computed yet, or failed. The log probabilities of prompts are added to `events`.
        """
        rows = self._rows
        chunks = [sequence.prompt[start:end] for sequence in group]
        scored = {row: sequence for row, sequence in enumerate(group) if sequence.request.prompt_logprobs is not None}
        kept, logits = self._model.forward(rows.cache, len(rows.generating), chunks, start, keeps_all=bool(scored))
        for row, sequence in scored.items():
            first_scored = max(start, sequence.scored)  # a sequence that was put off has reported some before
            following = sequence.request.prompt[first_scored + 1 : start + 1 + len(chunks[row])]
            sequence.scored = max(sequence.scored, start + len(chunks[row]))
            if following:
                tokens = torch.tensor(following, device=self._model.device)
                scores = kept[row, first_scored - start :][: len(following)]
                logprobs = logprobs_of(scores, tokens, sequence.request.prompt_logprobs or 0)
                events.append(TokenEvent(sequence.request.id, 0, None, prompt=tuple(logprobs)))
        for sequence, chunk in zip(group, chunks, strict=True):
            sequence.cached = start + len(chunk)
        if group[0].cached < len(group[0].prompt):
            return []
        choices = self._choose(logits, group)
        rows.generate(group)
        for sequence, choice in zip(group, choices, strict=True):
            sequence.cached -= choice is None  # after a restart: the next step computes the last token, the answer's
        return choices

    def _choose(self, logits: Tensor, sequences: Sequence[SlotSequence]) -> list[Choice | None]:
        """Choose the next token of each sequence; None where its grammar's mask is not computed yet, or failed."""
        constraints = [sequence.constraint for sequence in sequences]
        present_constraints = [constraint for constraint in constraints if constraint is not None]
        if self._grammars is None or not present_constraints:
            return [*choose(logits, [sequence.sampler for sequence in sequences])]
        self._grammars.wait(
            present_constraints,
            is_needed=not any(constraint is None or constraint.is_ready for constraint in constraints),
        )
        rows = [row for row, constraint in enumerate(constraints) if constraint is None or constraint.mask]
        choices: list[Choice | None] = [None] * len(sequences)
        if not rows:
            return choices
        held = {place: held_by for place, row in enumerate(rows) if (held_by := constraints[row]) is not None}
        allowed = self._grammars.allowed(list(held), list(held.values()), logits.device) if held else None
        if len(rows) < len(sequences):
            logits = logits[rows]
        for row, choice in zip(rows, choose(logits, [sequences[row].sampler for row in rows], allowed), strict=True):
            choices[row] = choice
        return choices
