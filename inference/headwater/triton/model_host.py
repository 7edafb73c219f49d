"""The host of a ``model.py`` of Triton's Python backend: a process under the user's Python that runs one instance.

Started by `headwater.triton.stub_bridge` as ``main()`` with the arguments CALLS SIDE SCRIPT METRICS: the descriptors of
two sockets, and the paths of the script and of the socket for metrics. The process ends when the bridge closes the
connections.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from headwater.triton import backend_utils
from headwater.triton.backend_utils import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    ModelConfig,
    Tensor,
    TritonError,
    TritonErrorCode,
    TritonModelException,
)
from headwater.triton.call_codec import BFLOAT16, Disconnected, Frames, Received, Told, read_request, request_content
from headwater.triton.execute_answers import SingleAnswer, check_sent, checked_answers
from headwater.triton.output_check import OutputCheck
from headwater.triton.user_script import account, script_class
from headwater.wire.bridge import describe, read_tensors

if TYPE_CHECKING:
    import asyncio  # takes 4 MB, and few models need it

__all__ = ["main"]


class _Asked:
    """Takes the answers to a request that this process sent on ``side``."""

    def __init__(self, *, is_decoupled: bool = False) -> None:
        self.is_decoupled = is_decoupled
        self._values: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._has_first = False
        self._on_first: Callable[[], object] = lambda: None

    def take(self, value: Any) -> None:
        """Take the next answer; None: there are no more."""
        with self._lock:
            self._has_first = True
            self._values.put(value)
            on_first, self._on_first = self._on_first, lambda: None
        on_first()

    def next(self) -> Any:
        """Wait for the next answer; raises it if it is an exception."""
        value = self._values.get()
        if isinstance(value, Exception):
            raise value
        return value

    def when_first(self, call: Callable[[], object]) -> None:
        """Call a function, in any thread, once the first answer is there."""
        with self._lock:
            if not self._has_first:
                self._on_first = call
                return
        call()


class _Responses:
    """The answers of a decoupled model, in turn as they come.

    Raises:
        TritonModelException: the first answer is a refusal of the request.
    """

    def __init__(self, asked: _Asked) -> None:
        self._asked = asked
        self._next = asked.next()

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        value = self._next
        if value is None:
            raise StopIteration
        if value is _UNREAD:
            value = self._asked.next()
            if value is None:
                self._next = None
                raise StopIteration
        self._next = _UNREAD
        return cast(InferenceResponse, value)


_UNREAD: Final = object()
_DATATYPES: Final = [*backend_utils.TRITON_STRING_TO_NUMPY, "TYPE_BF16"]
"""The names of the types in ``config.pbtxt``, in the order of Triton's numbers."""


class ModelHost:
    """Loads a model, and executes it for the bridge.

    Args:
        calls, side: the connections to the bridge.
        script: path of the script with the class ``TritonPythonModel``.
        metrics: path of the socket at which metrics are declared and counted.
    """

    def __init__(self, calls: Frames, side: Frames, script: str, metrics: str) -> None:
        self._pid = os.getpid()
        self._calls = calls
        self._side = side
        self._script = script
        self._metrics = _MetricCalls(metrics)
        self._title = os.path.basename(os.path.dirname(os.path.dirname(script)))
        self._main_thread = threading.get_ident()
        self._is_executing = False
        self._has_executed = False
        self._is_decoupled = False
        self._outputs = OutputCheck({})
        self._has_strict_outputs = False
        self._model: Any = None
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        """Runs coroutines of ``execute``: in the main thread, or of a decoupled model in a thread of its own."""

    def run(self) -> None:
        """Serve the bridge until it closes the connections."""
        threading.Thread(target=self._read_side, name="side", daemon=True).start()
        while True:
            try:
                reply = self._calls.receive()
            except Disconnected:
                return
            kind, *values = reply.content
            if kind == "execute":
                self._execute(values[0], values[1], reply)
                continue
            try:
                answer = ["fine", getattr(self, f"_{kind}")(*values)]
            except SystemExit as error:
                answer = ["raise", f"SystemExit: {error.code}"]
            except BaseException as error:
                answer = ["raise", self._account(error)]
            self._answered(answer)
            if kind == "finalize":
                return

    # The model

    def _complete(self, text: str) -> str:
        config = ModelConfig(json.loads(text))
        complete = getattr(script_class(self._script), "auto_complete_config", None)
        if complete is not None:
            config = complete(config)
            if not isinstance(config, ModelConfig):
                raise TypeError(f"auto_complete_config: expected the ModelConfig, got {type(config).__name__}")
        return json.dumps(config.as_dict())

    def _initialize(self, arguments: Mapping[str, str], has_strict_outputs: bool) -> None:
        config = json.loads(arguments["model_config"])
        self._outputs = OutputCheck(config)
        self._has_strict_outputs = has_strict_outputs
        self._is_decoupled = backend_utils.using_decoupled_model_transaction_policy(config)
        self._metrics.instance = arguments["model_instance_name"]
        model = script_class(self._script)()
        if hasattr(model, "initialize"):
            model.initialize(dict(arguments))
        self._model = model

    def _finalize(self) -> None:
        if hasattr(self._model, "finalize"):
            self._model.finalize()
        self._model = None

    def _execute(self, call: int, content: list[Any], reply: Received) -> None:
        requests: list[InferenceRequest] = []
        senders: list[Any] = []
        start = reply.start
        for place, one in enumerate(content):
            inputs, wanted, about, start = read_request(one, reply.body, start)
            request = InferenceRequest(
                inputs=[_tensor(*told) for told in inputs],
                requested_output_names=wanted,
                model_name=self._title,
                **about,
            )
            sender = _Decoupled(self, call, place) if self._is_decoupled else SingleAnswer()
            request.sender = sender
            requests.append(request)
            senders.append(sender)
        self._is_executing = self._has_executed = True
        try:
            answers = self._model.execute(requests)
            if hasattr(answers, "__await__"):
                if self._is_decoupled:
                    self._in_background(self._finish(answers, senders))
                    self._answered(["done"])
                    return
                answers = self._own_loop().run_until_complete(_awaited(answers))
            if self._is_decoupled:
                if answers is not None:
                    got = f"got {type(answers).__name__}; send the responses by get_response_sender()"
                    raise TritonModelException(f"execute of a decoupled model: expected None, {got}")
                self._answered(["done"])
                return
            data: list[bytes | memoryview] = []
            told = [self._told(answer, data) for answer in checked_answers(answers, requests)]
            self._answered(["answers", told], data)
        except Disconnected:
            raise
        except BaseException as error:
            message = self._account(error)
            if self._is_decoupled:
                _fail(senders, message)
                self._answered(["done"])
            else:
                self._answered(["raise", message])

    def _answered(self, content: list[Any], data: list[bytes | memoryview] | None = None) -> None:
        """Send the answer of a call, after which the bridge serves no calls."""
        self._is_executing = False
        if os.getpid() != self._pid:  # a child that the model has forked, and in which the call returns too
            os._exit(1)
        self._calls.send(content, data or [])

    async def _finish(self, answers: Awaitable[Any], senders: Sequence[Any]) -> None:
        try:
            await answers
        except BaseException as error:
            _fail(senders, self._account(error))

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop

    def _in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="coroutines", daemon=True).start()
        asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _account(self, error: BaseException) -> str:
        """What a client is told of an error; the log gets all of it."""
        self.log("ERROR", "".join(traceback.format_exception(error)).rstrip())
        return account(error, self._script)

    def _told(self, answer: InferenceResponse | str, data: list[bytes | memoryview]) -> dict[str, Any]:
        if isinstance(answer, str):
            return {"error": (TritonError.INTERNAL.value, answer)}
        if (error := answer.error()) is not None:
            return {"error": (error.code().value, error.message())}
        for tensor in answer.output_tensors():
            datatype = _DATATYPES[tensor.triton_dtype() - 1]
            if fault := self._outputs.fault(tensor.name(), datatype, tuple(tensor.shape())):
                if self._has_strict_outputs:
                    return {"error": (TritonError.INTERNAL.value, fault)}
                if self._outputs.is_new(tensor.name()):
                    self.log("WARNING", f"{fault}; it goes out as it is, and this is said once")
        return {"error": None, "outputs": describe(map(_pair, answer.output_tensors()), data)}

    # What the interface needs (`headwater.triton.backend_utils.TritonLink`)

    def log(self, level: str, message: str) -> None:
        """Write a line to the replica's log."""
        if level != "VERBOSE":
            sys.stderr.write(f"{level} model {self._title}: {message}\n")
            sys.stderr.flush()

    def send_answer(self, call: int, place: int, response: InferenceResponse | None, flags: int) -> None:
        """Send an answer of a decoupled request, or the end of its answers."""
        data: list[bytes | memoryview] = []
        told = None if response is None else self._told(response, data)
        self._side.send(["send", call, place, told, flags], data)

    def infer(self, request: InferenceRequest, *, decoupled: bool) -> Any:
        """See `headwater.triton.backend_utils.TritonLink.infer`."""
        if not decoupled and self._is_executing and threading.get_ident() == self._main_thread:
            data: list[bytes | memoryview] = []
            self._calls.send(["infer", 0, _content(request, data), False], data)
            value = self._value(self._calls.receive())
            if isinstance(value, Exception):
                raise value
            return value
        asked = self._ask(request, decoupled=decoupled)
        return _Responses(asked) if decoupled else asked.next()

    def infer_later(self, request: InferenceRequest, *, decoupled: bool) -> Awaitable[Any]:
        """See `headwater.triton.backend_utils.TritonLink.infer_later`."""
        import asyncio

        loop = asyncio.get_running_loop()  # as in Triton, it is an error without a loop
        asked = self._ask(request, decoupled=decoupled)
        first = loop.create_future()

        def wake() -> None:
            if not first.done():  # the coroutine was cancelled
                first.set_result(None)

        asked.when_first(lambda: loop.call_soon_threadsafe(wake))

        async def wait() -> Any:
            await first
            return _Responses(asked) if decoupled else asked.next()

        return wait()

    def call(self, function: str, *arguments: Any) -> Any:
        """See `headwater.triton.backend_utils.TritonLink.call`."""
        if function.startswith("metric"):
            return self._metrics.call(function, *arguments)
        number, asked = self._waiting()
        self._side.send(["call", number, function, arguments])
        return asked.next()

    def _ask(self, request: InferenceRequest, *, decoupled: bool) -> _Asked:
        if not self._has_executed:
            raise TritonModelException("exec: other models can be asked from `execute` on, not in `initialize`")
        number, asked = self._waiting(is_decoupled=decoupled)
        data: list[bytes | memoryview] = []
        self._side.send(["infer", number, _content(request, data), decoupled], data)
        return asked

    def _waiting(self, *, is_decoupled: bool = False) -> tuple[int, _Asked]:
        number, asked = next(self._numbers), _Asked(is_decoupled=is_decoupled)
        self._asked[number] = asked
        return number, asked

    def _read_side(self) -> None:
        try:
            while True:
                reply = self._side.receive()
                kind, number = reply.content[:2]
                asked = self._asked[number]
                asked.take(self._value(reply))
                if kind != "answer" or not asked.is_decoupled:
                    self._asked.pop(number, None)
        except Disconnected:
            os._exit(0)  # the bridge has ended; the main thread may be in the user's code

    def _value(self, reply: Received) -> Any:
        """The value of an answer: of ``end`` None, of ``refused`` an exception."""
        kind, *values = reply.content
        if kind == "end":
            return None
        if kind == "refused":
            return TritonModelException(values[1])
        if kind == "value":
            return values[1]
        told = values[1]
        if told["error"] is not None:
            code, message = told["error"]
            return InferenceResponse(error=TritonError(message, TritonErrorCode(code)))
        arrays, _ = read_tensors(told["outputs"], reply.body, reply.start)
        return InferenceResponse([_tensor(*one) for one in arrays])


class _MetricCalls:
    """Declares and counts metrics in the replica's host, a call at a time.

    Args:
        path: the socket of `headwater_server.repository.metric_registry`.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.RLock()  # the garbage collector may end a metric during a call
        self._file: Any = None
        self._gone: list[Any] = []
        """Metrics that ended during a call."""
        self._is_busy = False
        self.instance = ""
        """The instance's name in Triton, for the messages of errors."""

    def call(self, function: str, *arguments: Any) -> Any:
        """See `headwater.triton.backend_utils.TritonLink.call`."""
        with self._lock:
            if self._is_busy:
                self._gone.append(arguments[0])
                return None
            self._is_busy = True
            try:
                value = self._ask(function, *arguments)
                while self._gone:
                    self._ask("metric_forget", self._gone.pop())
                return value
            except OSError as error:
                raise TritonModelException(f"{function}: the replica counts no metrics: {error}") from None
            finally:
                self._is_busy = False

    def _ask(self, function: str, *arguments: Any) -> Any:
        if self._file is None:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(self._path)
            self._file = connection.makefile("rwb")
        self._file.write(json.dumps([function, *arguments]).encode() + b"\n")
        self._file.flush()
        answer = json.loads(self._file.readline() or b'{"error": "the replica is ending"}')
        if "error" not in answer:
            return answer["value"]
        text = answer["error"]
        if function != "metric":
            what = {"metric_family": "Error when creating MetricFamily"}.get(function)
            what = what or f"Failed to {arguments[1]} metric value"
            text = f"{what}: Failed to process the request for model '{self.instance}', message: {text}"
        raise TritonModelException(text)


class _Decoupled(InferenceResponseSender):
    """Sends the answers to a request of a decoupled model."""

    def __init__(self, host: ModelHost, call: int, place: int) -> None:
        self._host = host
        self._call = call
        self._place = place
        self._lock = threading.Lock()
        self.is_closed = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """See `InferenceResponseSender.send`."""
        check_sent(response, flags, is_closed=self.is_closed)
        with self._lock:  # answers leave in the order of their flags
            self._host.send_answer(self._call, self._place, response, flags)
            self.is_closed = bool(flags)

    def is_cancelled(self) -> bool:
        """See `InferenceResponseSender.is_cancelled`."""
        return not self.is_closed and bool(self._host.call("is_cancelled", self._call, self._place))


def _fail(senders: Sequence[Any], message: str) -> None:
    """Answer the requests of a decoupled model that have no end yet with an error and the end."""
    for sender in senders:
        if not sender.is_closed:
            error = InferenceResponse(error=TritonError(message))
            sender.send(error, flags=TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _content(request: InferenceRequest, data: list[bytes | memoryview]) -> list[Any]:
    about = {
        "model_name": request.model_name,
        "model_version": request.model_version,
        "request_id": request.request_id(),
        "correlation_id": request.correlation_id(),
        "flags": request.flags(),
        "timeout": request.timeout(),
        "parameters": request.parameters(),
    }
    return request_content(map(_pair, request.inputs()), data, request.requested_output_names(), about)


def _pair(tensor: Tensor) -> Told:
    if tensor.is_bfloat16:
        return f"{BFLOAT16} {tensor.name()}", tensor.bits
    array = tensor.bits
    if array.dtype.hasobject:
        array = array.copy()
        for at, value in enumerate(array.flat):
            if not isinstance(value, bytes):
                array.flat[at] = str(value).encode()
    return tensor.name(), array


def _tensor(name: str, array: Any) -> Tensor:
    kind, _, rest = name.partition(" ")
    return Tensor.of_bfloat16(rest, array) if kind == BFLOAT16 else Tensor(name, array)


async def _awaited(answers: Awaitable[Any]) -> Any:
    return await answers


def main() -> None:
    """Entry point; see the module's docstring."""
    calls, side, script, metrics = sys.argv[1:]
    sys.argv[:] = [script]
    host = ModelHost(Frames(socket.socket(fileno=int(calls))), Frames(socket.socket(fileno=int(side))), script, metrics)
    backend_utils.link = host
    backend_utils.model_folder = os.path.dirname(script)
    sys.path[0] = ""  # as in Triton's stub; it was the folder with the package `headwater`, which is imported
    with contextlib.suppress(Disconnected):
        host.run()
    sys.stdout.flush()
    os._exit(0)
