"""What a replica writes, as records of the log."""

from __future__ import annotations

import asyncio
import traceback

from headwater_server.supervisor.replica_log import MAX_LINES, QUIET_S, ReplicaLog


def records(lines: list[str]) -> list[str]:
    async def scenario() -> list[str]:
        found: list[str] = []
        log = ReplicaLog(found.append)
        for line in lines:
            log.take(line)
        log.flush()
        return found

    return asyncio.run(scenario())


def traceback_text(*, is_cause: bool) -> str:
    try:
        try:
            raise KeyError("first")
        except KeyError as error:
            raise ValueError("second") from (error if is_cause else None)
    except ValueError:
        return traceback.format_exc().rstrip("\n")


def test_a_traceback_is_one_record_with_its_causes() -> None:
    text = traceback_text(is_cause=True)
    assert "direct cause" in text
    lines = ["WARNING model: odd", *text.split("\n"), "after", "", "Traceback (most recent call last):", "  cut off"]
    assert records(lines) == ["WARNING model: odd", text, "after", "", "Traceback (most recent call last):\n  cut off"]


def test_two_tracebacks_are_two_records() -> None:
    text = traceback_text(is_cause=False)
    assert records([*text.split("\n"), *text.split("\n"), "", "after"]) == [text, text, "after"]


def test_a_group_of_exceptions_is_one_record() -> None:
    text = "  + Exception Group Traceback (most recent call last):\n  | ExceptionGroup: two (1 sub-exception)\n  +----"
    assert records([*text.split("\n"), "after"]) == [text, "after"]


def test_a_record_has_a_bound() -> None:
    found = records(["Traceback (most recent call last):", *["  and on"] * 2 * MAX_LINES])
    assert found[0].count("\n") == MAX_LINES - 1
    assert len(found) == 1 + 1 + MAX_LINES


def test_a_traceback_that_nothing_follows_is_logged() -> None:
    async def scenario() -> str:
        found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        log = ReplicaLog(found.set_result)
        log.take("Traceback (most recent call last):")
        log.take("ValueError: x")
        return await asyncio.wait_for(found, 20 * QUIET_S + 5)

    assert asyncio.run(scenario()) == "Traceback (most recent call last):\nValueError: x"
