"""The queue of the batching policy."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headwater_server.dispatch.queue import DEFAULT_WEIGHTS, REMOVED_LIMIT, BatchQueue, Item, Waiting

Queue = BatchQueue[Item]


def item(key: str = "a", rows: int = 1, *, at: float = 0.0, priority: int = 0) -> Item:
    return Item(key, rows, arrived_s=at, priority=priority)


def filled(*items: Item, max_batch_size: int = 4) -> Queue:
    queue = Queue(max_batch_size)
    for each in items:
        queue.push(each)
    return queue


def held(queue: BatchQueue[Any]) -> int:
    """Items held, those removed or taken but not yet cleared out among them."""
    # private: a queue counts the items that wait, not those that it keeps in memory
    lanes, classes = queue._lanes.values(), queue._active
    in_lanes = sum(len(items) for lane in lanes for items in lane.queues.values())
    return max(in_lanes, sum(len(one.arrivals) for one in classes))


def test_rows_leave_in_order_of_arrival() -> None:
    items = [item(at=index) for index in range(6)]
    queue = filled(*items)
    assert queue.pop() == items[:4]
    assert queue.pop() == items[4:]
    assert queue.pop() == []


def test_rows_of_different_keys_never_share_a_batch() -> None:
    first, other, second = item("a", at=0), item("b", at=1), item("a", at=2)
    queue = filled(first, other, second)
    assert queue.pop() == [first, second]
    assert queue.pop() == [other]


def test_an_item_that_does_not_fit_is_first_in_the_next_batch() -> None:
    small, large, late = item(rows=2, at=0), item(rows=3, at=1), item(rows=1, at=2)
    queue = filled(small, large, late)
    assert queue.pop() == [small]
    assert queue.pop() == [large, late]


def test_an_urgent_item_overtakes() -> None:
    usual, urgent = item(at=0), item(at=1, priority=1)
    queue = filled(usual, urgent, max_batch_size=1)
    assert queue.pop() == [urgent]


def test_waiting_outweighs_priority_in_the_end() -> None:
    patient = item(at=0, priority=10)
    queue = filled(patient, max_batch_size=1)
    for index in range(DEFAULT_WEIGHTS[1] + 2):
        queue.push(item(at=index, priority=1))
        if queue.pop() == [patient]:
            return
    raise AssertionError("the patient item never came out")


# Priority classes


def shares(queue: Queue, batches: int, push: Callable[[], None]) -> Counter[int]:
    """Rows by priority of so many batches, ``push`` being called before each."""
    rows: Counter[int] = Counter()
    for _ in range(batches):
        push()
        for each in queue.pop():
            rows[each.priority] += each.rows
    return rows


def test_classes_get_rows_by_their_weights() -> None:
    queue = Queue(4, {1: 8, 5: 4, 10: 1})

    def push() -> None:
        for priority in (1, 5, 10):
            for _ in range(4):
                queue.push(item(priority=priority))

    rows = shares(queue, 1300, push)
    assert [round(rows[priority] / 400) for priority in (1, 5, 10)] == [8, 4, 1]


@settings(max_examples=60, deadline=None)
@given(
    weights=st.dictionaries(st.integers(1, 10), st.integers(1, 50), min_size=2, max_size=4),
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=20),
)
def test_shares_differ_by_no_more_than_a_request_of_each(weights: dict[int, int], sizes: list[int]) -> None:
    queue = Queue(8, weights)
    backlog = {priority: itertools.cycle(sizes[index:] + sizes[:index]) for index, priority in enumerate(weights)}
    waiting: Counter[int] = Counter()
    rows: Counter[int] = Counter()
    for _ in range(200):
        for priority, kind in backlog.items():
            while waiting[priority] < 20:
                each = item(rows=next(kind), priority=priority)
                queue.push(each)
                waiting[priority] += each.rows
        for each in queue.pop():
            rows[each.priority] += each.rows
            waiting[each.priority] -= each.rows
        for one, other in itertools.combinations(weights, 2):
            difference = abs(rows[one] / weights[one] - rows[other] / weights[other])
            assert difference <= 8 / weights[one] + 8 / weights[other] + 1e-6


def test_a_request_counts_as_many_rows_as_it_has() -> None:
    queue = Queue(8, {5: 1, 6: 1})

    def push() -> None:
        queue.push(item(rows=8, priority=5))
        for _ in range(8):
            queue.push(item(priority=6))

    rows = shares(queue, 1000, push)
    assert abs(rows[5] - rows[6]) <= 8


def test_what_a_class_does_not_use_goes_to_the_others() -> None:
    queue = Queue(4, {1: 8, 10: 1})

    def push() -> None:
        for _ in range(4):
            queue.push(item(priority=10))

    assert shares(queue, 100, push) == {10: 400}


def test_an_idle_class_saves_nothing_up() -> None:
    queue = Queue(1, {5: 1, 6: 1})
    for _ in range(200):
        queue.push(item(priority=5))
    shares(queue, 100, lambda: None)
    for _ in range(100):
        queue.push(item(priority=6))
    rows = shares(queue, 20, lambda: None)
    assert abs(rows[5] - rows[6]) <= 1


def test_a_class_that_had_the_server_for_itself_is_not_made_to_pay_for_it() -> None:
    queue = Queue(1, {1: 512, 10: 1})
    shares(queue, 100, lambda: queue.push(item(priority=10)))
    queue.push(item(priority=10))
    first = item(priority=10)
    queue.push(first)
    for _ in range(2000):
        queue.push(item(priority=1))
    rows = 0
    while first.alive:
        rows += sum(each.priority == 1 for each in queue.pop())
    assert rows <= 512 + 1


def test_rows_that_were_removed_cost_their_class_nothing() -> None:
    queue = Queue(1, {5: 1, 6: 1})
    gone = [item(priority=5) for _ in range(100)]
    for each in gone:
        queue.push(each)
        queue.push(item(priority=6))
        queue.push(item(priority=5))
    for each in gone:
        queue.remove(each)
    rows = shares(queue, 50, lambda: None)
    assert abs(rows[5] - rows[6]) <= 1


def test_the_first_of_a_class_does_not_wait_for_ever_while_others_of_it_go_along() -> None:
    queue = Queue(4, {1: 512, 10: 1})
    first = item("rare", priority=10)
    queue.push(first)
    for _ in range(4 * 512):
        queue.push(item("usual", 1, priority=1))
        queue.push(item("usual", 1, priority=10))
        queue.pop()
        if not first.alive:
            return
    raise AssertionError("the first never came out")


def test_within_a_class_the_order_is_that_of_arrival() -> None:
    queue = Queue(2)
    items = [item(at=index, priority=1 + index % 3) for index in range(60)]
    for each in items:
        queue.push(each)
    out = [each for _ in range(30) for each in queue.pop()]
    for priority in (1, 2, 3):
        assert [each for each in out if each.priority == priority] == [
            each for each in items if each.priority == priority
        ]


@pytest.mark.parametrize(("priority", "weight"), [(1, 8), (2, 4), (0, 4), (5, 4), (6, 1), (9, 1), (2**32 - 1, 1)])
def test_a_priority_that_is_not_named_belongs_to_the_next_less_urgent_one(priority: int, weight: int) -> None:
    weights = {1: 8, 5: 4, 10: 1}
    queue = Queue(1, weights)
    other = 10 if weight == 8 else 1
    for _ in range(100):
        queue.push(item(priority=priority))
        queue.push(item(priority=other))
    rows = shares(queue, 5 * (weight + weights[other]), lambda: None)
    assert abs(rows[other] - 5 * weights[other]) <= 1


def test_other_weights_count_from_now_on() -> None:
    queue = Queue(1, {5: 1, 6: 1})
    for _ in range(100):
        queue.push(item(priority=5))
        queue.push(item(priority=6))
    queue.reweigh({5: 9, 6: 1})
    assert (queue.rows, held(queue)) == (200, 200)
    assert shares(queue, 100, lambda: None) == {5: 90, 6: 10}


# What gives way


def test_the_youngest_of_the_least_urgent_give_way() -> None:
    items = [item(at=index, priority=priority) for index, priority in enumerate([5, 10, 5, 10, 10, 5, 5])]
    queue = filled(*items)
    assert queue.giving_way(1, 2, 7) == [items[4], items[3]]
    assert queue.rows == 7


def test_a_class_keeps_its_share() -> None:
    queue = Queue(4, {1: 1, 10: 1})
    items = [item(at=index, priority=10) for index in range(8)]
    for each in items:
        queue.push(each)
    assert queue.giving_way(1, 4, 8) == items[:3:-1]
    assert queue.giving_way(1, 5, 8) is None  # more than its own share


def test_the_less_urgent_have_a_share_too() -> None:
    queue = Queue(4, {1: 3, 10: 1})
    items = [item(at=index, priority=1) for index in range(8)]
    for each in items:
        queue.push(each)
    assert queue.giving_way(10, 2, 8) == items[:5:-1]
    assert queue.giving_way(10, 3, 8) is None


def test_a_class_does_not_give_way_to_itself() -> None:
    queue = filled(*(item(at=index) for index in range(4)))
    assert queue.giving_way(5, 1, 4) is None


def test_a_row_of_every_class_has_a_place() -> None:
    items = [item(at=index, priority=1) for index in range(4)]
    assert filled(*items).giving_way(10, 1, 4) == items[3:]


def test_a_removed_item_does_not_come_out() -> None:
    kept, dropped = item(at=1), item(at=0)
    queue = filled(kept, dropped)
    assert queue.remove(dropped)
    assert not queue.remove(dropped)
    assert queue.rows == 1
    assert queue.pop() == [kept]


def test_the_next_batch_is_full_only_of_its_own_key() -> None:
    queue = filled(item("a", 3), item("b", 3))
    queue.push(item("b", 1))
    assert queue.next_has(3)
    assert not queue.next_has(4)
    queue.push(item("a", 1))
    assert queue.next_has(4)


def test_an_item_that_comes_back_keeps_its_place() -> None:
    first, second = item(at=0), item(at=1)
    queue = filled(first, second, max_batch_size=1)
    assert queue.pop() == [first]
    queue.push(first)
    assert queue.pop() == [first]
    assert queue.rows == 1


def test_what_was_removed_is_not_held_while_nothing_is_taken() -> None:
    queue = Queue(4)
    queue.push(item(at=0))
    for index in range(1000):
        gone = item("ab"[index % 2], at=index + 1)
        queue.push(gone)
        queue.remove(gone)
    assert queue.rows == 1
    assert held(queue) < 50


class QueueMachine(RuleBasedStateMachine):
    """Any sequence of calls keeps the invariants that `BatchQueue` states; rows are conserved, the limit is kept."""

    LIMIT = 40

    def __init__(self) -> None:
        super().__init__()
        self.total = Waiting()
        self.queue = Queue(8, {1: 4, 5: 2, 10: 1}, self.total)
        self.waiting: list[Item] = []
        self.taken: list[Item] = []
        self.now = 0.0
        self.pushed = self.popped = self.removed = self.shed = 0
        """Rows."""

    @rule(
        key=st.sampled_from("abc"),
        rows=st.integers(1, 8),
        priority=st.integers(0, 12),
        later=st.floats(0, 3),
    )
    def push(self, key: str, rows: int, priority: int, later: float) -> None:
        self.now += later
        each = item(key, rows, at=self.now, priority=priority)
        if self.queue.rows + rows > self.LIMIT:
            before = self.rows_by_class()
            found = self.queue.giving_way(priority, rows, self.LIMIT)
            own = self.class_of(each)
            present = {*before, own}
            share = {one: self.LIMIT * WEIGHTS[one] / sum(WEIGHTS[other] for other in present) for one in present}
            assert (found is not None) or before[own] + rows > share[own]
            if found is None:
                return
            assert sum(other.rows for other in found) >= self.queue.rows + rows - self.LIMIT
            for other in found:
                assert self.class_of(other) != own
                assert before[self.class_of(other)] > share[self.class_of(other)]
                before[self.class_of(other)] -= other.rows
                assert self.queue.remove(other)
                self.waiting.remove(other)
                self.shed += other.rows
        self.queue.push(each)
        self.pushed += rows
        self.waiting.append(each)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.waiting))
        assert self.queue.remove(each)
        self.waiting.remove(each)
        self.removed += each.rows

    @rule()
    def pop(self) -> None:
        batch = self.queue.pop()
        assert bool(batch) == bool(self.waiting)
        if batch:
            assert len({each.key for each in batch}) == 1
            assert sum(each.rows for each in batch) <= 8
            # Of some class, the one that came first.
            firsts = [min(each.place for each in self.waiting if self.class_of(each) == one) for one in WEIGHTS
                      if any(self.class_of(each) == one for each in self.waiting)]  # fmt: skip
            assert batch[0].place in firsts
            for each in batch:
                self.waiting.remove(each)
            self.taken = batch
            self.popped += sum(each.rows for each in batch)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def push_back(self, data: st.DataObject) -> None:
        each = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        if self.queue.rows + each.rows <= self.LIMIT:
            self.queue.push(each)
            self.waiting.append(each)
            self.popped -= each.rows

    @rule()
    def drain(self) -> None:
        assert self.queue.drain() == sorted(self.waiting, key=lambda each: each.place)
        self.removed += sum(each.rows for each in self.waiting)
        self.waiting = []

    def class_of(self, each: Item) -> int:
        return next(one for one in WEIGHTS if one >= each.priority)

    def rows_by_class(self) -> Counter[int]:
        counts: Counter[int] = Counter()
        for each in self.waiting:
            counts[self.class_of(each)] += each.rows
        return counts

    @invariant()
    def rows_are_conserved(self) -> None:
        waiting = sum(each.rows for each in self.waiting)
        assert self.queue.rows == self.total.rows == waiting <= self.LIMIT
        assert self.pushed == self.popped + self.removed + self.shed + waiting

    @invariant()
    def little_is_held_that_does_not_wait(self) -> None:
        assert held(self.queue) <= 2 * len(self.waiting) + 2 * REMOVED_LIMIT + 2

    @invariant()
    def the_oldest_is_known(self) -> None:
        if self.waiting:
            assert self.queue.oldest_s() == min(each.arrived_s for each in self.waiting)


WEIGHTS = {1: 4, 5: 2, 10: 1}
TestQueue = pytest.mark.slow(QueueMachine.TestCase)
TestQueue.settings = settings(max_examples=150, deadline=None)


# How long one waits


@settings(max_examples=200, deadline=None)
@given(
    before=st.lists(st.sampled_from("abcdefgh"), max_size=60),
    own=st.sampled_from("abcdefgh"),
    later=st.lists(st.sampled_from("abcdefgh"), min_size=4, max_size=40),
)
def test_an_item_waits_for_those_before_it_whatever_comes_after(before: list[str], own: str, later: list[str]) -> None:
    queue = filled(*(item(key) for key in before))
    mine = item(own)
    queue.push(mine)
    newcomers = itertools.cycle(later)
    counts = Counter(before)
    # The batches of each other key that those before it fill, and of its own those and its own.
    most = sum(-(-rows // 4) for key, rows in counts.items() if key != own) + counts[own] // 4 + 1
    assert most <= len(before) / 4 + len(counts) + 1
    for _ in range(most):
        for _ in range(8):
            queue.push(item(next(newcomers)))
        if mine in queue.pop():
            return
    raise AssertionError(f"not among {most} batches")


@settings(max_examples=100, deadline=None)
@given(keys=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=200))
def test_none_starves_while_others_keep_coming(keys: list[str]) -> None:
    queue = Queue(4, {1: 512, 10: 1})
    first = item(keys[0], priority=10)
    queue.push(first)
    newcomers = itertools.cycle(keys)
    for _ in range(512 + 1):
        for _ in range(4):
            queue.push(item(next(newcomers), priority=1))
        if first in queue.pop():
            return
    raise AssertionError("the first item never came out")


@settings(max_examples=100, deadline=None)
@given(keys=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=200))
def test_within_a_key_the_order_is_that_of_arrival(keys: list[str]) -> None:
    items = [item(key) for key in keys]
    queue = filled(*items)
    out: list[Item] = []
    while queue.rows:
        out += queue.pop()
    for key in set(keys):
        assert [each for each in out if each.key == key] == [each for each in items if each.key == key]
    assert len(out) == len(items)


def test_a_batch_of_ten_thousand_waiting_rows_is_found_without_looking_at_them() -> None:
    looks = 0

    class Key(str):
        """A key that counts how often it is looked at; a compiled `Item` can't be derived from."""

        __slots__ = ()

        def __hash__(self) -> int:
            nonlocal looks
            looks += 1
            return super().__hash__()

        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return super().__eq__(other)

    queue = Queue(8)
    for index in range(10_000):
        queue.push(Item(Key(index % 50), 1, 0.0, 0))
    looks = 0
    while queue.rows:
        queue.pop()
    assert looks < 10 * 10_000
