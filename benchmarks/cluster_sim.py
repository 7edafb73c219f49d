"""The dispatchers of many workers with 1,000 replicas, on a simulated clock: balance, and what it costs a worker.

``python -m benchmarks.cluster_sim [--replicas N] [--workers N] [--seconds S] [--loads L,...] [--smoke]``. The workers'
dispatchers are the real ones; their replicas are stand-ins that work as a Triton does, on the same simulated clock:
what waits is merged, and takes 6 ms and 0.5 ms a row. Requests of one row arrive at random at each worker. A replica's
load is a fraction of what it can compute one row at a time. In each run workers choose replicas in another way:

- all, own rows: the one with the fewest rows of the worker's own, the first of several, as it was once;
- random: any that may have another call;
- two, own rows: as now, but replicas report no rows;
- as it is: answers report the rows that Triton merged;
- exact reports: answers report the rows that wait in Triton, too, as what stands before a Triton could.

Prints for each the 99th percentile over the mean of the rows that replicas have, and the most calls that one had; the
time from a request to its answer; how long a choice takes by the number of replicas; how long a worker's look at its
load takes, and a cancel by a request's id; the size of a change in the routing table, and how long a worker takes to
take it in.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import selectors
import statistics
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, cast
from unittest import mock

import msgspec

from benchmarks.smoke import parse_with_smoke
from headwater.signature import Signature, TensorSpec
from headwater.wire.lm import Load, Open, StepFrame, decode_message, encode
from headwater.wire.report import REPORT, RowReport, Status, encode_reports
from headwater_server.codecs.tensors import InferRequest, OutputWish, RawTensor
from headwater_server.control.messages import DOWNWARD, encode_line
from headwater_server.control.route_kinds import LanguageKind
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, RoutingTable, State
from headwater_server.control.table_change import TableChange
from headwater_server.dispatch.choice import Choice
from headwater_server.dispatch.dispatcher import ModelDispatcher
from headwater_server.dispatch.pool import ReplicaCalls
from headwater_server.gateway.models import Models
from headwater_server.lm.language_model import LmDispatcher
from headwater_server.lm.sequence import SequenceSpec
from headwater_server.transport.replica_protocol import FrameRequest
from headwater_server.transport.segments import RemoteSegment

ROW: Final = bytes(64)
SIGNATURE: Final = Signature(
    name="m",
    inputs=(TensorSpec("x", "FP32", (16,)),),
    outputs=(TensorSpec("y", "FP32", (16,)),),
    max_batch_size=8,
)
CALL_S: Final = 0.006
ROW_S: Final = 0.0005
WAY_S: Final = 0.0003
"""From a worker to a replica, and back."""
WARM_S: Final = 0.3
SAMPLE_S: Final = 0.01
CHOICES: Final = 20_000
REPEATS: Final = 30
ROUNDS: Final = 7
REQUESTS: Final = 2000


class Waiting(selectors.DefaultSelector):
    """Waits in no time: the clock jumps instead."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing is left to wait for: a request is never answered")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while nothing is to be done."""

    def __init__(self) -> None:
        self._clock = Waiting()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


class StandIn:
    """A replica with its Triton, for all workers.

    Args:
        reported: of (rows merged, rows that wait behind them), what an answer reports.
    """

    def __init__(self, reported: Callable[[int, int], int]) -> None:
        self.rows = 0
        """Those that workers wait for."""
        self.calls = 0
        self.most_calls = 0
        self._reported = reported
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[int, asyncio.Future[dict[str, RawTensor]]]] = deque()
        self._is_busy = False

    async def infer(
        self, head: bytes, data: Sequence[bytes | memoryview], segment: RemoteSegment | None = None
    ) -> dict[str, RawTensor]:
        """A `ReplicaClient`'s."""
        rows = sum(map(len, data)) // len(ROW)
        answer = self._loop.create_future()
        self.rows += rows
        self.calls += 1
        self.most_calls = max(self.most_calls, self.calls)
        self._loop.call_later(WAY_S, self._take, rows, answer)
        try:
            found: dict[str, RawTensor] = await answer
            return found
        finally:
            self.rows -= rows
            self.calls -= 1

    def close(self) -> None:
        """A `ReplicaClient`'s."""

    def _take(self, rows: int, answer: asyncio.Future[dict[str, RawTensor]]) -> None:
        self._waiting.append((rows, answer))
        if not self._is_busy:
            self._compute()

    def _compute(self) -> None:
        batch, rows = [], 0
        while self._waiting and rows + self._waiting[0][0] <= SIGNATURE.max_batch_size:
            batch.append(self._waiting.popleft())
            rows += batch[-1][0]
        self._is_busy = True
        self._loop.call_later(CALL_S + ROW_S * rows, self._answer, batch, rows)

    def _answer(self, batch: list[tuple[int, asyncio.Future[dict[str, RawTensor]]]], rows: int) -> None:
        held = self._reported(rows, sum(one for one, _ in self._waiting))
        for one, answer in batch:
            report = encode_reports([RowReport(Status.OK)] * one, 1, held_rows=held)
            tensors = {
                "y": RawTensor("FP32", (one, 16), ROW * one),
                REPORT: RawTensor("UINT8", report.shape, report.tobytes()),
            }
            self._loop.call_later(WAY_S, _set, answer, tensors)
        self._is_busy = False
        if self._waiting:
            self._compute()


def _set(answer: asyncio.Future[dict[str, RawTensor]], tensors: dict[str, RawTensor]) -> None:
    if not answer.done():
        answer.set_result(tensors)


class OfAll(Choice):
    """Looks at all replicas: the fewest rows of the worker's own, the first of several."""

    def note(self, replica: ReplicaCalls) -> None:
        """Nothing depends on it."""

    def best(self, without: ReplicaCalls | None = None) -> ReplicaCalls | None:
        found: ReplicaCalls | None = None
        for one in self._replicas.values():
            if (
                one.calls < self._max_in_flight
                and not one.is_lost
                and not one.is_retiring
                and one is not without
                and (found is None or (one.calls >= self._instances, one.rows) < (found.calls > 0, found.rows))
            ):
                found = one
        return found


class OfAny(OfAll):
    """Draws any replica that may have another call, all being eligible."""

    def best(self, without: ReplicaCalls | None = None) -> ReplicaCalls | None:
        members = self.__dict__.setdefault("_members", list(self._replicas.values()))
        for _ in range(100):
            one: ReplicaCalls = members[int(self._chance() * len(members))]
            if one.calls < self._max_in_flight:
                return one
        return None


class Way(NamedTuple):
    """How workers choose."""

    name: str
    choice: type[Choice]
    reported: Callable[[int, int], int]


WAYS: Final = (
    Way("all, own rows", OfAll, lambda merged, waiting: 0),
    Way("random", OfAny, lambda merged, waiting: 0),
    Way("two, own rows", Choice, lambda merged, waiting: 0),
    Way("as it is", Choice, lambda merged, waiting: merged),
    Way("exact reports", Choice, lambda merged, waiting: 1 + waiting if waiting else 0),
)


class Found(NamedTuple):
    """What came of one run."""

    imbalance: float
    """The 99th percentile of the rows that replicas have, over their mean: the mean of all samples."""
    most_calls: int
    seconds: list[float]
    """From each request to its answer, sorted."""


def request() -> InferRequest:
    """A request of one row."""
    return InferRequest("", {"x": RawTensor("FP32", (1, 16), ROW)}, 1, [OutputWish("y", True)], {}, {})


def routes(count: int) -> tuple[ReplicaRoute, ...]:
    """So many replicas."""
    folder = "/tmp/headwater-1000/20261122-101112-4711/m-{0}"
    return tuple(
        ReplicaRoute(f"m-{number}", folder.format(number) + "/h", f"{number:032x}", facts={"device": "cuda:0"})
        for number in range(1, count + 1)
    )


def route(replicas: tuple[ReplicaRoute, ...], max_in_flight: int) -> DeploymentRoute:
    """Their deployment."""
    return DeploymentRoute("m", State.READY, signature=SIGNATURE, replicas=replicas, max_in_flight=max_in_flight)


async def balance(way: Way, replicas: int, workers: int, load: float, seconds: float) -> Found:
    """Have workers send requests, and look at the replicas' rows meanwhile."""
    loop = asyncio.get_running_loop()
    chance = random.Random(0)
    random.seed(0)  # the choices'
    found = {one.id: StandIn(way.reported) for one in routes(replicas)}
    state = route(routes(replicas), -(-2 // workers))
    with mock.patch("headwater_server.dispatch.policy.Choice", way.choice):
        dispatchers = [ModelDispatcher(state, lambda name, one: found[one.id]) for _ in range(workers)]
    took_s: list[float] = []
    samples: list[float] = []
    tasks: set[asyncio.Task[None]] = set()

    async def ask(dispatcher: ModelDispatcher) -> None:
        began_s = loop.time()
        await dispatcher.infer(request())
        if began_s >= WARM_S:
            took_s.append(loop.time() - began_s)

    async def send(dispatcher: ModelDispatcher) -> None:
        next_s = 0.0
        while next_s < WARM_S + seconds:
            next_s += chance.expovariate(load * replicas / (CALL_S + ROW_S) / workers)
            await asyncio.sleep(next_s - loop.time())
            task = asyncio.create_task(ask(dispatcher))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def look() -> None:
        await asyncio.sleep(WARM_S)
        while loop.time() < WARM_S + seconds:
            rows = sorted(one.rows for one in found.values())
            if rows[-1]:
                samples.append(rows[int(0.99 * len(rows))] / statistics.mean(rows))
            await asyncio.sleep(SAMPLE_S)

    await asyncio.gather(look(), *map(send, dispatchers))
    while tasks:
        await asyncio.wait(set(tasks))
    for dispatcher in dispatchers:
        dispatcher.close()
    return Found(statistics.mean(samples), max(one.most_calls for one in found.values()), sorted(took_s))


async def choice_us(kind: type[Choice], count: int) -> float:
    """The CPU time that one call costs for its choice, its begin and its end, if 70 % of the replicas have calls."""
    replicas: dict[str, ReplicaCalls] = {}
    choice = kind(replicas, random.Random(0).random)
    choice.bound(2, 1)
    for one in routes(count):
        replicas[one.id] = ReplicaCalls(one, cast(Any, None))
        choice.note(replicas[one.id])
    begun: deque[ReplicaCalls] = deque()
    spent_s = 0.0
    calls = CHOICES if kind is Choice else max(200, CHOICES // count)
    for _ in range(calls + int(0.7 * count)):
        is_filling = len(begun) < int(0.7 * count)
        began_s = time.perf_counter()
        best = choice.best()
        assert best is not None
        best.calls += 1
        best.rows += 1
        choice.note(best)
        begun.append(best)
        if not is_filling:
            ended = begun.popleft()
            ended.calls -= 1
            ended.rows -= 1
            choice.note(ended)
            spent_s += time.perf_counter() - began_s
    return spent_s / calls * 1e6


class AtOnce:
    """A replica that answers at once."""

    def __init__(self) -> None:
        report = encode_reports([RowReport(Status.OK)], 1)
        self._report = RawTensor("UINT8", report.shape, report.tobytes())

    async def infer(
        self, head: bytes, data: Sequence[bytes | memoryview], segment: RemoteSegment | None = None
    ) -> dict[str, RawTensor]:
        """A `ReplicaClient`'s."""
        return {"y": RawTensor("FP32", (1, 16), ROW), REPORT: self._report}

    def close(self) -> None:
        """A `ReplicaClient`'s."""


async def request_us(kind: type[Choice], count: int) -> float:
    """The CPU time of a request through a dispatcher whose replicas answer at once: the least of some rounds."""
    with mock.patch("headwater_server.dispatch.policy.Choice", kind):
        dispatcher = ModelDispatcher(route(routes(count), 2), lambda name, one: AtOnce())
    rounds_s = []
    for _ in range(ROUNDS):
        began_s = time.process_time()
        for _ in range(REQUESTS):
            await dispatcher.infer(request())
        rounds_s.append(time.process_time() - began_s)
    dispatcher.close()
    return min(rounds_s) / REQUESTS * 1e6


class Engine:
    """A replica of a language model, which never ends what it begins."""

    def open(self, nothing: FrameRequest, *, streams: bool = False) -> None:
        """A `FrameReplicaClient`'s."""

    async def frames(self, name: str, request: FrameRequest) -> AsyncGenerator[bytes, None]:
        """A `FrameReplicaClient`'s."""
        ((_, _, _, (raw,)),) = request.inputs
        if isinstance(decode_message(raw), Open):
            yield encode(StepFrame(0, [], Load(active=1)))
            await asyncio.Event().wait()

    def cancel(self, name: str) -> None:
        """A `FrameReplicaClient`'s."""

    def close(self) -> None:
        """A `FrameReplicaClient`'s."""


async def looks_us(count: int) -> tuple[float, float, float]:
    """The CPU time of a look at the load, without and with a language model, and of a cancel there: the least of some
    rounds. The replicas of the language model have three sequences each on average."""
    dispatcher = ModelDispatcher(route(routes(count), 2), lambda name, one: AtOnce())
    model = msgspec.structs.replace(route(routes(count), 2), kind=LanguageKind())
    language = LmDispatcher(model, lambda name, one: cast(Any, Engine()))
    for number in range(3 * count):
        language.open(str(number), [SequenceSpec([1], 1)])
    await asyncio.sleep(0.1)  # the engines confirm their channels
    whats: tuple[Callable[[], object], ...] = dispatcher.moment, language.moment, lambda: language.cancel("unknown")
    found = []
    for what in whats:
        rounds_s = []
        for _ in range(REPEATS):
            began_s = time.process_time()
            what()
            rounds_s.append(time.process_time() - began_s)
        found.append(min(rounds_s) * 1e6)
    dispatcher.close()
    language.close()
    return found[0], found[1], found[2]


class TakenIn(NamedTuple):
    """What a change in the table costs."""

    size_bytes: int
    took_us: float
    """From the line to the end of the dispatchers' updates: the median."""


async def change(count: int, *, is_whole: bool) -> TakenIn:
    """A worker takes in again and again that a replica ends and another one is ready."""
    models = Models(lambda name, one: StandIn(lambda merged, waiting: 0))
    state = routes(count + REPEATS)
    held = RoutingTable((route(state[:count], 1),), epoch=1)
    models.update(held)
    sizes, took_us = [], []
    for step in range(1, REPEATS):
        later = RoutingTable((route(state[step : count + step], 1),), epoch=1, version=step)
        line = encode_line(later if is_whole else TableChange.between(held, later))
        began_s = time.perf_counter()
        message = DOWNWARD.decode(line)
        held = message.applied(held) if isinstance(message, TableChange) else cast(RoutingTable, message)
        models.update(held)
        took_us.append((time.perf_counter() - began_s) * 1e6)
        sizes.append(len(line))
        if held != later:
            raise SystemExit("expected the table that was published, got another")
    models.close()
    return TakenIn(max(sizes), statistics.median(took_us))


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.2, help="of simulated time, after 0.3 to warm up")
    parser.add_argument("--loads", default="0.3,0.7,0.9")
    options = parse_with_smoke(parser, replicas=40, workers=4, seconds=0.05, loads="0.7")
    for load in map(float, options.loads.split(",")):
        print(f"load {load:g}, {options.replicas} replicas, {options.workers} workers")
        for way in WAYS:
            arguments = way, options.replicas, options.workers, load, options.seconds
            loop = SimulatedLoop()
            try:
                print(_line(way.name, loop.run_until_complete(balance(*arguments))), flush=True)
            finally:
                loop.close()
    for count in _counts(options.replicas):
        now, before = (asyncio.run(choice_us(kind, count)) for kind in (Choice, OfAll))
        whole, whole_before = (asyncio.run(request_us(kind, count)) for kind in (Choice, OfAll))
        print(
            f"{count} replicas: {now:.1f} us a call for the choice, {whole:.1f} us a request; all looked at: "
            f"{before:.1f} us, {whole_before:.1f} us"
        )
    tensors, language, cancel = asyncio.run(looks_us(options.replicas))
    print(
        f"a look at the load: {tensors:.0f} us, of a language model {language:.0f} us; a cancel there: {cancel:.0f} us"
    )
    table, part = (asyncio.run(change(options.replicas, is_whole=is_whole)) for is_whole in (True, False))
    print(f"whole table: {table.size_bytes:,} bytes, taken in within {table.took_us:,.0f} us")
    print(f"a change of one replica: {part.size_bytes:,} bytes, taken in within {part.took_us:,.0f} us")


def _line(name: str, found: Found) -> str:
    p50, p99 = (found.seconds[int(share * len(found.seconds))] * 1000 for share in (0.5, 0.99))
    return (
        f"  {name:<14} p99 / mean of rows {found.imbalance:.2f}; most calls of a replica {found.most_calls}; answers "
        f"p50 {p50:.1f} ms, p99 {p99:.1f} ms ({len(found.seconds)} requests)"
    )


def _counts(most: int) -> Iterable[int]:
    return sorted({count for count in (1, 8, 100, most) if count <= most})


if __name__ == "__main__":
    main()
