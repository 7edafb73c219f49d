"""Which rows are computed again after a call that failed, and what is said of those that fail alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from inference.errors import BadInput, BadOutput
from inference.runtime.isolation import CallFailed, Errors, Isolation, RaggedPieces
from inference.wire.report import RowReport, Status

BAD = 5


class Calls:
    """Fails where row 5 is among the rows."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.made: list[tuple[list[int], bool]] = []

    async def __call__(self, rows: list[int], is_retry: bool) -> list[int]:
        self.made.append((rows, is_retry))
        if BAD in rows:
            raise self.error
        return rows


def joined(pieces: Sequence[list[int]]) -> list[int]:
    return [row for piece in pieces for row in piece]


def run(calls: Calls, *, may_split: bool = True, broken: list[str] | None = None) -> tuple[list[int], set[int]]:
    on_broken = (lambda reason: None) if broken is None else broken.append
    isolation = Isolation(calls, Errors("cpu", on_broken, "step `a`: "), may_split=may_split)
    return asyncio.run(isolation.run(8, joined)), set(isolation.failures)


def test_the_row_that_fails_is_found_by_halving_and_fails_alone() -> None:
    calls = Calls(ValueError("no"))
    assert run(calls) == ([0, 1, 2, 3, 4, 6, 7], {BAD})
    assert calls.made[0] == (list(range(8)), False)
    assert calls.made[1:] == [([0, 1, 2, 3], True), ([4, 5, 6, 7], True), ([4, 5], True), ([4], True), ([5], True),
                              ([6, 7], True)]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "may_split"),
    [(ValueError("no"), False), (CallFailed("all"), True), (RuntimeError("CUDA error: an illegal access"), True)],
    ids=["rows that must not be computed twice", "a call that fails whatever its rows", "a broken device"],
)
def test_no_row_is_computed_again_after(error: BaseException, may_split: bool) -> None:
    calls = Calls(error)
    broken: list[str] = []
    assert run(calls, may_split=may_split, broken=broken) == ([], set(range(8)))
    assert len(calls.made) == 1
    assert len(broken) == ("CUDA" in str(error))


def test_pieces_that_cannot_be_joined_are_computed_once_more_together() -> None:
    calls = Calls(ValueError("no"))
    isolation = Isolation(calls, Errors("cpu", lambda reason: None), may_split=True)

    def one(pieces: Sequence[list[int]]) -> list[int]:
        if len(pieces) > 1:
            raise RaggedPieces
        return pieces[0]

    assert asyncio.run(isolation.run(8, one)) == [0, 1, 2, 3, 4, 6, 7]
    assert calls.made[-1] == ([0, 1, 2, 3, 4, 6, 7], True)


@pytest.mark.parametrize(
    ("error", "report"),
    [
        (BadInput("too long"), RowReport(Status.BAD_INPUT, "too long")),
        (BadOutput("no `y`"), RowReport(Status.BAD_OUTPUT, "step `a`: no `y`")),
        (BadOutput("step `b`, input `x`: no"), RowReport(Status.BAD_OUTPUT, "step `b`, input `x`: no")),
        (CallFailed("all of it"), RowReport(Status.RAISED, "all of it")),
        (KeyError(), RowReport(Status.RAISED, "step `a`: KeyError")),
        (SystemExit("bye"), RowReport(Status.RAISED, "step `a`: SystemExit: bye")),
    ],
)
def test_what_a_row_is_reported_to_have_failed_of(error: BaseException, report: RowReport) -> None:
    assert Errors("cpu", lambda reason: None, "step `a`: ").report(error) == report
