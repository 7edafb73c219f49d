"""Forks replicas that need not import anything, because this process has already imported it.

``python -m headwater.replica.preloaded FOLDER FD MODULE... SPACES`` imports the modules, sends ``ready`` on the socket
FD, and then forks a replica for each `ForkRequest` on that socket. In place of ``ready`` it sends the reason why it
can't fork replicas, and ends. It answers a request with the guardian's process id, or with the reason why it did not
fork. For ``MODULE:NAME`` it also reads this attribute of the module, which may import more. The process runs under the
Python of the models, has a single thread and no context on a GPU, imports none of the user's modules, and ends with the
supervisor. Hosts that it forks have its environment; guardians and binders have the supervisor's environment. The
command lines of forked processes are written over this process's command line, including SPACES.

A replica's guardian is forked, forks the replica, and then becomes a small separate Python::

    supervisor ── preloaded ── (ends at once) ── guardian: waits for "go", executes headwater_server.process.guardian
               └───── adopts the guardian ─────┘    └── host: headwater.replica
                                                          └── binder: headwater_server.binder
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from headwater.user_folders import decides_modules
from headwater.wire.handshake import COMMAND, GO, HOST, READY, STATUS, ForkRequest

__all__ = ["main"]

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
REQUEST_BYTES: Final = 64 * 1024
GPU_DEVICES = "/dev/nvidia"
"""Prefix of the names of the device files of GPUs."""


def main() -> None:
    """Serve until the supervisor has ended."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gc.disable()
    _, _, fd, *modules, _ = sys.argv
    with socket.socket(fileno=int(fd)) as connection:
        connection.set_inheritable(False)
        try:
            late_modules = _import(modules)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            connection.send(text.encode()[:REQUEST_BYTES])
            return
        if reason := _unfit():
            connection.send(reason.encode())
            return
        # Freeze, so that no collection in a replica writes to the pages that it shares. There is no collection before
        # the freeze: it would take 0.3 s, find 3 % of the objects and return no page.
        gc.freeze()
        gc.enable()
        before = _installed()
        connection.send(READY)
        while True:
            data, fds, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
            if not data:
                return
            try:
                answer = b"packages were installed or removed"
                if _installed() == before:
                    request = msgspec.json.decode(data, type=ForkRequest)
                    answer = str(_fork(request, fds, late_modules, connection)).encode()
            except OSError as error:
                answer = str(error.strerror).encode()
            finally:
                for descriptor in fds:
                    os.close(descriptor)
            connection.send(answer)


def _import(modules: Sequence[str]) -> set[str]:
    """Import the modules that replicas need. Returns the top-level modules that a normally started replica would import
    only after the user's modules."""
    first = "headwater.replica.__main__"
    importlib.import_module(first)
    del sys.modules[first]  # each replica runs it
    importlib.import_module("headwater.replica.served")
    early = _top_level()
    for name in modules:
        module, _, attribute = name.partition(":")
        with contextlib.suppress(Exception):  # if the module is needed, the replica reports the failure
            getattr(importlib.import_module(module), attribute or "__name__", None)
    return _top_level() - early


def _top_level() -> set[str]:
    return {name.partition(".")[0] for name in sys.modules}


def _unfit() -> str:
    """The reason why replicas can't be forked from this process; empty if they can."""
    if not (child := os.fork()):  # OpenBLAS ends its threads before a fork, and starts them again when it needs them
        os._exit(0)
    os.waitpid(child, 0)
    if (count := len(os.listdir("/proc/self/task"))) > 1:
        return f"the imports started {count - 1} threads"
    # Even asking whether there is a GPU may be too much: CUDA's driver then fails in forked processes.
    if any(_target(fd).startswith(GPU_DEVICES) for fd in os.listdir("/proc/self/fd")):
        return "the imports opened a GPU"
    return ""


def _target(fd: str) -> str:
    """The file behind a descriptor; empty if the descriptor is closed."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{fd}")
    return ""


def _installed() -> list[int]:
    """Modification times of the package folders, which change when a package is installed or removed."""
    folders = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    return [os.stat(folder).st_mtime_ns for folder in folders]


def _fork(request: ForkRequest, fds: Sequence[int], late_modules: Collection[str], connection: socket.socket) -> int:
    """Fork a guardian that the supervisor adopts. Returns its process id.

    Raises:
        OSError: a fork failed.
    """
    read, write = os.pipe()
    first = os.fork()
    if not first:
        try:
            if os.fork():
                os._exit(0)
            os.setsid()
            os.write(write, str(os.getpid()).encode())
            for descriptor in (read, write, connection.fileno()):
                os.close(descriptor)
            status, command, output = fds
            _become_guardian(request, status, command, output, late_modules)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as reader:
        pid = reader.read()
    os.waitpid(first, 0)
    if not pid:
        raise OSError(errno.EAGAIN, "a fork failed")
    return int(pid)


def _become_guardian(
    request: ForkRequest, status: int, command: int, output: int, late_modules: Collection[str]
) -> None:
    """Fork a replica's host, and execute the guardian. Returns at once if the supervisor doesn't send `GO`."""
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    if os.read(command, len(GO)) != GO:  # the supervisor doesn't wait any more
        return
    here = Path.cwd()
    os.chdir(request.directory)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    read, write = os.pipe()
    host = os.fork()
    if not host:
        os.close(command)
        os.close(read)
        os.setsid()
        os.close(write)
        _become_replica(request, status, late_modules, here)
        return
    os.close(write)
    os.read(read, 1)  # until the replica has a session
    os.close(read)
    # Starting replicas have a lower priority, which a session does not inherit; see
    # `headwater_server.process.priority`.
    with contextlib.suppress(OSError):
        Path(f"/proc/{host}/autogroup").write_text(Path("/proc/self/autogroup").read_text().split()[-1])
    places = {STATUS: str(status), COMMAND: str(command), HOST: str(host)}
    for descriptor in (status, command):
        os.set_inheritable(descriptor, True)
    arguments = [places.get(argument, argument) for argument in request.guardian]
    _change_environment(request.changes)
    os.execv(arguments[0], arguments)


def _become_replica(request: ForkRequest, status: int, late_modules: Collection[str], here: Path) -> None:
    """Run a replica's binder and its host, as `headwater_server.process.launcher` does."""
    if sys.path[0] == str(here):  # unless Python is told not to look in the working folder
        sys.path[0] = request.directory
    host, binder = socket.socketpair()
    if not os.fork():
        os.close(status)
        host.close()
        _become_binder(request, binder)
        return
    binder.close()
    os.environ.update(request.variables)
    fds = [status, host.detach()]
    command = ["headwater.replica", request.name, request.directory, *map(str, fds)]
    if _hides(request.user_paths, late_modules):
        _execute(sys.executable, command, fds)
    _run(command)


def _become_binder(request: ForkRequest, connection: socket.socket) -> None:
    fd = connection.detach()
    command = [request.binder, request.directory, str(fd)]
    _change_environment(request.changes)
    if request.python != sys.executable or decides_modules(request.changes):
        _execute(request.python, command, [fd])
    _run(command)


def _change_environment(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _execute(python: str, command: Sequence[str], fds: Sequence[int]) -> None:
    """Replace this program with a Python that runs a module, with arguments."""
    for fd in fds:
        os.set_inheritable(fd, True)
    os.execv(python, [python, "-m", *command])


def _run(command: Sequence[str]) -> None:
    """Run a module, with arguments, in this program."""
    _rename([sys.executable, "-m", *command])
    # Reset values that libraries drew at random, or stored, when they were imported; `random` detects a fork itself.
    sys.modules["numpy"].random.seed()
    multiprocessing.current_process().authkey = os.urandom(32)
    tempfile.tempdir = None
    sys.argv = ["", *command[1:]]
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def _hides(folders: Sequence[str], modules: Collection[str]) -> bool:
    """Whether a folder has a module with the name of one of these modules, which it would hide."""
    for folder in folders:
        with contextlib.suppress(OSError):
            if any(entry.partition(".")[0] in modules for entry in os.listdir(folder)):
                return True
    return False


def _rename(command: Sequence[str]) -> None:
    """Show another command line, written into the memory of the present command line."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    start, end = int(fields[45]), int(fields[46])
    line = "\0".join(command).encode()[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main()
