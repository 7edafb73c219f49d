"""A reload that allows smaller batches than before, while rows wait that were cut for larger ones."""

from __future__ import annotations

import msgspec
import numpy as np

from app.routing import ReplicaRoute
from tests.app.test_dispatch import NUMBERS, Bench, run, settle


def test_rows_that_wait_are_cut_for_the_batches_of_the_new_replicas() -> None:
    async def scenario() -> None:
        bench = Bench(max_in_flight=1)
        first = bench.send(1, 2)
        await settle()
        waiting = [bench.send(10, 11, 12, 13), bench.send(20, 21, 22, 23, 24, 25), bench.send(30)]
        await settle()
        assert [call.rows for call in bench.calls] == [2]
        route = msgspec.structs.replace(
            bench.route,
            signature=msgspec.structs.replace(NUMBERS, max_batch_size=3),
            replicas=(ReplicaRoute("m-9", "", ""),),
            retiring=bench.route.replicas,
        )
        bench.dispatcher.update(route)
        assert bench.dispatcher.queued_rows == 4 + 6 + 1
        replica = bench.replicas["m-9"]
        answered = 0
        while not all(task.done() for task in waiting):
            await settle()
            for call in replica.calls[answered:]:
                assert call.rows <= 3
                call.answer()
            answered = len(replica.calls)
        for task, values in zip(waiting, ([10, 11, 12, 13], [20, 21, 22, 23, 24, 25], [30]), strict=True):
            y = task.result()["y"]
            assert y.shape == (len(values), 1)
            assert np.frombuffer(y.data, np.float32).tolist() == [2.0 * value for value in values]
        bench.calls[0].answer()
        assert (await first)["y"].shape == (2, 1)
        assert bench.dispatcher.queued_rows == 0

    run(scenario)


def test_a_request_of_which_a_part_is_under_way_is_put_together_again() -> None:
    async def scenario() -> None:
        bench = Bench(max_in_flight=1)
        task = bench.send(1, 2, 3, 4, 5, 6, 7, 8, 9)  # 4, 4 and 1
        await settle()
        assert [call.values for call in bench.calls] == [[1, 2, 3, 4]]
        route = msgspec.structs.replace(bench.route, signature=msgspec.structs.replace(NUMBERS, max_batch_size=2))
        bench.dispatcher.update(route)
        answered = 0
        while not task.done():
            for call in bench.calls[answered:]:
                call.answer()
            answered = len(bench.calls)
            await settle()
        assert all(call.rows <= 2 for call in bench.calls[1:])
        assert np.frombuffer(task.result()["y"].data, np.float32).tolist() == [2.0 * value for value in range(1, 10)]

    run(scenario)
