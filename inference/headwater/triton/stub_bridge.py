"""The model that Triton's Python backend loads in place of a user's ``model.py``, and passes each request on to it.

An instance of the model in Triton's stub starts the host of the user's ``model.py`` (`headwater.triton.model_host`), a
process under the user's Python, and reaches it by two connections. ``calls`` has what Triton's ``execute`` waits for,
and what the model asks Triton meanwhile in the thread that executes. ``side`` has all else: the answers of decoupled
models, and requests to other models from other threads. Triton's batcher, queues, ensembles and sequences are before
this module, and don't know of it.

Requests are never joined: the host's ``execute`` gets the list that Triton's stub got. A host that ends takes the
requests of its call with it, and is started again for the next call.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from headwater.triton.call_codec import (
    BFLOAT16,
    CODES,
    Disconnected,
    Frames,
    Received,
    Told,
    read_request,
    request_content,
)
from headwater.triton.dlpack_capsule import capsule_of_bits, capsule_of_tensor
from headwater.triton.sequence_state import SequenceStates, StateFault, StateRequest
from headwater.wire.bridge import describe, read_tensors
from headwater.wire.host_program import HostProgram
from headwater.wire.open_requests import is_open, without_request

__all__ = ["BridgedModel"]

INFER_THREADS: Final = 32
"""Requests to other models that an instance can have computed at once, besides the one of its own thread."""
END_S: Final = 5.0
"""Time in which a host must end after ``finalize``; then it is killed."""
_START: Final = """\
import sys
sys.path[:] = [sys.argv.pop(1), *filter(None, sys.path)]
from headwater.triton.model_host import main
main()
"""
"""The program of a host. Modules in the working folder can't hide the modules that it imports."""


class _Host:
    """A host's process and the connections to it."""

    def __init__(self, program: HostProgram, script: str) -> None:
        self._limit_s = program.max_compute_s
        ours = []
        theirs = []
        for _ in range(2):
            one, other = socket.socketpair()
            ours.append(one)
            theirs.append(other)
        numbers = [str(end.fileno()) for end in theirs]
        output = os.open(program.output, os.O_WRONLY | os.O_APPEND)
        try:
            self._process = subprocess.Popen(
                [program.python, "-c", _START, program.stage, *numbers, script, program.metrics],
                env=program.environment,
                cwd=program.working_folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[end.fileno() for end in theirs],
            )
        finally:
            os.close(output)
            for end in theirs:
                end.close()
        self._socket = ours[0]
        self.calls, self.side = Frames(ours[0]), Frames(ours[1])

    def limit(self) -> None:
        """From now on, end the host when it takes longer than ``max_compute_s`` with a call."""
        self._socket.settimeout(self._limit_s)

    def ask(self, *content: Any) -> Any:
        """Send a request on ``calls`` and return the value of the answer.

        Raises:
            ValueError: the host answers with an error.
            Disconnected: the host has ended.
        """
        self.calls.send(content)
        kind, value = self.calls.receive().content
        if kind == "raise":
            raise ValueError(value)
        return value

    def end(self, wait_s: float = 0.0) -> str:
        """End the process, if it still runs after ``wait_s``. Returns how it ended."""
        is_running = self._process.poll() is None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        self._process.kill()
        self.calls.close()
        self.side.close()
        status = self._process.wait()
        if is_running and status == -signal.SIGKILL and self._limit_s is not None:
            return f"was ended: a call took longer than max_compute_s = {self._limit_s:g} s"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"exited with status {status}"


class BridgedModel:
    """An instance of the model, which Triton's stub constructs. A generated ``model.py`` subclasses it."""

    program: ClassVar[HostProgram]
    script: ClassVar[str]
    """Path of the user's ``model.py``, or of the ``default_model_filename``."""

    @classmethod
    def auto_complete_config(cls, config: Any) -> Any:
        """Have the host complete the configuration. Runs in a process of its own.

        Raises:
            ValueError: the model refuses, or can't be imported.
            Disconnected: the host has ended.
        """
        host = _Host(cls.program, cls.script)
        try:
            completed = host.ask("complete", json.dumps(config.as_dict()))
        finally:
            host.end()
        config._model_config = json.loads(completed)
        return config

    def initialize(self, args: Mapping[str, str]) -> None:
        """Start the host, and have it construct and initialize the model.

        Raises:
            TritonModelException: the model can't be loaded.
        """
        import triton_python_backend_utils

        self._triton: Any = triton_python_backend_utils
        model_folder = os.path.dirname(os.path.dirname(self.script))
        self._arguments = {**args, "model_repository": model_folder}
        config = json.loads(args["model_config"])
        self._is_decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        self._ready, self._start, self._controls = _controls(config.get("sequence_batching", {}))
        try:
            self._states = SequenceStates(config, model_folder, self.program.states)
        except (StateFault, OSError) as error:
            raise self._triton.TritonModelException(str(error)) from None
        self._codes = [getattr(self._triton.TritonError, name) for name in CODES]
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[_Host, dict[int, Any]]] = {}
        """By call of a decoupled model: its host, and the senders of the requests that are not answered to their end,
        by their place."""
        self._pool: Any = None
        self._host: _Host | None = None
        self._started()
        self._file = os.path.join(self.program.instances, str(os.getpid()))
        with open(self._file, "w", encoding="utf-8") as file:
            file.write(f"model {args['model_name']}, version {args['model_version']}")

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Compute the requests that Triton joined. Returns their responses, all of them errors if the call failed; None
        if the model is decoupled."""
        data: list[bytes | memoryview] = []
        content, sound, faults = [], [], {}
        self._states.begin_call()
        for place, request in enumerate(requests):
            try:
                content.append(self._content(request, data))
            except StateFault as error:
                faults[place] = str(error)
            else:
                sound.append(request)
        responses = self._computed(sound, content, data) if sound else []
        if responses is not None:
            for place, message in faults.items():
                responses[place:place] = self._failed(message, [requests[place]])
        return responses

    def _computed(self, requests: Sequence[Any], content: Any, data: list[bytes | memoryview]) -> list[Any] | None:
        number = next(self._numbers)
        senders = {place: self._new_sender(one) for place, one in enumerate(requests)} if self._is_decoupled else {}
        try:
            host = self._host or self._started()
        except self._triton.TritonModelException as error:  # it can't be started again
            self._fail(senders, str(error))
            return None if self._is_decoupled else self._failed(str(error), requests)
        if self._is_decoupled:
            self._open[number] = host, senders
        try:
            host.calls.send(["execute", number, content], data)
            return self._answers(host, requests)
        except OSError:
            reason = f"the model's process {self._lost(host)}"
        self._fail_open(host, reason)
        return None if self._is_decoupled else self._failed(reason, requests)

    def finalize(self) -> None:
        """Have the host finalize the model, and end."""
        with contextlib.suppress(OSError):  # the replica's folder is gone
            os.unlink(self._file)
        host, self._host = self._host, None
        if host is None:
            return
        with contextlib.suppress(OSError, ValueError):
            host.ask("finalize")
        host.end(END_S)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    # The host

    def _started(self) -> _Host:
        try:
            host = _Host(self.program, self.script)
        except OSError as error:
            raise self._triton.TritonModelException(f"the model's process can't be started: {error}") from None
        threading.Thread(target=self._serve_side, args=[host], name="side", daemon=True).start()
        try:
            host.ask("initialize", self._arguments, self.program.strict_outputs)
        except Disconnected:
            reason = f"the model's process {host.end()} before initialize() returned; the replica's log has more"
            raise self._triton.TritonModelException(reason) from None
        except ValueError as error:
            host.end()
            raise self._triton.TritonModelException(str(error)) from None
        host.limit()
        self._host = host
        return host

    def _lost(self, host: _Host) -> str:
        """Forget a host that doesn't answer, and end it. Returns how it ended."""
        if self._host is host:
            self._host = None
        return host.end(0.1)

    def _answers(self, host: _Host, requests: Sequence[Any]) -> list[Any] | None:
        """Wait for the answers of a call; meanwhile compute the requests that the host's thread sends."""
        while True:
            reply = host.calls.receive()
            kind, *values = reply.content
            if kind == "answers":
                return self._responses(values[0], reply, requests)
            if kind == "done":
                return None
            if kind == "raise":
                return self._failed(values[0], requests)
            self._infer(host.calls, reply)

    def _failed(self, message: str, requests: Sequence[Any]) -> list[Any]:
        """An error for each request. Triton would add places in this file to an exception."""
        return [self._triton.InferenceResponse(error=self._triton.TritonError(message)) for _ in requests]

    # Tensors

    def _content(self, request: Any, data: list[bytes | memoryview]) -> list[Any]:
        sequence, parameters = self._sequence(request)
        return request_content(
            self._inputs(request, sequence),
            data,
            request.requested_output_names(),
            {
                "parameters": parameters,
                "request_id": request.request_id(),
                "correlation_id": request.correlation_id(),
                "flags": sequence.flags,
                "timeout": request.timeout(),
            },
        )

    def _sequence(self, request: Any) -> tuple[StateRequest, str]:
        """What a request says of its sequence, and its parameters."""
        _, parameters = without_request(request.parameters())
        if not self._states.are_there:
            return StateRequest(0, request.flags()), parameters
        return StateRequest.read(request.correlation_id(), request.flags(), parameters)

    def _inputs(self, request: Any, sequence: StateRequest) -> list[Told]:
        """The inputs of a request. A request that stands for a slot without a sequence has zeros in place of Triton's
        uninitialised memory; a sequence that was at another replica before doesn't begin."""
        inputs = [self._told(tensor) for tensor in request.inputs()]
        if sequence.is_moved and self._start is not None:
            name, without = self._start
            inputs = [(told[0], np.full_like(told[1], without)) if told[0] == name else told for told in inputs]
        if self._ready is not None:
            name, without = self._ready
            if any(told[0] == name and told[1].flat[0] == without for told in inputs):
                return [told if told[0] in self._controls else (told[0], _zeros(told[1])) for told in inputs]
        return self._states.put(inputs, sequence)

    def _told(self, tensor: Any) -> Told:
        """A tensor of the stub, of BF16 as its bits."""
        try:
            return tensor.name(), tensor.as_numpy()
        except self._triton.TritonModelException:
            return f"{BFLOAT16} {tensor.name()}", capsule_of_tensor(tensor.to_dlpack())

    def _tensor(self, name: str, array: np.ndarray[Any, np.dtype[Any]]) -> Any:
        kind, _, rest = name.partition(" ")
        if kind == BFLOAT16:
            return self._triton.Tensor.from_dlpack(rest, capsule_of_bits(array))
        return self._triton.Tensor(name, array)

    def _responses(self, told: Iterable[Any], reply: Received, requests: Sequence[Any]) -> list[Any]:
        start, responses = reply.start, []
        for one, request in zip(told, requests, strict=True):
            response, start = self._response(one, reply.body, start, request)
            responses.append(response)
        return responses

    def _response(self, told: Any, body: memoryview, start: int, request: Any = None) -> tuple[Any, int]:
        if told["error"] is not None:
            code, message = told["error"]
            return self._triton.InferenceResponse(error=self._triton.TritonError(message, self._codes[code])), start
        arrays, start = read_tensors(told["outputs"], body, start)
        if request is not None:
            try:
                arrays = self._states.take(arrays, self._sequence(request)[0])
            except StateFault as error:
                return self._triton.InferenceResponse(error=self._triton.TritonError(str(error))), start
        return self._triton.InferenceResponse([self._tensor(*one) for one in arrays]), start

    def _told_response(self, response: Any, data: list[bytes | memoryview]) -> dict[str, Any]:
        if response.has_error():
            error = response.error()
            return {"error": (self._codes.index(error.code()), error.message())}
        return {"error": None, "outputs": describe(map(self._told, response.output_tensors()), data)}

    # Requests of the model to Triton

    def _serve_side(self, host: _Host) -> None:
        """Serve what comes on ``side``, until the host ends. Runs in a thread."""
        try:
            while True:
                reply = host.side.receive()
                kind = reply.content[0]
                if kind == "send":
                    self._send(reply)
                elif kind == "infer":
                    self._later(self._infer, host.side, reply)
                elif reply.content[2] in ("load_model", "unload_model"):
                    self._later(self._call, host.side, reply)
                else:
                    self._call(host.side, reply)
        except Disconnected:
            if self._host is host:
                self._fail_open(host, f"the model's process {self._lost(host)}")

    def _later(self, function: Any, *arguments: Any) -> None:
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor  # takes a megabyte, and few models need it

            self._pool = ThreadPoolExecutor(INFER_THREADS, "infer")
        self._pool.submit(function, *arguments)

    def _send(self, reply: Received) -> None:
        """Send an answer, or the end of the answers, of a decoupled request."""
        _, call, place, told, flags = reply.content
        sender = self._sender(call, place)
        if sender is None:  # it has failed
            return
        if flags:
            self._closed(call, place)
        try:
            if told is None:
                sender.send(flags=flags)
            else:
                sender.send(self._response(told, reply.body, reply.start)[0], flags=flags)
        except Exception as error:  # such as no space for the tensors in /dev/shm
            if not flags:
                self._closed(call, place)
            self._fail({place: sender}, str(error))

    def _new_sender(self, request: Any) -> Any:
        sender = request.get_response_sender()
        name, _ = without_request(request.parameters())
        return _HttpSender(sender, self.program.server, name) if name else sender

    def _closed(self, call: int, place: int) -> None:
        _, senders = self._open[call]
        senders.pop(place, None)
        if not senders:
            self._open.pop(call, None)

    def _sender(self, call: int, place: int) -> Any:
        """The sender of a request; None: the request is answered to its end."""
        opened = self._open.get(call)
        return None if opened is None else opened[1].get(place)

    def _fail_open(self, host: _Host, message: str) -> None:
        """Answer all decoupled requests of a host that are not answered to their end with an error."""
        for call, (owner, senders) in list(self._open.items()):
            if owner is host:
                self._open.pop(call, None)
                self._fail(senders, message)

    def _fail(self, senders: Mapping[int, Any], message: str) -> None:
        for sender in senders.values():
            error = self._triton.InferenceResponse(error=self._triton.TritonError(message))
            with contextlib.suppress(Exception):  # Triton may have ended the request
                sender.send(error, flags=self._triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _infer(self, frames: Frames, reply: Received) -> None:
        """Have Triton compute a request of the model, and send the answer, or each of the answers."""
        _, number, content, is_decoupled = reply.content
        try:
            inputs, wanted, about, _ = read_request(content, reply.body, reply.start)
            about["parameters"] = json.loads(about["parameters"])
            request = self._triton.InferenceRequest(
                inputs=[self._tensor(*one) for one in inputs], requested_output_names=wanted, **about
            )
            if is_decoupled:
                for response in request.exec(decoupled=True):
                    self._send_response(frames, number, response)
                frames.send(["end", number])
            else:
                self._send_response(frames, number, request.exec())
        except Disconnected:  # the host has ended
            pass
        except Exception as error:
            with contextlib.suppress(Disconnected):
                frames.send(["refused", number, str(error)])

    def _send_response(self, frames: Frames, number: int, response: Any) -> None:
        data: list[bytes | memoryview] = []
        told = self._told_response(response, data)
        frames.send(["answer", number, told], data)

    def _call(self, frames: Frames, reply: Received) -> None:
        _, number, function, arguments = reply.content
        try:
            value = getattr(self, f"_do_{function}")(*arguments)
            answer = ["value", number, value]
        except Exception as error:
            answer = ["refused", number, str(error)]
        with contextlib.suppress(Disconnected):
            frames.send(answer)

    def _do_is_cancelled(self, call: int, place: int) -> bool:
        sender = self._sender(call, place)
        return sender is None or bool(sender.is_cancelled())

    def _do_is_model_ready(self, name: str, version: str) -> bool:
        return bool(self._triton.is_model_ready(name, version))

    def _do_load_model(self, name: str, config: str) -> None:
        self._triton.load_model(name, config)

    def _do_unload_model(self, name: str, dependents: bool) -> None:
        self._triton.unload_model(name, dependents)


class _HttpSender:
    """The sender of a request over HTTP, which the gateway ends when its client has left, or its deadline has passed.

    Args:
        sender: Triton's sender.
        folder, name: see `is_open`.
    """

    def __init__(self, sender: Any, folder: str, name: str) -> None:
        self.send = sender.send
        self._folder = folder
        self._name = name

    def is_cancelled(self) -> bool:
        """Whether the request has ended at the gateway."""
        return not is_open(self._folder, self._name)


def _zeros(array: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    return np.full(array.shape, b"", object) if array.dtype.hasobject else np.zeros_like(array)


def _controls(
    batching: Mapping[str, Any],
) -> tuple[tuple[str, Any] | None, tuple[str, Any] | None, set[str]]:
    """The name and value by which a sequence batcher marks a slot without a sequence, and those by which it marks a
    request that begins none, None if it doesn't; and the names of all inputs that the batcher makes."""
    without: dict[str, tuple[str, Any]] = {}
    names: set[str] = set()
    for control in batching.get("control_input", []):
        names.add(control["name"])
        for one in control["control"]:
            values = one.get("int32_false_true") or one.get("fp32_false_true") or one.get("bool_false_true")
            if values:
                without[one["kind"]] = control["name"], values[0]
    return without.get("CONTROL_SEQUENCE_READY"), without.get("CONTROL_SEQUENCE_START"), names
