"""Calls and answers between an instance of a model, with a stand-in for Triton's Python backend, and its callable."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from headwater.replica import callee
from headwater.runtime.call_loop import CallLoop
from headwater.wire import bridge
from headwater.wire.bridge import HEAD, TritonPythonModel, describe, install, message, read_body, socket_path, tensors
from headwater.wire.triton_words import is_process_lost

TIMEOUT_S = 30
LARGE = np.arange(1 << 18, dtype=np.int64)
"""More than a socket takes at once, both ways."""

Outputs = list[dict[str, Any]]


class Tensor:
    """As the backend's."""

    def __init__(self, name: str, array: Any) -> None:
        self.name = name
        self.array = np.array(array)  # the backend copies it, too

    def as_numpy(self) -> Any:
        return self.array


class Request:
    """As the backend's."""

    def __init__(self, wanted: Sequence[str] = ("y",), parameters: dict[str, Any] | None = None, **inputs: Any) -> None:
        self.inputs = {name: Tensor(name, value) for name, value in inputs.items()}
        self.frames: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wanted = list(wanted)
        self._parameters = parameters or {}

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def requested_output_names(self) -> list[str]:
        return self._wanted

    def get_response_sender(self) -> Any:
        return SimpleNamespace(send=lambda response=None, flags=0: self.frames.put((response, flags)))

    def heard(self) -> list[Any]:
        """What has been sent: the outputs of each frame, or an error; up to the final flag."""
        found: list[Any] = []
        while True:
            response, flags = self.frames.get(timeout=TIMEOUT_S)
            if response is not None:
                found.append(response)
            if flags:
                return found


class Failed(Exception):
    """As the backend's ``TritonModelException``."""


def _response(tensors_: Sequence[Tensor] = (), error: Any = None) -> Any:
    return error if error is not None else {one.name: one.array.tolist() for one in tensors_}


BACKEND = SimpleNamespace(
    get_input_tensor_by_name=lambda request, name: request.inputs.get(name),
    Tensor=Tensor,
    InferenceResponse=_response,
    TritonError=lambda text: SimpleNamespace(error=text),
    TritonModelException=Failed,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Short enough for the paths of sockets."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", BACKEND)
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        yield name


@pytest.fixture
def serve(folder: str) -> Iterator[Callable[..., Any]]:
    """Makes an instance of a model, and serves it."""
    instances = []

    def make(answers: Any, *, frames: bool = False, instance: int = 0) -> Any:
        config = {
            "input": [{"name": "x"}, {"name": "left_out"}],
            "model_transaction_policy": {"decoupled": frames},
            "parameters": {"workspace-path": {"string_value": f"{folder}/w"}},
        }
        model = TritonPythonModel()
        name = f"m_0_{instance}"
        model.initialize({"model_config": json.dumps(config), "model_name": "m", "model_instance_name": name})
        callee.start(socket_path(folder, instance), answers, CallLoop())
        instances.append(model)
        return model

    yield make
    for model in instances:
        model.finalize()


async def doubled(requests: list[Any]) -> Outputs:
    return [{"y": one.data["x"] * 2, "z": one.data["x"]} for one in requests]


async def counting(requests: list[Any]) -> AsyncIterator[Outputs]:
    (one,) = requests
    for number in range(one.parameters["to"]):
        yield [{"y": one.data["x"] + number}]
        await asyncio.sleep(0)
    if one.parameters.get("fails"):
        raise ValueError("no more numbers")


def test_each_request_gets_the_outputs_that_it_wants(serve: Any) -> None:
    model = serve(doubled)
    first, second = Request(x=[[1, 2]]), Request(("z",), x=[[3]])
    assert model.execute([first, second]) == [{"y": [[2, 4]]}, {"z": [[3]]}]
    assert model.execute([Request(("z", "y"), x=[5])]) == [{"y": [10], "z": [5]}]


def test_the_callable_gets_parameters_and_the_inputs_that_there_are(serve: Any) -> None:
    async def shown(requests: list[Any]) -> Outputs:
        (one,) = requests
        assert list(one.data) == ["x"]
        return [{"y": np.array([f"{one.parameters} {one.data['x'].tolist()}".encode()], object)}]

    model = serve(shown)
    text = np.array([[b"", b"\0a"]], object)
    assert model.execute([Request(parameters={"p": 1.5}, x=text)]) == [{"y": [b"{'p': 1.5} [[b'', b'\\x00a']]"]}]


def test_large_tensors(serve: Any) -> None:
    (answer,) = serve(doubled).execute([Request(x=LARGE)])
    assert answer == {"y": (LARGE * 2).tolist()}


def test_what_the_callable_raises_fails_the_call_and_no_other(serve: Any) -> None:
    async def fails(requests: list[Any]) -> Outputs:
        if requests[0].data["x"][0]:
            raise ValueError("not this one")
        return await doubled(requests)

    model = serve(fails)
    with pytest.raises(Failed, match="ValueError: not this one"):
        model.execute([Request(x=[1])])
    assert model.execute([Request(x=[0])]) == [{"y": [0]}]


def test_instances_call_their_own_callables_at_once(serve: Any) -> None:
    both = threading.Barrier(2)

    def named(name: str) -> Any:
        async def answers(requests: list[Any]) -> Outputs:
            both.wait(TIMEOUT_S)
            return [{"y": np.array([name.encode()], object)} for _ in requests]

        return answers

    models = [serve(named("first")), serve(named("second"), instance=1)]
    found: list[Any] = [None, None]

    def ask(place: int) -> None:
        found[place] = models[place].execute([Request(x=[1])])

    threads = [threading.Thread(target=ask, args=[place]) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert found == [[{"y": [b"first"]}], [{"y": [b"second"]}]]


def test_frames_come_in_order_and_end(serve: Any) -> None:
    model = serve(counting, frames=True)
    requests = [Request(parameters={"to": count}, x=[10 * count]) for count in (3, 0, 50)]
    for request in requests:
        assert model.execute([request]) is None
    for count, request in zip((3, 0, 50), requests, strict=True):
        assert request.heard() == [{"y": [10 * count + number]} for number in range(count)]


def test_calls_that_are_answered_in_frames_overlap(serve: Any) -> None:
    may_end = threading.Event()

    async def answers(requests: list[Any]) -> AsyncIterator[Outputs]:
        yield [{"y": requests[0].data["x"]}]
        if requests[0].data["x"][0]:
            await asyncio.to_thread(may_end.wait, TIMEOUT_S)

    model = serve(answers, frames=True)
    slow, quick = Request(x=[1]), Request(x=[0])
    model.execute([slow])
    model.execute([quick])
    assert quick.heard() == [{"y": [0]}]
    may_end.set()
    assert slow.heard() == [{"y": [1]}]


def test_inputs_stay_as_they_are_after_their_call(serve: Any) -> None:
    kept: list[Any] = []

    async def answers(requests: list[Any]) -> AsyncIterator[Outputs]:
        kept.append(requests[0].data["x"])
        yield [{"y": np.concatenate(kept)}]

    model = serve(answers, frames=True)
    for number in range(3):
        request = Request(x=[number])
        model.execute([request])
        assert request.heard() == [{"y": list(range(number + 1))}]


def test_frames_that_are_larger_than_a_socket_takes(serve: Any) -> None:
    request = Request(parameters={"to": 3}, x=LARGE)
    serve(counting, frames=True).execute([request])
    assert request.heard() == [{"y": (LARGE + number).tolist()} for number in range(3)]


def test_an_error_ends_the_frames(serve: Any) -> None:
    request = Request(parameters={"to": 1, "fails": True}, x=[1])
    serve(counting, frames=True).execute([request])
    frame, error = request.heard()
    assert frame == {"y": [1]}
    assert "ValueError: no more numbers" in error.error


def test_a_frame_that_triton_cannot_send_ends_its_call_and_no_other(serve: Any) -> None:
    class Full(Request):
        def get_response_sender(self) -> Any:
            def send(response: Any = None, flags: int = 0) -> None:
                if isinstance(response, dict):
                    raise Failed("no space left")
                self.frames.put((response, flags))

            return SimpleNamespace(send=send)

    model = serve(counting, frames=True)
    large, small = Full(parameters={"to": 3}, x=[1]), Request(parameters={"to": 2}, x=[1])
    model.execute([large])
    (error,) = large.heard()
    assert error.error == "no space left"
    model.execute([small])
    assert small.heard() == [{"y": [1]}, {"y": [2]}]


@pytest.mark.parametrize("frames", [False, True])
def test_the_end_of_the_callable_s_process_fails_what_is_under_way(folder: str, serve: Any, frames: bool) -> None:
    async def hangs_up(requests: list[Any]) -> Outputs:
        server.close()
        for connection in connections:
            connection.abort()
        return []

    loop = asyncio.new_event_loop()
    connections: list[asyncio.Transport] = []

    class Kept(callee.Callee):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            connections.append(cast(asyncio.Transport, transport))

    model = serve(doubled, frames=frames)
    Path(socket_path(folder, 0)).unlink()
    server = loop.run_until_complete(loop.create_unix_server(lambda: Kept(hangs_up), socket_path(folder, 0)))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        request = Request(x=[1])
        if frames:
            model.execute([request])
            (error,) = request.heard()
            assert is_process_lost(error.error)
        else:
            for _ in range(2):  # its answer doesn't come; it can't be written
                with pytest.raises(ConnectionError) as caught:
                    model.execute([request])
                assert is_process_lost(str(caught.value))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_an_answer_to_another_call_is_given_to_no_request(folder: str, serve: Any) -> None:
    class Doubling(callee.Callee):
        """Sends each answer twice, as two processes do that share the connection."""

        def _send(self, call: int, answer: Any) -> None:
            super()._send(call, answer)
            super()._send(call, answer)

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            connections.append(cast(asyncio.Transport, transport))

    async def close() -> None:
        server.close()
        for connection in connections:
            connection.abort()
        await asyncio.sleep(0)

    connections: list[asyncio.Transport] = []
    loop = asyncio.new_event_loop()
    model = serve(doubled)
    Path(socket_path(folder, 0)).unlink()
    server = loop.run_until_complete(loop.create_unix_server(lambda: Doubling(doubled), socket_path(folder, 0)))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        assert model.execute([Request(("y",), x=[1])]) == [{"y": [2]}]
        with pytest.raises(Exception, match="expected the answer to call 1, got that to 0"):
            model.execute([Request(("y",), x=[2])])
        assert model.execute([Request(("y",), x=[3])]) == [{"y": [6]}]
    finally:
        asyncio.run_coroutine_threadsafe(close(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_call_that_could_not_be_sent_is_not_answered_in_frames_too(folder: str, serve: Any) -> None:
    model = serve(counting, frames=True)
    path = Path(socket_path(folder, 0))
    path.unlink()
    unsent, sent = Request(x=[1]), Request(x=[2])
    with pytest.raises(ConnectionError):
        model.execute([unsent])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen()
        model.execute([sent])
        server.accept()[0].close()
        (error,) = sent.heard()
    assert is_process_lost(error.error)
    assert unsent.frames.empty()


def test_a_call_that_ended_before_it_could_be_sent_is_answered_once(
    folder: str, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = serve(counting, frames=True)
    path = Path(socket_path(folder, 0))
    path.unlink()
    request = Request(x=[1])
    found: list[Any] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen()

        def hung_up(*given: Any) -> list[bytes | memoryview]:
            server.accept()[0].close()
            found.extend(request.heard())
            return message(*given)

        monkeypatch.setattr(bridge, "message", hung_up)
        assert model.execute([request]) is None
    (error,) = found
    assert is_process_lost(error.error)


def test_the_end_of_an_instance_cancels_its_calls(serve: Any) -> None:
    ends: queue.SimpleQueue[str] = queue.SimpleQueue()

    async def answers(requests: list[Any]) -> AsyncIterator[Outputs]:
        try:
            yield [{"y": requests[0].data["x"]}]
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            ends.put("cancelled")
            raise

    model = serve(answers, frames=True)
    request = Request(x=[1])
    model.execute([request])
    assert request.frames.get(timeout=TIMEOUT_S)[0] == {"y": [1]}
    model.finalize()
    assert ends.get(timeout=TIMEOUT_S) == "cancelled"


def test_the_script_runs_without_our_modules(tmp_path: Path) -> None:
    script = tmp_path / "model.py"
    script.write_text("PyTriton's")
    script.chmod(0o444)  # as where packages are for reading only
    install(script)
    found: dict[str, Any] = {"__name__": "model"}
    hidden = {
        name: None for name in sys.modules if name.partition(".")[0] in ("headwater", "headwater_server", "msgspec")
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, nothing in hidden.items():
            patch.setitem(sys.modules, name, nothing)
        exec(compile(script.read_text(), str(script), "exec"), found)
    assert "TritonPythonModel" in found


_DTYPES = st.sampled_from(["|b1", "|i1", "|u1", "<i2", "<u2", "<f2", "<i4", "<u4", "<f4", "<i8", "<u8", "<f8"])
_SHAPES = npst.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)
_NUMBERS = _DTYPES.flatmap(lambda dtype: npst.arrays(dtype, _SHAPES))
_BYTES = npst.arrays(object, _SHAPES, elements=st.binary(max_size=9))


@given(st.lists(st.dictionaries(st.text(max_size=3), st.one_of(_NUMBERS, _BYTES), max_size=3), max_size=3))
def test_any_tensors_come_back_as_they_were(requests: list[dict[str, Any]]) -> None:
    data: list[bytes | memoryview] = []
    content = [describe(one.items(), data) for one in requests]
    whole = b"".join(message(7, content, data))
    call, length, more = HEAD.unpack_from(whole)
    assert len(whole) == HEAD.size + length + more
    found = read_body(call, whole[HEAD.size :], length)
    assert found.call == 7
    start = found.start
    for given_ in requests:
        arrays, start = tensors(found.content.pop(0), found.body, start)
        assert list(arrays) == list(given_)
        for name, array in given_.items():
            assert arrays[name].dtype == array.dtype
            np.testing.assert_array_equal(arrays[name], array)
            assert arrays[name].shape == array.shape
    assert start == len(found.body)
