"""PyTriton's embedded Triton, listening on unix sockets only.

Differences from `pytriton.triton.Triton`, with reasons:

- HTTP, gRPC and metrics listen on unix sockets in the replica's folder (0700), so no other user can reach them.
  PyTriton's clients can't connect to such an address, so `EmbeddedTriton.wait` is called instead of PyTriton's
  `connect`.
- Triton loads models from a local model store when it starts, rather than through its load API: no temporary
  ``/tmp/folder*`` per model stays behind, and nothing polls at intervals of a second.
- Triton completes no configuration: PyTriton's configuration is complete, and Triton would start another Python process
  for each model to complete it.
- Triton starts while the model loads: it needs only the signature.
- Triton sees no GPU: it holds no tensors on GPUs, but would allocate memory pools and a context on each GPU.
- The process that binds the model becomes Triton (`headwater_server.binder`), and Triton's output goes to a file.
  PyTriton would start Triton as a child and read its output in a thread.
- Calls reach the callables by a shorter path (`headwater.wire.bridge`), so no process of PyTriton holds tensors.

Only this module uses private parts of PyTriton; tests/app/binder/test_embedded_triton.py names these parts.
"""

from __future__ import annotations

import errno
import http.client
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig, TritonLifecyclePolicy, TritonSecurityConfig

from headwater.datatypes import DATATYPES
from headwater.errors import ReplicaError, Shortage, shortage_in, shortage_of
from headwater.signature import Signature, TensorSpec
from headwater.wire.bridge import install
from headwater.wire.frame import FRAME
from headwater.wire.lm import CONTROL
from headwater.wire.report import REPORT
from headwater.wire.shared_memory import bound_shape
from headwater_server.binder.environment import library_path

__all__ = ["EmbeddedTriton", "UnixConnection", "telling_lines"]

LOG_FILE = "triton.log"
OUTPUT_FILE = "triton.out"
"""File with Triton's stdout and stderr, apart from its log."""
STUCK_S = 10.0
"""Time without progress after which Triton counts as stuck: it waits for a thread that it could not start."""
STUCK_CPU_NS = 10_000_000
"""Maximum CPU time that all threads together take within `STUCK_S` if they only wait."""
LOOK_EVERY_S = 0.5
REPORTED_LINES = 15
"""Maximum number of log lines that an error quotes when Triton did not start."""
# `health` is missing: `EmbeddedTriton.wait` polls it without the token, and it discloses nothing.
_RESTRICTED = [
    "metadata", "inference", "shared-memory", "model-config", "model-repository", "statistics", "trace", "logging",
]  # fmt: skip
_ERROR = re.compile(r"[EF]\d{4} |error: ")
_NO_GPU = "CudaDriverHelper has not been initialized"
"""Part of an error that Triton logs on every machine without a GPU."""


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class EmbeddedTriton(Triton):  # type: ignore[misc]  # pytriton has no type annotations
    """A Triton server for a single model.

    Args:
        directory: the replica's folder; sockets ``h`` (HTTP), ``g:1`` (gRPC) and ``m`` (metrics), the workspace and
            the log appear in it.
        token: the token that every request except health checks must carry as ``triton-access-token``.
    """

    def __init__(self, directory: Path, token: str) -> None:
        self.directory = directory
        self.http_socket = directory / "h"
        self.grpc_socket = directory / "g:1"
        super().__init__(
            config=TritonConfig(
                allow_http=False,  # so that PyTriton's clients don't use HTTP; switched on below
                grpc_address=f"unix:{directory}/g",
                grpc_port=1,
                allow_metrics=True,
                allow_gpu_metrics=False,
                allow_cpu_metrics=False,
                allow_vertex_ai=False,  # Triton would serve it where the variable AIP_MODE is PREDICTION
                log_file=directory / LOG_FILE,
                exit_timeout_secs=1,
            ),
            security_config=TritonSecurityConfig(access_token=token, restricted_endpoints=_RESTRICTED),
            triton_lifecycle_policy=TritonLifecyclePolicy(launch_triton_on_startup=True, local_model_store=True),
            workspace=directory / "w",
        )

    def bind(self, model_name: str, **about: Any) -> None:
        """Bind a model as PyTriton does, but with the shorter path for calls (`headwater.wire.bridge`)."""
        super().bind(model_name=model_name, **about)
        install(self._workspace.model_store_path / model_name / "1" / "model.py")

    def bind_signature(self, signature: Signature, *, instances: int = 1, is_language_model: bool = False) -> None:
        """Bind a model under the signature's name; the host computes its calls (`headwater.replica.callee`).

        A framed model answers each request with any number of frames (`headwater.wire.frame`, or for a language model
        `headwater.wire.lm`). Any other model gets a hidden output, the report, besides its declared outputs.

        Args:
            signature: the model's declared inputs and outputs.
            instances: number of instances, each of which computes a call at a time. A framed model has one instance.
            is_language_model: whether the model takes control messages in place of the signature's inputs.
        """
        inputs, outputs = [_tensor(spec) for spec in signature.inputs], [_tensor(spec) for spec in signature.outputs]
        hidden = {name: Tensor(name=name, dtype=np.uint8, shape=(-1,)) for name in (REPORT, FRAME, CONTROL)}
        is_framed = signature.is_framed
        self.bind(
            model_name=signature.name,
            infer_func=[_later] * instances,
            inputs=[hidden[CONTROL]] if is_language_model else inputs,
            outputs=[hidden[FRAME]] if is_framed else [*outputs, hidden[REPORT]],
            # A framed model gets no batcher: merged requests would have to end together, and a request may stay open
            # for hours.
            config=ModelConfig(
                max_batch_size=signature.max_batch_size,
                batcher=None if is_framed else DynamicBatcher(),
                decoupled=is_framed,
            ),
        )

    def command(self) -> tuple[list[str], dict[str, str]]:
        """The command line and environment of a Triton that serves the bound model, for `os.execve`. Writes Triton's
        configuration, and sets LD_LIBRARY_PATH of this process."""
        os.environ["LD_LIBRARY_PATH"] = library_path(os.environ)
        self._initialize_server()
        server = self._triton_server
        hidden = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "none"}
        return [str(server._server_path), *server._server_config.to_args_list()], {**server._get_env(), **hidden}

    def wait(self, pid: int, timeout_s: float) -> None:
        """Wait until Triton serves the model.

        Args:
            pid: Triton's process id.
            timeout_s: the maximum time to wait.

        Raises:
            ReplicaError: Triton ended or was not ready in time; the message includes the relevant lines of its log.
            Shortage: the machine lacks a resource that Triton needs, by its log or by its standstill (`Progress`).
        """
        deadline = time.monotonic() + timeout_s
        progress = Progress(pid)
        while not self._is_ready():
            # The log reports the failure at once, while Triton may take long to end.
            if "Failed to create instance" in "".join(lines := self._log_lines()):
                raise _not_started("an instance failed", lines)
            has_ended = _stat(pid)[:1] in ("", "Z", "X")
            if has_ended or time.monotonic() > deadline:
                ended = "it ended" if has_ended else f"not ready after {timeout_s:g} s"
                raise _not_started(ended, self._log_lines())
            _check_threads()
            if progress.is_stuck(time.monotonic()):
                text = f"Triton has made no progress for {STUCK_S:g} s, as happens if it could not start a thread"
                raise Shortage(errno.EAGAIN, text)
            time.sleep(0.02)

    def _prepare_triton_config(self, workspace: Any) -> None:
        super()._prepare_triton_config(workspace)
        self._triton_server_config["allow-http"] = True
        self._triton_server_config["http-address"] = f"unix:{self.http_socket}"
        self._triton_server_config["metrics-address"] = f"unix:{self.directory}/m"
        # The older name of disable-auto-complete-config. The new option takes no value, and PyTriton gives every option
        # a value.
        self._triton_server_config["strict-model-config"] = True

    def _shm_prefix(self) -> str:
        # PyTriton's prefix has this process's id, while the sweep (`headwater_server.process.sweep`) knows only the
        # group's id.
        return f"headwater-{os.getpgrp()}-{secrets.token_hex(8)}"

    def _is_ready(self) -> bool:
        connection = UnixConnection(self.http_socket, timeout_s=5)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _log_lines(self) -> list[str]:
        logs = [self.directory / name for name in (OUTPUT_FILE, LOG_FILE)]
        return [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines()]


class Progress:
    """Observes whether Triton and its stubs make progress.

    Args:
        pid: Triton's process id.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._next_look_s = self._since_s = 0.0
        self._ran_ns = -STUCK_CPU_NS

    def is_stuck(self, now_s: float) -> bool:
        """Whether all threads of Triton and its stubs have slept for `STUCK_S`, and computed for less than
        `STUCK_CPU_NS` meanwhile. Waiting for a CPU or a disk is not sleep. Call it often, with the monotonic time."""
        if now_s < self._next_look_s:
            return False
        self._next_look_s = now_s + LOOK_EVERY_S
        ran_ns = _ran_ns(self._pid)
        if ran_ns is None:
            self._since_s = now_s
        elif ran_ns - self._ran_ns >= STUCK_CPU_NS:
            self._since_s, self._ran_ns = now_s, ran_ns
        return now_s - self._since_s >= STUCK_S


def _ran_ns(pid: int) -> int | None:
    """CPU time in nanoseconds of a process and its children together; None if any of their threads doesn't sleep, or if
    they can't be read."""
    total_ns = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or (int(entry.name) != pid and _stat(int(entry.name)).split()[1:2] != [str(pid)]):
            continue
        try:
            for task in (entry / "task").iterdir():
                if (task / "stat").read_text().rpartition(") ")[2][0] != "S":
                    return None
                total_ns += int((task / "schedstat").read_text().split()[0])
        except OSError:
            return None
    return total_ns or None


def _stat(pid: int) -> str:
    """The state, parent and further fields of a process (proc(5)); empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2]
    except OSError:
        return ""


def _check_threads() -> None:
    """Check that a thread can be started: a Triton that can't start a thread may wait for it for ever.

    Raises:
        Shortage: the machine can't start a thread.
    """
    try:
        threading.Thread(target=lambda: None, daemon=True).start()
    except RuntimeError as error:
        shortage = shortage_of(error)
        raise shortage or error from error


def _not_started(why: str, lines: Sequence[str]) -> ReplicaError:
    why = f"Triton did not start ({why}); from its log:\n"
    return shortage_in(lines, why) or ReplicaError(why + "\n".join(telling_lines(lines)))


def telling_lines(lines: Sequence[str]) -> list[str]:
    """The lines of Triton's log that say why it did not start, at most `REPORTED_LINES`: its first errors, or else its
    last lines.

    After an error Triton still prints tables of its settings, so the errors are not at the end.
    """
    errors = [line for line in lines if _ERROR.match(line) and _NO_GPU not in line]
    return errors[:REPORTED_LINES] or list(lines[-REPORTED_LINES:])


def _later(requests: list[Any]) -> list[Any]:
    """Placeholder for the callable that PyTriton requires; calls reach the host by another path
    (`headwater.wire.bridge`)."""
    raise NotImplementedError


def _tensor(spec: TensorSpec) -> Any:
    datatype = DATATYPES[DATATYPES[spec.datatype].wire]
    dtype = object if datatype.numpy.hasobject else datatype.numpy.type
    return Tensor(name=spec.name, dtype=dtype, shape=bound_shape(spec), optional=spec.optional)
