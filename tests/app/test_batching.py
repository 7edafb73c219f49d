"""The queue of the batching policy."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from app.batching import LOOK_AHEAD, REMOVED_LIMIT, BatchQueue, Item


def item(key: str = "a", rows: int = 1, *, size: int = 0, at: float = 0.0, priority: int = 0) -> Item:
    return Item(key, rows, size_bytes=size, arrived_s=at, priority=priority, payload=None)


def filled(*items: Item, max_batch_size: int = 4) -> BatchQueue:
    queue = BatchQueue(max_batch_size)
    for each in items:
        queue.push(each)
    return queue


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
    patient, urgent = item(at=0, priority=10), item(at=60, priority=1)
    queue = filled(patient, urgent, max_batch_size=1)
    assert queue.pop() == [patient]


def test_a_removed_item_does_not_come_out() -> None:
    kept, dropped = item(at=1), item(at=0)
    queue = filled(kept, dropped)
    assert queue.remove(dropped)
    assert not queue.remove(dropped)
    assert queue.rows == 1
    assert queue.pop() == [kept]


def test_rows_of_similar_size_go_together() -> None:
    items = [item(at=index, size=size) for index, size in enumerate([10, 2000, 12, 1900, 11, 9, 2100])]
    queue = filled(*items)
    assert {each.size_bytes for each in queue.pop()} == {10, 12, 11, 9}
    assert {each.size_bytes for each in queue.pop()} == {2000, 1900, 2100}


def test_the_oldest_goes_although_none_is_like_it() -> None:
    odd = item(at=0, size=5000)
    queue = filled(odd, *(item(at=1 + index, size=10) for index in range(LOOK_AHEAD * 8)))
    assert odd in queue.pop()


def test_the_next_batch_is_full_only_of_its_own_key() -> None:
    queue = filled(item("a", 3), item("b", 3))
    queue.push(item("b", 1))
    assert not queue.next_is_full()
    queue.push(item("a", 1))
    assert queue.next_is_full()


def test_an_item_that_comes_back_keeps_its_place() -> None:
    first, second = item(at=0), item(at=1)
    queue = filled(first, second, max_batch_size=1)
    assert queue.pop() == [first]
    queue.push(first)
    assert queue.pop() == [first]
    assert queue.rows == 1


def test_what_was_removed_is_not_held_while_nothing_is_taken() -> None:
    queue = BatchQueue(4)
    queue.push(item(at=0))
    for index in range(1000):
        gone = item("ab"[index % 2], at=index + 1)
        queue.push(gone)
        queue.remove(gone)
    assert queue.rows == 1
    assert len(queue) < 50


class QueueMachine(RuleBasedStateMachine):
    """Any sequence of calls keeps the invariants that `BatchQueue` states."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = BatchQueue(8)
        self.waiting: list[Item] = []
        self.now = 0.0

    @rule(
        key=st.sampled_from("abc"),
        rows=st.integers(1, 8),
        size=st.sampled_from([0, 1, 10, 500]),
        priority=st.integers(0, 12),
        later=st.floats(0, 3),
    )
    def push(self, key: str, rows: int, size: int, priority: int, later: float) -> None:
        self.now += later
        # One key has rows of one kind: sizes, or none.
        each = item(key, rows, size=0 if key == "c" else max(size, 1), at=self.now, priority=priority)
        self.queue.push(each)
        self.waiting.append(each)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        each = data.draw(st.sampled_from(self.waiting))
        assert self.queue.remove(each)
        self.waiting.remove(each)

    @rule()
    def pop(self) -> None:
        batch = self.queue.pop()
        assert bool(batch) == bool(self.waiting)
        if batch:
            assert len({each.key for each in batch}) == 1
            assert sum(each.rows for each in batch) <= 8
            assert min(self.waiting, key=lambda each: each.order).order in {each.order for each in batch}
            for each in batch:
                self.waiting.remove(each)

    @invariant()
    def rows_are_counted(self) -> None:
        assert self.queue.rows == sum(each.rows for each in self.waiting)

    @invariant()
    def little_is_held_that_does_not_wait(self) -> None:
        assert len(self.queue) <= 2 * len(self.waiting) + 2 * REMOVED_LIMIT + 2


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=150, deadline=None)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=200))
def test_none_starves_while_others_keep_coming(sizes: list[int]) -> None:
    queue = BatchQueue(4)
    first = item(at=0, size=sizes[0])
    queue.push(first)
    for index, size in enumerate(sizes):
        queue.push(item(at=index + 1, size=size))
        queue.push(item(at=index + 1, size=size))
        if first in queue.pop():
            return
    raise AssertionError("the first item never came out")
