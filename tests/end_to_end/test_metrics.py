"""`/metrics` of a server with two workers: counts are exact, whoever dies, and a scrape waits for nobody."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families

from headwater_server.telemetry.catalogue import CATALOGUE, OUTCOMES
from tests.end_to_end.conftest import language_model
from tests.running import Running, in_background, leftovers, segments_of, serve, wait_for
from tests.token_streams import open_stream, run

DEPLOYMENTS: dict[str, Any] = {
    "faulty": {"model": "faulty:Faulty"},
    "slow": {"model": "faulty:Slow", "batching": {"max_in_flight": 2}},
    "null": language_model("null", step_s=0.02, max_sequences=32, context_length=2000),
}
CONFIG = {"deployments": DEPLOYMENTS, "server": {"workers": 2}}
ENDLESS = {"prompt": [1, 2, 3], "max_tokens": 1500, "stream": True, "model": "null"}
TRANSITION = re.compile(r'"message": ?"([^" ]+): ([A-Z]+) -> ([A-Z]+): ')


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serve(CONFIG) as running:
        yield running
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


class Scrape:
    """One answer of ``/metrics``."""

    def __init__(self, running: Running) -> None:
        response = running.get("/metrics")
        assert response.status_code == 200, response.text
        self.text = response.text
        self.families = {family.name: family for family in text_string_to_metric_families(response.text)}
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def of(self, name: str, **labels: str) -> float:
        """The sum over all series of that name with these labels."""
        wanted = set(labels.items())
        return sum(value for (one, pairs), value in self.values.items() if one == name and wanted <= set(pairs))

    def outcomes(self, **labels: str) -> dict[str, int]:
        """Requests that have ended."""
        found = {one: int(self.of("headwater_requests_total", outcome=one, **labels)) for one in OUTCOMES}
        return {outcome: count for outcome, count in found.items() if count}

    def in_flight(self, **labels: str) -> int:
        return int(self.of("headwater_requests_in_flight", **labels))

    def check(self) -> Scrape:
        """Accepted is the sum, for every deployment and route."""
        accepted = [key for key in self.values if key[0] == "headwater_requests_accepted_total"]
        for key in accepted:
            labels = dict(key[1])
            ended = sum(self.outcomes(**labels).values())
            assert self.values[key] == ended + self.in_flight(**labels), labels
        return self


def settled(running: Running, **labels: str) -> Scrape:
    """A scrape after everything has ended."""

    def idle() -> Scrape | None:
        scrape = Scrape(running).check()
        return scrape if not scrape.in_flight(**labels) else None

    found = wait_for(idle, 30, "nothing to be in flight")
    assert isinstance(found, Scrape)
    return found


def more(after: Scrape, before: Scrape, **labels: str) -> dict[str, int]:
    """Outcomes that came between two scrapes."""
    difference = collections.Counter(after.outcomes(**labels))
    difference.subtract(before.outcomes(**labels))
    return {outcome: count for outcome, count in difference.items() if count}


def test_every_count_is_what_was_sent(server: Running) -> None:
    before = settled(server)
    for _ in range(20):
        assert server.infer("faulty", [[3.0]], shape=[1, 1]).status_code == 200
    assert server.infer("faulty", [[3.0]] * 5, shape=[5, 1]).status_code == 200
    for value, status in ((-1.0, 500), (-1.0, 500), (-2.0, 400)):
        assert server.infer("faulty", [[value]], shape=[1, 1]).status_code == status
    assert server.infer("faulty", [["x"]], shape=[1, 1]).status_code == 400
    assert server.infer("nobody", [[1.0]], shape=[1, 1]).status_code == 404
    assert server.infer("slow", [[2.0]], shape=[1, 1], parameters={"timeout": 50_000}).status_code == 504

    async def tokens() -> None:
        async with open_stream(server, "/v1/completions", {**ENDLESS, "max_tokens": 5}) as stream:
            assert (await stream.rest()).is_done
        async with open_stream(server, "/v1/completions", ENDLESS) as stream:
            await stream.read(1)  # and leave
        async with open_stream(server, "/v2/models/null/generate", {"text_input": "x", "max_tokens": 2}) as stream:
            assert stream.status == 200

    run(tokens())
    after = settled(server)
    assert more(after, before, deployment="faulty", route="infer") == {"ok": 21, "failed": 2, "client_error": 2}
    assert more(after, before, deployment="slow", route="infer") == {"timeout": 1}
    assert more(after, before, deployment="null", route="completions") == {"ok": 1, "cancelled": 1}
    assert more(after, before, deployment="null", route="generate") == {"ok": 1}
    assert after.of("headwater_rows_total", deployment="faulty") == 25
    assert after.of("headwater_time_to_first_token_seconds_count", deployment="null") == 3
    assert after.of("headwater_generated_tokens_total", deployment="null") >= 8
    assert after.of("headwater_inter_token_seconds_count", deployment="null") >= 5
    for phase in ("queue", "batch_wait", "transport", "compute", "serialise"):
        count = after.of("headwater_request_phase_seconds_count", deployment="faulty", phase=phase)
        assert count == 21, phase
    seconds = {
        phase: after.of("headwater_request_phase_seconds_sum", deployment="faulty", phase=phase)
        for phase in ("queue", "batch_wait", "transport", "compute", "serialise")
    }
    assert 0 < sum(seconds.values()) <= after.of("headwater_request_seconds_sum", deployment="faulty", route="infer")
    infer = {"route": "/v2/models/{model}/infer"}
    http = "headwater_http_requests_total"
    for kind, count in (("2xx", 21), ("4xx", 3), ("5xx", 3)):
        assert after.of(http, status=kind, **infer) - before.of(http, status=kind, **infer) == count
    assert "nobody" not in after.text


def test_what_is_exposed_is_what_the_documentation_says(server: Running) -> None:
    scrape = Scrape(server).check()
    own = {name for name in scrape.families if not name.startswith("nv_")}
    assert own == set(CATALOGUE)  # which a test compares with docs/metrics.md
    for deployment in DEPLOYMENTS:
        assert scrape.of("nv_inference_exec_count", deployment=deployment) > 0
        assert scrape.of("headwater_deployment_state", deployment=deployment) == 1
        assert scrape.of("headwater_deployment_state", deployment=deployment, state="READY") == 1
        assert scrape.of("headwater_replicas_ready", deployment=deployment) == 1
        assert scrape.of("headwater_replicas_wanted", deployment=deployment) == 1
    wait_for(lambda: Scrape(server).of("headwater_replica_resident_memory_bytes", deployment="slow") > 50e6)
    processes = {dict(key[1])["process"] for key in scrape.values if key[0] == "process_open_fds"}
    assert processes == {"supervisor", "worker-0", "worker-1"}
    headers = {"accept": "application/openmetrics-text; version=1.0.0"}
    response = server.client.get(f"{server.url}/metrics", headers=headers)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    found = {family.name for family in open_metrics_families(response.text)}  # type: ignore[no-untyped-call]
    assert found >= own


def test_how_much_of_its_capacity_a_deployment_uses(server: Running) -> None:
    def used(deployment: str) -> float:
        return Scrape(server).of("headwater_utilization", deployment=deployment)

    wait_for(lambda: used("slow") == 0, what="nothing to be computed")
    gate = server.gate()
    with in_background(lambda: server.infer("slow", [gate.value], shape=[1, 1])) as answers:
        wait_for(lambda: used("slow") == 1, what="the only replica to be busy")
        assert used("faulty") == 0
        assert Scrape(server).in_flight(deployment="slow") == 1
        gate.open()
    assert answers[0].status_code == 200
    wait_for(lambda: used("slow") == 0, what="the replica to be idle")


def test_what_a_killed_worker_had_is_lost_and_nothing_else_is(server: Running) -> None:
    before = settled(server)
    streams = 8

    async def scenario() -> tuple[int, int, int]:
        """How many streams broke, how many the test left, and how many short requests were answered."""
        all_begun = asyncio.Event()
        killed = asyncio.Event()
        begun = 0
        broken = 0

        async def held() -> None:
            nonlocal begun, broken
            async with open_stream(server, "/v1/completions", ENDLESS) as stream:
                await stream.read(1)
                begun += 1
                if begun == streams:
                    all_begun.set()
                try:
                    while not killed.is_set():
                        await stream.read(1)
                except (OSError, asyncio.IncompleteReadError, AssertionError, ValueError):
                    broken += 1

        async def load() -> int:
            body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}
            answered = 0
            async with httpx.AsyncClient(base_url=server.url, timeout=30, trust_env=False) as client:
                while not killed.is_set():
                    with contextlib.suppress(httpx.TransportError):
                        response = await client.post("/v2/models/faulty/infer", json=body)
                        assert response.status_code == 200
                        answered += 1
            return answered

        holding = [asyncio.create_task(held()) for _ in range(streams)]
        loads = [asyncio.create_task(load()) for _ in range(4)]
        await all_begun.wait()
        scrape = await asyncio.to_thread(Scrape, server)
        assert scrape.check().in_flight(deployment="null") == streams
        victim = (await asyncio.to_thread(server.workers))[0]
        os.kill(victim, signal.SIGKILL)
        restarts = scrape.of("headwater_worker_restarts_total")

        def is_replaced() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return Scrape(server).check().of("headwater_worker_restarts_total") == restarts + 1
            return False

        await asyncio.to_thread(wait_for, is_replaced, 30, "the worker's end to be booked")
        killed.set()
        await asyncio.gather(*holding)
        return broken, streams - broken, sum(await asyncio.gather(*loads))

    broken, left, answered = run(scenario())
    after = settled(server)
    expected = {"lost": broken, "cancelled": left}
    assert more(after, before, deployment="null") == {one: count for one, count in expected.items() if count}
    short = more(after, before, deployment="faulty")
    assert set(short) <= {"ok", "lost"}
    assert answered <= short["ok"] <= answered + 4
    assert short.get("lost", 0) <= 4
    assert after.of("headwater_rows_total", deployment="faulty") > before.of(
        "headwater_rows_total", deployment="faulty"
    )


def has_stopped(pid: int) -> bool:
    """Whether all threads of a process have stopped."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(") ")[2].startswith("T") for stat in stats)


def test_a_scrape_does_not_wait_for_a_replica_that_is_stopped(server: Running) -> None:
    before = Scrape(server)
    pid = server.process("slow", "tritonserver")
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: has_stopped(pid), what="all threads to stop: any of them may answer")
    began_s = time.monotonic()
    scrape = Scrape(server).check()
    took_s = time.monotonic() - began_s
    assert took_s < 10
    assert scrape.of("nv_inference_exec_count", deployment="faulty") > 0
    assert scrape.of("nv_inference_exec_count", deployment="slow") == 0
    errors = "headwater_scrape_errors_total"
    assert scrape.of(errors, deployment="slow") == before.of(errors, deployment="slow") + 1
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

    def is_noticed() -> bool:
        now = Scrape(server).check()
        away = now.of("headwater_deployment_state", deployment="slow", state="UNAVAILABLE") == 1
        return away and now.of("headwater_replica_restarts_total", deployment="slow") == 1

    wait_for(is_noticed, 30, "the replica's end to be counted")

    def agree() -> bool:
        """Whether the metrics have the transitions that the log has."""
        logged = collections.Counter(TRANSITION.findall(server.log.read_text()))
        counted = {
            (dict(key[1])["deployment"], dict(key[1])["from"], dict(key[1])["to"]): value
            for key, value in Scrape(server).values.items()
            if key[0] == "headwater_deployment_state_transitions_total"
        }
        return counted == logged and counted["slow", "READY", "UNAVAILABLE"] == 1

    wait_for(agree, 60, "log and metrics to agree")
