"""The open requests of gateway workers, as models see them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater.wire.open_requests import FIRST_SLOTS, REQUEST, OpenRequests, is_open, without_request


def test_a_request_is_open_until_its_end(tmp_path: Path) -> None:
    folder = str(tmp_path)
    workers = [OpenRequests(folder, worker) for worker in (0, 1)]
    names = [worker.open() for worker in workers]
    assert all(is_open(folder, name) for name in names)
    workers[0].close(names[0])
    assert [is_open(folder, name) for name in names] == [False, True]
    again = workers[0].open()
    assert [is_open(folder, name) for name in (names[0], again)] == [False, True]


def test_any_number_of_requests_may_be_open(tmp_path: Path) -> None:
    requests = OpenRequests(str(tmp_path))
    names = [requests.open() for _ in range(2 * FIRST_SLOTS + 1)]
    assert len(set(names)) == len(names)
    for name in names[::2]:
        requests.close(name)
    assert [is_open(str(tmp_path), name) for name in names] == [number % 2 == 1 for number in range(len(names))]
    size = (tmp_path / "requests-0").stat().st_size
    for _ in names[::2]:
        requests.open()
    assert (tmp_path / "requests-0").stat().st_size == size


def test_the_requests_of_a_worker_that_was_killed_end_with_the_start_of_the_next(tmp_path: Path) -> None:
    folder = str(tmp_path)
    lost = OpenRequests(folder)
    names = [lost.open() for _ in range(FIRST_SLOTS + 1)]
    following = OpenRequests(folder)
    assert not any(is_open(folder, name) for name in names)
    assert is_open(folder, following.open())


@pytest.mark.parametrize(
    "name", ["", "x", "0-0", "0-x-00", "0-0-00-0", "../../x-0-00", "7-0-00", f"0-{1 << 70}-00", f"{'9' * 5000}-0-00",
             "0--8-00"]
)  # fmt: skip
def test_a_name_that_no_worker_gave_is_an_open_requests(tmp_path: Path, name: str) -> None:
    OpenRequests(str(tmp_path))
    assert is_open(str(tmp_path), name)


def test_a_file_that_is_gone_ends_no_request(tmp_path: Path) -> None:
    name = OpenRequests(str(tmp_path)).open()
    (tmp_path / "requests-0").unlink()
    assert is_open(str(tmp_path), name)


@pytest.mark.parametrize("others", [{}, {"a": 1, "b": "x", "c": True}])
def test_a_name_is_taken_out_of_the_parameters(others: dict[str, object]) -> None:
    assert without_request(json.dumps(others)) == ("", json.dumps(others))
    assert without_request(json.dumps({**others, REQUEST: "0-1-2"})) == ("0-1-2", json.dumps(others))
