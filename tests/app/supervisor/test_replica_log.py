"""What a replica writes, as records of the log."""

from __future__ import annotations

import asyncio
import traceback

import pytest

from headwater_server.supervisor.replica_log import LONGEST_S, MAX_LINES, QUIET_S, ReplicaLog


async def records(lines: list[str]) -> list[str]:
    found: list[str] = []
    log = ReplicaLog(found.append)
    for line in lines:
        log.take(line)
    log.flush()
    return found


def traceback_text(*, is_cause: bool) -> str:
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from (error if is_cause else None)
    except ValueError:
        return traceback.format_exc().rstrip("\n")


async def test_a_traceback_is_one_record_with_its_causes() -> None:
    text = traceback_text(is_cause=True)
    assert "direct cause" in text
    lines = ["WARNING model: odd", *text.split("\n"), "after", "", "Traceback (most recent call last):", "  cut off"]
    assert await records(lines) == [
        "WARNING model: odd",
        text,
        "after",
        "",
        "Traceback (most recent call last):\n  cut off",
    ]


async def test_two_tracebacks_are_two_records() -> None:
    text = traceback_text(is_cause=False)
    assert await records([*text.split("\n"), *text.split("\n"), "", "after"]) == [text, text, "after"]


async def test_a_group_of_exceptions_is_one_record() -> None:
    text = "  + Exception Group Traceback (most recent call last):\n  | ExceptionGroup: two (1 sub-exception)\n  +----"
    assert await records([*text.split("\n"), "after"]) == [text, "after"]


async def test_a_record_has_a_bound() -> None:
    found = await records(["Traceback (most recent call last):", *["  and on"] * 2 * MAX_LINES])
    assert found[0].count("\n") == MAX_LINES - 1
    assert len(found) == 1 + 1 + MAX_LINES


async def test_a_traceback_that_nothing_follows_is_logged() -> None:
    found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    log = ReplicaLog(found.set_result)
    log.take("Traceback (most recent call last):")
    log.take("ValueError: x")
    record = await asyncio.wait_for(found, 20 * QUIET_S + 5)
    assert record == "Traceback (most recent call last):\nValueError: x"


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time the test sets."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


def records_over(step_s: float, lines: list[str]) -> list[str]:
    """The records of lines that come ``step_s`` apart."""
    loop = Clock()

    async def scenario() -> list[str]:
        found: list[str] = []
        log = ReplicaLog(found.append)
        for line in lines:
            log.take(line)
            loop.now_s += step_s
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # now the timers that are due have run
        log.flush()
        return found

    try:
        return loop.run_until_complete(scenario())
    finally:
        loop.close()


def test_a_traceback_that_is_written_slowly_is_one_record() -> None:
    text = traceback_text(is_cause=True)
    lines = text.split("\n")
    step_s = LONGEST_S / 2 / len(lines)
    assert step_s * len(lines) > QUIET_S
    assert records_over(step_s, [*lines, "after"]) == [text, "after"]
    assert records_over(1.5 * QUIET_S, lines[:3]) == lines[:3]


def test_a_traceback_that_does_not_end_is_logged_in_parts() -> None:
    found = records_over(QUIET_S / 2, ["Traceback (most recent call last):", *["  and on"] * 100])
    assert found[0].count("\n") + 1 == pytest.approx(LONGEST_S / (QUIET_S / 2), abs=1)
