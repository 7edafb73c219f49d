"""Continuous batching with a transformers model's own forward pass: sequences join and leave between steps."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inference.engine import EngineFull, EngineLimits, Finish, Grammar, SequenceRequest, TokenEvent
from inference.errors import ReplicaError
from inference.lm.admission import Admission
from inference.lm.grammars import KINDS, Constraint, Grammars, Masks, refusal
from inference.lm.model_folder import context_length_of
from inference.lm.sampling import Choice, Sampler, choose
from inference.lm.slot_cache import SlotCache, StepMask
from inference.lm.transformers_parts import attention_of
from inference.runtime.device import breaks_device
from inference.runtime.failure_log import FailureLog, text_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["SlotEngine"]

CHECK_LENGTHS: Final = (12, 4)
"""Prompt lengths of the self-check, in tokens."""
COMPILE_WAIT_S: Final = 0.005
"""How long a step without other work waits for a grammar."""


@dataclass(eq=False)
class _Sequence:
    """An admitted sequence."""

    request: SequenceRequest
    stops: frozenset[int]
    sampler: Sampler
    constraint: Constraint | None = None
    cached: int = 0
    """Tokens in the cache: the computed part of the prompt, and then the answer without its last token."""
    produced: int = 0
    """Tokens of the answer."""
    last: int = 0
    """The answer's last token, the next step's input."""
    has_ended: bool = False


class SlotEngine(Admission):
    """An engine whose cache has one row per sequence.

    A step is one forward pass over all sequences that generate, and one over at most `prefill_chunk` tokens of prompts:
    a chunk of a long prompt, or several short ones, padded. A prompt's last chunk yields the answer's first token.

    Rows 0 to n - 1 of the cache belong to the n sequences that generate, row n to a partly computed prompt.

    Args:
        model: a causal language model, in eval mode, on its device.
        eos_ids: the model's end-of-sequence tokens.
        grammars: compiles grammars for the model; None if requests can have none.
        max_sequences: the most sequences computed together.
        max_waiting: the most sequences that wait beyond these.
        context_length: tokens of a prompt and its answer; by default, and at most, what the model's configuration says.
        cache_tokens: the cache's size: sequences × the longest of them; by default enough for all sequences.
        prefill_chunk: the most prompt tokens per step.
        on_broken: called once the device is unusable.

    Raises:
        ReplicaError: this engine can't serve the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_ids: frozenset[int] = frozenset(),
        grammars: Grammars | None = None,
        max_sequences: int = 32,
        max_waiting: int = 256,
        context_length: int | None = None,
        cache_tokens: int | None = None,
        prefill_chunk: int = 256,
        on_broken: Callable[[str], None] = lambda reason: None,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        context_length = context_length_of(config, context_length)
        attention = attention_of(model.config)
        if attention not in ("sdpa", "eager"):
            raise ReplicaError(f"attention: expected sdpa or eager, got {attention}")
        if "logits_to_keep" not in inspect.signature(model.forward).parameters:
            raise ReplicaError(f"model: expected a causal language model, got {type(model).__name__}")
        if cache_tokens is None:
            cache_tokens = max_sequences * context_length
        super().__init__(
            EngineLimits(
                max_sequences,
                max_waiting,
                context_length,
                cache_tokens,
                config.vocab_size,
                grammars=KINDS if grammars is not None else frozenset(),
            )
        )
        self._model = model
        self._device = model.device
        self._eos_ids = eos_ids
        self._grammars = grammars
        self._matchers: dict[str, tuple[Grammar, Future[LLMatcher]]] = {}
        """The grammars of sequences that have not started."""
        self._held: list[SequenceRequest] = []
        """Admitted sequences whose grammar is being compiled."""
        self._prefill_chunk = prefill_chunk
        self._on_broken = on_broken
        self._mask = StepMask(config, model.dtype, self._device)
        self._layers: int = config.num_hidden_layers
        self._cache = self._blank_cache()
        self._rows = torch.arange(max(max_sequences, len(CHECK_LENGTHS)), device=self._device)
        self._generating: list[_Sequence] = []
        """The sequences that generate, by cache row."""
        self._prompts: deque[_Sequence] = deque()
        """Sequences whose prompt is not fully computed, in order of arrival; only the first may be partly computed."""
        self._pending: list[TokenEvent] = []
        self._failures = FailureLog()

    @property
    def has_work(self) -> bool:
        return bool(self._pending or self.active or self.waiting)

    def submit(self, request: SequenceRequest) -> None:
        """As `Engine.submit`."""
        grammar, grammars = request.grammar, self._grammars
        if grammar is not None and grammars is not None and grammars.is_busy:
            raise EngineFull("too many grammars wait to be compiled")
        super().submit(request)
        if grammar is not None and grammars is not None:
            self._matchers[request.id] = grammar, grammars.compile(grammar)

    @torch.inference_mode()
    def cancel(self, id: str) -> bool:
        """As `Engine.cancel`."""
        if not self.release(id):
            return False
        self._forget_grammar(id)
        found = [one for one in (*self._generating, *self._prompts) if one.request.id == id]
        for sequence in found:
            sequence.has_ended = True
        self._compact()
        self._pending.append(TokenEvent(id, found[0].produced if found else 0, None, finish="cancelled"))
        return True

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """As `Engine.step`."""
        events, self._pending = self._pending, []
        if self._generating:
            self._attempt(self._generating, 0, self._decode, events)
        self._start(events)
        if self._held and not (events or self.active > len(self._held)):
            wait([matcher for _, matcher in self._matchers.values()], COMPILE_WAIT_S, FIRST_COMPLETED)
        group = self._group()
        if group:
            self._attempt(group, len(self._generating), lambda: self._prefill(group), events)
        return events

    def close(self) -> None:
        """As `Engine.close`."""
        self.clear()
        self._generating.clear()
        self._prompts.clear()
        self._pending.clear()
        self._matchers.clear()
        self._held.clear()
        self._cache = self._blank_cache()

    @torch.inference_mode()
    def check(self) -> None:
        """Compare the model's logits with and without the engine's cache and masks.

        Call it before the first `submit`.

        Raises:
            ReplicaError: the logits differ, or the model fails.
        """
        prompts = [
            [(5 * place + row) % self.limits.vocab_size for place in range(length)]
            for row, length in enumerate(CHECK_LENGTHS)
        ]
        # A separate cache, because the engine's may be too small.
        self._cache = SlotCache(
            self._layers, max_rows=len(prompts), max_tokens=len(prompts) * max(CHECK_LENGTHS), chunk=max(CHECK_LENGTHS)
        )
        try:
            inputs = [torch.tensor([ids], device=self._device) for ids in prompts]
            expected = torch.cat([self._model(ids, use_cache=False).logits[:, -1] for ids in inputs])
            for row, ids in enumerate(prompts):
                self._cache.fit(row + 1, len(ids))
                self._cache.aim(slice(row, row + 1), 0)
                self._forward([ids[:2]], start=0)
                self._cache.aim(slice(row, row + 1), 2)
                self._forward([ids[2:-1]], start=2)
            got = self._forward_each([ids[-1] for ids in prompts], [len(ids) - 1 for ids in prompts])
        except Exception as error:
            reason = f"{type(error).__name__}: {text_of(error)}"
            raise ReplicaError(f"model: fails in the slot engine: {reason}") from error
        finally:
            self._cache = self._blank_cache()
        scale = float(expected.float().std())
        difference = float((got - expected).abs().max())
        allowed = (0.01 if self._model.dtype == torch.float32 else 0.2) * scale
        if not difference <= allowed:
            raise ReplicaError(
                f"model: {type(self._model).__name__} gives other logits with the slot engine's cache: they differ by "
                f"{difference:.2g}, expected at most {allowed:.2g}; the engine does not support its kind of attention"
            )

    def _blank_cache(self) -> SlotCache:
        limits = self.limits
        return SlotCache(self._layers, max_rows=limits.max_sequences, max_tokens=limits.cache_tokens)

    def _start(self, events: list[TokenEvent]) -> None:
        """Start the newly admitted sequences that don't wait for a grammar."""
        self._reject(events)
        self._held.extend(iter(self.take, None))
        held, self._held = self._held, []
        for request in held:
            _, matcher = self._matchers.get(request.id, (None, None))
            if matcher is not None and not matcher.done():
                self._held.append(request)
                continue
            self._matchers.pop(request.id, None)
            if request.max_tokens == 0:
                self.release(request.id)
                events.append(TokenEvent(request.id, 0, None, finish="length"))
                continue
            try:
                constraint = None if matcher is None else Constraint(request, matcher.result())
                sampler = Sampler(request.sampling, request.prompt, self.limits.vocab_size, self._device)
            except Exception as error:  # out of memory
                self.release(request.id)
                events.append(TokenEvent(request.id, 0, None, finish="error", error=self._report(error)))
                continue
            ignores_eos = request.ignore_eos and constraint is None
            stops = request.stop_ids if ignores_eos else request.stop_ids | self._eos_ids
            self._prompts.append(_Sequence(request, stops, sampler, constraint))

    def _reject(self, events: list[TokenEvent]) -> None:
        """End the sequences, admitted or waiting, whose grammars could not be compiled."""
        for id, (grammar, matcher) in list(self._matchers.items()):
            if matcher.done() and (error := matcher.exception()) is not None:
                self._forget_grammar(id)
                self.release(id)
                events.append(TokenEvent(id, 0, None, finish="rejected", error=refusal(grammar, text_of(error))))

    def _forget_grammar(self, id: str) -> None:
        if self._matchers.pop(id, None) is not None:
            self._held = [one for one in self._held if one.id != id]

    def _begin_masks(self, sequences: Sequence[_Sequence]) -> Masks | None:
        """Start to compute which tokens may come next."""
        return None if self._grammars is None else self._grammars.begin([one.constraint for one in sequences])

    def _choose(self, logits: Tensor, sequences: Sequence[_Sequence], masks: Masks | None) -> list[Choice]:
        allowed = None if masks is None else masks.allowed(logits.device)
        return choose(logits, [one.sampler for one in sequences], allowed)

    def _attempt(
        self,
        sequences: Sequence[_Sequence],
        first_row: int,
        compute: Callable[[], Sequence[Choice]],
        events: list[TokenEvent],
    ) -> None:
        """Compute tokens of sequences in successive rows; if that fails, only these sequences end."""
        sequences = list(sequences)
        try:
            choices = compute()
        except Exception as error:
            text = self._report(error)
            for sequence in sequences:
                self._end(sequence, "error", events, text)
        else:
            # A partly computed prompt has no choice yet.
            for row, (sequence, choice) in enumerate(zip(sequences, choices, strict=False), first_row):
                if sequence.constraint is not None and sequence.constraint.error:
                    self._end(sequence, "rejected", events, sequence.constraint.error)
                elif choice.is_valid:
                    self._advance(sequence, choice, events)
                else:
                    self._cache.wipe(row)
                    self._end(sequence, "error", events, "the model's logits are not finite")
        self._compact()

    def _decode(self) -> list[Choice]:
        """Compute the next token of each sequence that generates."""
        sequences = self._generating
        masks = self._begin_masks(sequences)
        logits = self._forward_each([one.last for one in sequences], [one.cached for one in sequences])
        for one in sequences:
            one.cached += 1
        return self._choose(logits, sequences, masks)

    def _group(self) -> list[_Sequence]:
        """The sequences whose prompts are computed next: part of one, or as many as fit whole in a padded chunk."""
        group: list[_Sequence] = []
        width = 0
        for sequence in self._prompts:
            width = max(width, len(sequence.request.prompt))
            if group and (len(group) + 1) * width > self._prefill_chunk:
                break
            group.append(sequence)
            if sequence.cached or width > self._prefill_chunk:
                break
        return group

    def _prefill(self, group: Sequence[_Sequence]) -> list[Choice]:
        """Compute prompts; returns the first tokens of those that are complete."""
        start = group[0].cached
        chunks = [one.request.prompt[start : start + self._prefill_chunk] for one in group]
        is_last = start + self._prefill_chunk >= len(group[0].request.prompt)
        masks = self._begin_masks(group) if is_last else None
        first = len(self._generating)
        self._fit(first + len(group), start + max(map(len, chunks)))
        self._cache.aim(slice(first, first + len(group)), start)
        logits = self._forward(chunks, start)
        for one, chunk in zip(group, chunks, strict=True):
            one.cached += len(chunk)
        if group[0].cached < len(group[0].request.prompt):
            return []
        choices = self._choose(logits, group, masks)
        for one in group:
            self._prompts.remove(one)
            self._generating.append(one)
        return choices

    def _forward(self, chunks: Sequence[Sequence[int]], start: int) -> Tensor:
        """Logits [rows, vocab] after each chunk's last token; chunks follow `start` tokens in the cache's window."""
        lengths = [len(chunk) for chunk in chunks]
        width = max(lengths)
        # Padded on the right: no token sees a later one, and the padding in the cache is overwritten before it is seen.
        ids = torch.tensor([[*chunk, *[0] * (width - len(chunk))] for chunk in chunks], device=self._device)
        positions = torch.arange(start, start + width, device=self._device).expand(len(chunks), width)
        ends = sorted(set(lengths))
        logits: Tensor = self._model(
            input_ids=ids,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=torch.tensor(ends, device=self._device) - 1,
        ).logits
        return logits[range(len(chunks)), [ends.index(length) for length in lengths]]

    def _forward_each(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Logits [rows, vocab] after one more token in each of the first rows, each at its own position."""
        count, longest = len(tokens), max(positions)
        self._fit(count, longest + 1)
        ids = torch.tensor(tokens, device=self._device)[:, None]
        at = torch.tensor(positions, device=self._device)
        mask = None
        if min(positions) == longest:
            self._cache.aim(slice(0, count), longest)
        else:
            self._cache.aim_each(self._rows[:count], at, longest=longest)
            mask = self._mask(at[:, None], longest=longest)
        logits: Tensor = self._model(
            input_ids=ids,
            position_ids=at[:, None],
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1]

    def _fit(self, rows: int, length: int) -> None:
        """Grow the cache to at least this many rows and tokens, keeping what it holds."""
        cached = [one.cached for one in self._generating]
        if self._prompts and self._prompts[0].cached:
            cached.append(self._prompts[0].cached)
        self._cache.fit(max(rows, len(cached)), max(length, *cached, 0))

    def _advance(self, sequence: _Sequence, choice: Choice, events: list[TokenEvent]) -> None:
        """Report a sequence's token, and end the sequence if that was the last."""
        request, index = sequence.request, sequence.produced
        sequence.last = choice.token
        if sequence.constraint is not None:
            sequence.constraint.token = choice.token
        sequence.produced = index + 1
        finish: Finish | None = None
        if choice.token in sequence.stops:
            finish = "stop"
        elif index + 1 == request.max_tokens:
            finish = "length"
        events.append(TokenEvent(request.id, index, choice.token, choice.logprob, choice.top, finish))
        if finish:
            sequence.has_ended = True
            self.release(request.id)

    def _end(self, sequence: _Sequence, finish: Finish, events: list[TokenEvent], error: str) -> None:
        """End a sequence without a token."""
        sequence.has_ended = True
        self.release(sequence.request.id)
        events.append(TokenEvent(sequence.request.id, sequence.produced, None, finish=finish, error=error))

    def _compact(self) -> None:
        """Fill the rows of ended sequences from the last rows, in one copy."""
        before = len(self._generating)
        rows = [(row, one) for row, one in enumerate(self._generating) if not one.has_ended]
        partial = self._prompts[0] if self._prompts else None
        if partial is not None and (not partial.cached or partial.has_ended):
            partial = None
        if any(one.has_ended for one in self._prompts):
            self._prompts = deque(one for one in self._prompts if not one.has_ended)
        after = len(rows)
        if after == before:
            return
        holes = [row for row in range(after) if self._generating[row].has_ended]
        moved = [(row, one) for row, one in rows if row >= after]
        for hole, (_, one) in zip(holes, moved, strict=True):
            self._generating[hole] = one
        del self._generating[after:]
        if partial is not None:
            holes.append(after)
            moved.append((before, partial))
        if moved:
            self._cache.move([row for row, _ in moved], holes, max(one.cached for _, one in moved))

    def _report(self, error: Exception) -> str:
        self._failures.note(error)
        text = text_of(error)
        reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
        if breaks_device(reason, str(self._device)):
            self._on_broken(reason)
        return reason
