"""Who is next in the queue of grammars."""

from __future__ import annotations

from headwater.lm.compile_queue import CompileQueue, Lane


def test_scopes_take_turns() -> None:
    queue = CompileQueue[str](Lane(1, 1))
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.add(item[0], item)
    taken = []
    for _ in range(6):
        taken.append(queue.take())
        queue.end()
    assert taken == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_bounded_number_runs() -> None:
    queue = CompileQueue[int](Lane(1, 2))
    for item in range(3):
        queue.add("", item)
    assert [queue.take(), queue.take(), queue.take(), queue.waiting("")] == [0, 1, None, 1]
    queue.end()
    assert [queue.take(), queue.take(), queue.waiting("")] == [2, None, 0]


def test_what_is_dropped_is_not_taken() -> None:
    queue = CompileQueue[str](Lane(1, 1))
    queue.add("a", "a1")
    queue.add("b", "b1")
    queue.discard("a", "a1")
    assert [queue.take(), queue.waiting("a")] == ["b1", 0]
