"""The chaos run's own judgement: that it would say so if something were wrong."""

from __future__ import annotations

import random
from itertools import islice
from typing import cast

import httpx
import pytest

from tests.chaos.asks import Ask, make_ask
from tests.chaos.book import Scrape, compare
from tests.chaos.client import Result
from tests.chaos.faults import planned
from tests.chaos.reply import Reply
from tests.running import Running

ASK = Ask("infer", "plain", "infer", "/v2/models/plain/infer", b"{}", lambda reply: "")


class Server:
    """Answers ``/metrics``."""

    def __init__(self, accepted: int, **outcomes: int) -> None:
        where = 'deployment="plain",route="infer"'
        lines = [f"headwater_requests_accepted_total{{{where}}} {accepted}"]
        lines += [f'headwater_requests_total{{{where},outcome="{name}"}} {count}' for name, count in outcomes.items()]
        types = ["# TYPE headwater_requests_accepted_total counter", lines[0]]
        self._text = "\n".join([*types, "# TYPE headwater_requests_total counter", *lines[1:], ""])

    def get(self, path: str) -> httpx.Response:
        return httpx.Response(200, text=self._text, request=httpx.Request("GET", f"http://test{path}"))


def scrape(accepted: int, **outcomes: int) -> Scrape:
    return Scrape(cast(Running, Server(accepted, **outcomes)))


def result(how: str = "answered", outcome: str = "ok") -> Result:
    return Result(ASK, "plain", how, 0.0, 1.0, outcome if how == "answered" else "")


def disagreements(results: list[Result], found: Scrape, *, workers_hit: bool = True) -> list[str]:
    return compare(results, found, scrape(0), workers_hit=workers_hit)


def test_books_that_agree() -> None:
    results = [result(), result(outcome="failed"), result("left"), result("broken")]
    assert disagreements(results, scrape(4, ok=1, failed=1, cancelled=1, lost=1)) == []
    assert disagreements(results, scrape(2, ok=1, failed=1)) == []  # two never came so far
    assert disagreements([result()], scrape(1, lost=1)) == []  # read, but its worker was killed before it booked it


@pytest.mark.parametrize(
    ("results", "found", "fault"),
    [
        ([result()] * 2, scrape(2, ok=1), "accepted 2, ended 1"),
        ([result()] * 2, scrape(1, ok=1), "accepted 1, but the clients had 2 answers"),
        ([result()], scrape(2, ok=2), "accepted 2, but the clients had 1 answers"),
        ([result()], scrape(1, failed=1), "ok: 0, but the clients saw 1"),
        ([result(outcome="failed")], scrape(1, ok=1), "ok: 1, but the clients saw 0"),
        ([], scrape(1, ok=1), "accepted 1, but the clients had 0 answers"),
    ],
)
def test_books_that_do_not_agree(results: list[Result], found: Scrape, fault: str) -> None:
    assert any(fault in one for one in disagreements(results, found))


def test_nothing_is_lost_unless_a_worker_was_hit() -> None:
    assert disagreements([result("broken")], scrape(1, lost=1), workers_hit=False)
    assert disagreements([result("broken")], scrape(1, lost=1)) == []


def stream(body: bytes) -> Reply:
    reply = Reply(200, {"content-type": "text/event-stream"}, body)
    reply.take_events()
    return reply


def test_an_outcome_is_that_of_the_error_in_the_stream() -> None:
    assert stream(b'data: {"piece": 1}\n\ndata: {"final": true}\n\n').outcome == "ok"
    assert stream(b'data: {"error": "gone", "status": 503}\n\n: ping\n').outcome == "unavailable"
    late = stream(b'data: {"error": {"message": "late", "code": "timeout"}}\n\ndata: [DONE]\n\n')
    assert (late.outcome, late.is_done) == ("timeout", True)
    assert stream(b'data: {"head": "a", "status": "failed", "error": "no"}\n\n').outcome == ""
    assert Reply(429, {}).outcome == "shed"
    with pytest.raises(ValueError, match="expected an event"):
        stream(b"dat: 1\n\n")


def test_a_seed_gives_the_same_requests_and_faults() -> None:
    def asked(seed: int) -> list[tuple[str, bytes]]:
        chance = random.Random(seed)
        asks = [make_ask(chance, {}, {"plain", "graph"}) for _ in range(50)]
        assert {ask.deployment for ask in asks} == {"plain", "graph"}
        return [(ask.path, ask.body) for ask in asks]

    assert asked(1) == asked(1) != asked(2)
    assert list(islice(planned(1), 50)) == list(islice(planned(1), 50)) != list(islice(planned(2), 50))


def test_a_wrong_answer_is_noticed() -> None:
    chance = random.Random(3)
    ask = next(ask for ask in (make_ask(chance, {}, {"plain"}) for _ in range(100)) if ask.what == "infer")
    wrong = Reply(200, {}, b'{"outputs": [{"name": "y", "data": [1.0, 2.0, 3.0, 4.0]}]}')
    assert "expected" in ask.check(wrong)
