"""The rows of the slot engine's cache: which sequence or kept prefix each row holds, and the copies between rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from headwater.lm.prefix_index import BLOCK, NEWEST, Chain, PrefixIndex, chain_of
from headwater.lm.slot_cache import SlotCache
from headwater.lm.slot_sequence import SlotSequence

__all__ = ["SlotRows"]


class SlotRows:
    """Sequences in the rows of a cache.

    Rows 0 to n - 1 of the cache belong to the n sequences that generate, row n to a partly computed prompt. Other rows
    keep the content of ended sequences until the row is needed. If a prompt begins like the content of a row, or
    like the prompt of a sequence that still generates, with the same `cache_scope`, this prefix is copied, in whole
    blocks of `BLOCK` tokens, instead of computed. Rows for sequences have priority over kept content. Of the kept
    content, content that another row holds too is dropped first, then the least recently used.

    Args:
        make_cache: makes an empty cache.
        max_rows: the most rows of the cache, kept prefixes included.
        kept_tokens: the size of the cache, rows × length in tokens, beyond which it gets no more rows for kept
            prefixes.
        reuses_prefixes: whether prefixes are kept and reused.
        on_error: called with an error that only keeps memory from being freed, or a prefix from being kept.
    """

    def __init__(
        self,
        make_cache: Callable[[], SlotCache],
        max_rows: int,
        kept_tokens: int,
        *,
        reuses_prefixes: bool,
        on_error: Callable[[Exception], object],
    ) -> None:
        self._make_cache = make_cache
        self._max_rows = max_rows
        self._kept_tokens = kept_tokens
        self._reuses_prefixes = reuses_prefixes
        self._on_error = on_error
        self.cache = make_cache()
        self.generating: list[SlotSequence] = []
        """The sequences that generate, by row."""
        self.prompts: deque[SlotSequence] = deque()
        """Sequences whose prompt is not fully computed, in order of arrival; only the first may be partly computed."""
        self.prefixes = PrefixIndex()

    @property
    def running(self) -> list[SlotSequence]:
        """All sequences, in the order of their rows."""
        return [*self.generating, *self.prompts]

    def chain(self, ids: Sequence[int], scope: str) -> Chain:
        """The chain of these tokens, for reuse; empty if prefixes are not reused."""
        return chain_of(ids, scope) if self._reuses_prefixes else []

    def forget_prefixes(self) -> None:
        """Forget the content of all rows, after a failure: the index may list copies that were not made."""
        self.prefixes = PrefixIndex()

    def clear(self) -> None:
        """Drop all sequences and the memory of the cache."""
        self.generating.clear()
        self.prompts.clear()
        self.forget_prefixes()
        self.cache = self._make_cache()

    def fit(self, rows: int = 0, length: int = 0) -> None:
        """Grow the cache to at least this many rows and tokens, and to the size that all sequences need by now."""
        needed = self._lengths()
        before = self.cache.shape
        try:
            self.cache.fit(max(rows, len(needed)), max(length, *needed, 0))
        finally:
            if self.cache.shape != before:
                self.prefixes.trim(*self.cache.shape)

    def keep_no_more(self) -> None:
        """Free the rows that only keep prefixes, and allocate no more of them."""
        self._kept_tokens = 0
        self._shrink(len(self.running), self.cache.shape[1])

    def retain(self, retained: Sequence[SlotSequence]) -> list[SlotSequence]:
        """Drop all sequences but these, and free the memory that these don't need. Returns the dropped sequences, in
        the order of their rows."""
        dropped = [sequence for sequence in self.running if sequence not in retained]
        self.generating = [sequence for sequence in self.generating if sequence in retained]
        self.prompts = deque(sequence for sequence in self.prompts if sequence in retained)
        self._shrink(len(retained), max(self._lengths()))
        return dropped

    def next_prompts(self, chunk: Callable[[Sequence[SlotSequence]], int]) -> tuple[list[SlotSequence], int]:
        """The sequences with the prompts to compute next, and the index of the first token to compute: part of a
        prompt, or as many whole prompts as fit in a padded chunk. A prompt that could reuse more of another prompt in
        the group than of the cached content waits for that prompt.

        Args:
            chunk: returns the most tokens of some sequences' prompts in a step.
        """
        group: list[SlotSequence] = []
        start = width = 0
        for sequence in self.prompts:
            length = len(sequence.prompt)
            blocks = self.prefixes.find(sequence.chain)[1]
            begin = sequence.cached or min(blocks * BLOCK, length - 1)
            if group:
                begin, length = min(start, begin), max(width, length)
                shared = sequence.chain[blocks : blocks + 1]
                if (len(group) + 1) * (length - begin) > chunk([*group, sequence]) or (
                    shared and any(member.chain[blocks : blocks + 1] == shared for member in group)
                ):
                    break
            group.append(sequence)
            start, width = begin, length
            if sequence.cached or width - start > chunk(group):
                break
        return group, start

    def begin(self, group: Sequence[SlotSequence], start: int, needed_rows: int) -> None:
        """Give prompts the next rows: move the rows' earlier content to spare rows if possible, and copy the prefixes
        that the prompts reuse.

        Args:
            group: the sequences.
            start: number of tokens that the prompts reuse.
            needed_rows: the number of admitted sequences; rows from here on may keep prefixes.
        """
        first = len(self.generating)
        prefixes = self.prefixes
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
            spare = self._spare(prefixes.value(row), needed_rows) if prefixes.holds_alone(row) else None
            if spare is None:
                prefixes.forget(row)
            else:
                kept[spare] = row
                length = max(length, prefixes.blocks(row) * BLOCK)
                prefixes.move({spare: row})
        self.cache.copy(({row: source for row, source in sources.items() if row != source}, start), (kept, length))

    def generate(self, group: Sequence[SlotSequence]) -> None:
        """Note that these sequences, in the next rows, generate from now on, as their prompts are computed."""
        for row, sequence in enumerate(group, len(self.generating)):
            self.prompts.remove(sequence)
            self.generating.append(sequence)
            self.prefixes.learn(row, sequence.chain)

    def compact(self, needed_rows: int) -> None:
        """Fill the rows of ended sequences from the last rows, and keep the content of the ended sequences, if
        possible, in rows that no sequence needs, all in a single copy; `needed_rows` is as for `begin`."""
        before = len(self.generating)
        ended = [(row, sequence) for row, sequence in enumerate(self.generating) if sequence.has_ended]
        after = before - len(ended)
        partial = self.prompts[0] if self.prompts and self.prompts[0].cached else None
        if partial is not None and partial.has_ended:
            ended.append((before, partial))
            partial = None
        if any(sequence.has_ended for sequence in self.prompts):
            self.prompts = deque(sequence for sequence in self.prompts if not sequence.has_ended)
        if not ended:
            return
        last = [row for row in range(after, before) if not self.generating[row].has_ended]
        moved = {hole: row for (hole, _), row in zip(ended, last, strict=False)}
        for hole, row in moved.items():
            self.generating[hole] = self.generating[row]
        del self.generating[after:]
        length = max((self.generating[hole].cached for hole in moved), default=0)
        if partial is not None and after < before:
            moved[after] = before
            length = max(length, partial.cached)
        for row, _ in ended:
            self.prefixes.forget(row)
        self.prefixes.move(moved)
        kept: dict[int, int] = {}
        longest = 0
        for row, sequence in reversed(ended):  # rows that can stay in place come first
            request = sequence.request
            chain = self.chain([*request.prompt, *sequence.answer][: sequence.cached], request.cache_scope)
            if self.prefixes.find(chain)[1] == len(chain):  # too short, or held by another row, too
                continue
            target = row if row >= after + (partial is not None) else self._spare(NEWEST, needed_rows)
            if target is not None:
                self.prefixes.learn(target, chain)
                if target != row:
                    kept[target] = row
                    longest = max(longest, len(chain) * BLOCK)
        self.cache.copy((moved, length), (kept, longest))

    def _spare(self, value: tuple[int, int], needed_rows: int) -> int | None:
        """A row that no sequence needs, for content of this value: an empty row, a row added to the cache, or
        a row with content of less value; None if there is no such row."""
        value_of = self.prefixes.value
        row = min(range(self.cache.shape[0] - 1, needed_rows - 1, -1), key=value_of, default=None)
        if row is None or self.prefixes.holds_alone(row):
            try:
                if self.cache.widen(self._max_rows, self._kept_tokens):
                    return self.cache.shape[0] - 1
            except Exception as error:  # out of memory
                self._on_error(error)
        return row if row is not None and value_of(row) < value else None

    def _shrink(self, rows: int, length: int) -> None:
        """Free the cache's memory beyond this shape. This may fail, because copying the rest takes memory, too. A
        failure is only logged."""
        try:
            self.cache.shrink(rows, length)
        except Exception as error:
            self._on_error(error)

    def _lengths(self) -> list[int]:
        """Number of tokens that each sequence needs in the cache by now, by row."""
        return [sequence.cached for sequence in self.generating] + [len(sequence.prompt) for sequence in self.prompts]
