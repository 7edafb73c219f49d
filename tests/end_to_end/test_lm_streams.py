"""Many token streams at once: clients that leave or don't read, limits, cancels, engines and replicas that fail."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.end_to_end.conftest import language_model, logged
from tests.running import Running, leftovers, resident_bytes, segments_of, serve, wait_for
from tests.services.engines import AFTER
from tests.token_streams import (
    Stream,
    figures,
    is_idle,
    left_alone,
    open_stream,
    run,
    text_of,
    together,
    whole,
    worker_of,
)

PATH = "/v1/completions"
STREAMS = 64
LEAKS = 2000
FREED_WITHIN_S = 1.5
"""The goal is 300 ms on a machine that does nothing else; what was measured is printed."""


def streamed(model: str, **fields: Any) -> dict[str, Any]:
    """A request's body."""
    return {"model": model, "prompt": [1, 2, 3], "max_tokens": 10, "temperature": 0, "stream": True, **fields}


class TestClientsThatLeave:
    def test_the_engine_follows_and_the_others_go_on(self, lm: Running) -> None:
        chance = random.Random(0)
        prompts = [[300 + 10 * number, 400, 500 + number] for number in range(8)]
        bodies = [streamed("tiny", prompt=prompts[row % 8], max_tokens=150, ignore_eos=True) for row in range(STREAMS)]
        leavers = {row: chance.randrange(2, 50) for row in chance.sample(range(STREAMS), STREAMS // 2)}
        live = STREAMS
        left: list[tuple[float, int]] = []  # when, and how many were left
        samples: list[tuple[float, int]] = []

        async def one(row: int, all_begun: asyncio.Event) -> str:
            nonlocal live
            async with open_stream(lm, PATH, bodies[row]) as stream:
                assert stream.status == 200, stream.body
                await stream.read(1)
                begun.append(row)
                if len(begun) == STREAMS:
                    all_begun.set()
                await all_begun.wait()
                if row in leavers:
                    await stream.read(leavers[row])
                    stream.leave()
                    live -= 1
                    left.append((time.monotonic(), live))
                    return ""
                await stream.rest()
                live -= 1
                assert stream.error is None
                return text_of(stream.events)

        async def watch() -> None:
            while True:
                active = (await asyncio.to_thread(figures, lm, "tiny"))["sequences"]["active"]
                samples.append((time.monotonic(), active))

        async def all_of_them() -> list[str]:
            all_begun = asyncio.Event()
            watching = asyncio.create_task(watch())
            texts = await asyncio.gather(*[one(row, all_begun) for row in range(STREAMS)])
            wanted = len(samples) + 2
            while len(samples) < wanted:  # one that was asked for after the last event
                await asyncio.wait([watching], timeout=0.01)
            watching.cancel()
            return texts

        begun: list[int] = []
        with left_alone(lm, "tiny"):
            texts = run(all_of_them(), 120)
        lags = []
        for when, remaining in left:
            lags.append(next(sampled for sampled, active in samples if sampled > when and active <= remaining) - when)
        print(f"a place is free after {sorted(lags)[len(lags) // 2] * 1e3:.0f} ms, at most {max(lags) * 1e3:.0f} ms")
        assert len(lags) == STREAMS // 2
        assert max(lags) < FREED_WITHIN_S
        alone = [text_of(run(whole(lm, body)).events) for body in bodies[:8]]
        assert all(texts[row] == ("" if row in leavers else alone[row % 8]) for row in range(STREAMS))

    def test_nothing_is_left_of_2000_streams(self, lm: Running) -> None:
        chance = random.Random(1)

        async def one(number: int) -> None:
            async with open_stream(lm, PATH, streamed("null", max_tokens=90_000 if number % 3 == 0 else 30)) as stream:
                assert stream.status == 200, stream.body
                if number % 3:
                    await stream.rest()
                    assert (stream.error, stream.is_done) == (None, True)
                elif number % 2:
                    await stream.read(chance.randrange(1, 4))

        def some(count: int) -> None:
            run(together([one(number) for number in range(count)]), 120)

        def held() -> tuple[int, int, int]:
            pids = [*lm.workers(), lm.replica_pid("null")]
            descriptors = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
            threads = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids)
            return descriptors, threads, sum(map(resident_bytes, pids))

        with left_alone(lm, "null"):
            some(200)
        before = held()
        with left_alone(lm, "null"):
            some(LEAKS)
        wait_for(lambda: held()[0] <= before[0] + 8, 60, "the connections to be gone")
        after = held()
        print(f"worker and replica grew by {(after[2] - before[2]) / 1e6:.1f} MB over {LEAKS} streams")
        assert after[1] <= before[1] + 4
        assert after[2] - before[2] < 32_000_000

    def test_a_whole_answer_whose_client_leaves(self, lm: Running) -> None:
        async def leave() -> None:
            body = {**streamed("slow", max_tokens=500), "stream": False}
            asking = asyncio.create_task(open_stream(lm, PATH, body).__aenter__())
            while not (await asyncio.to_thread(figures, lm, "slow"))["sequences"]["active"]:
                pass
            asking.cancel()

        with left_alone(lm, "slow"):
            run(leave())

    def test_one_that_reads_nothing_is_cut_off(self, lm: Running) -> None:
        """16 sequences as fast as they come: more than the system's buffers take."""

        async def stall() -> None:
            body = streamed("null", n=16, max_tokens=90_000)
            async with open_stream(lm, PATH, body, request_id="no-reader") as stream:
                await stream.read(1)
                stream.pause()
                before = resident_bytes(worker)
                beside = await whole(lm, streamed("null", max_tokens=200))
                assert (beside.error, beside.is_done) == (None, True)
                line = await asyncio.to_thread(logged, lm, "no-reader")
                assert line["status"] == 499
                assert resident_bytes(worker) - before < 64_000_000

        (worker,) = lm.workers()
        with left_alone(lm, "null"):
            run(stall())


class TestLimits:
    def test_more_than_may_wait_are_refused(self, lm: Running) -> None:
        """Two run, one waits."""

        async def crowd() -> None:
            body = streamed("slow", max_tokens=900)
            async with open_stream(lm, PATH, body), open_stream(lm, PATH, body), open_stream(lm, PATH, body) as third:
                for stream in (False, True):
                    async with open_stream(lm, PATH, {**body, "stream": stream}) as refused:
                        assert refused.status == 429
                        assert int(refused.headers["retry-after"]) >= 1
                        error = json.loads(refused.body)["error"]
                        assert error["type"] == "rate_limit_error"
                found = await asyncio.to_thread(figures, lm, "slow")
                assert (found["sequences"], found["shed"] - before) == ({"active": 2, "waiting": 1}, 2)
                third.leave()

        with left_alone(lm, "slow"):
            before = figures(lm, "slow")["shed"]
            run(crowd())
        assert run(whole(lm, streamed("slow", max_tokens=3))).is_done

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("model", "fields", "said"),
        [
            ("tiny", {"prompt": [5] * 600}, "512"),
            ("tiny", {"prompt": [5] * 500, "max_tokens": 100}, "512"),
            ("slow", {"prompt": [5] * 1000}, "1000"),
            ("slow", {"prompt": "import os\n" * 2000}, "1000"),
            ("tiny", {"prompt": [4096]}, "4095"),
            ("tiny", {"prompt": []}, "prompt"),
        ],
    )
    def test_what_never_fits_is_refused_at_once(
        self, lm: Running, model: str, fields: dict[str, Any], said: str, stream: bool
    ) -> None:
        async def ask() -> Stream:
            async with open_stream(lm, PATH, {**streamed(model, **fields), "stream": stream}) as answer:
                return answer

        answer = run(ask())
        assert answer.status == 400, answer.body
        assert said in json.loads(answer.body)["error"]["message"]
        assert is_idle(lm, model)

    def test_a_deadline_of_one_that_waits(self, lm: Running) -> None:
        async def crowd() -> tuple[Stream, int]:
            body = streamed("slow", max_tokens=900)
            async with open_stream(lm, PATH, body), open_stream(lm, PATH, body):
                late = await whole(lm, streamed("slow", timeout_s=0.5))
                async with open_stream(lm, PATH, {**streamed("slow", timeout_s=0.5), "stream": False}) as answer:
                    return late, answer.status

        with left_alone(lm, "slow"):
            late, status = run(crowd())
        assert late.status == 200  # it was told that it waits
        assert late.error is not None
        assert late.is_done
        assert "0.5 s" in late.error["message"]
        assert status == 504

    def test_the_deployments_bound_is_on_silence_and_not_on_length(self, lm: Running) -> None:
        async def ask() -> tuple[list[Stream], int]:
            long = streamed("slow", max_tokens=120)  # takes 6 s; `timeout_s` is 3
            running = [asyncio.create_task(whole(lm, long)) for _ in range(2)]
            while (await asyncio.to_thread(figures, lm, "slow"))["sequences"]["active"] < 2:
                pass
            async with open_stream(lm, PATH, {**streamed("slow"), "stream": False}) as waiting:
                return await asyncio.gather(*running), waiting.status

        streams, status = run(ask())
        assert {(stream.error is None, stream.is_done) for stream in streams} == {(True, True)}
        assert status == 504


class TestCancelling:
    @staticmethod
    def cancel(running: Running, request_id: str) -> Any:
        return running.client.post(f"{running.url}/v2/requests/{request_id}/cancel")

    def test_a_stream(self, lm: Running) -> None:
        async def ask() -> Stream:
            async with open_stream(lm, PATH, streamed("slow", max_tokens=900), request_id="c-1") as stream:
                await stream.read(2)
                answer = await asyncio.to_thread(self.cancel, lm, "c-1")
                assert answer.json() == {"request_id": "c-1", "cancelled": 1}
                return await stream.rest()

        with left_alone(lm, "slow"):
            stream = run(ask())
        assert stream.error is not None
        assert "cancelled" in stream.error["message"]
        assert stream.is_done

    def test_all_of_a_requests_sequences(self, lm: Running) -> None:
        async def ask() -> Stream:
            body = streamed("slow", max_tokens=900, n=2, temperature=1)
            async with open_stream(lm, PATH, body, request_id="c-2") as stream:
                await stream.read(4)
                answer = await asyncio.to_thread(self.cancel, lm, "c-2")
                assert answer.json()["cancelled"] == 2
                return await stream.rest()

        with left_alone(lm, "slow"):
            assert run(ask()).error is not None

    def test_a_whole_answer(self, lm: Running) -> None:
        async def ask() -> Stream:
            body = {**streamed("slow", max_tokens=900), "stream": False}

            async def asking() -> Stream:
                async with open_stream(lm, PATH, body, request_id="c-3") as answer:
                    return answer

            waiting = asyncio.create_task(asking())
            while (await asyncio.to_thread(self.cancel, lm, "c-3")).status_code == 404:
                pass
            return await waiting

        with left_alone(lm, "slow"):
            assert run(ask()).status == 409

    def test_one_that_is_not_there(self, lm: Running) -> None:
        answer = self.cancel(lm, "nobodys")
        assert answer.status_code == 404
        assert "nobodys" in answer.json()["error"]


@pytest.mark.parametrize("first", [11, 12, 13], ids=["repeat", "skip", "history"])
class TestAnEngineThatBreaksItsContract:
    def test_its_stream_ends_with_an_error_and_neighbours_complete(self, lm: Running, first: int) -> None:
        bad = streamed("faulty", prompt=[first, 1], max_tokens=40, n=1)
        good = streamed("faulty", prompt=[1, 2], max_tokens=40)

        async def ask() -> tuple[list[Stream], list[Stream]]:
            asks = [whole(lm, bad if number % 4 == 0 else good) for number in range(16)]
            streams = await together(asks)
            return streams[::4], [stream for number, stream in enumerate(streams) if number % 4]

        with left_alone(lm, "faulty"):
            before = figures(lm, "faulty")["contract_violations"]
            broken, healthy = run(ask())
            assert figures(lm, "faulty")["contract_violations"] - before == len(broken) == 4
        (whole_text,) = {text_of(stream.events) for stream in healthy}
        assert {(stream.error is None, stream.is_done) for stream in healthy} == {(True, True)}
        assert whole_text == text_of(run(whole(lm, good)).events)
        # What came before the fault is right, and nothing that came after it was told.
        right = text_of(run(whole(lm, {**good, "max_tokens": AFTER + 1})).events)
        for stream in broken:
            if stream.status == 200:
                error = stream.error
                assert stream.is_done
            else:  # the fault was there before the first event was sent
                assert (stream.status, stream.events) == (500, [])
                error = json.loads(stream.body)["error"]
            assert error is not None
            assert "expected" in error["message"]
            assert right.startswith(text_of(stream.events))

    def test_a_whole_answer_is_a_500(self, lm: Running, first: int) -> None:
        body = {"model": "faulty", "prompt": [first, 1], "max_tokens": 40}
        answer = lm.client.post(f"{lm.url}{PATH}", json=body)
        assert answer.status_code == 500
        assert "expected" in answer.json()["error"]["message"]


def test_an_engine_that_raises_ends_what_it_has_and_goes_on(lm: Running) -> None:
    bodies = [streamed("faulty", prompt=[first, 1], max_tokens=40) for first in (1, 1, 1, 15)]
    with left_alone(lm, "faulty"):
        streams = run(together([whole(lm, body) for body in bodies]))
        for stream in streams:
            assert stream.is_done
            assert stream.error is not None
            assert "a deliberate fault" in stream.error["message"]
            assert "Traceback" not in stream.error["message"]
    assert run(whole(lm, bodies[0])).error is None


def test_streams_at_sigterm_are_finished_or_ended() -> None:
    config = {"deployments": {"slow": language_model("null", step_s=0.05)}, "server": {"shutdown_timeout_s": 4}}
    with serve(config) as running:

        async def ask() -> tuple[Stream, Stream, Stream]:
            short, long = streamed("slow", max_tokens=40), streamed("slow", max_tokens=900)
            async with open_stream(running, PATH, short) as one, open_stream(running, PATH, long) as two:
                await asyncio.gather(one.read(1), two.read(1))
                running.popen.send_signal(signal.SIGTERM)
                await asyncio.to_thread(
                    wait_for, lambda: running.get("/v2/health/ready").status_code == 503, 2, "not to be ready"
                )
                late = await whole(running, short)
                await asyncio.gather(one.rest(), two.rest())
                return one, two, late

        one, two, late = run(ask())
        assert running.popen.wait(30) == 0
    assert (one.error, one.is_done, one.events[-1]["choices"][0]["finish_reason"]) == (None, True, "length")
    assert two.error is not None
    assert two.is_done
    assert late.status == 503


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Running]:
    """Two gateway workers, and an engine of 20 tokens a second."""
    config = {
        "deployments": {"slow": language_model("null", step_s=0.05, max_sequences=8)},
        "server": {"workers": 2},
    }
    with serve(config) as running:
        yield running
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


class TestTwoWorkers:
    def test_a_cancel_by_id_reaches_the_request_wherever_it_runs(self, two_workers: Running) -> None:
        had_streams = set()

        async def ask(name: str) -> Stream:
            async with open_stream(two_workers, PATH, streamed("slow", max_tokens=900), request_id=name) as stream:
                await stream.read(1)
                had_streams.add(worker_of(two_workers, stream.port))
                answer = await asyncio.to_thread(TestCancelling.cancel, two_workers, name)
                assert answer.json() == {"request_id": name, "cancelled": 1}
                return await stream.rest()

        # Who takes a connection is the system's choice: ask until both workers had streams. That a cancel then met
        # another one than its stream is all but sure.
        for round_ in range(30):
            streams = run(together([ask(f"w-{round_}-{number}") for number in range(15)], 8))
            assert all(stream.error is not None and stream.is_done for stream in streams)
            if len(had_streams - {None}) == 2:
                return
        raise AssertionError(f"expected both workers to have had streams, got {had_streams}")

    def test_a_worker_that_is_killed_takes_its_sequences_with_it(self, two_workers: Running) -> None:
        async def ask() -> None:
            body = streamed("slow", max_tokens=900)
            async with open_stream(two_workers, PATH, body) as one, open_stream(two_workers, PATH, body) as two:
                await asyncio.gather(one.read(1), two.read(1))
                for worker in two_workers.workers():
                    os.kill(worker, signal.SIGKILL)
                wait_for(lambda: len(two_workers.workers()) == 2 and two_workers.is_ready(), 30, "new workers")

        async def ask_again() -> None:
            async with open_stream(two_workers, PATH, streamed("slow", max_tokens=900)) as stream:
                await stream.read(1)
                await asyncio.to_thread(wait_for, only_this_one, 20, "the lost sequences to be ended")

        def only_this_one() -> bool:
            # The worker that has the stream knows how busy the engine is.
            told = {int(figures(two_workers, "slow")["sequences"]["active"]) for _ in range(8)}
            return max(told) == 1

        run(ask())
        run(ask_again())

    def test_a_replica_that_is_killed_ends_its_streams_and_another_one_comes(self, two_workers: Running) -> None:
        async def ask() -> Stream:
            async with open_stream(two_workers, PATH, streamed("slow", max_tokens=900)) as stream:
                await stream.read(2)
                os.kill(two_workers.replica_pid("slow"), signal.SIGKILL)
                return await stream.rest()

        def is_answered() -> bool:
            answer = run(whole(two_workers, streamed("slow", max_tokens=5)))
            assert answer.status in (200, 503)
            return answer.is_done

        stream = run(ask())
        assert stream.error is not None
        assert stream.error["type"] == "server_error"
        assert stream.error["code"] != "timeout", "the deadline has ended it, not the loss"
        assert stream.is_done
        refused = run(whole(two_workers, streamed("slow")))
        assert refused.status in (200, 503)
        wait_for(lambda: two_workers.is_ready("slow"), 180, "another replica")
        # Each worker learns of it by itself: after one has said ready, the other may still refuse.
        wait_for(is_answered, 20, "both workers to know of it")
