"""Prepares a model repository, and becomes the Triton that serves it.

``python -m headwater_server.repository DIRECTORY PYTHON`` is a child of the replica's host
(`headwater_server.repository.triton_host`). DIRECTORY is the replica's folder, with ``spec.json``; PYTHON is the
interpreter of the models' hosts. Triton listens on unix sockets in the folder only.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from headwater.environment import package_folder
from headwater.reference import find_folder
from headwater.wire.handshake import ReplicaSpec
from headwater.wire.host_program import HostProgram
from headwater_server.binder.environment import PYTHON, library_path
from headwater_server.process.interpreter import foreign_environment, stage_package
from headwater_server.process.launcher import with_changes
from headwater_server.repository.environments import named_path, python_of
from headwater_server.repository.metric_registry import CALLS_SOCKET
from headwater_server.repository.model_config import RepositoryModel
from headwater_server.repository.prepared import prepare

__all__ = ["main"]

PR_SET_PDEATHSIG: Final = 1
LOG_FILE: Final = "triton.log"
"""Triton's log, in the replica's folder."""
ENVIRONMENTS: Final = "environments"
"""Folder of unpacked environments, in the server's folder."""
INSTANCES: Final = "instances"
"""See `HostProgram.instances`; `headwater_server.repository.triton_host` looks at it."""
STATES: Final = "states"
"""The folder of the states of sequences, in the server's folder; `headwater_server.repository.triton_host` sweeps
it."""
OUTPUT_FILE: Final = "triton.out"
"""What Triton prints besides its log."""
BLOCK_BYTES: Final = 4 * 1024 * 1024
"""Shared memory between Triton and a stub at the start; it grows as needed."""


def main() -> None:
    """Entry point; see the module's docstring."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    directory, python = Path(sys.argv[1]), sys.argv[2]
    spec = msgspec.json.decode((directory / "spec.json").read_bytes(), type=ReplicaSpec)
    stage = stage_package(directory / "python")
    environment = with_changes(os.environ, spec.environment)
    states = directory.parent / STATES / spec.name
    states.mkdir(parents=True, exist_ok=True)
    program = HostProgram(
        python or sys.executable,
        str(stage),
        foreign_environment(environment, stage) if python else environment,
        spec.working_dir,
        f"/proc/{os.getppid()}/fd/1",  # the replica's log, while its host lives
        str(directory / INSTANCES),
        str(directory / CALLS_SOCKET),
        str(states),
        str(directory.parent),
        spec.max_compute_s,
        spec.options["strict_outputs"],
    )
    (directory / INSTANCES).mkdir()
    program.write(str(directory / "host.json"))

    def program_of(model: RepositoryModel) -> str:
        path = named_path(model)
        if path is None:
            return str(directory / "host.json")
        interpreter = python_of(path, directory.parent / ENVIRONMENTS, stage, environment)
        own = directory / f"host-{model.name}.json"
        program._replace(python=interpreter, environment=foreign_environment(environment, stage)).write(str(own))
        return str(own)

    repository = find_folder(spec.model, [spec.working_dir, *spec.user_paths])
    prepare(repository, directory / "repository", directory / "scripts", str(stage), program_of, spec.options["models"])
    command, environ = _triton(directory, spec.options)
    os.chdir(directory)
    output = os.open(directory / OUTPUT_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(output, standard)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these signals, and Triton would inherit that
        signal.signal(number, signal.SIG_DFL)
    os.execve(command[0], command, environ)


def _triton(directory: Path, options: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of Triton."""
    pytriton = package_folder("pytriton")
    assert pytriton is not None  # the replica's host has checked that
    server = pytriton / "tritonserver"
    backend = directory / "backends" / "python"
    backend.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        (backend / name).symlink_to(server / "backends" / "python" / name)
    stub = server / "python_backend_stubs" / PYTHON / "triton_python_backend_stub"
    (backend / stub.name).symlink_to(stub)
    control = options["model_control"]
    arguments = {
        "model-repository": directory / "repository",
        "backend-directory": backend.parent,
        "cache-directory": server / "caches",
        "http-address": f"unix:{directory / 'h'}",
        "grpc-address": f"unix:{directory / 'g'}",
        "grpc-port": 1,
        "metrics-address": f"unix:{directory / 'm'}",
        "allow-gpu-metrics": "false",
        "allow-cpu-metrics": "false",
        "allow-vertex-ai": "false",
        "exit-timeout-secs": 5,
        "exit-on-error": "false",
        "strict-readiness": "false",
        "http-thread-count": options["http_threads"],
        "log-file": directory / LOG_FILE,
        "model-control-mode": control,
    }
    if options["header_pattern"]:
        arguments["http-header-forward-pattern"] = options["header_pattern"]
        arguments["grpc-header-forward-pattern"] = options["header_pattern"]
    if options["cache_bytes"]:
        arguments["cache-config"] = f"local,size={options['cache_bytes']}"
    prefix = f"headwater-{os.getpgrp()}-{secrets.token_hex(8)}"  # the sweep knows the group's id
    command = [f"--{name}={value}" for name, value in arguments.items()]
    command += [f"--backend-config=python,shm-region-prefix-name={prefix}"]
    command += [f"--backend-config=python,shm-default-byte-size={BLOCK_BYTES}"]
    command += [f"--load-model={name}" for name in options["load_models"]] if control == "explicit" else []
    libraries = [str(pytriton.parent / "nvidia_pytriton.libs"), library_path(os.environ)]
    environ = {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(libraries),
        "PATH": os.pathsep.join([os.path.join(sys.prefix, "bin"), os.environ.get("PATH", "")]),
        "TMPDIR": str(directory / "tmp"),
        "CUDA_VISIBLE_DEVICES": "",  # Triton holds no tensors on GPUs; the hosts have the deployment's devices
        "NVIDIA_VISIBLE_DEVICES": "none",
    }
    return [str(server / "bin" / "tritonserver"), *command], environ


if __name__ == "__main__":
    main()
