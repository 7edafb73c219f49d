"""How many connections there may be."""

from __future__ import annotations

import resource

import pytest

from headwater_server.gateway.http.connections import OTHER_FILES, SPARE_PLACES, Closable, Connections, allow_open_files


class Fake(Closable):
    """A connection that notes its end."""

    def __init__(self) -> None:
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


def test_the_one_that_is_idle_longest_goes() -> None:
    connections = Connections(3)
    one, two, three, four, five = (Fake() for _ in range(5))
    for connection in (one, two, three):
        connections.add(connection)
    connections.begin(one)
    connections.end(one)
    connections.add(four)
    connections.add(five)
    assert [item.is_aborted for item in (one, two, three, four, five)] == [False, True, True, False, False]


def test_a_busy_one_stays_and_without_another_there_is_only_a_spare_place() -> None:
    connections = Connections(2)
    one, two, three = (Fake() for _ in range(3))
    for connection in (one, two):
        connections.add(connection)
        connections.begin(connection)
    connections.add(three)
    assert not connections.admit(three)
    connections.remove(one)
    assert connections.admit(three)
    assert not any(item.is_aborted for item in (one, two, three))


def test_one_whose_body_is_incomplete_is_as_old_as_its_head() -> None:
    connections = Connections(3)
    slow, idle, later, four, five, six = (Fake() for _ in range(6))
    for connection in (slow, idle, later):
        connections.add(connection)
    connections.read(slow)
    connections.add(four)
    connections.add(five)
    assert [item.is_aborted for item in (slow, idle, later, four)] == [False, True, True, False]
    connections.begin(four)
    connections.begin(five)
    connections.add(six)
    assert slow.is_aborted
    assert connections.admit(six)


def test_spare_places_are_bounded_and_the_newest_have_them() -> None:
    connections = Connections(1)
    busy, *others = (Fake() for _ in range(SPARE_PLACES + 3))
    connections.add(busy)
    connections.begin(busy)
    for connection in others:
        connections.add(connection)
    assert [item.is_aborted for item in others] == [True] * 2 + [False] * SPARE_PLACES
    connections.remove(busy)
    assert connections.admit(others[-1])


def test_one_that_had_to_go_counts_once() -> None:
    connections = Connections(1)
    one, two, three = (Fake() for _ in range(3))
    connections.add(one)
    connections.add(two)
    connections.begin(one)  # its bytes were there already
    connections.end(one)
    connections.remove(one)
    connections.begin(two)
    connections.add(three)
    assert not connections.admit(three)


def test_open_files_are_allowed_as_far_as_may_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[int, int]] = []
    limits = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: asked.append(wanted))
    assert allow_open_files(100, 1) == 100
    assert asked == []
    assert allow_open_files(1000, 1) == 1000
    assert asked.pop() == (1000 + OTHER_FILES, 4096)
    assert caplog.text == ""
    assert allow_open_files(10_000, 1) == 4096 - OTHER_FILES
    assert asked.pop() == (4096, 4096)
    assert "server.max_connections" in caplog.text
    assert allow_open_files(1000, 2) == 1000
    assert asked.pop() == (2000 + OTHER_FILES, 4096)
    assert allow_open_files(10_000, 2) == (4096 - OTHER_FILES) // 2
    limits[1] = resource.RLIM_INFINITY
    assert allow_open_files(10_000, 1) == 10_000
