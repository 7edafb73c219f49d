"""gRPC beside HTTP: unmodified clients, the same limits and errors, and what no client should send."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc
from tritonclient.utils import InferenceServerException

import headwater_server
from headwater_server.security.keys import Key, make_key
from headwater_server.security.keys_file import change_file
from tests.end_to_end.conftest import language_model
from tests.running import Running, leaves_nothing, serve, wait_for

SERVICE = "inference.GRPCInferenceService"
MAX_BODY_BYTES = 1_000_000
BRISK = "brisk"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    config = {
        "deployments": {
            "mirror": {"model": "typed:Mirror", "batching": {"max_batch_size": 8}},
            "tuned": {"model": "typed:Tuned"},
            "faulty": {"model": "faulty:Faulty"},
            "slow": {"model": "faulty:Slow", "batching": {"max_batch_size": 1, "max_in_flight": 1}, "timeout_s": 5},
            "pieces": {"model": "chaotic:Pieces", "options": {"count": 3, "interval_s": 0.01}},
            "endless": {"model": "chaotic:Pieces", "options": {"count": 10**6, "interval_s": 0.005}},
            "heads": {
                "pipeline": {
                    "placement": "fused",
                    "trunk": {"model": "fanout:Trunk"},
                    "heads": {
                        "a": {"model": "fanout:Head", "options": {"output": "ya"}},
                        "b": {
                            "model": "fanout:Head",
                            "options": {"output": "yb", "add": 2, "fail_on": 14},
                            "on_error": "omit",
                        },
                    },
                }
            },
            "null": language_model("null", step_s=0.01),
        },
        "server": {"grpc_port": 0, "max_body_bytes": MAX_BODY_BYTES, "client_timeout_s": 3, "workers": 2},
    }
    with leaves_nothing(config) as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[Any]:
    with tritonclient.grpc.InferenceServerClient(running.grpc_address) as made:
        yield made


@pytest.fixture
def stub(running: Running) -> Iterator[Any]:
    with grpc.insecure_channel(running.grpc_address) as channel:
        yield pb_grpc.GRPCInferenceServiceStub(channel)


def tensor(name: str, array: Any, datatype: str) -> Any:
    made = tritonclient.grpc.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def x_of(*values: float) -> Any:
    return tensor("x", np.array([values], np.float32), "FP32")


def refusal(call: Any, *arguments: Any, **options: Any) -> tuple[str, str]:
    """The code and message with which a call of tritonclient fails."""
    with pytest.raises(InferenceServerException) as caught:
        call(*arguments, **options)
    return str(caught.value.status()), str(caught.value.message())


class Streamed:
    """The responses of a stream, as they come."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self._queue: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: self._queue.put(error or result.get_response()))

    def send(self, model: str, *inputs: Any, **options: Any) -> None:
        self.client.async_stream_infer(model, list(inputs), **options)

    def next(self) -> Any:
        return self._queue.get(timeout=30)


@pytest.fixture
def stream(client: Any) -> Iterator[Streamed]:
    yield Streamed(client)
    client.stop_stream(cancel_requests=True)


class TestMetadata:
    def test_of_the_server(self, client: Any) -> None:
        assert client.is_server_live()
        assert client.is_server_ready()
        found = client.get_server_metadata()
        assert (found.name, found.version) == ("headwater", headwater_server.__version__)

    def test_of_a_model(self, client: Any) -> None:
        assert client.is_model_ready("mirror")
        found = client.get_model_metadata("tuned")
        assert [(one.name, one.datatype, list(one.shape)) for one in found.inputs] == [("x", "FP32", [-1, -1])]
        assert client.get_model_config("tuned").config.max_batch_size == 32
        client.infer("tuned", [x_of(1)])
        (statistics,) = client.get_inference_statistics("tuned").model_stats
        assert statistics.inference_stats.success.count >= 1
        assert {entry.name for entry in client.get_model_repository_index().models} >= {"mirror", "null"}

    def test_an_unknown_model(self, client: Any) -> None:
        code, message = refusal(client.get_model_metadata, "nobody")
        assert code == "StatusCode.NOT_FOUND"
        assert "nobody" in message
        assert "`mirror`" in message
        assert refusal(client.infer, "a/b", [x_of(1)])[0] == "StatusCode.NOT_FOUND"

    def test_load_and_unload(self, client: Any) -> None:
        client.unload_model("tuned")
        assert not client.is_model_ready("tuned")
        assert refusal(client.infer, "tuned", [x_of(1)])[0] == "StatusCode.UNAVAILABLE"
        client.load_model("tuned")
        wait_for(lambda: client.is_model_ready("tuned"))
        code, message = refusal(client.load_model, "tuned", files={"file:1/model.onnx": b"x"})
        assert code == "StatusCode.INVALID_ARGUMENT"
        assert "file:1/model.onnx" in message

    def test_what_is_not_there(self, client: Any, running: Running) -> None:
        code, message = refusal(client.register_system_shared_memory, "r", "/r", 8)
        assert code == "StatusCode.UNIMPLEMENTED"
        assert "shared memory" in message
        client.unregister_system_shared_memory()  # examples call it first
        assert refusal(client.get_trace_settings)[0] == "StatusCode.UNIMPLEMENTED"
        with grpc.insecure_channel(running.grpc_address) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/{SERVICE}/Nothing")(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


class TestInfer:
    def test_every_datatype(self, client: Any) -> None:
        arrays: dict[str, Any] = {
            "BOOL": np.array([[True], [False]]),
            "INT32": np.array([[1], [-(2**31)]], np.int32),
            "UINT64": np.array([[0], [2**64 - 1]], np.uint64),
            "FP16": np.array([[0.1], [-65504]], np.float16),
            "BF16": np.array([[0.1], [3e38]], ml_dtypes.bfloat16),
            "FP64": np.array([[0.1], [5e-324]]),
            "BYTES": np.array([[b"\xff\0"], [b""]], object),
        }
        inputs = [tensor(f"in_{name.lower()}", array, name) for name, array in arrays.items()]
        result = client.infer("mirror", inputs, request_id="7")
        assert result.get_response().id == "7"
        for name, array in arrays.items():
            found = result.as_numpy(f"out_{name.lower()}")
            if name == "BF16":
                found, array = found.astype(np.float32), array.astype(np.float32)
            assert np.array_equal(found, array), name

    def test_outputs_parameters_and_contents(self, stub: Any) -> None:
        request = pb.ModelInferRequest(model_name="tuned")
        request.parameters["offset"].int64_param = 1
        request.inputs.add(name="x", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1, 2])
        request.outputs.add(name="y")
        response = stub.ModelInfer(request)
        assert [output.name for output in response.outputs] == ["y"]
        assert np.frombuffer(response.raw_output_contents[0], np.float32).tolist() == [3, 5]

    @pytest.mark.parametrize(("value", "code"), [(-1, "INTERNAL"), (-2, "INVALID_ARGUMENT")], ids=["fails", "refuses"])
    def test_a_model_that_fails(self, client: Any, value: float, code: str, running: Running) -> None:
        over_http = running.infer("faulty", [[value]], shape=[1, 1])
        assert refusal(client.infer, "faulty", [x_of(value)]) == (f"StatusCode.{code}", over_http.json()["error"])

    def test_wrong_requests(self, client: Any, stub: Any) -> None:
        code, message = refusal(client.infer, "tuned", [tensor("x", np.zeros((1, 1)), "FP64")])
        assert code == "StatusCode.INVALID_ARGUMENT"
        assert "FP32" in message
        assert "FP64" in message
        request = pb.ModelInferRequest(model_name="tuned")
        request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(request)
        assert (caught.value.code(), "fp32_contents" in caught.value.details()) == (
            grpc.StatusCode.INVALID_ARGUMENT, True,
        )  # fmt: skip

    def test_it_counts_and_logs_as_any_request(self, stub: Any, running: Running) -> None:
        request = pb.ModelInferRequest(model_name="tuned")
        request.inputs.add(name="x", datatype="FP32", shape=[1, 1]).contents.fp32_contents.append(1)
        _, call = stub.ModelInfer.with_call(request, metadata=[("x-request-id", "by-grpc")])
        assert dict(call.trailing_metadata())["x-request-id"] == "by-grpc"

        def logged() -> str:
            return next((line for line in running.log.read_text().splitlines() if '"by-grpc"' in line), "")

        line = json.loads(wait_for(logged))
        assert (line["protocol"], line["status"], line["path"]) == ("grpc", 200, "/v2/models/tuned/infer")


class TestHeads:
    def test_a_pipelines_heads(self, client: Any) -> None:
        result = client.infer("heads", [x_of(1, 2, 3, 4)])
        assert (result.as_numpy("ya").tolist(), result.as_numpy("yb").tolist()) == ([[2, 4, 6, 8]], [[4, 6, 8, 10]])

    def test_a_head_that_is_left_out_is_named(self, client: Any) -> None:
        response = client.infer("heads", [x_of(7, 0, 0, 0)]).get_response()
        assert [output.name for output in response.outputs] == ["ya"]
        assert response.parameters["omitted_heads"].string_param == "b"
        assert "yb can't bear 14" in response.parameters["head.b.reason"].string_param

    def test_each_head_comes_when_it_is_ready(self, stream: Streamed) -> None:
        stream.send("heads", x_of(7, 0, 0, 0), enable_empty_final_response=True)
        found: list[Any] = []
        while not found or isinstance(found[-1], InferenceServerException) or found[-1].outputs:
            found.append(stream.next())
        errors = [str(one) for one in found if isinstance(one, InferenceServerException)]
        assert len(errors) == 1
        assert "head `b`: " in errors[0]
        (answer,) = (one for one in found if not isinstance(one, InferenceServerException) and one.outputs)
        assert answer.parameters["head"].string_param == "a"


class TestDeadlines:
    def test_a_clients_deadline_ends_the_request(self, client: Any, running: Running) -> None:
        gate = running.gate()
        code, _ = refusal(client.infer, "slow", [x_of(gate.value)], client_timeout=0.3)
        assert code == "StatusCode.DEADLINE_EXCEEDED"
        wait_for(lambda: running.in_flight("slow") == 0)
        gate.open()

    def test_a_client_that_cancels(self, client: Any, running: Running) -> None:
        gate = running.gate()
        call = client.async_infer("slow", [x_of(gate.value)], lambda result, error: None)
        wait_for(gate.has_begun)
        call.cancel()
        wait_for(lambda: running.in_flight("slow") == 0)
        gate.open()

    def test_the_deployments_deadline(self, client: Any, running: Running) -> None:
        gate = running.gate()
        assert refusal(client.infer, "slow", [x_of(gate.value)])[0] == "StatusCode.DEADLINE_EXCEEDED"
        gate.open()


class TestStreams:
    def test_each_piece_is_a_response(self, stream: Streamed) -> None:
        stream.send("pieces", x_of(1, 2), request_id="a", enable_empty_final_response=True)
        for index in range(3):
            response = stream.next()
            assert response.id == "a"
            assert np.frombuffer(response.raw_output_contents[0], np.float32).tolist() == [1 + index, 2 + index]
            assert not response.parameters["triton_final_response"].bool_param
        final = stream.next()
        assert (len(final.outputs), final.parameters["triton_final_response"].bool_param) == (0, True)

    def test_several_requests_and_a_fault(self, stream: Streamed) -> None:
        for value in (1, -1, 3):
            stream.send("faulty", x_of(value), request_id=str(value))
        found = [stream.next() for _ in range(3)]
        errors = [one for one in found if isinstance(one, InferenceServerException)]
        assert len(errors) == 1
        assert "poison" in str(errors[0])
        answers = {one.id: np.frombuffer(one.raw_output_contents[0], np.float32).item() for one in found
                   if one not in errors}  # fmt: skip
        assert answers == {"1": 2, "3": 6}
        stream.send("faulty", x_of(5))
        assert stream.next().parameters["triton_final_response"].bool_param

    def test_a_client_that_leaves_ends_the_model(self, client: Any, running: Running) -> None:
        streamed = Streamed(client)
        streamed.send("endless", x_of(0))
        streamed.next()
        client.stop_stream(cancel_requests=True)
        wait_for(lambda: running.in_flight("endless") == 0)

    def test_a_client_that_does_not_read_is_cut_off(self, running: Running, stub: Any) -> None:
        request = pb.ModelInferRequest(model_name="endless")
        wide = request.inputs.add(name="x", datatype="FP32", shape=[1, 50_000])
        wide.contents.fp32_contents.extend([0.0] * 50_000)
        call = stub.ModelStreamInfer(iter([request]))
        next(call)
        wait_for(lambda: running.in_flight("endless") == 0)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert (caught.value.code(), "read no data" in caught.value.details()) == (grpc.StatusCode.CANCELLED, True)

    def test_a_language_model(self, stream: Streamed, client: Any) -> None:
        text = tensor("text_input", np.array([b"def f("], object), "BYTES")
        limit = tensor("max_tokens", np.array([40], np.int32), "INT32")
        whole = client.infer("null", [text, limit]).as_numpy("text_output")[0]
        stream.send("null", text, limit, tensor("stream", np.array([True]), "BOOL"))
        pieces = []
        while True:
            response = stream.next()
            pieces.append(response.raw_output_contents[0][4:])
            if response.parameters["triton_final_response"].bool_param:
                break
        assert b"".join(pieces) == whole
        assert response.parameters["completion_tokens"].int64_param == 40
        assert len(pieces) > 2
        code, message = refusal(client.infer, "null", [text, tensor("max_tokenz", np.array([5], np.int32), "INT32")])
        assert code == "StatusCode.INVALID_ARGUMENT"
        assert "max_tokens" in message


def test_a_worker_that_is_killed_is_replaced(running: Running) -> None:
    for pid in running.workers():
        os.kill(pid, signal.SIGKILL)

    def answers() -> bool:
        with tritonclient.grpc.InferenceServerClient(running.grpc_address) as client:
            try:
                return bool(client.infer("tuned", [x_of(1)]).as_numpy("y").item() == 2)
            except InferenceServerException:
                return False

    wait_for(answers)


class TestHealthAndReflection:
    def test_health(self, running: Running) -> None:
        with grpc.insecure_channel(running.grpc_address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", SERVICE, "mirror"):
                assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == 1
            with pytest.raises(grpc.RpcError) as caught:
                health.Check(health_pb2.HealthCheckRequest(service="nobody"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            watch = health.Watch(health_pb2.HealthCheckRequest(service="faulty"))
            assert next(watch).status == 1
            running.client.post(f"{running.url}/v2/repository/models/faulty/unload")
            assert next(watch).status == 2
            running.client.post(f"{running.url}/v2/repository/models/faulty/load")
            assert next(watch).status == 1
            watch.cancel()

    def test_reflection(self, running: Running) -> None:
        with grpc.insecure_channel(running.grpc_address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert SERVICE in database.get_services()
            service = DescriptorPool(database).FindServiceByName(SERVICE)
            assert "ModelStreamInfer" in service.methods_by_name


class TestBadInput:
    def test_a_message_over_the_limit(self, client: Any) -> None:
        code, message = refusal(client.infer, "tuned", [tensor("x", np.zeros((1, 300_000), np.float32), "FP32")])
        assert code == "StatusCode.RESOURCE_EXHAUSTED"
        assert str(MAX_BODY_BYTES) in message

    @pytest.mark.parametrize("how", ["gzip", "deflate"])
    def test_a_compressed_message(self, client: Any, how: str) -> None:
        assert client.infer("tuned", [x_of(1, 2)], compression_algorithm=how).as_numpy("y").tolist() == [[2, 4]]
        bomb = tensor("x", np.zeros((1, 300_000), np.float32), "FP32")  # a few KB when compressed
        assert refusal(client.infer, "tuned", [bomb], compression_algorithm=how)[0] == "StatusCode.RESOURCE_EXHAUSTED"

    def test_bytes_that_are_no_message(self, running: Running) -> None:
        with grpc.insecure_channel(running.grpc_address) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/{SERVICE}/ModelInfer")(b"\xff\xff\xff")
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            call = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(iter([b"\xff\xff\xff"]))
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    @pytest.mark.parametrize(
        "sent", [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64]
    )
    def test_what_is_no_grpc(self, running: Running, client: Any, sent: bytes) -> None:
        host, _, port = running.grpc_address.rpartition(":")
        with socket.create_connection((host, int(port)), 10) as connection:
            connection.sendall(sent)
            while connection.recv(4096):
                pass
        assert client.is_server_live()

    def test_a_preface_without_more_is_cut_off(self, running: Running) -> None:
        host, _, port = running.grpc_address.rpartition(":")
        with socket.create_connection((host, int(port)), 30) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            while connection.recv(4096):
                pass

    def test_thousands_of_streams(self, running: Running, client: Any) -> None:
        calls = [Streamed(tritonclient.grpc.InferenceServerClient(running.grpc_address)) for _ in range(20)]
        with grpc.insecure_channel(running.grpc_address) as channel:
            method = pb_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer
            opened = [method(iter(())) for _ in range(2000)]
            for call in opened:
                assert list(call) == []
        for streamed in calls:
            streamed.send("tuned", x_of(1))
            assert len(streamed.next().outputs) == 2
            streamed.client.stop_stream()
            streamed.client.close()
        assert client.is_server_live()


def test_keys_and_tls(tmp_path: Path) -> None:
    tls = {"certificate": str(tmp_path / "server.pem"), "key": str(tmp_path / "server.key")}
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2", "-keyout", tls["key"], "-out",
         tls["certificate"]],
        check=True, capture_output=True,
    )  # fmt: skip
    text, digest = make_key()
    keys = [Key(BRISK, digest, scopes=("infer",), requests_per_second=2)]
    change_file(tmp_path / "keys.json", lambda _: keys)
    config = {
        "deployments": {"tuned": {"model": "typed:Tuned"}},
        "security": {"keys_file": str(tmp_path / "keys.json")},
        "server": {"grpc_port": 0, "tls": tls},
    }
    with leaves_nothing(config) as running:
        port = running.grpc_address.rpartition(":")[2]
        made = tritonclient.grpc.InferenceServerClient(
            f"localhost:{port}", ssl=True, root_certificates=tls["certificate"]
        )
        with made as client:
            assert client.is_server_live()
            assert refusal(client.infer, "tuned", [x_of(1)])[0] == "StatusCode.UNAUTHENTICATED"
            headers = {"authorization": f"Bearer {text}"}
            assert client.infer("tuned", [x_of(1)], headers=headers).as_numpy("y").item() == 2
            assert refusal(client.unload_model, "tuned", headers=headers)[0] == "StatusCode.PERMISSION_DENIED"
            codes = set()
            until = time.monotonic() + 30
            while "StatusCode.RESOURCE_EXHAUSTED" not in codes and time.monotonic() < until:
                try:
                    client.infer("tuned", [x_of(1)], headers=headers)
                except InferenceServerException as error:
                    codes.add(str(error.status()))
            assert codes == {"StatusCode.RESOURCE_EXHAUSTED"}


def test_a_server_that_stops_sends_clients_elsewhere_and_finishes_their_calls() -> None:
    config = {"deployments": {"slow": {"model": "faulty:Slow"}}, "server": {"grpc_port": 0, "drain_delay_s": 600}}
    with serve(config) as running, tritonclient.grpc.InferenceServerClient(running.grpc_address) as client:
        gate = running.gate()
        answers: queue.Queue[Any] = queue.Queue()
        client.async_infer("slow", [x_of(gate.value)], lambda result, error: answers.put(error or result))
        wait_for(gate.has_begun)
        running.popen.send_signal(signal.SIGTERM)

        def has_to_connect_again() -> bool:
            try:
                return not client.is_server_live()
            except InferenceServerException as error:
                return "refused" in str(error)

        wait_for(has_to_connect_again)
        assert running.get("/v2/health/live").status_code == 200
        gate.open()
        assert answers.get(timeout=30).as_numpy("y").shape == (1, 1)
        running.popen.send_signal(signal.SIGTERM)  # ends the delay
        assert running.popen.wait(60) == 0


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = tmp_path / "config.yaml"
        config.write_text(json.dumps({
            "deployments": {"tuned": {"model": "typed:Tuned"}}, "server": {"port": 0, "grpc_port": port},
        }))  # fmt: skip
        command = [sys.executable, "-m", "headwater_server", "serve", str(config)]
        services = Path(__file__).parents[1] / "services"
        ended = subprocess.run(command, cwd=services, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "server.grpc_port" in ended.stderr + ended.stdout
    assert "--grpc-port" in ended.stderr + ended.stdout
