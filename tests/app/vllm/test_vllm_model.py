"""A language model that vLLM computes: which replica gets a request, what is under way, and what replicas say."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from headwater.wire.lm import Load
from headwater_server.codecs.tensors import InferRequest
from headwater_server.control.load import Moment
from headwater_server.control.routing import State
from headwater_server.errors import BadRequest, HeadwaterError, ReplicaLost, Unavailable
from headwater_server.telemetry.recorder import recorder
from headwater_server.transport.relay_client import RelayClient
from headwater_server.vllm import vllm_model
from headwater_server.vllm.answers import ChunkAnswer, TokenCount
from headwater_server.vllm.relay import Relay
from tests.app.serving import until
from tests.app.vllm.stand_in import Bench, benched, hangs, request, route_of, stand_ins
from tests.counted import count_from_zero

METRICS = b"""\
# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
"""


@pytest.fixture(autouse=True)
def samples_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_model, "SAMPLE_S", 0.02)
    count_from_zero()


async def begun(bench: Bench, id: str = "id", **body: Any) -> tuple[Relay, Any]:
    """A stream that has begun, and its events."""
    asked = request(**body)
    relay = bench.dispatcher.open(asked, id)
    events = relay.events(ChunkAnswer(asked, TokenCount(recorder().language_model("m"))))
    await anext(events)
    bench.begun.append((relay, events))
    return relay, events


def counts(bench: Bench) -> list[int]:
    return [len(one.exchanges) for one in bench.replicas.values()]


async def test_requests_go_to_the_least_busy_replica() -> None:
    async with benched("a", "b") as bench:
        for one in bench.replicas.values():
            one.script = hangs
        streams = [await begun(bench) for _ in range(6)]
        assert counts(bench) == [3, 3]
        await streams[0][1].aclose()
        await streams[2][1].aclose()
        await begun(bench)
        await begun(bench)
        assert counts(bench) == [5, 3]
        bench.leave()


async def test_requests_with_one_prefix_go_to_one_replica_until_that_is_too_busy() -> None:
    async with benched("a", "b", prefix_affinity=2.0) as bench:
        for one in bench.replicas.values():
            one.script = hangs
        for _ in range(4):
            await begun(bench, prompt="x" * 2000)
        assert sorted(counts(bench)) == [1, 3]
        bench.leave()


async def test_a_replica_that_is_retired_gets_nothing_new_and_finishes() -> None:
    async with benched("a", "b") as bench:
        for one in bench.replicas.values():
            one.script = hangs
        await begun(bench)
        route = route_of(bench.replicas)
        old, new = route.replicas
        bench.dispatcher.update(msgspec.structs.replace(route, replicas=(new,), retiring=(old,)))
        await begun(bench)
        await begun(bench)
        assert counts(bench) == [1, 2]
        assert len(bench.dispatcher.under_way(["a"])) == 1
        assert len(bench.dispatcher.under_way(None)) == 3
        bench.leave()


async def test_what_is_not_done_when_a_drain_ends_fails_with_its_error() -> None:
    async with benched() as bench:
        bench.replica.script = hangs
        _, events = await begun(bench)
        (fail,) = bench.dispatcher.under_way(None)
        fail(Unavailable("it is being unloaded"))
        assert bench.dispatcher.under_way(None) == []
        with pytest.raises(Unavailable, match="it is being unloaded"):
            await anext(events)
        await bench.exchanges[0].left()


async def test_a_replica_that_leaves_the_table_loses_its_requests() -> None:
    async with benched() as bench:
        bench.replica.script = hangs
        _, events = await begun(bench)
        bench.dispatcher.update(msgspec.structs.replace(route_of(bench.replicas), replicas=()))
        with pytest.raises(ReplicaLost):
            await anext(events)
        with pytest.raises(HeadwaterError):
            await begun(bench)


async def test_a_model_that_is_not_ready_takes_no_requests() -> None:
    async with benched() as bench:
        bench.dispatcher.update(msgspec.structs.replace(route_of(bench.replicas), state=State.DRAINING))
        with pytest.raises(Unavailable):
            bench.dispatcher.open(request(), "id")


async def test_tensors_are_refused() -> None:
    async with benched() as bench:
        asked = InferRequest("", {}, 1, [], {}, {})
        with pytest.raises(BadRequest, match="takes no tensors"):
            await bench.dispatcher.infer(asked)
        with pytest.raises(BadRequest, match="takes no tensors"):
            bench.dispatcher.stream(asked)


# Metrics


async def test_the_load_is_what_the_replicas_metrics_say() -> None:
    async with benched("a", "b") as bench:
        bench.replicas["a"].metrics = METRICS
        bench.replicas["b"].metrics = METRICS
        await until(lambda: bench.dispatcher.load == Load(6, 4, 500))
        gauges = bench.dispatcher.gauges()
        meter = bench.dispatcher.meter
        found = [gauges[one] for one in (meter.active, meter.waiting, meter.cache_used, meter.cache_limit)]
        assert found == [6, 4, 500, 2000]
        route = route_of(bench.replicas)
        bench.dispatcher.update(msgspec.structs.replace(route, replicas=route.replicas[:1]))
        assert bench.dispatcher.load == Load(3, 2, 250)


async def test_requests_of_other_workers_count_as_last_sampled() -> None:
    async with benched("a", "b") as bench:
        for one in bench.replicas.values():
            one.script = hangs
        bench.replicas["a"].metrics = METRICS
        await until(lambda: bench.dispatcher.load == Load(3, 2, 250))
        for _ in range(5):
            await begun(bench)
        assert counts(bench) == [0, 5]
        bench.leave()


async def test_requests_of_other_workers_do_not_count_with_more_replicas_than_are_read_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_model, "MOST_SAMPLED", 1)

    async with benched("a", "b") as bench:
        for one in bench.replicas.values():
            one.script = hangs
        bench.replicas["a"].metrics = METRICS
        await until(lambda: bench.dispatcher.load == Load(3, 2, 250))
        for _ in range(6):
            await begun(bench)
        assert counts(bench) == [3, 3]
        bench.leave()


async def test_a_replica_that_says_nothing_keeps_no_other_from_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with benched("a", "b") as bench:
        bench.replicas["a"].close()
        bench.replicas["b"].metrics = b"\xff{} nonsense\n" + METRICS
        await until(lambda: bench.dispatcher.load == Load(3, 2, 250))


@pytest.mark.parametrize("turns", range(5))
async def test_a_dispatcher_that_is_closed_asks_no_more(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the answer comes when the task is cancelled, some turns of the event loop before or after."""
    is_asked, may_answer = asyncio.Event(), asyncio.Event()

    async def get(client: RelayClient, path: str) -> bytes:
        is_asked.set()
        await may_answer.wait()
        return METRICS

    monkeypatch.setattr(RelayClient, "get", get)
    async with stand_ins("a") as replicas:
        before = asyncio.all_tasks()
        bench = Bench(replicas)
        await is_asked.wait()
        (task,) = (one for one in asyncio.all_tasks() - before if "_sample" in repr(one))
        may_answer.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        bench.dispatcher.close()
        await asyncio.wait([task], timeout=5)
        assert task.done()


async def test_what_there_is_to_do_is_told_in_requests_of_this_worker_and_since_when_some_wait() -> None:
    async with benched() as bench:
        assert bench.dispatcher.moment() == Moment(0, 0, 0, 0.0)
        bench.replica.script = hangs
        bench.replica.metrics = METRICS
        await begun(bench)
        await until(lambda: bench.dispatcher.load.waiting == 2)
        bench.dispatcher.moment()
        await asyncio.sleep(0.02)
        moment = bench.dispatcher.moment()
        assert moment[:3] == (1, 1, 1)
        assert moment[3] > 0
        bench.leave()
