"""Checks of the machine: addresses, folders, open files, shared memory, security, tracing. A check returns a list of
problems; empty: nothing is wrong."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import resource
import socket
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import psutil

from headwater.environment import install_command
from headwater.errors import Problem
from headwater.signature import Signature
from headwater.wire.shared_memory import ASSUMED_DIMENSION, batch_bytes
from headwater_server.config.schema import Config, Deployment, Server
from headwater_server.errors import ConfigError
from headwater_server.process.machine import size_text
from headwater_server.process.sweep import BACKEND_FOLDERS, SHARED_MEMORY
from headwater_server.security.keys_file import known_keys
from headwater_server.security.tls import Certificate
from headwater_server.supervisor.kind_programs import KindProgram, program_of

__all__ = [
    "address_problems",
    "free_shared_memory_problems",
    "needed_shared_memory_bytes",
    "open_files_problems",
    "open_listener",
    "region_problems",
    "runtime_dir_problems",
    "security_problems",
    "shared_memory_bytes",
    "shared_memory_problems",
    "shared_memory_warnings",
    "temporary_folder_problems",
    "tracing_problems",
]

MIB = 1024 * 1024
TRITON_REGION_BYTES = 4 * MIB
"""Size of the Python backend's region at start, as PyTriton sets it. The region grows with the calls in flight."""
UNIX_PATH_BYTES = 107
"""The longest path of a socket on Linux: ``sun_path`` less its closing zero."""
INSTANCE_NAME_BYTES = len("/headwater--xxxxxxxx")
LEAST_OPEN_FILES: Final = 256
"""Number of open files that each process must be allowed. Triton has 70 files open without any request; each
connection, call and replica adds a few more."""
VANISHED_AFTER_MS: Final = 120_000
"""A client counts as gone if data sent to it stays unacknowledged for this long."""


def open_listener(host: str, port: int) -> socket.socket:
    """Listen on a TCP address.

    Raises:
        OSError: listening isn't possible; `socket.gaierror` if the host's name has no address.
        UnicodeError: the host is not a valid name.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = addresses[0]
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family, kind, protocol))
        # An earlier server's connections that are still closing don't prevent listening.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit these options: if a client vanishes without closing its connection, the
        # connection ends after a minute or two, even while a request is computed or an answer is streamed.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, VANISHED_AFTER_MS)
        listener.bind(address)
        listener.listen(2048)
        stack.pop_all()
        return listener


def hold_port(host: str, port: int) -> socket.socket:
    """Keep a TCP port for other processes of this user, each of which listens on it itself (``SO_REUSEPORT``), for as
    long as the socket is open. The socket doesn't listen. Raises as `open_listener`."""
    listener = open_listener(host, port)  # without SO_REUSEPORT: fails if any other process has the port
    address = listener.getsockname()
    listener.close()
    holder = socket.socket(listener.family, listener.type)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
    except BaseException:
        holder.close()
        raise
    return holder


def address_problems(host: str, port: int, option: str = "port") -> list[Problem]:
    """Check whether the gateway can listen on an address. ``option``: the field of ``server`` with the port."""
    where = f"{host}:{port}"
    field, flag = f"server.{option}", f"--{option.replace('_', '-')}"
    try:
        open_listener(host, port).close()
    except (socket.gaierror, UnicodeError) as error:
        return [Problem("server.host", f"{host!r} is not this machine's address: {error}", "choose another: --host")]
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            fix = f"end that process, or choose another port: {flag} (0 takes a free one)"
            return [Problem(field, f"{where} is taken{_holder(port)}", fix)]
        if error.errno == errno.EACCES:
            return [Problem(field, f"{where} is not allowed to this user", f"choose a port from 1024: {flag}")]
        fix = "choose another: --host 127.0.0.1, or 0.0.0.0 for all"
        return [Problem("server.host", f"can't listen on {where}: {error.strerror}", fix)]
    return []


def runtime_dir_problems(server: Server, deployments: Mapping[str, Deployment]) -> list[Problem]:
    """Check whether the runtime folder can hold sockets, workspaces and temporary files."""
    title = "server.runtime_dir"
    # The supervisor makes the folder if it is missing. A relative path starts in the working folder of Headwater.
    root = Path(os.path.abspath(server.runtime_dir or tempfile.gettempdir()))
    another = "set `server.runtime_dir` to another folder, or TMPDIR"
    problems = []
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(prefix="headwater-check-", dir=there):
            pass
    except OSError as error:
        problems.append(Problem(title, f"can't write in {there}: {error.strerror}", another))
    else:
        if os.statvfs(there).f_flag & os.ST_NOEXEC:
            reason = f"{there} is mounted noexec, and PyTriton executes Triton from its workspace there"
            problems.append(Problem(title, reason, f"mount it with exec, or {another}"))
    if any(character.isspace() for character in str(root)):
        reason = f"{str(root)!r} has white space, at which PyTriton splits Triton's arguments"
        problems.append(Problem(title, reason, another))
    programs = (program_of(deployment.kind) for deployment in deployments.values())
    socket_bytes = max((program.socket_bytes for program in programs), default=KindProgram.socket_bytes)
    length = len(os.fsencode(root)) + INSTANCE_NAME_BYTES + len(str(os.getuid())) + socket_bytes
    if length > UNIX_PATH_BYTES:
        reason = f"the path of a replica's socket would have {length} bytes; a unix socket's has {UNIX_PATH_BYTES}"
        problems.append(Problem(title, reason, f"{another}, {length - UNIX_PATH_BYTES} bytes shorter than {root}"))
    return problems


def temporary_folder_problems(deployments: Iterable[Deployment]) -> list[Problem]:
    """Check whether Triton, if any deployment uses it, can write to the folder that it uses regardless of TMPDIR."""
    if not any(deployment.kind.runs_in_triton for deployment in deployments):
        return []
    try:
        with tempfile.TemporaryDirectory(prefix="headwater-check-", dir=BACKEND_FOLDERS):
            return []
    except OSError as error:
        reason = f"can't write in {BACKEND_FOLDERS}, where Triton writes regardless of TMPDIR: {error.strerror}"
        fix = f"mount a tmpfs there: docker run --tmpfs {BACKEND_FOLDERS}:rw,exec"
        return [Problem("temporary folder", reason, fix)]


def open_files_problems() -> list[Problem]:
    """Check whether each process may open `LEAST_OPEN_FILES`. Increases the soft limit of this process and its future
    children if only that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST_OPEN_FILES:
        reason = f"a process may open {hard} files here; expected {LEAST_OPEN_FILES} at least, since Triton needs 70"
        fix = "raise the hard limit, best to 4,096 or more: ulimit -Hn, LimitNOFILE=, docker run --ulimit nofile=..."
        return [Problem("open files", reason, fix)]
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_OPEN_FILES, hard))
    return []


def security_problems(config: Config) -> list[Problem]:
    """Check whether the API keys and the certificate can be used, if they are configured."""
    problems = []
    tls = config.server.tls
    for attempt in (lambda: known_keys(config.security.keys_file), lambda: None if tls is None else Certificate(tls)):
        try:
            attempt()
        except ConfigError as error:
            problems.append(Problem(error.field, error.reason, error.fix or "correct it"))
    return problems


def tracing_problems(server: Server) -> list[Problem]:
    """Check whether the packages that send traces are installed, if tracing is configured."""
    if server.tracing is None:
        return []
    with contextlib.suppress(ModuleNotFoundError):  # raised if the top-level package is missing
        if importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None:
            return []
    packages = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
    reason = f"it needs {' and '.join(packages)}, which are not installed"
    return [Problem("server.tracing", reason, install_command("otel", *packages))]


def shared_memory_bytes(deployment: Deployment, signature: Signature | None) -> int:
    """Bytes that a deployment's maximum number of replicas needs in /dev/shm, with `ASSUMED_DIMENSION` for each
    dimension that varies.

    Each replica has the Python backend's regions: 4 MiB per instance, and the tensors of its calls in flight, as far as
    ``signature`` is known. Replicas without a Triton need 0.
    """
    region = _region_bytes(deployment)
    if signature is not None and deployment.kind.runs_in_triton:
        rows = deployment.batching.max_batch_size
        input_bytes, output_bytes = (batch_bytes(side, rows) for side in (signature.inputs, signature.outputs))
        region += deployment.max_in_flight * (input_bytes + output_bytes)
    return region * deployment.replicas.max


def shared_memory_problems(needed_bytes: int, free_bytes: int, total_bytes: int) -> list[Problem]:
    """Check whether ``needed_bytes`` fit into a /dev/shm with so many free bytes; ``total_bytes`` is its size."""
    if needed_bytes <= free_bytes:
        return []
    used = max(total_bytes - free_bytes, 0)
    # A quarter more, since inputs may be larger than assumed; in steps of 64 MiB.
    size_mib = -(-(used + needed_bytes * 5 // 4) // (64 * MIB)) * 64
    reason = (
        f"the replicas need about {size_text(needed_bytes)} in {SHARED_MEMORY}, {size_text(free_bytes)} of "
        f"{size_text(total_bytes)} are free (counted with {ASSUMED_DIMENSION} for a dimension that varies)"
    )
    kubernetes = f"in Kubernetes mount an emptyDir with `medium: Memory` at {SHARED_MEMORY}"
    docker = f"docker run --shm-size={size_mib}m (containers have 64 MB by default; {kubernetes})"
    return [Problem("shared memory", reason, f"{docker}, or lower max_batch_size, max_in_flight or replicas")]


def region_problems(deployments: Iterable[Deployment]) -> list[Problem]:
    """Check whether the regions that replicas have at start fit into /dev/shm, with the minimum number of replicas."""
    needed = sum(_region_bytes(deployment) * deployment.replicas.min for deployment in deployments)
    return free_shared_memory_problems(needed)


def shared_memory_warnings(deployments: Mapping[str, Deployment], signatures: Mapping[str, Signature]) -> list[Problem]:
    """Check whether /dev/shm is large enough for everything that the replicas may need, regardless of how much is used
    now."""
    space = os.statvfs(SHARED_MEMORY)
    total = space.f_blocks * space.f_frsize
    return shared_memory_problems(needed_shared_memory_bytes(deployments, signatures), total, total)


def free_shared_memory_problems(needed_bytes: int) -> list[Problem]:
    """Check whether ``needed_bytes`` fit into the part of /dev/shm that is free now."""
    if not SHARED_MEMORY.is_dir():
        return [Problem("shared memory", f"there is no {SHARED_MEMORY}", f"mount a tmpfs at {SHARED_MEMORY}")]
    if not os.access(SHARED_MEMORY, os.W_OK):
        fix = f"mount a tmpfs at {SHARED_MEMORY} that this user may write"
        return [Problem("shared memory", f"can't write in {SHARED_MEMORY}, where Triton keeps tensors", fix)]
    space = os.statvfs(SHARED_MEMORY)
    return shared_memory_problems(needed_bytes, space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize)


def needed_shared_memory_bytes(deployments: Mapping[str, Deployment], signatures: Mapping[str, Signature]) -> int:
    """Bytes that the replicas of all deployments need in /dev/shm, with the maximum number of replicas; see
    `shared_memory_bytes`. ``signatures`` may lack deployments: only their regions at start count."""
    return sum(shared_memory_bytes(deployment, signatures.get(name)) for name, deployment in deployments.items())


def _region_bytes(deployment: Deployment) -> int:
    """Bytes that a replica's Triton takes in /dev/shm when it starts."""
    return TRITON_REGION_BYTES * deployment.instances if deployment.kind.runs_in_triton else 0


def _holder(port: int) -> str:
    """The process that listens on a TCP port, as an addition to a message; empty if it can't be determined."""
    with contextlib.suppress(psutil.Error, OSError):  # a process that has just ended, or a /proc that cannot be read
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid is not None:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f" by process {connection.pid} ({command[:100]})"
    return ""
