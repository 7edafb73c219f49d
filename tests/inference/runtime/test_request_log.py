"""The records of requests that a model gets, and the id in what it logs."""

from __future__ import annotations

import logging

import msgspec

from headwater.model import Request
from headwater.runtime.request_log import RequestFilter, note_call, requests_of


def text(id: str, **headers: str) -> str:
    return msgspec.json.encode(Request(id, headers=headers)).decode()


def suffix() -> str:
    record = logging.makeLogRecord({})
    assert RequestFilter().filter(record)
    value = record.request  # type: ignore[attr-defined]
    assert isinstance(value, str)
    return value


def test_each_row_has_its_requests_record_with_the_chosen_headers() -> None:
    first, second, third = requests_of([text("a", user="ann", team="red"), text("b"), text("b")], ["user"])
    assert first == Request("a", headers={"user": "ann"})
    assert second is third
    assert second == Request("b")


def test_a_warm_up_has_defaults() -> None:
    assert requests_of(["", ""], []) == [Request(), Request()]


def test_lines_have_the_id_if_all_rows_are_of_one_request() -> None:
    note_call([Request("a"), Request("a")])
    assert suffix() == " [request a]"
    for requests in ([Request("a"), Request("b")], [], [Request()]):
        note_call(requests)
        assert suffix() == ""
