"""Streams of server-sent events over a real connection, from a pipeline whose heads the test answers for."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from typing import Any, cast

import httpx
import numpy as np
import pytest
import uvicorn

from headwater.signature import HeadSpec, Signature, TensorSpec
from headwater_server.codecs.tensors import Answer, HeadAnswer, InferRequest, RawTensor
from headwater_server.config.schema import Server
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, RoutingTable, State
from headwater_server.dispatch.deployment_protocol import Dispatcher, Fail
from headwater_server.errors import BadRequest, CallableFailed, DeadlineExceeded, QueueFull, ReplicaLost, Unavailable
from headwater_server.gateway.app import create_app
from headwater_server.gateway.http.bounded_connection import BoundedConnection
from headwater_server.gateway.http.connections import Connections
from headwater_server.gateway.http.entry import Entry, RequestRecords
from headwater_server.gateway.http.event_stream import StreamLimits
from headwater_server.gateway.models import Models
from headwater_server.telemetry.logs import AccessLog
from tests.running import Raw, wait_for

PIPELINE = Signature(
    name="p",
    inputs=(TensorSpec("x", "FP32", (-1,)),),
    outputs=(TensorSpec("digit", "INT32", (1,)), TensorSpec("scores", "FP32", (-1,)), TensorSpec("c", "INT32", (1,))),
    heads=(HeadSpec("a", ("digit", "scores")), HeadSpec("b", ("c",), on_error="omit")),
)
STREAMING = Signature(
    name="s",
    inputs=(TensorSpec("x", "FP32", (-1,)),),
    outputs=(TensorSpec("y", "FP32", (-1,)),),
    streams=True,
)
HEAD_A = {
    "digit": RawTensor("INT32", (1, 1), np.int32(7).tobytes()),
    "scores": RawTensor("FP32", (1, 2), np.array([0.5, 1.0], np.float32).tobytes()),
}
HEAD_B = {"c": RawTensor("INT32", (1, 1), np.int32(3).tobytes())}

Script = Callable[["Fake", InferRequest], AsyncIterator[HeadAnswer]]


class Fake(Dispatcher):
    """A dispatcher that answers as a test says; it runs in the server's thread."""

    script: Script
    whole: Answer
    requests: list[InferRequest]
    in_flight = 0

    def __init__(self, route: DeploymentRoute) -> None:
        self.route = route
        self.requests = []
        self.go = asyncio.Event()
        """For scripts that wait: the test sets it."""
        self.left = threading.Event()
        """A script that waits sets it when it is cancelled or closed."""
        self.given = 0
        """Pieces taken."""

    def under_way(self, replicas: Collection[str] | None) -> list[Fail]:
        return []

    async def infer(self, request: InferRequest, *, is_step: bool = False) -> Answer:
        return self.whole

    async def stream(self, request: InferRequest) -> AsyncIterator[HeadAnswer]:
        self.requests.append(request)
        self.in_flight += 1
        try:
            async for piece in self.script(self, request):
                yield piece
                self.given += 1
        finally:
            self.in_flight -= 1
            self.left.set()


class _NoReplica:
    def close(self) -> None:
        pass


class Gateway:
    """The application on a socket, in a thread of its own."""

    def __init__(self) -> None:
        self._lines = io.StringIO()
        self.models: Models
        self.fakes: dict[str, Fake] = {}
        self.loop: asyncio.AbstractEventLoop
        self.app: Entry
        self.server: uvicorn.Server
        self.url = ""

    @property
    def log(self) -> list[dict[str, Any]]:
        """The access log's lines, which it writes in groups."""
        return [json.loads(line) for line in self._lines.getvalue().splitlines()]

    async def serve(self, listener: socket.socket) -> None:
        self.loop = asyncio.get_running_loop()
        self.models = Models(cast("Any", lambda name, replica: _NoReplica()))
        self.models.update(
            RoutingTable(
                deployments=tuple(
                    DeploymentRoute(
                        name=signature.name,
                        state=State.READY,
                        signature=signature,
                        replicas=(ReplicaRoute("r", "unix:", ""),),
                    )
                    for signature in (PIPELINE, STREAMING)
                )
            )
        )
        for model in self.models:
            model.dispatcher = self.fakes[model.route.name] = Fake(model.route)
        self.records = RequestRecords(AccessLog(self._lines, "json"), StreamLimits(15, 30))
        self.app = create_app(self.models, Server(), records=self.records)
        self.server = uvicorn.Server(
            uvicorn.Config(
                self.app,
                log_config=None,
                access_log=False,
                lifespan="off",
                interface="asgi3",
                http=cast("Any", _connection),
            )
        )
        await self.server.serve([listener])

    def limit(self, limits: StreamLimits) -> None:
        """Set what holds for streams; before the first request."""
        self.records.stream_limits = limits

    def post(self, fake: Fake, script: Script | None = None, path: str = "generate_stream", **body: Any) -> Any:
        """A streaming response, as a context."""
        if script is not None:
            fake.script = script
        url = f"{self.url}/v2/models/{fake.route.name}/{path}"
        return httpx.stream("POST", url, json={"x": [1.0], **body}, timeout=20)

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call something in the server's thread."""
        self.loop.call_soon_threadsafe(function, *arguments)


def _connection(**arguments: Any) -> BoundedConnection:
    records = RequestRecords(None, StreamLimits(15, 30))
    return BoundedConnection(head_timeout_s=5, connections=Connections(100), records=records, **arguments)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    served = Gateway()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        served.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=lambda: asyncio.run(served.serve(listener)))
        thread.start()
        try:
            wait_for(lambda: hasattr(served, "server") and served.server.started, what="the server")
            yield served
        finally:
            served.server.should_exit = served.server.force_exit = True
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture
def pipeline(gateway: Gateway) -> Fake:
    return gateway.fakes["p"]


@pytest.fixture
def streaming(gateway: Gateway) -> Fake:
    return gateway.fakes["s"]


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """All events, each of which must be one line of data and an empty one."""
    text = response.read().decode()
    assert text.endswith("\n\n")
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = [line for line in block.split("\n") if line != ": ping"]
        assert len(lines) == 1, block
        assert lines[0].startswith("data: ")
        events.append(json.loads(lines[0].removeprefix("data: ")))
    return events


async def both(fake: Fake, request: InferRequest) -> AsyncIterator[HeadAnswer]:
    """Head b at once, a when the test says so."""
    if "b" in request.heads:
        yield HeadAnswer("b", HEAD_B, took_ms=0.5)
        await fake.go.wait()
    yield HeadAnswer("a", HEAD_A, took_ms=12.34567)


def test_heads_arrive_each_as_it_finishes(gateway: Gateway, pipeline: Fake) -> None:
    with gateway.post(pipeline, both, id="i") as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-request-id"]
        lines = response.iter_lines()
        assert json.loads(next(lines).removeprefix("data: ")) == {
            "model_name": "p",
            "model_version": "1",
            "id": "i",
            "head": "b",
            "status": "ok",
            "time_ms": 0.5,
            "c": 3,
        }
        wait_for(lambda: pipeline.given == 1)
        gateway.call(pipeline.go.set)
        rest = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert [event.get("head") for event in rest] == ["a", None]
    assert (rest[0]["digit"], rest[0]["scores"], rest[0]["time_ms"]) == (7, [0.5, 1.0], 12.346)
    assert rest[1] == {
        "model_name": "p",
        "model_version": "1",
        "id": "i",
        "final": True,
        "heads": {"b": "ok", "a": "ok"},
    }
    wait_for(lambda: gateway.log)
    assert gateway.log[-1]["status"] == 200


def test_only_the_wanted_heads(gateway: Gateway, pipeline: Fake) -> None:
    with gateway.post(pipeline, both, heads="a") as response:
        events = events_of(response)
    assert [event.get("head") for event in events] == ["a", None]
    assert pipeline.requests[0].heads == ("a",)


def test_a_head_that_fails_says_so_and_the_others_answer(gateway: Gateway, pipeline: Fake) -> None:
    async def script(fake: Fake, request: InferRequest) -> AsyncIterator[HeadAnswer]:
        yield HeadAnswer("b", error=DeadlineExceeded("b was late"), took_ms=5)
        yield HeadAnswer("a", HEAD_A)

    with gateway.post(pipeline, script) as response:
        failed, answered, end = events_of(response)
    assert (failed["head"], failed["status"], failed["error"]) == ("b", "timeout", "b was late")
    assert "c" not in failed
    assert answered["status"] == "ok"
    assert end["heads"] == {"b": "timeout", "a": "ok"}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadRequest("x: wrong"), 400),
        (QueueFull("full", retry_after_s=3), 429),
        (CallableFailed("ValueError: poison"), 500),
        (Unavailable("loading", retry_after_s=3), 503),
        (DeadlineExceeded("late"), 504),
        (RuntimeError("a bug"), 500),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_early_failure_has_its_true_status(gateway: Gateway, pipeline: Fake, error: Exception, status: int) -> None:
    async def script(fake: Fake, request: InferRequest) -> AsyncIterator[HeadAnswer]:
        raise error
        yield

    with gateway.post(pipeline, script) as response:
        said = json.loads(response.read())["error"]
        assert response.status_code == status
        assert response.headers["content-type"] == "application/json"
        assert response.headers.get("retry-after") == ("3" if status in (429, 503) else None)
    assert said == str(error) if not isinstance(error, RuntimeError) else "a bug" not in said
    wait_for(lambda: gateway.models.is_idle)


def test_a_first_event_that_is_slow_does_not_hold_back_the_status_line(gateway: Gateway, pipeline: Fake) -> None:
    async def script(fake: Fake, request: InferRequest) -> AsyncIterator[HeadAnswer]:
        await fake.go.wait()
        raise DeadlineExceeded("late")
        yield

    with gateway.post(pipeline, script) as response:
        assert response.status_code == 200
        gateway.call(pipeline.go.set)
        error, end = events_of(response)
    assert error == {"error": "late", "status": 504}
    assert (end["final"], end["heads"]) == (True, {"a": "timeout", "b": "timeout"})


@pytest.mark.parametrize(
    ("error", "said", "status"),
    [(ReplicaLost("the replica ended"), "the replica ended", 503), (RuntimeError("a bug"), "internal error", 500)],
)
def test_an_error_after_the_start_is_an_event(
    gateway: Gateway, pipeline: Fake, error: Exception, said: str, status: int
) -> None:
    async def script(fake: Fake, request: InferRequest) -> AsyncIterator[HeadAnswer]:
        yield HeadAnswer("b", HEAD_B)
        raise error

    with gateway.post(pipeline, script) as response:
        assert response.status_code == 200
        first, failure, end = events_of(response)
    assert first["head"] == "b"
    assert said in failure["error"]
    assert "a bug" not in failure["error"]
    assert failure["status"] == status
    assert (end["final"], end["heads"]) == (True, {"b": "ok", "a": "unavailable" if status == 503 else "failed"})


def test_a_client_that_goes_away_cancels_the_work_and_is_logged_as_such(gateway: Gateway, pipeline: Fake) -> None:
    with gateway.post(pipeline, both) as response:
        lines = response.iter_lines()  # kept: httpx closes the connection with its iterator
        next(lines)
        assert not gateway.models.is_idle
    assert pipeline.left.wait(10)
    wait_for(lambda: gateway.log, what="the access log")
    assert gateway.log[-1]["status"] == 499
    wait_for(lambda: gateway.models.is_idle)


def test_a_client_that_goes_away_before_the_first_event(gateway: Gateway, pipeline: Fake) -> None:
    async def script(fake: Fake, request: InferRequest) -> AsyncIterator[HeadAnswer]:
        await fake.go.wait()
        yield HeadAnswer("a", HEAD_A)

    pipeline.script = script
    body = b'{"x": 1}'
    with Raw(gateway.url) as connection:
        head = f"POST /v2/models/p/generate_stream HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.send(head.encode() + body)
        wait_for(lambda: pipeline.requests)
    assert pipeline.left.wait(10)
    wait_for(lambda: gateway.log, what="the access log")
    assert gateway.log[-1]["status"] == 499
    wait_for(lambda: gateway.models.is_idle)


def test_silence_is_broken_by_comments(gateway: Gateway, pipeline: Fake) -> None:
    gateway.limit(StreamLimits(ping_s=0.05))
    with gateway.post(pipeline, both) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert next(lines) == ""
        assert [next(lines), next(lines)] == [": ping", ": ping"]  # no empty line behind it
        gateway.call(pipeline.go.set)
        rest = list(lines)
    assert [line for line in rest if line.startswith("data: ")][-1].count('"final":true') == 1


def ask_and_wait_to_be_cut_off(gateway: Gateway, connection: Raw) -> None:
    """Ask for a stream of `s`, and read nothing."""
    body = b'{"x": 1}'
    head = f"POST /v2/models/s/generate_stream HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.send(head.encode() + body)
    wait_for(lambda: gateway.log, what="the stream to be cut off")


def test_a_reader_that_is_slow_blocks_the_work_and_is_cut_off(gateway: Gateway, streaming: Fake) -> None:
    # A comment that is due while the event waits doesn't prolong it.
    gateway.limit(StreamLimits(ping_s=0.4, write_timeout_s=0.5))

    async def script(fake: Fake, request: InferRequest) -> AsyncIterator[HeadAnswer]:
        data = np.full(20_000, 0.123456, np.float32).tobytes()
        for _ in range(10_000):
            yield HeadAnswer("", {"y": RawTensor("FP32", (1, 20_000), data)})

    streaming.script = script
    with Raw(gateway.url) as connection:
        ask_and_wait_to_be_cut_off(gateway, connection)
        assert streaming.left.is_set()
        assert 0 < streaming.given < 100
        received = b""
        with contextlib.suppress(ConnectionError):  # what the system had taken over may still come
            while chunk := connection.socket.recv(1 << 20):
                received += chunk
        assert b'"final"' not in received
        assert not received.endswith(b"0\r\n\r\n")
    assert gateway.log[-1]["status"] == 499
    assert "read no data" in gateway.log[-1]["note"]
    wait_for(lambda: gateway.models.is_idle)


def test_a_client_that_reads_nothing_is_cut_off_though_nothing_more_is_said(gateway: Gateway, streaming: Fake) -> None:
    gateway.limit(StreamLimits(ping_s=0.05, write_timeout_s=0.2))

    async def script(fake: Fake, request: InferRequest) -> AsyncIterator[HeadAnswer]:
        values = np.full(4_000_000, 0.123456, np.float32)  # more than the system takes for it
        yield HeadAnswer("", {"y": RawTensor("FP32", (1, len(values)), values.tobytes())})
        await fake.go.wait()

    streaming.script = script
    with Raw(gateway.url) as connection:
        ask_and_wait_to_be_cut_off(gateway, connection)
        assert streaming.left.is_set()
    assert gateway.log[-1]["status"] == 499
    assert "read no data" in gateway.log[-1]["note"]


def test_a_stream_on_which_nothing_happens_has_one_task(gateway: Gateway, pipeline: Fake) -> None:
    def tasks() -> int:
        counted: list[int] = []
        gateway.call(lambda: counted.append(len(asyncio.all_tasks(gateway.loop))))
        wait_for(lambda: counted)
        return counted[0]

    with contextlib.ExitStack() as streams:

        def open_one() -> None:
            lines = streams.enter_context(gateway.post(pipeline, both)).iter_lines()
            streams.callback(lines.close)  # httpx closes the connection with its iterator
            next(lines)

        open_one()
        one = tasks()
        for _ in range(3):
            open_one()
        assert tasks() == one + 3


def test_a_streaming_model_gives_any_number_of_results(gateway: Gateway, streaming: Fake) -> None:
    async def script(fake: Fake, request: InferRequest) -> AsyncIterator[HeadAnswer]:
        for value in range(int(np.frombuffer(request.inputs["x"].data, np.float32)[0])):
            yield HeadAnswer("", {"y": RawTensor("FP32", (1, 1), np.float32(value).tobytes())})

    for count in (0, 3):
        with gateway.post(streaming, script, x=count) as response:
            *results, end = events_of(response)
        assert [event["y"] for event in results] == [0.0, 1.0, 2.0][:count]
        assert end == {"model_name": "s", "model_version": "1", "final": True}


@pytest.mark.parametrize(("path", "count"), [("infer", 1), ("generate", 0), ("generate", 2)])
def test_a_streaming_model_has_no_whole_answer(gateway: Gateway, streaming: Fake, path: str, count: int) -> None:
    async def script(fake: Fake, request: InferRequest) -> AsyncIterator[HeadAnswer]:
        for _ in range(count):
            yield HeadAnswer("", {"y": RawTensor("FP32", (1, 1), bytes(4))})

    with gateway.post(streaming, script, path=path) as response:
        said = json.loads(response.read())["error"]
        assert response.status_code == 400
    assert "/v2/models/s/generate_stream" in said


@pytest.mark.parametrize("path", ["generate", "infer"])
def test_an_omitted_head_is_reported(gateway: Gateway, pipeline: Fake, path: str) -> None:
    pipeline.whole = Answer(HEAD_A, [HeadAnswer("b", error=CallableFailed("ValueError: no"))])
    body: dict[str, Any] = {"x": 1}
    if path == "infer":
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}]}
    answer = httpx.post(f"{gateway.url}/v2/models/p/{path}", json=body)
    assert answer.status_code == 200, answer.text
    content = answer.json()
    assert content["parameters"] == {
        "omitted_heads": "b",
        "head.b.status": "failed",
        "head.b.reason": "ValueError: no",
    }
    names = [output["name"] for output in content["outputs"]] if path == "infer" else list(content)
    assert "scores" in names
    assert "c" not in names


def test_metadata_lists_the_heads(gateway: Gateway) -> None:
    metadata = httpx.get(f"{gateway.url}/v2/models/p").json()
    assert metadata["heads"][0] == {
        "name": "a",
        "outputs": ["digit", "scores"],
        "on_error": "fail",
        "timeout_s": None,
    }
    assert "heads" not in httpx.get(f"{gateway.url}/v2/models/s").json()


def test_the_schema_documents_heads_and_streams(gateway: Gateway) -> None:
    paths = httpx.get(f"{gateway.url}/openapi.json").json()["paths"]
    assert {path for path in paths if path.startswith("/v2/models/s/")} == {"/v2/models/s/generate_stream"}
    for route in ("infer", "generate", "generate_stream"):
        body = paths[f"/v2/models/p/{route}"]["post"]["requestBody"]["content"]["application/json"]
        heads = body["schema"]["properties"]["parameters"]["properties"]["heads"]
        assert heads["anyOf"][0]["items"]["enum"] == ["a", "b"]
        assert httpx.post(f"{gateway.url}/v2/models/p/{route}", json={**body["example"], "heads": 1}).status_code == 400
    assert body["example"] == {"x": 0.0}
    event = paths["/v2/models/p/generate_stream"]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    assert event["properties"]["data"]["contentSchema"]["properties"]["head"]["enum"] == ["a", "b"]
