"""Traces: one tree of spans a request, W3C context in and out, and nothing where they are off."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any, cast

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from starlette.types import ASGIApp, Scope

from headwater.environment import install_command
from headwater.lm.null_engine import NullEngine
from headwater.wire.frame import StepCount
from headwater_server.codecs.tensors import Answer, InferRequest
from headwater_server.config.schema import Server
from headwater_server.config.sections import TracingSection
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, RoutingTable, State
from headwater_server.dispatch.graph import GraphDispatcher
from headwater_server.errors import ReplicaLost
from headwater_server.gateway.app import create_app
from headwater_server.gateway.http.entry import RequestRecords
from headwater_server.gateway.http.event_stream import StreamLimits
from headwater_server.gateway.models import Models
from headwater_server.supervisor.preflight import tracing_problems
from headwater_server.telemetry.logs import AccessLog
from headwater_server.telemetry.tracing import Tracing, add_model, current, exporting, use
from tests.app.dispatch import test_graph as graph
from tests.app.dispatch.stand_in import ONCE, PIPELINE, FrameBench, FrameReplica, settle
from tests.app.lm import app_with_engine as lm
from tests.app.lm.stand_in import LIMITS
from tests.app.telemetry.stand_in import HANG, Gateway

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-1] + "0"
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0.0]}]}


class Spans:
    """Those that have ended."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    @property
    def all(self) -> dict[str, ReadableSpan]:
        """By name."""
        found = self._exporter.get_finished_spans()
        names = [one.name for one in found]
        assert len(names) == len(set(names)), names
        return {one.name: one for one in found}

    def tree(self) -> dict[str, str]:
        """Each span's parent, by name; of the root, the id of who asked, or nothing."""
        spans = self.all
        ids = {span_id(one): name for name, one in spans.items()}
        return {
            name: "" if one.parent is None else ids.get(one.parent.span_id, f"{one.parent.span_id:016x}")
            for name, one in spans.items()
        }

    def are_nested(self) -> None:
        """Each lies within its parent's time."""
        spans = self.all
        for name, parent in self.tree().items():
            if parent in spans:
                inner, outer = spans[name], spans[parent]
                times = (outer.start_time, inner.start_time, inner.end_time, outer.end_time)
                assert sorted(cast(tuple[int, ...], times)) == list(times), name


def span_id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def trace_ids(spans: Mapping[str, ReadableSpan]) -> set[str]:
    return {f"{one.context.trace_id:032x}" for one in spans.values() if one.context is not None}


def attributes(span: ReadableSpan) -> Mapping[str, Any]:
    return span.attributes or {}


@pytest.fixture
def spans() -> Iterator[Spans]:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    use(tracing)
    yield Spans(exporter)
    use(None)
    tracing.close()


async def ask(app: ASGIApp, path: str, body: object, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        return await asyncio.create_task(client.post(path, json=body, headers=headers))


async def logged() -> dict[str, Any]:
    """The line that the access log has for a request with `PARENT`."""
    lines = io.StringIO()
    log = AccessLog(lines, "json")
    app = create_app(Gateway().models, Server(), records=RequestRecords(log, StreamLimits(15, 30)))
    await ask(app, "/v2/models/m/infer", BODY, traceparent=PARENT)
    log.flush()
    line: dict[str, Any] = json.loads(lines.getvalue())
    return line


INFER = "POST /v2/models/{model}/infer"


class TestTree:
    async def test_from_http_through_queue_and_replica_to_the_callable(self, spans: Spans) -> None:
        answer = await ask(Gateway().app, "/v2/models/m/infer", BODY)
        assert answer.status_code == 200
        assert spans.tree() == {
            INFER: "", "infer m": INFER, "queue": "infer m", "replica": "infer m", "compute": "replica",
        }  # fmt: skip
        spans.are_nested()
        http, replica = spans.all[INFER], spans.all["replica"]
        assert http.kind is SpanKind.SERVER
        assert attributes(http)["http.response.status_code"] == 200
        assert attributes(http)["http.route"] == "/v2/models/{model}/infer"
        assert attributes(http)["url.path"] == "/v2/models/m/infer"
        assert attributes(replica)["headwater.replica"] == "m-1"

    async def test_the_steps_of_a_fused_pipeline(self, spans: Spans) -> None:
        replica = FrameReplica()
        models = Models(lambda name, route: replica)
        route = DeploymentRoute(
            "m", State.READY, signature=PIPELINE, replicas=(ReplicaRoute("m-1", "unix:", "", "unix:grpc"),)
        )
        models.update(RoutingTable((route,)))
        asking = asyncio.create_task(ask(create_app(models, Server(access_log=False)), "/v2/models/m/infer", BODY))
        while not replica.calls:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        (call,) = replica.calls
        call.say(counts=[StepCount("trunk", 1, 0, 300)])
        await settle()
        call.say(call.piece("a"), call.piece("b"), counts=[StepCount("a", 1, 0, 10), StepCount("b", 1, 0, 20)])
        call.say(call.piece("c"), counts=[StepCount("c", 1, 0, 5), StepCount("b", 0, 1, 30)])
        call.end()
        assert (await asking).status_code == 200
        steps = {f"step {name}": "replica" for name in ("trunk", "a", "b", "c")}
        assert spans.tree() == {INFER: "", "infer m": INFER, "queue": "infer m", "replica": "infer m", **steps}
        spans.are_nested()
        took = {name: attributes(spans.all[name])["headwater.compute_us"] for name in steps}
        assert took == {"step trunk": 300, "step a": 10, "step b": 50, "step c": 5}

    async def test_the_steps_of_a_pipeline_whose_steps_are_deployments(self, spans: Spans) -> None:
        class Step:
            """As much of a `Dispatcher` as a pipeline needs."""

            route = DeploymentRoute("step", State.READY)

            def __init__(self, name: str) -> None:
                self._name = name

            async def infer(self, request: InferRequest, *, is_step: bool) -> Answer:
                trace = add_model(self._name)
                assert trace is not None
                trace.call("some")
                await asyncio.sleep(0)
                trace.end(request.rows, 0, "")
                value = {"p.trunk": "features", "p.head_a": "a", "p.head_b": "b"}[self._name]
                return Answer({value: graph.numbers(request.rows)})

        bench = graph.Bench()
        dispatcher = GraphDispatcher(bench.route, lambda name: cast(Any, Step(name)))

        async def app(scope: Scope, receive: Any, send: Any) -> None:
            tracing = current()
            assert tracing is not None
            trace = tracing.begin(scope, "r1")
            assert trace is not None
            await dispatcher.infer(bench.request())
            trace.end(scope, 200, None)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        await ask(app, "/", {})
        tree = {one.name: one for one in spans._exporter.get_finished_spans()}
        infer = {name: one.parent for name, one in tree.items() if name.startswith("infer ")}
        assert set(infer) == {"infer p.trunk", "infer p.head_a", "infer p.head_b"}
        assert {parent.span_id for parent in infer.values() if parent is not None} == {span_id(tree["POST"])}

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_language_model(self, spans: Spans, stream: bool) -> None:
        async with lm.app_with_engine(NullEngine(LIMITS)) as (asking, _dispatcher):
            answer = await asking("/v1/completions", model="lm", prompt="x", max_tokens=40, stream=stream)
            assert answer.status_code == 200
        http = "POST /v1/completions"
        assert spans.tree() == {
            http: "", "generate lm": http, "first token": "generate lm", "further tokens": "generate lm",
        }  # fmt: skip
        spans.are_nested()
        assert attributes(spans.all["generate lm"])["headwater.generated_tokens"] == 40


class TestContext:
    async def test_comes_in_and_goes_out(self, spans: Spans) -> None:
        answer = await ask(Gateway().app, "/v2/models/m/infer", BODY, traceparent=PARENT, tracestate="a=b")
        http = spans.all[INFER]
        assert answer.headers["traceresponse"] == f"{PARENT[:35]}-{span_id(http):016x}-01"
        assert http.context is not None
        assert http.context.trace_state.get("a") == "b"
        assert spans.tree()[INFER] == PARENT[36:52]
        assert trace_ids(spans.all) == {PARENT[3:35]}

    async def test_who_asks_decides_whether_it_is_sampled(self, spans: Spans) -> None:
        answer = await ask(Gateway().app, "/v2/models/m/infer", BODY, traceparent=UNSAMPLED)
        assert answer.headers["traceresponse"].startswith(PARENT[:35])
        assert answer.headers["traceresponse"].endswith("-00")
        assert spans.all == {}

    def test_the_environment_says_how_many_are_sampled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
        exporter = InMemorySpanExporter()
        tracing = Tracing(SimpleSpanProcessor(exporter))
        scope = {"type": "http", "method": "GET", "path": "/v2", "headers": []}
        for number in range(400):
            trace = tracing.begin(scope, f"r{number}")
            assert trace is not None
            trace.end(scope, 200, None)
        tracing.close()
        assert 40 < len(exporter.get_finished_spans()) < 160

    @pytest.mark.parametrize(
        "header",
        ["", "nonsense", PARENT + "-more", "00-" + "0" * 32 + PARENT[35:], "ff" + PARENT[2:], "\xff" * 55, "x" * 9000],
    )
    async def test_a_bad_one_is_as_good_as_none(self, spans: Spans, header: str) -> None:
        app = Gateway().app
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            answer = await client.post(
                "/v2/models/m/infer", json=BODY, headers=[(b"traceparent", header.encode("latin-1"))]
            )
        assert answer.status_code == 200
        assert spans.tree()[INFER] == ""

    def test_the_access_log_tells_the_ids(self, spans: Spans) -> None:
        line = asyncio.run(logged())
        assert (line["trace_id"], line["span_id"]) == (PARENT[3:35], f"{span_id(spans.all[INFER]):016x}")


class TestProbes:
    @pytest.mark.parametrize("path", ["/v2/health/ready", "/v2/health/live", "/health", "/health/ready", "/metrics"])
    async def test_what_only_looks_after_the_server_is_not_traced(self, spans: Spans, path: str) -> None:
        transport = httpx.ASGITransport(Gateway().app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            assert "traceresponse" not in (await client.get(path)).headers
        assert spans.all == {}


class TestErrors:
    async def test_a_callable_that_raises(self, spans: Spans) -> None:
        body = {"inputs": [{**BODY["inputs"][0], "data": [1.0]}]}

        assert (await ask(Gateway().app, "/v2/models/m/infer", body)).status_code == 500
        for name in (INFER, "infer m", "replica"):
            assert attributes(spans.all[name])["error.type"] == "CallableFailed"
            assert spans.all[name].status.status_code is StatusCode.ERROR
            assert spans.all[name].status.description is None  # it may quote what a client sent

    async def test_a_client_s_own_fault_is_none_of_the_server(self, spans: Spans) -> None:
        assert (await ask(Gateway().app, "/v2/models/m/infer", {"inputs": 3})).status_code == 400
        assert spans.tree() == {INFER: ""}
        assert attributes(spans.all[INFER])["error.type"] == "BadRequest"
        assert spans.all[INFER].status.status_code is StatusCode.UNSET

    async def test_a_replica_that_is_lost(self, spans: Spans) -> None:
        bench = FrameBench(ONCE)
        tracing = current()
        assert tracing is not None
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        trace = tracing.begin(scope, "r1")
        assert trace is not None
        task = bench.send(1)
        await settle()
        bench.calls[0].end(ReplicaLost("the replica ended"))
        with pytest.raises(ReplicaLost):
            await task
        trace.end(scope, 503, ReplicaLost("the replica ended"))
        assert attributes(spans.all["infer m"])["error.type"] == "ReplicaLost"

    async def test_a_client_that_goes_away_while_it_waits(self, spans: Spans) -> None:
        gateway = Gateway(max_in_flight=1)
        gone = asyncio.Event()
        body = json.dumps({"inputs": [{**BODY["inputs"][0], "data": [HANG]}]}).encode()
        first = asyncio.create_task(gateway.ask("/v2/models/m/infer", body, asyncio.Event()))
        while not gateway.replica.hanging:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        second = asyncio.create_task(gateway.ask("/v2/models/m/infer", body, gone))
        while not gateway.queued_rows:  # noqa: ASYNC110 - likewise
            await asyncio.sleep(0)
        gone.set()
        await second
        assert spans.tree() == {INFER: "", "infer m": INFER, "queue": "infer m"}
        assert attributes(spans.all[INFER])["http.response.status_code"] == 499
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        gateway.models.close()


class TestOff:
    async def test_there_is_no_header(self) -> None:
        app = create_app(Gateway().models, Server())
        answer = await ask(app, "/v2/models/m/infer", BODY, traceparent=PARENT)
        assert "traceresponse" not in answer.headers

    def test_there_is_nothing_in_the_log(self) -> None:
        line = asyncio.run(logged())
        assert line["path"] == "/v2/models/m/infer"
        assert "trace_id" not in line

    @pytest.mark.slow
    def test_the_sdk_is_not_imported(self) -> None:
        code = (
            "import sys, headwater_server.gateway.worker, headwater_server.telemetry.tracing\n"
            "sys.exit('opentelemetry.sdk' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


class TestConfiguration:
    @pytest.mark.parametrize(
        ("endpoint", "url"),
        [
            ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
            ("http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"),
            ("https://collector/otlp/v1/traces", "https://collector/otlp/v1/traces"),
        ],
    )
    def test_the_protocol_s_path_is_added_where_there_is_none(self, endpoint: str, url: str) -> None:
        assert TracingSection(endpoint=endpoint).traces_url == url

    @pytest.mark.parametrize("endpoint", ["", "localhost:4318", "grpc://a:4317", "http://", "http://a b"])
    def test_what_is_no_address(self, endpoint: str) -> None:
        with pytest.raises(ValueError, match="endpoint"):
            TracingSection(endpoint=endpoint)

    def test_without_the_extra_it_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        server = Server(tracing=TracingSection(endpoint="http://127.0.0.1:4318"))
        assert tracing_problems(server) == []
        monkeypatch.setattr("headwater_server.supervisor.preflight.importlib.util.find_spec", lambda name: None)
        assert tracing_problems(Server()) == []
        (problem,) = tracing_problems(server)
        assert problem.fix == install_command("otel", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")


def test_spans_reach_a_collector_before_the_end() -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        tracing = exporting(TracingSection(endpoint=f"http://127.0.0.1:{server.server_port}"))
        scope = {"type": "http", "method": "GET", "path": "/v2", "headers": []}
        trace = tracing.begin(scope, "r1")
        assert trace is not None
        trace.end(scope, 200, None)
        tracing.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    ((path, body),) = received
    assert path == "/v1/traces"
    assert b"GET" in body
