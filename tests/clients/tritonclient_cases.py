"""Triton's client for gRPC, blocking and asyncio: unary calls, streams, sequences, decoupled models, keys, errors."""

from __future__ import annotations

import asyncio
import functools
import itertools
import queue
import time
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from cases import GRPC, KEY, KEYED_GRPC, raised, run
from tritonclient.utils import InferenceServerException

SEQUENCE_IDS = itertools.count(1)


def x_of(*values: int, is_batched: bool = True) -> Any:
    """The input of the models in `triton_models`."""
    array = np.array(values, np.int32)
    array = array[:, np.newaxis] if is_batched else array
    made = triton.InferInput("x", list(array.shape), "INT32")
    made.set_data_from_numpy(array)
    return made


def refused(code: str, call: Any, *arguments: Any, **options: Any) -> str:
    """A call must fail with this code; returns the message."""
    error = raised(InferenceServerException, functools.partial(call, *arguments, **options))
    assert str(error.status()) == f"StatusCode.{code}", error
    return str(error.message())


class Stream:
    """A client with a stream, and what arrives by it."""

    def __init__(self, address: str = GRPC, **options: Any) -> None:
        self.client = triton.InferenceServerClient(address)
        self._queue: queue.Queue[Any] = queue.Queue()
        self.client.start_stream(lambda result, error: self._queue.put(error or result), **options)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def send(self, model: str, *values: int, is_batched: bool = True, **options: Any) -> None:
        self.client.async_stream_infer(model, [x_of(*values, is_batched=is_batched)], **options)

    def next(self) -> Any:
        return self._queue.get(timeout=30)

    def until_final(self) -> tuple[list[int], bool]:
        """The numbers of one request, and whether its end was an empty response."""
        numbers: list[int] = []
        while True:
            result = self.next()
            assert not isinstance(result, InferenceServerException), result
            response = result.get_response()
            if response.outputs:
                numbers.append(result.as_numpy("y").item())
            if response.parameters["triton_final_response"].bool_param:
                return numbers, not response.outputs


def health_and_metadata() -> None:
    with triton.InferenceServerClient(GRPC) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.get_server_metadata(as_json=True)["name"] == "headwater"
        assert client.is_model_ready("doubled", "1")
        assert not client.is_model_ready("nope")
        metadata = client.get_model_metadata("doubled", as_json=True)
        assert metadata["inputs"] == [{"name": "x", "datatype": "INT32", "shape": ["-1", "1"]}]
        assert client.get_model_config("counted").config.model_transaction_policy.decoupled
        assert client.get_model_config("summed").config.HasField("sequence_batching")
        assert client.get_model_metadata("mirror").platform


def infer_and_statistics() -> None:
    with triton.InferenceServerClient(GRPC) as client:

        def count() -> int:
            (statistics,) = client.get_inference_statistics("doubled").model_stats
            return int(statistics.inference_stats.success.count)

        before = count()
        for how in (None, "gzip", "deflate"):
            result = client.infer(
                "doubled", [x_of(1, 2)], request_id="7", outputs=[triton.InferRequestedOutput("y")],
                compression_algorithm=how,
            )  # fmt: skip
            assert result.as_numpy("y").tolist() == [[2], [4]]
            assert result.get_response().id == "7"
        wide = np.arange(100_000, dtype=np.int32)[np.newaxis]
        tensor = triton.InferInput("in_int32", list(wide.shape), "INT32")
        tensor.set_data_from_numpy(wide)
        result = client.infer("mirror", [tensor], compression_algorithm="gzip")
        assert np.array_equal(result.as_numpy("out_int32"), wide)
        assert count() == before + 3
        assert len(client.get_inference_statistics().model_stats) > 1


def every_datatype() -> None:
    arrays = {
        "BOOL": np.array([[True, False]]),
        "BYTES": np.array([["hä".encode(), b"\0"]], np.object_),
        **{f"{sign}INT{bits}": np.array([[0, 1]], f"{sign}int{bits}".lower()) for bits in (8, 16, 32, 64)
           for sign in ("", "U")},
        **{f"FP{bits}": np.array([[0.5, -1]], f"float{bits}") for bits in (16, 32, 64)},
    }  # fmt: skip
    inputs = []
    for name, array in arrays.items():
        made = triton.InferInput(f"in_{name.lower()}", list(array.shape), name)
        made.set_data_from_numpy(array)
        inputs.append(made)
    with triton.InferenceServerClient(GRPC) as client:
        result = client.infer("mirror", inputs)
    for name, array in arrays.items():
        assert np.array_equal(result.as_numpy(f"out_{name.lower()}"), array), name


def repository() -> None:
    with triton.InferenceServerClient(GRPC) as client:

        def state() -> str:
            entries = client.get_model_repository_index().models
            return next(str(entry.state) for entry in entries if entry.name == "doubled")

        assert state() == "READY"
        client.unload_model("doubled")
        assert not client.is_model_ready("doubled")
        until_s = time.monotonic() + 30
        while state() == "UNLOADING" and time.monotonic() < until_s:
            time.sleep(0.02)
        assert state() == "UNAVAILABLE"
        refused("NOT_FOUND", client.infer, "doubled", [x_of(1)])
        client.load_model("doubled")
        assert client.infer("doubled", [x_of(4)]).as_numpy("y").item() == 8


def errors() -> None:
    with triton.InferenceServerClient(GRPC) as client:
        assert "nope" in refused("NOT_FOUND", client.infer, "nope", [x_of(1)])
        refused("NOT_FOUND", client.infer, "doubled", [x_of(1)], model_version="9")
        refused("INVALID_ARGUMENT", client.infer, "doubled", [x_of(*range(9))])
        assert refused("INTERNAL", client.infer, "doubled", [x_of(-1)]) == "no -1"
        assert refused("INVALID_ARGUMENT", client.infer, "doubled", [x_of(-2)]) == "no -2"
        refused("UNIMPLEMENTED", client.infer, "counted", [x_of(1, is_batched=False)])
        refused("UNIMPLEMENTED", client.get_log_settings)
        refused("UNIMPLEMENTED", client.register_system_shared_memory, "region", "/region", 64)


def timeouts_and_cancellations() -> None:
    with triton.InferenceServerClient(GRPC) as client:
        refused("DEADLINE_EXCEEDED", client.infer, "slow", [x_of(5000)], client_timeout=0.2)
        done: queue.Queue[Any] = queue.Queue()
        call = client.async_infer("slow", [x_of(100)], lambda result, error: done.put(error))
        call.cancel()
        assert "cancelled" in str(done.get(timeout=30))
        client.async_infer("doubled", [x_of(3)], lambda result, error: done.put(error or result))
        assert done.get(timeout=30).as_numpy("y").item() == 6


def streams_of_several_requests() -> None:
    with Stream(compression_algorithm="gzip") as stream:
        for number in range(20):
            stream.send("doubled", number, request_id=str(number))
        stream.send("nope", 1, request_id="unknown")
        results = [stream.next() for _ in range(21)]
        (error,) = (result for result in results if isinstance(result, InferenceServerException))
        assert "nope" in str(error)
        responses = [result for result in results if result is not error]
        found = {result.get_response().id: result.as_numpy("y").item() for result in responses}
        assert found == {str(number): 2 * number for number in range(20)}


def decoupled_models() -> None:
    with Stream() as stream:
        stream.send("counted", 4, is_batched=False, enable_empty_final_response=True)
        assert stream.until_final() == ([0, 1, 2, 3], True)
        stream.send("counted", 0, is_batched=False, enable_empty_final_response=True)
        assert stream.until_final() == ([], True)
        stream.send("counted", 2, is_batched=False)
        stream.send("counted", -1, is_batched=False)
        results = [stream.next() for _ in range(4)]
        numbers = [
            result.as_numpy("y").item() for result in results if not isinstance(result, InferenceServerException)
        ]
        assert sorted(numbers) == [0, 0, 1]
        (error,) = (result for result in results if isinstance(result, InferenceServerException))
        assert error.message() == "negative"
        stream.send("doubled", 1)  # the stream goes on
        assert stream.next().as_numpy("y").item() == 2


def sequences() -> None:
    ids: tuple[int | str, ...] = (next(SEQUENCE_IDS), f"sequence-{next(SEQUENCE_IDS)}")
    with Stream() as stream, triton.InferenceServerClient(GRPC) as client:
        for step in range(1, 4):
            for id in ids:
                stream.send("summed", step, sequence_id=id, sequence_start=step == 1, request_id=str(id))
        sums: dict[str, list[int]] = {str(id): [] for id in ids}
        for _ in range(6):
            result = stream.next()
            assert not isinstance(result, InferenceServerException), result
            sums[result.get_response().id].append(result.as_numpy("y").item())
        assert set(map(tuple, sums.values())) == {(1, 3, 6)}
        for id in ids:  # the same sequences, by another call
            result = client.infer("summed", [x_of(10)], sequence_id=id, sequence_end=True)
            assert result.as_numpy("y").item() == 16
        refused("INVALID_ARGUMENT", client.infer, "summed", [x_of(1)], sequence_id=ids[0])


def cancelled_streams_free_the_model() -> None:
    for _ in range(3):
        with Stream() as stream:
            stream.send("endless", 0, is_batched=False)
            assert stream.next().as_numpy("y").item() == 0
            stream.client.stop_stream(cancel_requests=True)
    with Stream(stream_timeout=1) as stream:
        stream.send("endless", 0, is_batched=False)
        while not isinstance(result := stream.next(), InferenceServerException):
            pass
        assert str(result.status()) == "StatusCode.DEADLINE_EXCEEDED", result.status()


def keys() -> None:
    with triton.InferenceServerClient(KEYED_GRPC) as client:
        assert client.is_server_live()
        refused("UNAUTHENTICATED", client.infer, "doubled", [x_of(1)])
        refused("UNAUTHENTICATED", client.infer, "doubled", [x_of(1)], headers={"authorization": "Bearer no"})
        for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}):
            assert client.infer("doubled", [x_of(1)], headers=headers).as_numpy("y").item() == 2
        refused("PERMISSION_DENIED", client.unload_model, "doubled", headers=headers)
    with Stream(KEYED_GRPC, headers={"authorization": f"Bearer {KEY}"}) as stream:
        stream.send("doubled", 1)
        assert stream.next().as_numpy("y").item() == 2
    with Stream(KEYED_GRPC) as stream:
        stream.send("doubled", 1)
        assert "API key" in str(stream.next())


def asynchronously() -> None:
    async def ask() -> None:
        async with triton_aio.InferenceServerClient(GRPC) as client:
            assert await client.is_model_ready("doubled")
            results = await asyncio.gather(*(client.infer("doubled", [x_of(n)]) for n in range(20)))
            assert [result.as_numpy("y").item() for result in results] == [2 * n for n in range(20)]

            async def requests() -> Any:
                for count in (2, 3):
                    inputs = [x_of(count, is_batched=False)]
                    yield {"model_name": "counted", "inputs": inputs, "request_id": str(count)}

            numbers: dict[str, list[int]] = {"2": [], "3": []}
            stream = client.stream_infer(requests())
            async for result, error in stream:
                assert error is None, error
                numbers[result.get_response().id].append(result.as_numpy("y").item())
            assert numbers == {"2": [0, 1], "3": [0, 1, 2]}, numbers

            async def one() -> Any:
                yield {"model_name": "endless", "inputs": [x_of(0, is_batched=False)]}

            stream = client.stream_infer(one())
            async for _ in stream:
                stream.cancel()
                break
            call = client.infer("slow", [x_of(5000)], client_timeout=0.2)
            failure: Any = (await asyncio.gather(call, return_exceptions=True))[0]
            assert str(failure.status()) == "StatusCode.DEADLINE_EXCEEDED", failure

    asyncio.run(ask())


run(
    health_and_metadata, infer_and_statistics, every_datatype, repository, errors, timeouts_and_cancellations,
    streams_of_several_requests, decoupled_models, sequences, cancelled_streams_free_the_model, keys, asynchronously,
)  # fmt: skip
