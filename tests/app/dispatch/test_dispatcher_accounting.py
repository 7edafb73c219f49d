"""Whatever happens to requests, each ends once, and then nothing is counted as there any more."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater_server.control.routing import ReplicaRoute
from headwater_server.dispatch.admission import QueueBudget
from headwater_server.errors import HeadwaterError, ReplicaLost, ReplicaUnreachable
from tests.app.dispatch.stand_in import NUMBERS, Bench, Call, numbers, settle
from tests.app.dispatch.test_queue import held
from tests.counted import count_from_zero, requests_of

EVENTS = ("send", "send", "answer", "answer", "leave", "lose", "miss", "raise", "come", "retire", "smaller", "larger")


class Deployment:
    """A bench to which everything happens.

    Args:
        budget: shared with another.
        chance: says to which request, call or replica.
    """

    def __init__(self, budget: QueueBudget, chance: Any) -> None:
        self.bench = Bench(budget=budget, replicas=2, max_in_flight=2, max_queue_size=12)
        self.sent: list[tuple[asyncio.Task[Any], list[float]]] = []
        self._chance = chance
        self._replicas = dict.fromkeys(self.bench.replicas, False)
        """Whether it retires."""
        self._size = NUMBERS.max_batch_size
        self._names = iter(range(2, 1000))
        self._values = iter(range(100_000))

    @property
    def calls(self) -> list[tuple[str, Call]]:
        """Those under way."""
        replicas = self.bench.replicas
        return [(id, call) for id in self._replicas for call in replicas[id].calls if not call.answered.done()]

    def happen(self, event: str) -> None:
        chance = self._chance
        if event == "send":
            values = [float(next(self._values)) for _ in range(chance.randint(1, 9))]
            self.sent.append((self.bench.send(*values, priority=chance.choice([0, 1, 10])), values))
        elif event == "leave" and self.sent:
            chance.choice(self.sent)[0].cancel()
        elif event == "come":
            self._replicas[f"m-{next(self._names)}"] = False
            self._update()
        elif event in ("smaller", "larger"):
            self._size = max(1, self._size + (1 if event == "larger" else -1))
            self._update()
        elif event == "retire" and self._replicas:
            self._replicas[chance.choice(list(self._replicas))] = True
            self._update()
        elif event == "lose" and self._replicas:
            self._lose(chance.choice(list(self._replicas)))
        elif self.calls:
            id, call = chance.choice(self.calls)
            self._end(id, call, event)

    def _end(self, id: str, call: Call, event: str) -> None:
        if event == "miss":
            call.answered.set_exception(ReplicaUnreachable("gone"))
            del self._replicas[id]
            asyncio.get_running_loop().call_soon(self._update)
        elif event == "raise":
            call.answered.set_exception(RuntimeError("a fault of the gateway's own"))
        else:
            call.answer()

    def _lose(self, id: str) -> None:
        for call in self.bench.replicas[id].calls:
            if not call.answered.done():
                call.answered.set_exception(ReplicaLost("gone"))
        del self._replicas[id]
        asyncio.get_running_loop().call_soon(self._update)

    def _update(self) -> None:
        self.bench.dispatcher.update(
            msgspec.structs.replace(
                self.bench.route,
                signature=msgspec.structs.replace(NUMBERS, max_batch_size=self._size),
                replicas=tuple(ReplicaRoute(id, "unix:", "") for id, is_old in self._replicas.items() if not is_old),
                retiring=tuple(ReplicaRoute(id, "unix:", "") for id, is_old in self._replicas.items() if is_old),
            )
        )

    def check(self) -> tuple[int, int, int]:
        """Everything is over. Returns how many requests were answered, have failed, or were left by their clients."""
        dispatcher = self.bench.dispatcher
        answered = failed = left = 0
        for task, values in self.sent:
            assert task.done()
            if task.cancelled():
                left += 1
            elif task.exception() is None:
                answered += 1
                assert numbers(task.result()) == [2 * value for value in values]
            else:
                assert isinstance(task.exception(), HeadwaterError)
                failed += 1
        assert (dispatcher.in_flight, dispatcher.queued_rows) == (0, 0)
        # private: what is kept of requests that have ended, and a replica that stays set aside, are in no count
        queue, retries, tasks = dispatcher._queue, dispatcher._retries, dispatcher._calls._tasks
        assert (held(queue), queue.held_bytes, bool(retries), tasks) == (0, 0, False, set())
        assert [one for one in self.bench.connected if one.calls or one.rows or one.batches] == []
        assert dispatcher.under_way(None) == []
        moment = dispatcher.moment()
        assert (moment.computing, moment.requests, moment.waiting) == (0, 0, 0)
        return answered, failed, left


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from(EVENTS), st.integers(0, 3)), max_size=60),
    st.booleans(),
    st.randoms(use_true_random=False),
)
async def test_at_the_end_every_request_has_ended_and_all_counters_are_zero(
    events: list[tuple[int, str, int]], is_closed: bool, chance: Any
) -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    count_from_zero()
    budget = QueueBudget(max_rows=16, max_bytes=80)
    deployments = [Deployment(budget, chance) for _ in range(2)]
    for which, event, turns in events:
        deployments[which].happen(event)
        for _ in range(turns):
            await asyncio.sleep(0)
    await settle()
    for one in deployments:
        if is_closed:
            one.bench.dispatcher.close()
        else:
            one.happen("come")
    await settle()
    while any(one.calls for one in deployments):
        for one in deployments:
            one.happen("answer")
        await settle()
    answered, failed, left = map(sum, zip(*[one.check() for one in deployments], strict=True))
    requests, _, _, failures = requests_of("m")
    # Who leaves as the answer comes has it counted; who comes while no replica is there has not.
    assert answered <= requests <= answered + left
    assert failures <= failed + left
    assert (budget.waiting.rows, budget.waiting.held_bytes) == (0, 0)
    assert told == []
