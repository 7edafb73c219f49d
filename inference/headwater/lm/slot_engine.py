"""Continuous batching with a transformers model's forward pass: sequences join and leave between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from transformers import PreTrainedModel

from headwater.engine import EngineLimits, Finish, SequenceRequest, TokenEvent
from headwater.lm.admission import Admission, id_in_use
from headwater.lm.batch_invariance import KEYS
from headwater.lm.cached_model import CachedModel
from headwater.lm.forward_passes import ForwardPasses
from headwater.lm.grammars import KINDS, Grammars
from headwater.lm.invariance_check import check_invariance
from headwater.lm.model_folder import check_windows, context_length_of
from headwater.lm.pending_grammars import PendingGrammars
from headwater.lm.rotary import fix_frequencies
from headwater.lm.sampling import Biases, Choice, Sampler
from headwater.lm.slot_cache import SlotCache
from headwater.lm.slot_rows import SlotRows
from headwater.lm.slot_sequence import SlotSequence
from headwater.lm.step_limits import StepLimits
from headwater.runtime.capacity import Capacity
from headwater.runtime.device import breaks_device, is_out_of_memory
from headwater.runtime.failure_log import FailureLog, text_of

__all__ = ["SlotEngine"]

KEPT_ROWS: Final = 32
"""The most rows of the cache beyond `max_sequences`, for prefixes."""
KEPT_TOKENS: Final = 16_384
"""Unless `cache_tokens` is given: the size of the cache, rows × length in tokens, beyond which it gets no more rows for
kept prefixes."""
GRAMMAR_WAIT_S: Final = 0.005
"""The most seconds that a step without events and prompts waits at its end for a reply of a grammar process."""


class SlotEngine(Admission):
    """An engine with a key/value cache that has a row for each sequence.

    A step runs a forward pass over all sequences that generate, and another over at most `prefill_chunk` tokens of
    prompts: a chunk of a long prompt, or several short prompts, padded. A prompt's last chunk yields the answer's first
    token.

    `SlotRows` describes the use of the rows, and which prefixes are kept.

    If the device's memory does not suffice, the engine first frees the rows that only keep prefixes, and allocates no
    more of them; then it computes prompts in smaller parts; then it puts sequences off: they are computed again and
    resume once fewer sequences run, or once the limit in `capacity` has lapsed. A sequence ends for lack of memory only
    if no other sequence runs, or if there is no memory for its `Sampler`.

    Args:
        model: a causal language model, in eval mode, on its device.
        eos_ids: the model's end-of-sequence tokens.
        grammars: compiles grammars for the model; None if requests can't have grammars.
        max_sequences: the most sequences computed together.
        max_waiting: the most sequences that wait, in addition to `max_sequences`.
        context_length: the most tokens of a prompt and its answer together; default and maximum: the length in the
            model's configuration.
        cache_tokens: the cache's size: number of sequences × length of the longest; by default enough for all
            sequences. If given, kept prefixes may fill the cache; otherwise the cache grows for prefixes only up to
            `KEPT_TOKENS`.
        prefill_chunk: the most prompt tokens per step, padding included.
        prefix_cache: whether prefixes are reused.
        batch_invariant: whether a sequence's logits must be the same to the bit for any other sequences beside it, and
            for any way to cut its prompt into chunks or copy it; on a CPU only. The model's layers are replaced.
        cuda_graphs: whether steps of sequences that generate are recorded as CUDA graphs, on a GPU.
        on_broken: called with the reason when an error has made the device unusable.
        capacity: records how many sequences fit in the device's memory, when a step has run out of it.

    Raises:
        ReplicaError: this engine can't serve the model; `context_length` exceeds the maximum, or is None although the
            model's configuration has no length.
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
        prefix_cache: bool = True,
        batch_invariant: bool = False,
        cuda_graphs: bool = True,
        on_broken: Callable[[str], None] = lambda reason: None,
        capacity: Capacity | None = None,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        context_length = context_length_of(config, context_length)
        self._model = CachedModel(model, max_sequences, batch_invariant=batch_invariant, cuda_graphs=cuda_graphs)
        check_windows(config, context_length)
        fix_frequencies(model, context_length)
        kept_tokens = KEPT_TOKENS if cache_tokens is None else cache_tokens
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
                prompt_logprobs=True,
            )
        )
        self._device = model.device
        self._eos_ids = eos_ids
        self._grammars = grammars
        self._biases = Biases()
        self._pending_grammars = None if grammars is None else PendingGrammars(grammars)
        self._held: list[SequenceRequest] = []
        """Admitted sequences that wait until their grammar is compiled again, because it was dropped while they
        waited."""
        self._on_broken = on_broken
        self._step_limits = StepLimits(self.limits, prefill_chunk, capacity or Capacity())
        self._rows = SlotRows(
            partial(
                SlotCache,
                self._model.layers,
                max_rows=max_sequences,
                max_tokens=cache_tokens,
                multiple=KEYS if batch_invariant else 1,
                has_spare=self._model.needs_spare,
            ),
            max_sequences + KEPT_ROWS,
            kept_tokens,
            reuses_prefixes=prefix_cache,
            on_error=self._report,
        )
        self._passes = ForwardPasses(self._model, self._rows, grammars)
        self._put_off: deque[SlotSequence] = deque()
        """Sequences that start, or start again, as soon as the memory allows."""
        self._events: list[TokenEvent] = []
        """Events that `step` has not returned."""
        self._failures = FailureLog()

    @property
    def waiting(self) -> int:
        return len(self._waiting) + (0 if self._pending_grammars is None else self._pending_grammars.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._events or self.active or self.waiting)

    def submit(self, request: SequenceRequest) -> None:
        """See `Engine.submit`."""
        pending = self._pending_grammars
        if pending is not None and request.id in pending:
            raise id_in_use(request.id)
        if request.grammar is None or pending is None:
            super().submit(request)
            return
        self._check(request)
        if self.waiting >= self.limits.max_waiting + self.limits.max_sequences - self.active:
            raise self._full()
        pending.add(request, request.grammar)

    @torch.inference_mode()
    def cancel(self, id: str) -> bool:
        """See `Engine.cancel`."""
        if not self._leave(id):
            return False
        matches = [candidate for candidate in (*self._rows.running, *self._put_off) if candidate.request.id == id]
        for sequence in matches:
            self._drop(sequence)
        self._put_off = deque(put_off for put_off in self._put_off if not put_off.has_ended)
        self._rows.compact(self.active)
        self._events.append(TokenEvent(id, len(matches[0].answer) if matches else 0, None, finish="cancelled"))
        return True

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """See `Engine.step`."""
        rows = self._rows
        if self._grammars is not None:
            self._grammars.poll()
        if any(sequence.constraint is None or not sequence.constraint.is_late for sequence in rows.generating):
            self._attempt(rows.generating, 0, self._passes.decode)
        self._start()
        group, start = rows.next_prompts(self._step_limits.chunk)
        if self._grammars is not None and not (group or self._events):
            self._grammars.poll(GRAMMAR_WAIT_S if self.has_work else 0)
        if group:
            self._attempt(group, len(rows.generating), lambda: self._prefill(group, start))
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """See `Engine.close`."""
        self.clear()
        for sequence in (*self._rows.running, *self._put_off):
            self._drop(sequence)
        if self._pending_grammars is not None:
            self._pending_grammars.clear()
        self._put_off.clear()
        self._events.clear()
        self._held.clear()
        self._rows.clear()

    def check(self) -> None:
        """Check the model with `CachedModel.check` and, if `batch_invariant` is set, with `check_invariance`. Call it
        before the first `submit`.

        Raises:
            ReplicaError: a check failed.
        """
        self._model.check(self.limits.context_length)
        if self._model.batch_invariant:
            check_invariance(self._model)

    def _start(self) -> None:
        """End sequences with grammars that failed, queue sequences with grammars that are compiled, and start the
        sequences that are admitted or put off, as far as the memory allows."""
        pending = self._pending_grammars
        if pending is not None:
            for id, finish, error in pending.failures():
                self._refuse(id, finish, error)
            for request in pending.take_compiled():
                self._enqueue(request)
        self._held.extend(iter(self.take, None))
        admitted, self._held = self._held, []
        for request in admitted:
            if pending is not None and not pending.is_ready(request.id):
                self._held.append(request)
            elif request.max_tokens == 0 and request.prompt_logprobs is None:
                self._refuse(request.id, "length")
            else:
                self._admit(request)
        if self._grammars is not None:
            self._grammars.trim()
        begun: list[SlotSequence] = []
        prompts = self._rows.prompts
        max_sequences = self._step_limits.max_sequences
        while self._put_off and len(self._rows.generating) + len(prompts) < max_sequences:
            begun.append(self._put_off.popleft())
            prompts.append(begun[-1])
        # Grown before prefixes are looked up, because growing the cache may drop prefixes.
        while begun and not self._attempt(begun, 0, self._rows.fit):
            begun = [sequence for sequence in begun if sequence in self._rows.prompts]

    def _admit(self, request: SequenceRequest) -> None:
        """Make an admitted request's sequence, which starts as soon as the memory allows."""
        ignores_eos = request.ignore_eos and request.grammar is None
        stops = request.stop_ids if ignores_eos else request.stop_ids | self._eos_ids
        try:
            vocab_size = self.limits.vocab_size
            sampler = Sampler(request.sampling, request.prompt, vocab_size, self._device, stops, self._biases)
        except Exception as error:
            text = self._report(error)
            self._refuse(request.id, "out_of_memory" if is_out_of_memory(text) else "error", text)
            return
        # A copied prefix gives no logits, which prompt log probabilities need.
        chain = self._rows.chain(request.prompt, request.cache_scope) if request.prompt_logprobs is None else []
        constraint = None if self._pending_grammars is None else self._pending_grammars.follow(request.id)
        self._put_off.append(SlotSequence(request, stops, sampler, chain, constraint))

    def _refuse(self, id: str, finish: Finish, error: str = "") -> None:
        """End a sequence that has not started."""
        self._leave(id)
        self._events.append(TokenEvent(id, 0, None, finish=finish, error=error))

    def _leave(self, id: str) -> bool:
        """Drop a request wherever it waits or runs, and its grammar unless a sequence follows it; False if no request
        has this id."""
        self._held = [request for request in self._held if request.id != id]
        is_waiting = self._pending_grammars is not None and self._pending_grammars.leave(id)
        return self.release(id) or is_waiting

    def _attempt(
        self,
        sequences: Sequence[SlotSequence],
        first_row: int,
        compute: Callable[[], Sequence[Choice | None] | None],
    ) -> bool:
        """Compute tokens of sequences in successive rows, and return whether the computation succeeded. If it fails,
        only these sequences end. But if the memory did not suffice, they are restored to their earlier state, and
        `_relieve` decides.

        Args:
            sequences: the sequences.
            first_row: the first sequence's row.
            compute: returns a choice for each sequence, or no choices.
        """
        sequences = list(sequences)
        before = [(member.cached, member.reused, member.scored) for member in sequences]
        reported = len(self._events)
        failure = ""
        try:
            choices = compute() or ()
        except Exception as error:
            failure = self._report(error)
        if not failure:
            # A partly computed prompt has no choice yet.
            for row, (sequence, choice) in enumerate(zip(sequences, choices, strict=False), first_row):
                constraint = sequence.constraint
                if constraint is not None and constraint.finish is not None:
                    self._end(sequence, constraint.finish, constraint.error)
                elif choice is None:  # its mask comes in a later step
                    continue
                elif choice.is_valid:
                    self._advance(sequence, choice)
                else:
                    self._rows.cache.wipe(row)
                    self._end(sequence, "error", "the model's logits are not finite")
        else:
            self._rows.forget_prefixes()
            if is_out_of_memory(failure):
                del self._events[reported:]
                for sequence, state in zip(sequences, before, strict=True):
                    sequence.cached, sequence.reused, sequence.scored = state
                self._relieve(sequences, failure)
            else:
                for sequence in sequences:
                    self._end(sequence, "error", failure)
        self._rows.compact(self.active)
        return not failure

    def _relieve(self, sequences: Sequence[SlotSequence], failure: str) -> None:
        """Put sequences off, perhaps others than these, which ran out of memory, or have later steps compute less; end
        the first sequence if neither is possible."""
        put_off = self._step_limits.lower(self._rows, sequences)
        if put_off is None:
            fix = "send a shorter prompt, or give the model a device with more free memory"
            text = f"out of memory on {self._device} with this sequence alone; {fix}: {failure[:300]}"
            self._end(sequences[0], "out_of_memory", text)
            return
        for sequence in put_off:
            sequence.restart()
        self._put_off.extendleft(reversed(put_off))

    def _prefill(self, group: Sequence[SlotSequence], start: int) -> list[Choice | None]:
        """Compute prompts from the token `start` on; see `ForwardPasses.prefill`."""
        if not group[0].cached:
            self._rows.begin(group, start, self.active)
        return self._passes.prefill(group, start, start + self._step_limits.chunk(group), self._events)

    def _advance(self, sequence: SlotSequence, choice: Choice) -> None:
        """Report a sequence's token, and end the sequence if the token is its last."""
        request, index = sequence.request, len(sequence.answer)
        if not request.max_tokens:  # only the prompt's log probabilities are wanted
            self._end(sequence, "length")
            return
        sequence.answer.append(choice.token)
        finish: Finish | None = None
        if choice.token in sequence.stops:
            finish = "stop"
        elif index + 1 == request.max_tokens:
            finish = "length"
        reused = 0 if index else sequence.reused
        self._events.append(
            TokenEvent(request.id, index, choice.token, choice.logprob, choice.top, finish, cached=reused)
        )
        if finish:
            self._drop(sequence)
            self.release(request.id)
        elif sequence.constraint is not None:
            sequence.constraint.advance(choice.token)

    def _drop(self, sequence: SlotSequence) -> None:
        """Mark a sequence as ended, and end the process that follows its grammar."""
        sequence.has_ended = True
        if sequence.constraint is not None and self._grammars is not None:
            self._grammars.close(sequence.constraint)

    def _end(self, sequence: SlotSequence, finish: Finish, error: str = "") -> None:
        """End a sequence without a token."""
        self._drop(sequence)
        sequence.cached = 0  # so that no prefix is kept
        self.release(sequence.request.id)
        self._events.append(TokenEvent(sequence.request.id, len(sequence.answer), None, finish=finish, error=error))

    def _report(self, error: Exception) -> str:
        """Log an error, and return its class's name and message. If it broke the device, call `on_broken`."""
        self._failures.note(error)
        text = text_of(error)
        reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
        if breaks_device(reason, str(self._device)):
            self._on_broken(reason)
        return reason
