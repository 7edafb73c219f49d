"""What a gateway worker does while a deployment, or some of its replicas, are on their way out."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from headwater_server.codecs.tensors import InferRequest, OutputWish, RawTensor
from headwater_server.control.messages import Drain, Drained
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, State
from headwater_server.dispatch.deployment_protocol import drain
from headwater_server.dispatch.dispatcher import ModelDispatcher
from headwater_server.errors import Unavailable
from headwater_server.gateway.models import Models
from headwater_server.lm.language_model import LmDispatcher
from tests.app.dispatch.stand_in import NUMBERS, Bench, settle
from tests.app.lm import stand_in as lm

LATE = Unavailable("it took too long")


def request(value: float = 1) -> InferRequest:
    return InferRequest("", {"x": RawTensor("FP32", (1, 1), bytes(4))}, 1, [OutputWish("y", True)], {}, {})


class TableBench(Bench):
    """A dispatcher whose table the test changes."""

    def tell(self, **changes: object) -> None:
        self.route = msgspec.structs.replace(self.route, **changes)
        self.dispatcher.update(self.route)

    def ask(self) -> asyncio.Task[object]:
        return asyncio.get_running_loop().create_task(self.dispatcher.infer(request()))


async def test_while_it_drains_what_waits_and_what_runs_is_answered_and_nothing_new_is_taken() -> None:
    bench = TableBench(max_in_flight=1)
    tasks = [bench.ask()]
    await settle()
    tasks.append(bench.ask())  # waits in the queue
    await settle()
    bench.tell(state=State.DRAINING, reason="it is being unloaded")
    draining = asyncio.create_task(drain(lambda: bench.dispatcher.under_way(None), 10, LATE))
    with pytest.raises(Unavailable, match="`m` is DRAINING: it is being unloaded"):
        await bench.ask()
    (replica,) = bench.replicas.values()
    replica.calls[0].answer()
    await settle()
    assert not draining.done()
    replica.calls[1].answer()
    assert await draining == Drained(2, 0)
    await asyncio.gather(*tasks)


async def test_what_takes_too_long_is_ended_whether_it_runs_or_waits() -> None:
    bench = TableBench(max_in_flight=1)
    tasks = [bench.ask()]
    await settle()
    tasks.append(bench.ask())
    await settle()
    assert await drain(lambda: bench.dispatcher.under_way(None), 0.01, LATE) == Drained(0, 2)
    for task in tasks:
        with pytest.raises(Unavailable, match="it took too long"):
            await task
    assert bench.dispatcher.in_flight == bench.dispatcher.queued_rows == 0


async def test_replicas_that_retire_finish_what_they_have_and_get_nothing_new() -> None:
    bench = TableBench()
    first = bench.ask()
    await settle()
    old = bench.route.replicas
    bench.tell(replicas=(ReplicaRoute("m-new", "unix:", ""),), retiring=old)
    draining = asyncio.create_task(drain(lambda: bench.dispatcher.under_way(["m-0"]), 10, LATE))
    others = [bench.ask() for _ in range(3)]
    await settle()
    assert [len(bench.replicas[id].calls) for id in ("m-0", "m-new")] == [1, 1]
    bench.replicas["m-new"].calls[0].answer()
    await asyncio.gather(*others)
    assert not draining.done()
    bench.replicas["m-0"].calls[0].answer()
    assert await draining == Drained(1, 0)
    await first


async def test_only_what_the_retiring_replicas_have_is_ended() -> None:
    bench = TableBench()
    first = bench.ask()
    await settle()
    bench.tell(replicas=(ReplicaRoute("m-new", "unix:", ""),), retiring=bench.route.replicas)
    other = bench.ask()
    await settle()
    assert await drain(lambda: bench.dispatcher.under_way(["m-0"]), 0.01, LATE) == Drained(0, 1)
    with pytest.raises(Unavailable, match="it took too long"):
        await first
    bench.replicas["m-new"].calls[0].answer()
    await other


async def test_with_retiring_replicas_only_nothing_is_taken() -> None:
    bench = TableBench()
    bench.tell(replicas=(), retiring=bench.route.replicas, state=State.UNAVAILABLE, reason="killed")
    with pytest.raises(Unavailable, match="UNAVAILABLE: killed"):
        await bench.ask()


async def test_a_step_still_answers_its_pipeline_while_it_drains() -> None:
    bench = TableBench(part_of="p")
    bench.tell(state=State.DRAINING)
    with pytest.raises(Unavailable):
        await bench.ask()
    task = asyncio.create_task(bench.dispatcher.infer(request(), is_step=True))
    await settle()
    next(iter(bench.replicas.values())).calls[0].answer()
    await task
    bench.tell(part_of=None)  # others' shared step has no such excuse
    with pytest.raises(Unavailable):
        await bench.dispatcher.infer(request(), is_step=True)


@pytest.mark.parametrize(
    ("state", "is_set_aside", "expected_s"),
    [(State.UNAVAILABLE, False, 2), (State.UNAVAILABLE, True, 60), (State.LOADING, True, 5), (State.FAILED, False, 60)],
)
async def test_when_to_come_again_depends_on_who_must_act(state: State, is_set_aside: bool, expected_s: int) -> None:
    route = DeploymentRoute("m", state, "gone", NUMBERS, is_set_aside=is_set_aside)
    with pytest.raises(Unavailable) as raised:
        await ModelDispatcher(route).infer(request())
    assert raised.value.retry_after_s == expected_s


# Language models


async def test_a_language_models_sequences_run_to_their_end_while_it_drains() -> None:
    bench = lm.Bench()
    generation = bench.dispatcher.open("q", [lm.spec()])
    await lm.settle()
    bench.dispatcher.update(msgspec.structs.replace(bench.dispatcher.route, state=State.DRAINING))
    with pytest.raises(Unavailable, match="DRAINING"):
        bench.dispatcher.open("q", [lm.spec()])
    draining = asyncio.create_task(drain(lambda: bench.dispatcher.under_way(None), 10, LATE))
    bench.replica.say(lm.event(0, 0, [1]))
    await generation.news()
    assert not draining.done()
    bench.replica.say(lm.event(0, 1, [2], finish="stop"))
    # Its reader may be slow: that takes no replica.
    assert await draining == Drained(1, 0)
    assert await generation.news()
    assert await generation.news() == []


async def test_a_stream_of_tokens_that_takes_too_long_ends_with_the_error_behind_its_tokens() -> None:
    bench = lm.Bench()
    generation = bench.dispatcher.open("q", [lm.spec()])
    await lm.settle()
    bench.replica.say(lm.event(0, 0, [1]))
    await generation.news()
    assert await drain(lambda: bench.dispatcher.under_way(None), 0.01, LATE) == Drained(0, 1)
    with pytest.raises(Unavailable, match="it took too long"):
        await generation.news()


async def test_a_language_models_retiring_replica_keeps_its_streams_and_gets_no_other() -> None:
    bench = lm.Bench("a", "b")
    dispatcher: LmDispatcher = bench.dispatcher
    a, b = bench.replicas.values()
    on_a = dispatcher.open("one", [lm.spec()])
    await lm.settle()
    old, new = dispatcher.route.replicas
    dispatcher.update(msgspec.structs.replace(dispatcher.route, replicas=(new,), retiring=(old,)))
    dispatcher.open("two", [lm.spec()])
    dispatcher.open("three", [lm.spec()])
    await lm.settle()
    assert (len(a.submits), len(b.submits)) == (1, 2)
    draining = asyncio.create_task(drain(lambda: dispatcher.under_way(["a"]), 10, LATE))
    await lm.settle()
    assert not draining.done()
    a.say(lm.event(0, 0, [1], finish="stop"))
    assert await draining == Drained(1, 0)
    assert await on_a.news()


# Models


async def test_a_model_that_the_worker_does_not_know_has_nothing_in_flight() -> None:
    assert await Models().drain(Drain(1, "m", 10)) == Drained()
