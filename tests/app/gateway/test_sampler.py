"""What a gateway worker tells of its load, and which replica gets a call where replicas have several instances."""

from __future__ import annotations

import asyncio

import msgspec

from headwater_server.control.load import DeploymentLoad, LoadReport
from headwater_server.control.routing import ReplicaRoute, RoutingTable
from headwater_server.gateway.models import Models
from headwater_server.gateway.sampler import LoadSampler
from tests.app.dispatch.stand_in import Bench, Replica, settle


async def calls(bench: Bench, count: int) -> None:
    """So many calls have been made, and no more."""
    await settle()
    assert len(bench.calls) == count


def of(
    bench: Bench, least: int = 1, most: int = 3, *, for_metrics: bool = False
) -> tuple[LoadSampler, list[LoadReport]]:
    """A sampler of a worker with one deployment, the bench's."""
    sent: list[LoadReport] = []
    models = Models(connect=lambda name, route: Replica())
    route = msgspec.structs.replace(bench.route, least=least, most=most)
    models.update(RoutingTable((route,)))
    bench.dispatcher.update(route)
    models.get("m").dispatcher = bench.dispatcher
    return LoadSampler(models, sent.append, for_metrics=for_metrics), sent


async def test_it_tells_of_calls_requests_and_waiting_rows() -> None:
    bench = Bench(max_in_flight=1)
    sampler, sent = of(bench)
    sampler.sample()
    asks = [bench.send(1.0)]
    await calls(bench, 1)
    asks += [bench.send(2.0), bench.send(3.0, 4.0)]
    await settle()
    sampler.sample()
    sampler.report()
    ((load,),) = [report.deployments for report in sent]
    # Half of the two moments it computed; three requests were there at once, and three rows still wait.
    assert (load.name, load.waiting, load.computing, load.requests) == ("m", 3, 0.5, 3)
    assert load.wait_s >= 0
    bench.calls[0].answer()
    await calls(bench, 2)
    bench.calls[1].answer()
    await asyncio.gather(*asks)
    sampler.sample()
    sampler.report()
    assert sent[1].deployments == [DeploymentLoad("m", 0, 0.0, 0.0, 0)]


async def test_the_longest_wait_between_two_reports_is_told() -> None:
    bench = Bench(max_in_flight=1)
    sampler, sent = of(bench)
    first = bench.send(1.0)
    await calls(bench, 1)
    second = bench.send(2.0)
    await asyncio.sleep(0)
    began_s = asyncio.get_running_loop().time()
    while asyncio.get_running_loop().time() < began_s + 0.02:
        sampler.sample()
        await asyncio.sleep(0)
    sampler.sample()
    bench.calls[0].answer()
    await calls(bench, 2)
    bench.calls[1].answer()
    await asyncio.gather(first, second)
    sampler.sample()
    sampler.report()
    assert sent[0].deployments[0].wait_s >= 0.015


async def test_a_deployment_that_does_not_scale_is_told_of_for_metrics_only() -> None:
    sampler, sent = of(Bench(), least=2, most=2)
    sampler.sample()
    sampler.report()
    assert sent == []
    sampler, sent = of(Bench(), least=2, most=2, for_metrics=True)
    sampler.sample()
    sampler.report()
    assert sent == [LoadReport([DeploymentLoad("m", 0, 0.0, 0.0, 0)])]


async def test_a_replica_with_an_idle_instance_gets_a_call_at_once() -> None:
    bench = Bench(max_in_flight=3, instances=2)
    asks = [bench.send(1.0)]
    await calls(bench, 1)
    asks.append(bench.send(2.0))
    await calls(bench, 2)
    asks += [bench.send(3.0), bench.send(4.0)]  # both compute: these wait for company
    await settle()
    assert bench.dispatcher.moment().waiting == 2
    assert len(bench.calls) == 2
    bench.calls[0].answer()
    await calls(bench, 3)
    assert bench.calls[2].rows == 2
    for call in bench.calls[1:]:
        call.answer()
    await asyncio.gather(*asks)


async def test_an_idle_instance_comes_before_a_replica_with_fewer_rows() -> None:
    bench = Bench(replicas=2, max_in_flight=3, instances=2)
    asks = [bench.send(1.0, 2.0, 3.0)]
    await calls(bench, 1)
    first = next(id for id, replica in bench.replicas.items() if replica.calls)
    (other,) = set(bench.replicas) - {first}
    for value in (4.0, 5.0):  # the other has fewer rows, until both of its instances compute
        asks.append(bench.send(value))
        await calls(bench, len(asks))
    assert len(bench.replicas[other].calls) == 2
    asks.append(bench.send(6.0))
    await calls(bench, 4)
    assert len(bench.replicas[first].calls) == 2
    for call in bench.calls:
        call.answer()
    await asyncio.gather(*asks)


async def test_calls_of_a_replica_that_leaves_still_count() -> None:
    bench = Bench(replicas=2)
    ask = bench.send(1.0)
    await calls(bench, 1)
    busy = next(id for id, replica in bench.replicas.items() if replica.calls)
    stays = tuple(one for one in bench.route.replicas if one.id != busy)
    leaves: tuple[ReplicaRoute, ...] = tuple(one for one in bench.route.replicas if one.id == busy)
    bench.dispatcher.update(msgspec.structs.replace(bench.route, replicas=stays, retiring=leaves))
    assert bench.dispatcher.moment()[:2] == (1, 1)
    bench.calls[0].answer()
    await ask
    assert bench.dispatcher.moment()[:2] == (0, 0)
