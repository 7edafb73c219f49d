"""Closed loop against a server that is told what to do."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from headwater_server.cli.bench.closed_loop import STOPPED, closed_loop
from headwater_server.cli.bench.job import Job, Load, RequestSet
from headwater_server.cli.bench.outcomes import Outcomes
from headwater_server.cli.bench.request_bodies import Body
from headwater_server.cli.bench.sample_reader import Fault
from headwater_server.cli.bench.slo import Limits
from tests.load_target import Answer, Asked, LoadTarget, events, load_target
from tests.running import wait_for

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[4]
BODY = Body(b"{}")


def unary(target: LoadTarget, **options: float) -> RequestSet:
    return RequestSet(target.url, "m", (BODY,), **options)  # type: ignore[arg-type]


def run(
    target: RequestSet, connections: int, seconds: float, warmup_s: float, limits: Limits | None = None
) -> Outcomes:
    return asyncio.run(closed_loop(Job(target, Load(connections), seconds, warmup_s, limits=limits or Limits())))


def test_it_reports_a_delay_and_a_share_of_failures() -> None:
    # The server is a process of its own: it must not wait for the generator's turn.
    command = [sys.executable, "-m", "tests.load_target", "--delay", "0.3", "--fail-every", "5"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            outcomes = run(RequestSet(url, "m", (BODY,)), 40, 3.5, 0.1)
        finally:
            server.kill()
    assert min(outcomes.latencies_s) >= 0.3
    # A connection has one request at a time: what is reported beyond the true latencies would exceed all of its time.
    assert sum(outcomes.latencies_s) <= 40 * outcomes.elapsed_s
    assert outcomes.error_share == pytest.approx(1 / 5, abs=0.02)
    assert set(outcomes.errors) == {Fault("status", 500, "the fifth, or so")}
    assert not outcomes.ended


def test_what_is_asked_in_the_warm_up_does_not_count() -> None:
    with load_target(lambda asked: Answer(delay_s=0.02)) as target:
        outcomes = run(unary(target), 2, 0.3, 0.3)
        asked = target.asked["POST /v2/models/m/infer"]
    assert 0 < outcomes.requests < asked
    assert outcomes.tokens == 0


def test_bodies_are_sent_in_turn() -> None:
    got: Counter[bytes] = Counter()

    def note(asked: Asked) -> Answer:
        got[asked.body] += 1
        return Answer(delay_s=0.01)

    with load_target(note) as target:
        bodies = [b'{"a":1}', b'{"b":2}', b'{"c":3}']
        run(RequestSet(target.url, "m", tuple(map(Body, bodies))), 1, 0.3, 0)
    assert sorted(got) == bodies
    assert max(got.values()) - min(got.values()) <= 1


def test_the_key_is_shown() -> None:
    seen: list[str] = []

    def note(asked: Asked) -> Answer:
        seen.append(asked.headers.get("authorization", ""))
        return Answer(delay_s=0.02)

    with load_target(note) as target:
        run(RequestSet(target.url, "m", (BODY,), key="secret"), 1, 0.1, 0)
    assert set(seen) == {"Bearer secret"}


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (Answer(b'{"error": "busy"}', 429), Fault("status", 429, "busy")),
        (Answer(b'{"error": {"message": "busy", "type": "x"}}', 503), Fault("status", 503, "busy")),
        (
            Answer(b'{"error": "row 0123456789abcdef0123456789abcdef is bad"}', 500),
            Fault("status", 500, "row … is bad"),
        ),
        (Answer(b"<html>", 502), Fault("status", 502, "<html>")),
        (Answer(hangs_up=True), Fault("reset", None, "the connection ended before the answer did")),
        (Answer(says_nothing=True), Fault("timeout", None, "no whole answer in time")),
    ],
)
def test_errors_are_counted_by_kind(answer: Answer, fault: Fault) -> None:
    with load_target(lambda asked: answer._replace(delay_s=0.01)) as target:
        outcomes = run(unary(target, timeout_s=0.2 if answer.says_nothing else 30), 2, 0.2, 0)
    assert set(outcomes.errors) == {fault}
    assert outcomes.answers == 0
    assert outcomes.error_share == 1
    assert outcomes.requests_per_s == 0
    with pytest.raises(ValueError, match="no request"):
        outcomes.latency_ms(50)


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"model_name": "m"}', b"\xff"])
def test_an_answer_that_is_none_is_an_error(body: bytes) -> None:
    with load_target(lambda asked: Answer(body, delay_s=0.01)) as target:
        outcomes = run(unary(target), 1, 0.1, 0)
    assert {fault.kind for fault in outcomes.errors} == {"bad answer"}


def test_streams_are_told_by_their_tokens() -> None:
    stream = events(
        *[{"choices": [{"delta": {"content": "a"}}]}] * 5, {"choices": [], "usage": {"completion_tokens": 9}}, "[DONE]",
        gap_s=0.02,
    )  # fmt: skip
    with load_target(lambda asked: Answer(pieces=stream, delay_s=0.05)) as target:
        outcomes = run(RequestSet(target.url, "m", (BODY,), "chat"), 2, 0.4, 0, Limits(ttft_s=0.0001))
    assert outcomes.answers >= 2
    assert not outcomes.errors
    assert outcomes.tokens == 9 * outcomes.answers
    assert len(outcomes.first_token_s) == len(outcomes.per_token_s) == outcomes.answers
    assert len(outcomes.gaps_s) == 4 * outcomes.answers
    assert min(outcomes.first_token_s) >= 0.05
    for place, per_token_s in enumerate(outcomes.per_token_s):  # four gaps, nine tokens
        assert per_token_s * 8 == pytest.approx(sum(outcomes.gaps_s[4 * place : 4 * place + 4]))
    assert outcomes.met == 0
    assert outcomes.tokens_per_s == pytest.approx(9 * outcomes.requests_per_s)


def test_a_server_that_goes_away_leaves_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater_server.cli.bench.closed_loop.GONE_AFTER_S", 0.3)
    with load_target(lambda asked: Answer(delay_s=0.01)) as target:

        def stop_soon() -> None:
            wait_for(lambda: target.asked.get("POST /v2/models/m/infer", 0) >= 50)
            target.stop()

        thread = threading.Thread(target=stop_soon)
        thread.start()
        outcomes = run(unary(target), 2, 60, 0)
        thread.join()
    assert outcomes.answers >= 40
    assert outcomes.ended.startswith("no connection could be made for 0.3 s: ")
    assert {fault.kind for fault in outcomes.errors} <= {"reset", "connect"}
    assert any(fault.kind == "connect" for fault in outcomes.errors)


def test_it_can_be_stopped() -> None:
    async def stopped(target: LoadTarget) -> Outcomes:
        stop = asyncio.Event()
        running = asyncio.create_task(closed_loop(Job(unary(target), Load(2), 60, 0), stop))
        await asyncio.to_thread(wait_for, lambda: target.asked.get("POST /v2/models/m/infer", 0) >= 10)
        stop.set()
        return await running

    with load_target(lambda asked: Answer(delay_s=0.01)) as target:
        outcomes = asyncio.run(stopped(target))
    assert outcomes.ended == STOPPED
    assert outcomes.answers > 0
    assert not outcomes.errors
