"""Every request that is accepted ends with one outcome, whatever becomes of it; gateway and dispatcher, in-process."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.wire.report import RowReport, Status
from headwater_server.errors import (
    BadRequest,
    CallableFailed,
    Cancelled,
    ClientGone,
    DeadlineExceeded,
    HeadwaterError,
    Quarantined,
    QueueFull,
    ReplicaLost,
    Unavailable,
)
from headwater_server.telemetry.catalogue import ACCEPTED, IN_FLIGHT, REQUESTS
from headwater_server.telemetry.ledger import merged
from headwater_server.telemetry.recorder import outcome_of, recorder, use
from headwater_server.telemetry.store import SeriesKey, Store
from tests.app.telemetry.stand_in import NOT_ACCEPTED, Gateway

Action = tuple[str, str]
INFER: dict[str, str | None] = {
    "ok": "ok",
    "raised": "failed",
    "bad row": "client_error",
    "bad output": "failed",
    "no JSON": "client_error",
    "too late": "timeout",
    "client gone": "cancelled",
    "under way": None,
}
"""What may happen to a request for ``m``, and its outcome; None: it is still under way."""
ACTIONS: list[Action] = [
    *(("infer", action) for action in INFER),
    *(("generate", action) for action in INFER),
    *(("generate_stream", action) for action in INFER),
    ("infer", "not loaded"),
    ("generate_stream", "not loaded"),
    ("embeddings", "no embeddings"),
    ("chat", "no language model"),
    ("completions", "no language model"),
    ("tokenize", "no language model"),
    ("detokenize", "no language model"),
    ("responses", "no language model"),
]


def outcome(action: str) -> str | None:
    if action == "not loaded":
        return "unavailable"
    return INFER.get(action, "client_error")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    use(Store())


def counts() -> dict[SeriesKey, int]:
    return {key: numbers[0] for key, numbers in merged([recorder().store.snapshot().records]).items() if numbers[0]}


def total(name: str, of: dict[SeriesKey, int]) -> int:
    return sum(count for key, count in of.items() if key.name == name)


async def settled(gateway: Gateway, tasks: list[asyncio.Task[int]], open_: int) -> None:
    """Wait until all but so many are answered, and these are with the replica."""
    while sum(not task.done() for task in tasks) > open_ or len(gateway.replica.hanging) < open_:
        done, _ = await asyncio.wait(tasks, timeout=0.01)
        for task in done:
            task.result()


@pytest.mark.slow
@settings(max_examples=30)
@given(actions=st.lists(st.sampled_from(ACTIONS), max_size=12), refused=st.lists(st.sampled_from(list(NOT_ACCEPTED))))
async def test_accepted_is_the_sum_of_all_outcomes_and_what_is_in_flight(
    actions: list[Action], refused: list[str]
) -> None:
    use(Store())

    gateway = Gateway()
    gone = asyncio.Event()
    calls: list[Coroutine[Any, Any, int]] = [gateway.do(*action, gone) for action in actions]
    tasks = [asyncio.create_task(call) for call in [*calls, *map(gateway.refuse, refused)]]
    expected = Counter(
        SeriesKey(REQUESTS, ("away" if action == "not loaded" else "m", route, str(outcome(action))))
        for route, action in actions
        if outcome(action) is not None
    )
    under_way = sum(outcome(action) is None for _, action in actions)
    gone.set()
    if tasks:
        await asyncio.wait_for(settled(gateway, tasks, under_way), 20)
    found = counts()
    assert {key: count for key, count in found.items() if key.name == REQUESTS} == expected
    assert total(ACCEPTED, found) == len(actions)
    assert total(IN_FLIGHT, found) == under_way
    assert total(REQUESTS, found) == len(actions) - under_way
    assert total("headwater_http_requests", found) == len(actions) + len(refused) - under_way
    for call in gateway.replica.hanging:
        if not call.answered.done():
            call.answer([RowReport(Status.OK)])
    if tasks:
        await asyncio.wait_for(asyncio.gather(*tasks), 20)
    found = counts()
    assert total(IN_FLIGHT, found) == 0
    assert total(REQUESTS, found) == len(actions)


async def test_what_the_queue_has_no_room_for_is_shed() -> None:
    use(Store())

    gateway = Gateway(max_in_flight=1, max_queue_size=1)
    tasks = [asyncio.create_task(gateway.do("infer", "under way", asyncio.Event()))]
    await settled(gateway, tasks, 1)
    tasks.append(asyncio.create_task(gateway.do("infer", "under way", asyncio.Event())))
    while not gateway.queued_rows:  # noqa: ASYNC110 - no event of the product's
        await asyncio.sleep(0)
    assert await gateway.do("infer", "ok", asyncio.Event()) == 429
    found = counts()
    assert found[SeriesKey(REQUESTS, ("m", "infer", "shed"))] == 1
    assert found[SeriesKey(IN_FLIGHT, ("m", "infer"))] == 2
    for task in tasks:
        task.cancel()  # as the server does at its end
    await asyncio.gather(*tasks, return_exceptions=True)
    assert counts()[SeriesKey(REQUESTS, ("m", "infer", "cancelled"))] == 2


async def test_routes_are_named_by_their_patterns_and_never_by_what_a_client_made_up() -> None:
    use(Store())

    gateway = Gateway()
    for path in ("/v2/models/secret/infer", "/v2/models/secret/generate", "/secret", "/v2/models/secret/ready"):
        await gateway.ask(path, b"{}")
    await gateway.ask("/v2/models/secret/stats", b"", method="GET")
    assert counts() == {
        SeriesKey("headwater_http_requests", ("/v2/models/{model}/infer", "4xx")): 1,
        SeriesKey("headwater_http_requests", ("/v2/models/{model}/generate", "4xx")): 1,
        SeriesKey("headwater_http_requests", ("/v2/models/{model}/ready", "4xx")): 1,
        SeriesKey("headwater_http_requests", ("/v2/models/{model}/stats", "4xx")): 1,
        SeriesKey("headwater_http_requests", ("unmatched", "4xx")): 1,
    }


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (BadRequest, "client_error"),
        (Quarantined, "client_error"),
        (QueueFull, "shed"),
        (Cancelled, "cancelled"),
        (ClientGone, "cancelled"),
        (CallableFailed, "failed"),
        (Unavailable, "unavailable"),
        (ReplicaLost, "unavailable"),
        (DeadlineExceeded, "timeout"),
    ],
)
def test_an_error_is_an_outcome(error: type[HeadwaterError], outcome: str) -> None:
    assert outcome_of(error("")) == outcome


async def test_the_phases_of_a_request_add_up() -> None:
    use(Store())

    gateway = Gateway()
    assert await gateway.do("infer", "ok", asyncio.Event()) == 200
    records = recorder().store.snapshot().records
    whole_ns = records[SeriesKey("headwater_request_seconds", ("m", "infer"))][-1]
    phases = {
        phase: records[SeriesKey("headwater_request_phase_seconds", ("m", phase))][-1]
        for phase in ("queue", "batch_wait", "transport", "compute", "serialise")
    }
    assert phases["compute"] == 5000
    assert phases["batch_wait"] == 0
    assert all(phases[one] > 0 for one in ("queue", "transport", "serialise"))
    assert sum(phases.values()) <= whole_ns
    assert records[SeriesKey("headwater_batch_rows", ("m",))][0] == 1
    assert records[SeriesKey("headwater_batch_capacity_rows", ("m",))] == [1]
