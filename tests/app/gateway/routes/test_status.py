"""``GET /v2/status``: states and counts of all gateway workers, whichever of them answers."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater.signature import HeadSpec, Signature, TensorSpec
from headwater_server.config.schema import Server
from headwater_server.control.route_kinds import LanguageKind
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, RoutingTable, State
from headwater_server.gateway.app import create_app
from headwater_server.gateway.http.entry import RequestRecords
from headwater_server.gateway.http.event_stream import StreamLimits
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.status import status_routes
from headwater_server.gateway.sampler import Sampler
from headwater_server.telemetry import recorder as recorders
from headwater_server.telemetry.ledger import Ledger
from headwater_server.telemetry.logs import AccessLog
from headwater_server.telemetry.recorder import Recorder
from headwater_server.telemetry.store import SeriesKey, Store

X = (TensorSpec("x", "FP32", (1,)),)
MS = 1_000_000


class _Replica:
    """A `ReplicaClient` that nobody asks."""

    def close(self) -> None: ...


def served() -> Models:
    """What a worker serves; made where its event loop runs."""
    models = Models(lambda name, route: _Replica())  # type: ignore[arg-type, return-value]
    heads = (HeadSpec("only", ("x",)),)
    replicas = (
        ReplicaRoute("m-1", "unix:", "", facts={"device": "cpu", "python": "3.13.0"}),
        ReplicaRoute("m-3", "10.0.0.3:4000", "", facts={"device": "cuda:1"}, node="10.0.0.3"),
    )
    models.update(
        RoutingTable(
            (
                DeploymentRoute(
                    "m",
                    State.READY,
                    "replica m-3 ready",
                    signature=Signature("m", X, X),
                    replicas=replicas,
                    retiring=(ReplicaRoute("m-0", "unix:", ""),),
                    wanted=3,
                    since_s=1_700_000_000.5,
                ),
                DeploymentRoute("lm", State.LOADING, "loading on cpu", kind=LanguageKind()),
                DeploymentRoute("heads", State.FAILED, "no such file", signature=Signature("heads", X, X, heads=heads)),
            )
        )
    )
    return models


def ask(folder: Path | None) -> dict[str, Any]:
    """Have one worker answer."""

    async def get() -> dict[str, Any]:
        models = served()
        app = create_app(models, Server(access_log=False), status_routes(models, folder, Sampler(models)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            answer = await client.get("/v2/status")
        assert answer.status_code == 200, answer.text
        assert answer.headers["cache-control"] == "no-store"
        found: dict[str, Any] = answer.json()
        return found

    return asyncio.run(get())


@pytest.fixture
def here() -> Iterator[Recorder]:
    """This process' recorder, for the test alone."""
    before = recorders.recorder()
    yield recorders.use(Store())
    recorders.use(before.store)


def of(status: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in status["deployments"] if one["name"] == name)
    return found


def test_states_reasons_and_replicas(here: Recorder) -> None:
    status = ask(None)
    model = of(status, "m")
    assert (model["state"], model["reason"], model["since_s"]) == ("READY", "replica m-3 ready", 1_700_000_000.5)
    assert (model["replicas"]["ready"], model["replicas"]["wanted"]) == (2, 3)
    assert [(one["id"], one["state"], one["device"], one["node"]) for one in model["replica_list"]] == [
        ("m-1", "READY", "cpu", None),
        ("m-3", "READY", "cuda:1", "10.0.0.3"),
        ("m-0", "RETIRING", "", None),
    ]
    assert model["nodes"] == {"10.0.0.3": 1}
    assert model["environments"] == [
        {"versions": {"python": "3.13.0"}, "replicas": ["m-1"]},
        {"versions": {}, "replicas": ["m-3"]},
    ]
    assert "nodes" not in of(status, "lm")
    assert of(status, "heads")["reason"] == "no such file"
    assert {one["name"]: one["kind"] for one in status["deployments"]} == {
        "m": "model",
        "lm": "language model",
        "heads": "pipeline",
    }
    assert "language_model" not in model


def test_counts_are_those_of_all_workers_and_of_those_that_ended(tmp_path: Path, here: Recorder) -> None:
    folder = tmp_path / "metrics"
    ledger = Ledger(folder)
    paths = [ledger.add_worker(index) for index in range(3)]
    for index, path in enumerate(paths, 1):
        worker = Recorder(Store(path))
        requests = worker.requests("m", "infer")
        for _ in range(index):
            requests.accept()
            requests.end("ok", index * 10 * MS)
        requests.accept()  # is on its way
        worker.requests("m", "generate").accept()
        worker.requests("m", "generate").end("shed", MS)
        worker.deployment("m").note_call(4 * index, 64, MS)
        worker.deployment("m").queue_rows.set(index)
        worker.language_model("lm").generated_tokens.add(100)
        worker.language_model("lm").active.set(index)
    ledger.write_state(
        {
            SeriesKey("headwater_replica_threads", ("m", "m-1")): 7,
            SeriesKey("headwater_replica_resident_memory_bytes", ("m", "m-1")): 2**30,
        }
    )
    ledger.end_worker(paths[2])
    status = ask(folder)
    model = of(status, "m")
    assert status["scope"] == "server"
    # 1 + 2 + 3 answered; one each on its way, of which the third was lost; one each shed
    assert (model["accepted"], model["in_flight"]) == (6 + 3 + 3, 2)
    assert (model["outcomes"]["ok"], model["outcomes"]["shed"], model["outcomes"]["lost"]) == (6, 3, 1)
    assert sum(model["seconds"]["counts"]) == 6
    assert model["seconds"]["sum"] == pytest.approx((1 * 10 + 2 * 20 + 3 * 30) / 1000)
    assert len(model["seconds"]["counts"]) == len(status["bounds"]["seconds"]) + 1
    assert (sum(model["rows"]["counts"]), model["rows"]["sum"]) == (3, 4 + 8 + 12)
    assert model["rows"]["counts"][status["bounds"]["rows"].index(8)] == 1
    assert model["waiting"] == 1 + 2  # what the ended one had isn't waiting any more
    language_model = of(status, "lm")["language_model"]
    assert (language_model["generated_tokens"], language_model["active_sequences"]) == (300, 2)
    assert [(one["threads"], one["resident_bytes"], one["gpu_bytes"]) for one in model["replica_list"]] == [
        (7, 2**30, None),
        (None, None, None),
        (None, None, None),
    ]


def test_without_metrics_a_worker_tells_its_own_counts_and_says_so(here: Recorder) -> None:
    here.requests("m", "infer").accept()
    status = ask(None)
    assert (status["scope"], of(status, "m")["accepted"], of(status, "m")["in_flight"]) == ("worker", 1, 1)


async def test_the_pages_questions_fill_no_access_log(here: Recorder) -> None:
    lines = io.StringIO()

    models = served()
    log = AccessLog(lines, "json")
    records = RequestRecords(log, StreamLimits(15, 30))
    app = create_app(models, Server(), status_routes(models, None, Sampler(models)), records=records)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        for path in ("/v2/status", "/v2/nothing", "/v2"):
            await client.get(path)
    log.flush()
    assert [json.loads(line)["path"] for line in lines.getvalue().splitlines()] == ["/v2/nothing", "/v2"]


def test_a_language_model_is_one_before_it_is_loaded(here: Recorder) -> None:
    assert of(ask(None), "lm")["language_model"]["active_sequences"] == 0
