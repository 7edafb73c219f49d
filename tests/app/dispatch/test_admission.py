"""Who may wait."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headwater_server.dispatch.admission import BYTES_OF_ALL, ROWS_OF_ALL, Admission, QueueBudget
from headwater_server.dispatch.queue import Item
from headwater_server.errors import BadRequest, BodyTooLarge, QueueFull


class Queue:
    """A deployment's admission, and what became of its requests; each request is one item."""

    def __init__(self, name: str = "m", budget: QueueBudget | None = None, limit: int = 8) -> None:
        self.admission = Admission(name, budget or QueueBudget(), self._drop)
        self.admission.limit = limit
        self.dropped: list[tuple[Item, QueueFull]] = []

    def _drop(self, item: Item, error: QueueFull) -> None:
        assert self.admission.queue.remove(item)
        self.dropped.append((item, error))

    def send(self, rows: int = 1, *, size: int = 0, priority: int = 0) -> Item:
        self.admission.check(rows, size, priority)
        each = Item("a", rows, arrived_s=0, priority=priority, held_bytes=size)
        self.admission.queue.push(each)
        return each

    def fill(self, count: int, priority: int = 0) -> list[Item]:
        return [self.send(priority=priority) for _ in range(count)]

    @property
    def rows(self) -> int:
        return self.admission.queue.rows


def test_a_full_queue_refuses() -> None:
    queue = Queue(limit=3)
    queue.fill(3)
    with pytest.raises(QueueFull, match=r"^model `m`: the queue is full: 3 of 3 rows wait \(max_queue_size\)$"):
        queue.send()


def test_a_request_that_never_fits_is_wrong_not_early() -> None:
    with pytest.raises(BadRequest, match=r"at most 3 rows \(max_queue_size of model `m`, .* got 4;"):
        Queue(limit=3).send(4)
    with pytest.raises(BadRequest, match=r"at most 2 rows \(server\.max_queue_size, .* got 3;"):
        Queue(limit=3, budget=QueueBudget(max_rows=2)).send(3)
    with pytest.raises(BodyTooLarge, match=r"at most 100 bytes \(server\.max_queue_bytes, .* got 101;"):
        Queue(budget=QueueBudget(max_bytes=100)).send(size=101)


def test_the_less_urgent_give_way_and_are_told() -> None:
    queue = Queue(limit=4)
    waiting = queue.fill(4, priority=10)
    queue.send(priority=1)
    ((item, error),) = queue.dropped
    assert item is waiting[3]
    assert "a request whose class or model has less" in error.message
    assert error.retry_after_s == 1


def test_a_class_that_has_its_share_is_refused() -> None:
    queue = Queue(limit=8)
    queue.admission.queue.reweigh({1: 3, 10: 1})
    queue.fill(8, priority=10)
    queue.fill(6, priority=1)
    assert queue.rows == 8
    for priority in (1, 10):
        with pytest.raises(QueueFull):
            queue.send(priority=priority)
    assert len(queue.dropped) == 6


# Retry-After


def drained(queue: Queue, rows_per_s: float) -> None:
    """Have it seen rows leave at that rate."""
    queue.admission.rate.note(1, 0.0, others_wait=True)
    queue.admission.rate.note(1, 1 / rows_per_s, others_wait=True)


@pytest.mark.parametrize(("rows_per_s", "wait_s"), [(1000, 1), (4, 2), (2, 4), (0.1, 60)])
def test_a_client_is_told_when_what_is_before_it_will_be_gone(rows_per_s: float, wait_s: int) -> None:
    queue = Queue(limit=8)
    queue.fill(8)
    drained(queue, rows_per_s)
    with pytest.raises(QueueFull) as caught:
        queue.send()
    assert caught.value.retry_after_s == wait_s


def test_that_is_so_for_every_class() -> None:
    queue = Queue(limit=80)
    queue.admission.queue.reweigh({1: 9, 10: 1})
    patient = queue.fill(80, priority=10)
    urgent = queue.fill(72, priority=1)
    kept = [item for item in patient if item.alive]
    drained(queue, 10)
    for priority in (1, 10):
        with pytest.raises(QueueFull) as caught:
            queue.send(priority=priority)
        assert caught.value.retry_after_s == 8
    # The last of either has its turn among the last.
    last = {priority: max(sent, key=lambda item: item.place) for priority, sent in ((1, urgent), (10, kept))}
    rows = 0
    while any(item.alive for item in last.values()):
        rows += len(queue.admission.queue.pop())
        assert rows >= 70 or all(item.alive for item in last.values())


# Of all deployments


def test_a_deployment_may_use_what_others_do_not() -> None:
    budget = QueueBudget(max_rows=10)
    greedy, _ = Queue("greedy", budget, limit=100), Queue("quiet", budget, limit=100)
    greedy.fill(10)
    with pytest.raises(QueueFull, match=r"queues are full: 10 of 10 rows wait \(server\.max_queue_size\), 10 of them"):
        greedy.send()


def test_and_gives_it_back_when_they_need_it() -> None:
    budget = QueueBudget(max_rows=10)
    greedy, quiet = Queue("greedy", budget, limit=100), Queue("quiet", budget, limit=100)
    waiting = greedy.fill(10)
    quiet.fill(5)
    assert [item for item, _ in greedy.dropped] == waiting[:4:-1]
    assert all(ROWS_OF_ALL in error.message and "model `greedy`" in error.message for _, error in greedy.dropped)
    for queue in (greedy, quiet):
        with pytest.raises(QueueFull, match=r"server\.max_queue_size"):
            queue.send()
    assert (greedy.rows, quiet.rows) == (5, 5)


def test_bytes_are_shared_likewise() -> None:
    budget = QueueBudget(max_bytes=1000)
    greedy, quiet = Queue("greedy", budget), Queue("quiet", budget)
    for _ in range(4):
        greedy.send(size=250)
    with pytest.raises(QueueFull, match=r"1000 of 1000 bytes wait \(server\.max_queue_bytes\), 1000 of them here"):
        greedy.send(size=1)
    quiet.send(size=300)
    assert [BYTES_OF_ALL in error.message for _, error in greedy.dropped] == [True, True]
    assert budget.waiting.held_bytes == 800


def test_where_the_server_is_full_classes_of_a_deployment_still_have_their_shares() -> None:
    budget = QueueBudget(max_rows=10)
    mixed, other = Queue("mixed", budget, limit=100), Queue("other", budget, limit=100)
    waiting = mixed.fill(5, priority=10)
    other.fill(5)
    mixed.send(priority=1)
    assert [item for item, _ in mixed.dropped] == [waiting[4]]
    assert not other.dropped


def test_a_deployment_that_is_gone_has_no_part() -> None:
    budget = QueueBudget(max_rows=10)
    first, second = Queue("first", budget), Queue("second", budget)
    assert budget.share()[0] == 5
    second.admission.close()
    second.admission.close()
    assert budget.share()[0] == 10
    first.fill(8)


class RoomMachine(RuleBasedStateMachine):
    """Any sequence of calls: no bound is exceeded, who has less than its part is admitted, and rows are conserved."""

    MAX_ROWS, MAX_BYTES = 30, 3000
    LIMITS = (5, 12, 100)

    def __init__(self) -> None:
        super().__init__()
        self.budget = QueueBudget(self.MAX_ROWS, self.MAX_BYTES)
        self.queues = [Queue(str(limit), self.budget, limit) for limit in self.LIMITS]
        for queue in self.queues:
            queue.admission.queue.max_batch_size = 8
        self.pushed = self.left = 0
        """Rows."""

    @rule(
        index=st.integers(0, 2), rows=st.integers(1, 8), size=st.integers(0, 600), priority=st.sampled_from([1, 5, 10])
    )
    def send(self, index: int, rows: int, size: int, priority: int) -> None:
        queue = self.queues[index]
        waiting = queue.admission.queue
        is_sure = (
            waiting.rows + rows <= min(self.MAX_ROWS // 3, queue.admission.limit)
            and waiting.held_bytes + size <= self.MAX_BYTES // 3
        )
        try:
            queue.send(rows, size=size, priority=priority)
        except (QueueFull, BadRequest):
            assert not is_sure
        else:
            self.pushed += rows

    @rule(index=st.integers(0, 2))
    def pop(self, index: int) -> None:
        self.left += sum(item.rows for item in self.queues[index].admission.queue.pop())

    @invariant()
    def no_bound_is_exceeded(self) -> None:
        assert self.budget.waiting.rows == sum(queue.rows for queue in self.queues) <= self.MAX_ROWS
        held = sum(queue.admission.queue.held_bytes for queue in self.queues)
        assert self.budget.waiting.held_bytes == held <= self.MAX_BYTES
        assert all(queue.rows <= queue.admission.limit for queue in self.queues)

    @invariant()
    def rows_are_conserved(self) -> None:
        shed = sum(item.rows for queue in self.queues for item, _ in queue.dropped)
        assert self.pushed == self.left + shed + self.budget.waiting.rows


TestRoom = pytest.mark.slow(RoomMachine.TestCase)
TestRoom.settings = settings(max_examples=150, deadline=None)
