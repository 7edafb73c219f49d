"""A stand-in for the ``triton_python_backend_utils`` of Triton's stub, and instances of models that use it."""

from __future__ import annotations

import enum
import gc
import json
import os
import queue
import socketserver
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np

from headwater.triton.call_codec import CODES
from headwater.triton.dlpack_capsule import capsule_of_bits, capsule_of_tensor
from headwater.triton.stub_bridge import BridgedModel
from headwater.wire.host_program import HostProgram

__all__ = [
    "TIMEOUT_S",
    "ClientRequest",
    "MetricLines",
    "MetricServer",
    "StubFolder",
    "StubRefusal",
    "StubResponse",
    "StubTensor",
    "stub_module",
]

TIMEOUT_S: Final = 60
STAGE: Final = Path(__file__).parents[3] / "inference"
HEAD: Final = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n"


class StubRefusal(Exception):
    """As the stub's ``TritonModelException``."""


class StubTensor:
    """As the stub's ``Tensor``. BF16 is kept as its bits."""

    def __init__(self, name: str, array: Any, *, is_bfloat16: bool = False) -> None:
        self._name = name
        self.array = array
        self.is_bfloat16 = is_bfloat16

    @classmethod
    def from_dlpack(cls, name: str, capsule: Any) -> StubTensor:
        return cls(name, capsule_of_tensor(capsule), is_bfloat16=True)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        if self.is_bfloat16:
            raise StubRefusal("BF16")
        return self.array

    def to_dlpack(self) -> Any:
        return capsule_of_bits(self.array)


def _codes() -> Any:
    return enum.Enum("StubCode", [(name, f"stub's {name}") for name in CODES])


StubCode: Final = _codes()


class StubError:
    """As the stub's ``TritonError``."""

    def __init__(self, message: str, code: Any = StubCode.INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> Any:
        return self._code


for stub_code in StubCode:
    setattr(StubError, stub_code.name, stub_code)


class StubResponse:
    """As the stub's ``InferenceResponse``."""

    def __init__(self, output_tensors: Sequence[StubTensor] = (), error: Any = None) -> None:
        self._tensors = list(output_tensors)
        self._error = error

    def output_tensors(self) -> list[StubTensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> Any:
        return self._error

    @property
    def values(self) -> dict[str, Any]:
        """The outputs as lists by name."""
        assert self._error is None, self._error.message()
        return {tensor.name(): tensor.array.tolist() for tensor in self._tensors}


class StubSender:
    """As the stub's response sender; keeps what is sent."""

    def __init__(self) -> None:
        self.is_cancelled_now = False
        self.sent: queue.SimpleQueue[tuple[Any, int]] = queue.SimpleQueue()

    def send(self, response: Any = None, flags: int = 0) -> None:
        self.sent.put((response, flags))

    def is_cancelled(self) -> bool:
        return self.is_cancelled_now

    def heard(self) -> list[Any]:
        """The responses up to the end of the answers."""
        responses: list[Any] = []
        while True:
            response, flags = self.sent.get(timeout=TIMEOUT_S)
            if response is not None:
                responses.append(response)
            if flags:
                return responses


class ClientRequest:
    """As the stub's ``InferenceRequest`` of a client; its inputs are arrays by name."""

    def __init__(self, parameters: Any = None, request_id: str = "", **inputs: Any) -> None:
        self.sender = StubSender()
        self._inputs = [
            value if isinstance(value, StubTensor) else StubTensor(name, np.asarray(value))
            for name, value in inputs.items()
        ]
        self._parameters = parameters or {}
        self._id = request_id

    def inputs(self) -> list[StubTensor]:
        return self._inputs

    def requested_output_names(self) -> list[str]:
        return ["y"]

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def request_id(self) -> str:
        return self._id

    def correlation_id(self) -> int:
        return 7

    def flags(self) -> int:
        return 1

    def timeout(self) -> int:
        return 9

    def get_response_sender(self) -> StubSender:
        return self.sender


def stub_module(answer: Callable[[Any, bool], Any]) -> Any:
    """The module, whose Triton answers requests of models by ``answer``, given the request and whether it is decoupled.

    The module's ``asked`` has the requests of models, and ``loaded`` what models have Triton load and unload.
    """

    class SentRequest:
        def __init__(self, **fields: Any) -> None:
            self.fields = fields

        def exec(self, decoupled: bool = False) -> Any:
            module.asked.append(self.fields)
            return answer(self.fields, decoupled)

    module: Any = ModuleType("triton_python_backend_utils")
    module.Tensor = StubTensor
    module.TritonError = StubError
    module.TritonModelException = StubRefusal
    module.InferenceResponse = StubResponse
    module.InferenceRequest = SentRequest
    module.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    module.asked = []
    module.loaded = []
    module.load_model = lambda name, config: module.loaded.append(("load", name, config))
    module.unload_model = lambda name, dependents: module.loaded.append(("unload", name, dependents))
    module.is_model_ready = lambda name, version: name == "ready"
    return module


class StubConfig:
    """As the stub's ``ModelConfig``."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._model_config = config

    def as_dict(self) -> dict[str, Any]:
        return self._model_config


class StubFolder:
    """Makes instances of models in a folder, and finalizes them at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.working_folder = folder / "work"
        self.log = folder / "log"
        self.instances = folder / "instances"
        self.states = folder / "states"
        self.states.mkdir()
        self.working_folder.mkdir()
        self.instances.mkdir()
        self.log.touch()
        self._made: list[Any] = []

    def bridged(
        self,
        code: str,
        *,
        max_compute_s: float | None = None,
        python: str = sys.executable,
        strict_outputs: bool = False,
    ) -> Any:
        """The class that a generated ``model.py`` has, of a user's script."""
        script = self.folder / "m" / "1" / "model.py"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(HEAD + textwrap.dedent(code))
        program = HostProgram(
            python=python,
            stage=str(STAGE),
            environment=dict(os.environ),
            working_folder=str(self.working_folder),
            output=str(self.log),
            instances=str(self.instances),
            metrics=str(self.folder / "metrics"),
            states=str(self.states),
            server=str(self.folder),
            max_compute_s=max_compute_s,
            strict_outputs=strict_outputs,
        )
        return type("TritonPythonModel", (BridgedModel,), {"program": program, "script": str(script)})

    def model(self, code: str, config: dict[str, Any] | None = None, **program: Any) -> Any:
        """An initialized instance."""
        model = self.bridged(code, **program)()
        arguments = {
            "model_config": json.dumps(config or {}), "model_name": "m", "model_version": "1",
            "model_instance_name": "m_0_0", "model_instance_kind": "CPU", "model_instance_device_id": "0",
            "model_repository": "/of/triton",
        }  # fmt: skip
        model.initialize(arguments)
        self._made.append(model)
        return model

    def completed(self, code: str, config: dict[str, Any]) -> dict[str, Any]:
        """A configuration that a model has completed."""
        done: StubConfig = self.bridged(code).auto_complete_config(StubConfig(config))
        return done.as_dict()

    def close(self) -> None:
        """Finalize the instances."""
        for model in self._made:
            model.finalize()
        self._made.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # `Frames.close` leaves its file to the collector
            gc.collect()


class MetricServer(socketserver.ThreadingUnixStreamServer):
    """In place of the replica's registry of metrics."""

    daemon_threads = True  # a host that a failed test leaves must not keep the server's end waiting
    block_on_close = False

    def __init__(self, path: str, handler: type[MetricLines]) -> None:
        super().__init__(path, handler)
        self.lines: list[Any] = []


class MetricLines(socketserver.StreamRequestHandler):
    """Answers the lines by which a model declares and counts metrics, and keeps them in the server's `lines`."""

    server: MetricServer

    def handle(self) -> None:
        for line in self.rfile:
            call = json.loads(line)
            self.server.lines.append(call)
            is_refused = call[0] == "metric_do" and call[2] == "increment" and call[3] < 0
            answer = {"error": "a counter only grows"} if is_refused else {"value": 5.0}
            self.wfile.write(json.dumps(answer).encode() + b"\n")
            self.wfile.flush()
