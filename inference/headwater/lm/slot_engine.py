"""Continuous batching with a transformers model's forward pass: sequences join and leave between steps."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwater.engine import EngineFull, EngineLimits, Finish, SequenceRequest, TokenEvent
from headwater.lm.admission import Admission, id_in_use
from headwater.lm.batch_invariance import KEYS
from headwater.lm.cached_model import CachedModel
from headwater.lm.grammars import KINDS, Compilation, Constraint, Grammars, refusal
from headwater.lm.invariance_check import check_invariance
from headwater.lm.model_folder import context_length_of
from headwater.lm.prefix_index import BLOCK, NEWEST, Chain, PrefixIndex, chain_of
from headwater.lm.rotary import fix_frequencies
from headwater.lm.sampling import Biases, Choice, Sampler, choose, logprobs_of
from headwater.lm.slot_cache import SlotCache
from headwater.runtime.capacity import Capacity
from headwater.runtime.device import breaks_device, free_memory, is_out_of_memory
from headwater.runtime.failure_log import FailureLog, text_of

__all__ = ["SlotEngine"]

logger = logging.getLogger(__name__)

KEPT_ROWS: Final = 32
"""The most rows of the cache beyond `max_sequences`, for prefixes."""
KEPT_TOKENS: Final = 16_384
"""Unless `cache_tokens` is given: the size of the cache, rows × length in tokens, beyond which it gets no more rows for
kept prefixes."""
SCORED_LOGITS: Final = 2**24
"""The most logits of a step that reports log probabilities of prompts: with a vocabulary of 128,000 tokens, the logits
of 131 prompt tokens."""
GRAMMAR_WAIT_S: Final = 0.005
"""The most seconds that a step without events and prompts waits at its end for a reply of a grammar process."""
LEAST_CHUNK: Final = 16
"""The number of prompt tokens in a step is not halved below this when memory is short."""
NAME: Final = "the engine"
"""The engine's name in the messages of `Capacity`."""


@dataclass(eq=False)
class _Sequence:
    """An admitted sequence."""

    request: SequenceRequest
    stops: frozenset[int]
    sampler: Sampler
    chain: Chain
    """The chain of the request's prompt; empty if the prompt is shorter than a block, or may not reuse prefixes."""
    constraint: Constraint | None = None
    cached: int = 0
    """Number of tokens in the cache: of the prompt, computed or copied, and then of the answer without its last
    token."""
    reused: int = 0
    """Number of prompt tokens that were not computed, because a row of the cache held them."""
    scored: int = 0
    """Number of prompt tokens for which the log probability of the following prompt token was reported."""
    answer: list[int] = field(default_factory=list)
    """Tokens of the answer; the last is the next step's input."""
    has_ended: bool = False
    prompt: list[int] = field(init=False)
    """Tokens to compute before the next token: the request's prompt and, if the sequence was put off, its answer so
    far."""

    def __post_init__(self) -> None:
        self.prompt = self.request.prompt


class SlotEngine(Admission):
    """An engine with a key/value cache that has a row for each sequence.

    A step runs a forward pass over all sequences that generate, and another over at most `prefill_chunk` tokens of
    prompts: a chunk of a long prompt, or several short prompts, padded. A prompt's last chunk yields the answer's first
    token.

    Rows 0 to n - 1 of the cache belong to the n sequences that generate, row n to a partly computed prompt. Other rows
    keep the content of ended sequences until the row is needed. If a prompt begins like the content of a row, or
    like the prompt of a sequence that still generates, with the same `cache_scope`, this prefix is copied, in whole
    blocks of `BLOCK` tokens, instead of computed. Rows for sequences have priority over kept content. Of the kept
    content, content that another row holds too is dropped first, then the least recently used.

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
        fix_frequencies(model, context_length)
        self._kept_tokens = KEPT_TOKENS if cache_tokens is None else cache_tokens
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
        self._compilations: dict[str, tuple[SequenceRequest, Compilation]] = {}
        """The grammars of sequences that have not started."""
        self._uncompiled: dict[str, SequenceRequest] = {}
        """Sequences that wait for their grammar before they wait for admission: they take no capacity of the cache
        yet."""
        self._held: list[SequenceRequest] = []
        """Admitted sequences that wait until their grammar is compiled again, because it was dropped while they
        waited."""
        self._prefill_chunk = prefill_chunk
        self._prefix_cache = prefix_cache
        self._on_broken = on_broken
        self._capacity = capacity or Capacity()
        """How many sequences fit in the memory; no limit before a step runs out of memory, nor once a limit lapses."""
        self._chunks = Capacity(lambda text, _: logger.warning("%s", text))
        """How many prompt tokens in a step fit in the memory; its limits begin and lapse as in `_capacity`."""
        self._cache = self._blank_cache()
        self._prefixes = PrefixIndex()
        self._put_off: deque[_Sequence] = deque()
        """Sequences that start, or start again, as soon as the memory allows."""
        self._generating: list[_Sequence] = []
        """The sequences that generate, by cache row."""
        self._prompts: deque[_Sequence] = deque()
        """Sequences whose prompt is not fully computed, in order of arrival; only the first may be partly computed."""
        self._pending: list[TokenEvent] = []
        self._failures = FailureLog()

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._uncompiled)

    @property
    def has_work(self) -> bool:
        return bool(self._pending or self.active or self.waiting)

    def submit(self, request: SequenceRequest) -> None:
        """See `Engine.submit`."""
        if request.id in self._uncompiled:
            raise id_in_use(request.id)
        grammars = self._grammars
        if request.grammar is None or grammars is None:
            super().submit(request)
            return
        self._check(request)
        if self.waiting >= self.limits.max_waiting + self.limits.max_sequences - self.active:
            raise self._full()
        if grammars.is_full(request.cache_scope):
            raise EngineFull("too many grammars wait to be compiled")
        self._compilations[request.id] = request, grammars.compile(request.grammar, request.cache_scope)
        self._uncompiled[request.id] = request

    @torch.inference_mode()
    def cancel(self, id: str) -> bool:
        """See `Engine.cancel`."""
        if self._uncompiled.pop(id, None) is None and not self.release(id):
            return False
        self._forget_grammar(id)
        matches = [
            candidate for candidate in (*self._generating, *self._prompts, *self._put_off) if candidate.request.id == id
        ]
        for sequence in matches:
            self._drop(sequence)
        self._put_off = deque(put_off for put_off in self._put_off if not put_off.has_ended)
        self._compact()
        self._pending.append(TokenEvent(id, len(matches[0].answer) if matches else 0, None, finish="cancelled"))
        return True

    @torch.inference_mode()
    def step(self) -> list[TokenEvent]:
        """See `Engine.step`."""
        events, self._pending = self._pending, []
        if self._grammars is not None:
            self._grammars.poll()
        if any(sequence.constraint is None or not sequence.constraint.is_late for sequence in self._generating):
            self._attempt(self._generating, 0, self._decode, events)
        self._start(events)
        group, start = self._group()
        if self._grammars is not None and not (group or events):
            self._grammars.poll(GRAMMAR_WAIT_S if self.has_work else 0)
        if group:
            self._attempt(group, len(self._generating), lambda: self._prefill(group, start, events), events)
        return events

    def close(self) -> None:
        """See `Engine.close`."""
        self.clear()
        for sequence in (*self._generating, *self._prompts, *self._put_off):
            self._drop(sequence)
        for id in list(self._compilations):
            self._forget_grammar(id)
        self._generating.clear()
        self._prompts.clear()
        self._put_off.clear()
        self._pending.clear()
        self._prefixes = PrefixIndex()
        self._uncompiled.clear()
        self._held.clear()
        self._cache = self._blank_cache()

    def check(self) -> None:
        """Check the model with `CachedModel.check` and, if `batch_invariant` is set, with `check_invariance`. Call it
        before the first `submit`.

        Raises:
            ReplicaError: a check failed.
        """
        self._model.check(self.limits.context_length)
        if self._model.batch_invariant:
            check_invariance(self._model)

    def _blank_cache(self) -> SlotCache:
        limits = self.limits
        return SlotCache(
            self._model.layers,
            max_rows=limits.max_sequences,
            max_tokens=limits.cache_tokens,
            multiple=KEYS if self._model.batch_invariant else 1,
            has_spare=self._model.needs_spare,
        )

    def _start(self, events: list[TokenEvent]) -> None:
        """End sequences with grammars that failed, queue sequences with grammars that are compiled, and start the
        sequences that are admitted or put off, as far as the memory allows."""
        self._reject(events)
        for id, request in list(self._uncompiled.items()):
            if self._compilations[id][1].is_done:
                del self._uncompiled[id]
                self._enqueue(request)
        self._held.extend(iter(self.take, None))
        held, self._held = self._held, []
        for request in held:
            if request.grammar is not None and not self._is_compiled(request):
                self._held.append(request)
                continue
            if request.max_tokens == 0 and request.prompt_logprobs is None:
                self._forget_grammar(request.id)
                self.release(request.id)
                events.append(TokenEvent(request.id, 0, None, finish="length"))
                continue
            ignores_eos = request.ignore_eos and request.grammar is None
            stops = request.stop_ids if ignores_eos else request.stop_ids | self._eos_ids
            try:
                vocab_size = self.limits.vocab_size
                sampler = Sampler(request.sampling, request.prompt, vocab_size, self._device, stops, self._biases)
            except Exception as error:
                self._forget_grammar(request.id)
                self.release(request.id)
                text = self._report(error)
                finish: Finish = "out_of_memory" if is_out_of_memory(text) else "error"
                events.append(TokenEvent(request.id, 0, None, finish=finish, error=text))
                continue
            # A copied prefix gives no logits, which prompt log probabilities need.
            chain = self._chain(request.prompt, request) if request.prompt_logprobs is None else []
            self._put_off.append(_Sequence(request, stops, sampler, chain, self._constraint(request)))
        if self._grammars is not None:
            self._grammars.trim()
        begun: list[_Sequence] = []
        max_sequences = self._capacity.most(NAME) or self.limits.max_sequences
        while self._put_off and len(self._generating) + len(self._prompts) < max_sequences:
            begun.append(self._put_off.popleft())
            self._prompts.append(begun[-1])
        while begun and not self._attempt(begun, 0, self._make_room, events):
            begun = [sequence for sequence in begun if sequence in self._prompts]

    def _reject(self, events: list[TokenEvent]) -> None:
        """End the sequences, admitted or waiting, whose grammars could not be compiled."""
        for id, (request, compilation) in list(self._compilations.items()):
            if compilation.error and request.grammar is not None:
                self._forget_grammar(id)
                self._uncompiled.pop(id, None)
                self.release(id)
                finish: Finish = "error" if compilation.is_lost else "rejected"
                error = refusal(request.grammar, compilation.error)
                events.append(TokenEvent(id, 0, None, finish=finish, error=error))

    def _is_compiled(self, request: SequenceRequest) -> bool:
        """Whether an admitted sequence's grammar can be followed now. A grammar that was dropped is compiled again."""
        assert self._grammars is not None
        assert request.grammar is not None
        _, compilation = self._compilations[request.id]
        if compilation.has_ended:
            self._grammars.leave(compilation)
            compilation = self._grammars.compile(request.grammar, request.cache_scope)
            self._compilations[request.id] = request, compilation
        return compilation.first is not None

    def _constraint(self, request: SequenceRequest) -> Constraint | None:
        """The constraint of a sequence by its compiled grammar; None if it has no grammar."""
        if request.grammar is None:
            return None
        assert self._grammars is not None
        _, compilation = self._compilations.pop(request.id)
        return self._grammars.follow(request, compilation)

    def _forget_grammar(self, id: str) -> None:
        _, compilation = self._compilations.pop(id, (None, None))
        if compilation is not None and self._grammars is not None:
            self._grammars.leave(compilation)
            self._held = [request for request in self._held if request.id != id]

    def _choose(self, logits: Tensor, sequences: Sequence[_Sequence]) -> list[Choice | None]:
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
        held = [
            (place, row_constraint)
            for place, row in enumerate(rows)
            if (row_constraint := constraints[row]) is not None
        ]
        allowed = None
        if held:
            allowed = self._grammars.allowed(
                [place for place, _ in held], [constraint for _, constraint in held], logits.device
            )
        if len(rows) < len(sequences):
            logits = logits[rows]
        for row, choice in zip(rows, choose(logits, [sequences[row].sampler for row in rows], allowed), strict=True):
            choices[row] = choice
        return choices

    def _attempt(
        self,
        sequences: Sequence[_Sequence],
        first_row: int,
        compute: Callable[[], Sequence[Choice | None]],
        events: list[TokenEvent],
    ) -> bool:
        """Compute tokens of sequences in successive rows, and return whether the computation succeeded. If it fails,
        only these sequences end. But if the memory did not suffice, they are restored to their earlier state, and
        `_relieve` decides.

        Args:
            sequences: the sequences.
            first_row: the first sequence's row.
            compute: returns a choice for each sequence, or an empty list.
            events: gets the tokens and ends.
        """
        sequences = list(sequences)
        before = [(member.cached, member.reused, member.scored) for member in sequences]
        reported = len(events)
        failure = ""
        try:
            choices = compute()
        except Exception as error:
            failure = self._report(error)
        if not failure:
            # A partly computed prompt has no choice yet.
            for row, (sequence, choice) in enumerate(zip(sequences, choices, strict=False), first_row):
                constraint = sequence.constraint
                if constraint is not None and constraint.finish is not None:
                    self._end(sequence, constraint.finish, events, constraint.error)
                elif choice is None:  # its mask comes in a later step
                    continue
                elif choice.is_valid:
                    self._advance(sequence, choice, events)
                else:
                    self._cache.wipe(row)
                    self._end(sequence, "error", events, "the model's logits are not finite")
        else:
            self._prefixes = PrefixIndex()  # the index may list copies that were not made
            if is_out_of_memory(failure):
                del events[reported:]
                for sequence, state in zip(sequences, before, strict=True):
                    sequence.cached, sequence.reused, sequence.scored = state
                self._relieve(sequences, events, failure)
            else:
                for sequence in sequences:
                    self._end(sequence, "error", events, failure)
        self._compact()
        return not failure

    def _relieve(self, sequences: Sequence[_Sequence], events: list[TokenEvent], failure: str) -> None:
        """Take less memory from now on, after these sequences ran out of memory: the class describes the order of the
        measures. Sequences outside `sequences` may be put off, too."""
        free_memory()
        running = [*self._generating, *self._prompts]
        are_prompts = sequences[0] in self._prompts
        rows, length = self._cache.shape
        is_cached = rows >= len(running) and length >= max(
            (len(sequence.prompt) for sequence in self._prompts), default=0
        )
        chunk = min(self._chunk(sequences), max(len(sequence.prompt) - sequence.cached for sequence in sequences))
        if rows > len(running):
            self._kept_tokens = 0
            self._shrink(len(running), length)
        elif are_prompts and is_cached and chunk > LEAST_CHUNK:
            self._chunks.learn(NAME, chunk, max(chunk // 2, LEAST_CHUNK), what="prompt tokens")
        elif len(running) > 1:
            rest = [sequence for sequence in running if sequence not in sequences] if are_prompts else []
            kept = rest or running[: len(running) // 2]
            self._capacity.learn(NAME, len(running), len(kept), what="sequences")
            self._put_off.extendleft(
                self._restarted(sequence) for sequence in reversed(running) if sequence not in kept
            )
            self._generating = [sequence for sequence in self._generating if sequence in kept]
            self._prompts = deque(sequence for sequence in self._prompts if sequence in kept)
            needed = [sequence.cached for sequence in self._generating] + [
                len(sequence.prompt) for sequence in self._prompts
            ]
            self._shrink(len(kept), max(needed))
        else:
            fix = "send a shorter prompt, or give the model a device with more free memory"
            text = f"out of memory on {self._device} with this sequence alone; {fix}: {failure[:300]}"
            self._end(sequences[0], "out_of_memory", events, text)

    def _restarted(self, sequence: _Sequence) -> _Sequence:
        """Reset a sequence, so that it is computed from its beginning when its turn comes."""
        sequence.prompt = [*sequence.request.prompt, *sequence.answer]
        sequence.cached = sequence.reused = 0
        return sequence

    def _shrink(self, rows: int, length: int) -> None:
        """Free the cache's memory beyond this shape. This may fail, because copying the rest takes memory, too. A
        failure is only logged."""
        try:
            self._cache.shrink(rows, length)
        except Exception as error:
            self._report(error)

    def _make_room(self) -> list[Choice | None]:
        """Grow the cache for the prompts before prefixes are looked up, because growing may drop prefixes."""
        self._fit(0, 0)
        return []

    def _decode(self) -> list[Choice | None]:
        """Compute the next token of each sequence that generates."""
        sequences = self._generating
        positions = [sequence.cached for sequence in sequences]
        self._fit(len(sequences), max(positions) + 1)
        logits = self._model.forward_each(self._cache, [sequence.answer[-1] for sequence in sequences], positions)
        choices = self._choose(logits, sequences)
        for sequence, choice in zip(sequences, choices, strict=True):
            sequence.cached += choice is not None
        return choices

    def _group(self) -> tuple[list[_Sequence], int]:
        """The sequences with the prompts to compute next, and the index of the first token to compute: part of a
        prompt, or as many whole prompts as fit in a padded chunk. A prompt that could reuse more of another prompt in
        the group than of the cached content waits for that prompt."""
        group: list[_Sequence] = []
        start = width = 0
        for sequence in self._prompts:
            length = len(sequence.prompt)
            blocks = self._prefixes.find(sequence.chain)[1]
            begin = sequence.cached or min(blocks * BLOCK, length - 1)
            if group:
                begin, length = min(start, begin), max(width, length)
                shared = sequence.chain[blocks : blocks + 1]
                if (len(group) + 1) * (length - begin) > self._chunk([*group, sequence]) or (
                    shared and any(member.chain[blocks : blocks + 1] == shared for member in group)
                ):
                    break
            group.append(sequence)
            start, width = begin, length
            if sequence.cached or width - start > self._chunk(group):
                break
        return group, start

    def _chunk(self, group: Sequence[_Sequence]) -> int:
        """The most tokens of these sequences' prompts in a step."""
        limit = min(self._chunks.most(NAME) or self._prefill_chunk, self._prefill_chunk)
        if all(sequence.request.prompt_logprobs is None for sequence in group):
            return limit
        return min(limit, max(SCORED_LOGITS // self.limits.vocab_size, 1))

    def _prefill(self, group: Sequence[_Sequence], start: int, events: list[TokenEvent]) -> list[Choice | None]:
        """Compute prompts from the token `start` on. Returns the answers' next tokens, as `_choose`, if the prompts are
        complete; otherwise an empty list."""
        if not group[0].cached:
            self._begin(group, start)
        end = start + self._chunk(group)
        chunks = [sequence.prompt[start:end] for sequence in group]
        first = len(self._generating)
        scored = {row: sequence for row, sequence in enumerate(group) if sequence.request.prompt_logprobs is not None}
        kept, logits = self._model.forward(self._cache, first, chunks, start, keeps_all=bool(scored))
        for row, sequence in scored.items():
            first_scored = max(start, sequence.scored)  # a sequence that was put off has reported some before
            following = sequence.request.prompt[first_scored + 1 : start + 1 + len(chunks[row])]
            sequence.scored = max(sequence.scored, start + len(chunks[row]))
            if following:
                tokens = torch.tensor(following, device=self._device)
                scores = kept[row, first_scored - start :][: len(following)]
                logprobs = logprobs_of(scores, tokens, sequence.request.prompt_logprobs or 0)
                events.append(TokenEvent(sequence.request.id, 0, None, prompt=tuple(logprobs)))
        for sequence, chunk in zip(group, chunks, strict=True):
            sequence.cached = start + len(chunk)
        if group[0].cached < len(group[0].prompt):
            return []
        choices = self._choose(logits, group)
        for row, (sequence, choice) in enumerate(zip(group, choices, strict=True), first):
            self._prompts.remove(sequence)
            self._generating.append(sequence)
            self._prefixes.learn(row, sequence.chain)
            sequence.cached -= choice is None  # after a restart: the next step computes the last token, the answer's
        return choices

    def _begin(self, group: Sequence[_Sequence], start: int) -> None:
        """Give prompts the next rows: move the rows' earlier content to spare rows if possible, and copy the prefixes
        that the prompts reuse."""
        first = len(self._generating)
        prefixes = self._prefixes
        sources: dict[int, int] = {}
        for row, sequence in enumerate(group, first) if start else ():
            sources[row], _ = prefixes.find(sequence.chain)
            prefixes.touch(sources[row])
            sequence.cached = sequence.reused = start
        for source in set(sources.values()):  # content that these rows will hold again need not be kept
            if source >= first and prefixes.blocks(source) * BLOCK <= start:
                prefixes.forget(source)
        kept: dict[int, int] = {}
        length = 0
        for row in range(first, first + len(group)):
            spare = self._spare(prefixes.value(row)) if prefixes.holds_alone(row) else None
            if spare is None:
                prefixes.forget(row)
            else:
                kept[spare] = row
                length = max(length, prefixes.blocks(row) * BLOCK)
                prefixes.move({spare: row})
        self._cache.copy(({row: source for row, source in sources.items() if row != source}, start), (kept, length))

    def _spare(self, value: tuple[int, int]) -> int | None:
        """A row that no sequence needs, for content of this value: an empty row, a row added to the cache, or
        a row with content of less value; None if there is no such row."""
        value_of = self._prefixes.value
        row = min(range(self._cache.shape[0] - 1, self.active - 1, -1), key=value_of, default=None)
        if row is None or self._prefixes.holds_alone(row):
            try:
                if self._cache.widen(self.limits.max_sequences + KEPT_ROWS, self._kept_tokens):
                    return self._cache.shape[0] - 1
            except Exception as error:  # out of memory
                self._report(error)
        return row if row is not None and value_of(row) < value else None

    def _chain(self, ids: Sequence[int], request: SequenceRequest) -> Chain:
        return chain_of(ids, request.cache_scope) if self._prefix_cache else []

    def _fit(self, rows: int, length: int) -> None:
        """Grow the cache to at least this many rows and tokens, and to the size that all started sequences need by
        now."""
        needed = [sequence.cached for sequence in self._generating] + [
            len(sequence.prompt) for sequence in self._prompts
        ]
        before = self._cache.shape
        try:
            self._cache.fit(max(rows, len(needed)), max(length, *needed, 0))
        finally:
            if self._cache.shape != before:
                self._prefixes.trim(*self._cache.shape)

    def _advance(self, sequence: _Sequence, choice: Choice, events: list[TokenEvent]) -> None:
        """Report a sequence's token, and end the sequence if the token is its last."""
        request, index = sequence.request, len(sequence.answer)
        if not request.max_tokens:  # only the prompt's log probabilities are wanted
            self._end(sequence, "length", events)
            return
        sequence.answer.append(choice.token)
        finish: Finish | None = None
        if choice.token in sequence.stops:
            finish = "stop"
        elif index + 1 == request.max_tokens:
            finish = "length"
        reused = 0 if index else sequence.reused
        events.append(TokenEvent(request.id, index, choice.token, choice.logprob, choice.top, finish, cached=reused))
        if finish:
            self._drop(sequence)
            self.release(request.id)
        elif sequence.constraint is not None:
            sequence.constraint.advance(choice.token)

    def _drop(self, sequence: _Sequence) -> None:
        """Mark a sequence as ended, and end the process that follows its grammar."""
        sequence.has_ended = True
        if sequence.constraint is not None and self._grammars is not None:
            self._grammars.close(sequence.constraint)

    def _end(self, sequence: _Sequence, finish: Finish, events: list[TokenEvent], error: str = "") -> None:
        """End a sequence without a token."""
        self._drop(sequence)
        sequence.cached = 0  # so that no prefix is kept
        self.release(sequence.request.id)
        events.append(TokenEvent(sequence.request.id, len(sequence.answer), None, finish=finish, error=error))

    def _compact(self) -> None:
        """Fill the rows of ended sequences from the last rows, and keep the content of the ended sequences, if
        possible, in rows that no sequence needs, all in a single copy."""
        before = len(self._generating)
        ended = [(row, sequence) for row, sequence in enumerate(self._generating) if sequence.has_ended]
        after = before - len(ended)
        partial = self._prompts[0] if self._prompts and self._prompts[0].cached else None
        if partial is not None and partial.has_ended:
            ended.append((before, partial))
            partial = None
        if any(sequence.has_ended for sequence in self._prompts):
            self._prompts = deque(sequence for sequence in self._prompts if not sequence.has_ended)
        if not ended:
            return
        last = [row for row in range(after, before) if not self._generating[row].has_ended]
        moved = {hole: row for (hole, _), row in zip(ended, last, strict=False)}
        for hole, row in moved.items():
            self._generating[hole] = self._generating[row]
        del self._generating[after:]
        length = max((self._generating[hole].cached for hole in moved), default=0)
        if partial is not None and after < before:
            moved[after] = before
            length = max(length, partial.cached)
        for row, _ in ended:
            self._prefixes.forget(row)
        self._prefixes.move(moved)
        kept: dict[int, int] = {}
        longest = 0
        for row, sequence in reversed(ended):  # rows that can stay in place come first
            chain = self._chain([*sequence.request.prompt, *sequence.answer][: sequence.cached], sequence.request)
            if self._prefixes.find(chain)[1] == len(chain):  # too short, or held by another row, too
                continue
            target = row if row >= after + (partial is not None) else self._spare(NEWEST)
            if target is not None:
                self._prefixes.learn(target, chain)
                if target != row:
                    kept[target] = row
                    longest = max(longest, len(chain) * BLOCK)
        self._cache.copy((moved, length), (kept, longest))

    def _report(self, error: Exception) -> str:
        """Log an error, and return its class's name and message. If it broke the device, call `on_broken`."""
        self._failures.note(error)
        text = text_of(error)
        reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
        if breaks_device(reason, str(self._device)):
            self._on_broken(reason)
        return reason
