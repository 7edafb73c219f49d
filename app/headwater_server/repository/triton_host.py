"""Hosts the Triton of a model repository: starts it, reports its models, watches it, and ends it.

Started by `headwater_server.process.guardian` as ``python -m headwater_server.repository.triton_host PYTHON NAME FOLDER
STATUS_FD``, under Headwater's Python and environment; FOLDER holds ``spec.json`` (`ReplicaSpec`). An empty PYTHON is
Headwater's. Triton is its child, in the guardian's group (`headwater_server.repository`), and so are the hosts of the
models. The host reports its status on the pipe STATUS_FD, as every replica's host does.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import msgspec

from headwater.environment import installed_version
from headwater.errors import LoadError, Problem, ReplicaError
from headwater.reference import find_folder
from headwater.signature import Signature, TritonSpec
from headwater.wire.handshake import OWN_SIDE, ReplicaSpec, ReplicaStatus, failure_of
from headwater.wire.state_files import STATES, sweep_states
from headwater_server.binder.environment import require
from headwater_server.control.model_commands import ModelCommands
from headwater_server.process.interpreter import (
    NUMPY_ALONE,
    InterpreterError,
    find_interpreter,
    foreign_environment,
    stage_package,
)
from headwater_server.process.launcher import with_changes
from headwater_server.process.socket_http import ask_socket
from headwater_server.process.sweep import process_stat
from headwater_server.repository.command_follower import CommandFollower
from headwater_server.repository.metric_registry import serve_metrics
from headwater_server.repository.model_config import models_of

__all__ = ["main", "sequences_of"]

PR_SET_PDEATHSIG: Final = 1
READY_FILE: Final = "ready"
"""File that the host creates in the replica's folder when Triton is ready, as every replica does."""
SOCKET: Final = "h"
"""The name of Triton's HTTP socket in the replica's folder."""
LOG_FILE: Final = "triton.log"
INSTANCES: Final = "instances"
"""See `headwater.wire.host_program.HostProgram.instances`."""
SERVER: Final = "tritonserver"
"""The name of Triton's process."""
POLL_S: Final = 0.05
LOOK_S: Final = 1.0
"""Time between two looks at a Triton that serves."""
ASK_TIMEOUT_S: Final = 5.0
MISSED: Final = 4
"""Consecutive looks without an answer after which Triton counts as hung."""
END_S: Final = 8.0
"""Time in which Triton must end after SIGTERM; then the guardian kills the group."""
SWEEP_EVERY_S: Final = 30.0
REPORTED_LINES: Final = 10
_ERROR: Final = re.compile(r"[EF]\d{4} |error: ")
_NO_GPU: Final = "CudaDriverHelper has not been initialized"
"""Part of an error that Triton logs on every machine without a GPU."""


class TritonHost:
    """Starts, watches and ends the Triton of a repository, and reports its status.

    Args:
        spec: the repository and its options.
        directory: the replica's folder.
        status_fd: descriptor to which status lines are written.
    """

    def __init__(self, spec: ReplicaSpec, directory: Path, status_fd: int) -> None:
        self._spec = spec
        self._directory = directory
        self._status_fd = status_fd
        self._stop = threading.Event()
        self._server: subprocess.Popen[bytes]

    def report(self, status: ReplicaStatus) -> None:
        """Write a status line."""
        with contextlib.suppress(OSError):  # the supervisor is gone; the guardian will end this process
            os.write(self._status_fd, msgspec.json.encode(status) + b"\n")

    def run(self, python: str) -> None:
        """Serve until SIGTERM. A SIGTERM before Triton is ready ends the process at once, with status 0.

        Args:
            python: path of the models' interpreter; empty: Headwater's.

        Raises:
            InterpreterError: the interpreter can't run models.
            EnvironmentUnfit: Triton can't run here.
            LoadError: there is no such repository, or it lacks one of ``options.models``.
            ReplicaError: Triton ended, or doesn't answer.
            OSError: a process can't be started, or a file can't be written.
        """
        signal.signal(signal.SIGTERM, self._on_sigterm)
        spec = self._spec
        require()
        repository = find_folder(spec.model, [spec.working_dir, *spec.user_paths])
        sequences = sequences_of(repository, spec.options["models"])
        if python:
            stage = stage_package(self._directory / "looked")
            environment = foreign_environment(with_changes(os.environ, spec.environment), stage)
            python = find_interpreter(python, environment, NUMPY_ALONE)
        self.report(ReplicaStatus("progress", "starting Triton"))
        serve_metrics(self._directory, self._directory / "m")
        self._server = subprocess.Popen(
            [sys.executable, "-m", "headwater_server.repository", str(self._directory), python],
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
        )
        models = self._await_models()
        if not models and spec.options["model_control"] != "explicit":
            fix = "name the folder that has a folder for each model"
            raise LoadError(Problem(f"model {spec.model}", f"{repository} has no models", fix))
        for model in models:
            if model.get("state") == "UNAVAILABLE" and model.get("reason") != "unloaded":
                text = f"model {model['name']} {model.get('version', '')} is not loaded: {model.get('reason') or '?'}"
                self.report(ReplicaStatus("warning", text))
        follower = CommandFollower(
            ModelCommands(self._directory.parent, spec.name),
            self._directory.name,
            lambda path, body: self._ask("POST", path, body, spec.load_timeout_s),
            lambda text: self.report(ReplicaStatus("warning", text)),
        )
        follower.follow()
        names = tuple(sorted({model["name"] for model in models}))
        signature = Signature(spec.name, (), (), triton=TritonSpec(names, sequences), idempotent=False)
        facts = {f"{OWN_SIDE}{name}": installed_version(name) or "unknown" for name in ("numpy", "nvidia-pytriton")}
        # Stubs come and go with the loads of models, so only Triton's own process is vital to the guardian.
        (self._directory / READY_FILE).write_text(SERVER, encoding="ascii")
        device = "cpu" if spec.device == "auto" else spec.device
        self.report(ReplicaStatus("ready", signature=msgspec.to_builtins(signature), facts={"device": device, **facts}))
        threading.Thread(target=follower.run, args=[self._stop], daemon=True).start()
        self._watch()
        self._end()
        self.report(ReplicaStatus("unloaded"))

    def _on_sigterm(self, number: int, frame: object) -> None:
        if not (self._directory / READY_FILE).exists():
            os._exit(0)
        self._stop.set()

    def _await_models(self) -> list[dict[str, Any]]:
        """Wait until Triton has tried to load all models. Returns its index.

        Raises:
            ReplicaError: Triton has ended.
        """
        while True:
            self._check_alive("before it was ready")
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                if self._ask("GET", "/v2/health/live")[0] == 200:
                    return self._index()
            time.sleep(POLL_S)

    def _watch(self) -> None:
        """Wait for SIGTERM, and check that Triton answers.

        Raises:
            ReplicaError: Triton has ended, or doesn't answer.
        """
        missed = 0
        swept_s = 0.0
        while not self._stop.wait(LOOK_S):
            if time.monotonic() - swept_s > SWEEP_EVERY_S:
                swept_s = time.monotonic()
                sweep_states(self._directory.parent / STATES / self._spec.name)
            self._check_alive("while it served")
            self._check_instances()
            try:
                missed = 0 if self._ask("GET", "/v2/health/live")[0] == 200 else missed + 1
            except (OSError, http.client.HTTPException):
                missed += 1
            if missed >= MISSED:
                raise ReplicaError(f"Triton gave no answer at {MISSED} checks")

    def _check_instances(self) -> None:
        """Check that the process of each loaded instance lives: Triton would go on to list it as ready.

        Raises:
            ReplicaError: a process has ended.
        """
        for path in (self._directory / INSTANCES).iterdir():
            stat = process_stat(int(path.name))
            if stat is None or stat.state in "ZX":
                with contextlib.suppress(FileNotFoundError):  # an unload removes the file before the process ends
                    raise ReplicaError(f"the process of an instance has ended: {path.read_text(encoding='utf-8')}")

    def _end(self) -> None:
        self._server.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(END_S)

    def _check_alive(self, when: str) -> None:
        if (status := self._server.poll()) is None:
            return
        how = f"status {status}" if status >= 0 else signal.Signals(-status).name
        log = self._directory / LOG_FILE
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        errors = [line for line in lines if _ERROR.match(line) and _NO_GPU not in line][:REPORTED_LINES]
        raise ReplicaError(f"Triton ended {when} ({how})" + "".join(f"\n{line}" for line in errors))

    def _ask(
        self, method: str, path: str, body: str | None = None, timeout_s: float = ASK_TIMEOUT_S
    ) -> tuple[int, bytes]:
        return ask_socket(self._directory / SOCKET, method, path, body, timeout_s)

    def _index(self) -> list[dict[str, Any]]:
        """Triton's index: for each version of a model its name and state.

        Raises:
            OSError, http.client.HTTPException, ValueError: Triton didn't answer as expected.
        """
        status, body = self._ask("POST", "/v2/repository/index", "{}")
        if status != 200:
            raise ValueError(f"the index was answered with {status}")
        index: list[dict[str, Any]] = json.loads(body)
        return index


def sequences_of(repository: Path, names: Collection[str] = ()) -> dict[str, bool]:
    """The models of a repository that have sequences, each with whether it has implicit states. An ensemble has the
    sequences of its models, without states of its own. Arguments and errors as for `models_of`."""
    models = {model.name: model.config for model in models_of(repository, names)}
    found = {
        name: bool(config.sequence_batching.state)
        for name, config in models.items()
        if config.HasField("sequence_batching")
    }
    while True:
        more = {
            name: False
            for name, config in models.items()
            if name not in found and any(step.model_name in found for step in config.ensemble_scheduling.step)
        }
        if not more:
            return found
        found |= more


def main() -> None:
    """Entry point; see the module's docstring."""
    python, _, directory, status_fd = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    folder = Path(directory)
    spec = msgspec.json.decode((folder / "spec.json").read_bytes(), type=ReplicaSpec)
    host = TritonHost(spec, folder, int(status_fd))
    try:
        host.run(python)
    except InterpreterError as error:
        cause = f"its Python can't run models: {error.reason}"
        host.report(ReplicaStatus("failed", str(error), cause=cause, is_permanent=error.is_permanent))
        sys.exit(1)
    except Exception as error:
        if (folder / READY_FILE).exists():
            print(error, file=sys.stderr, flush=True)
        host.report(failure_of(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
