"""Forks replicas, which need not import again the modules that this process has imported.

``python -m headwater.replica.preloaded FOLDER FD MODULE... SPACES`` imports the modules, sends ``ready`` on the socket
FD, and then forks a replica for each `ForkRequest` on that socket. In place of ``ready`` it sends the reason why it
can't fork replicas, and ends. It answers a request with the guardian's process id, or with the reason why it did not
fork. For ``MODULE:NAME`` it also reads this attribute of the module, which may import more. The process runs under the
Python of the models, has a single thread and no context on a GPU, imports none of the user's modules, and ends with the
socket or the supervisor. Hosts that it forks have its environment; guardians and binders have the supervisor's
environment. The command lines of forked processes are written over this process's command line, including SPACES.

A replica's processes are forked before its request, at the `BinderProgram` that precedes each request. The supervisor
sends that message early where a binder has to execute another Python and import PyTriton, which takes 0.25 s. Each of
the waiting processes ends with the processes around it. At the request the guardian's parent ends, the supervisor
adopts the guardian, and the guardian waits for "go" and executes headwater_server.process.guardian::

    supervisor ── preloaded ── parent (ends at the request) ── guardian
                                                                 └── host: headwater.replica
                                                                       └── binder: headwater_server.binder
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from headwater.user_folders import decides_modules
from headwater.wire.handshake import COMMAND, GO, HOST, READY, STATUS, BinderProgram, ForkRequest

__all__ = ["main"]

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
REQUEST_BYTES: Final = 64 * 1024
GPU_DEVICES = "/dev/nvidia"
"""Prefix of the names of the device files of GPUs."""


def main() -> None:
    """Serve until the supervisor has closed the socket, or has ended."""
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
        # Freeze, so that no collection in a replica writes to shared pages. A collection before the freeze would take
        # 0.3 s, find 3 % of the objects and return no page.
        gc.freeze()
        gc.enable()
        before = _installed()
        connection.send(READY)
        waiting: _Waiting | None = None
        while True:
            data, fds, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
            if not data:
                break
            try:
                if not fds:
                    if waiting is not None and waiting.has_ended:
                        waiting.end()
                        waiting = None
                    binder = msgspec.json.decode(data, type=BinderProgram)
                    waiting = waiting or _Waiting(binder, late_modules, connection)
                elif _installed() != before:
                    connection.send(b"packages were installed or removed")
                else:
                    starting, waiting = waiting, None
                    connection.send(b"a fork failed" if starting is None else starting.start(data, fds))
            except OSError as error:
                if fds:
                    connection.send(str(error.strerror).encode())
            finally:
                for descriptor in fds:
                    os.close(descriptor)
        if waiting is not None:
            waiting.end()


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


class _Waiting:
    """A guardian, host and binder that wait for a `ForkRequest`.

    Args:
        binder: the binder's program.
        late_modules: see `_import`.
        connection: the socket to the supervisor, which the new processes close.

    Raises:
        OSError: a fork failed.
    """

    def __init__(self, binder: BinderProgram, late_modules: Collection[str], connection: socket.socket) -> None:
        self._socket, requests = _socket_pair()
        with requests:
            self._parent = os.fork()
            if not self._parent:
                connection.close()
                self._socket.close()
                _run_forked(lambda: _become_parent(requests, binder, late_modules))
        self._guardian = self._socket.recv(REQUEST_BYTES)
        """The guardian's process id; empty if it could not be forked."""

    @property
    def has_ended(self) -> bool:
        """Whether the processes have ended before a request."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def start(self, request: bytes, fds: Sequence[int]) -> bytes:
        """Start a replica in the processes. Returns the guardian's process id in digits.

        Raises:
            OSError: the processes have ended.
        """
        try:
            socket.send_fds(self._socket, [request], list(fds))
            os.kill(self._parent, signal.SIGKILL)
        finally:
            self.end()
        return self._guardian

    def end(self) -> None:
        """Close the socket, at which waiting processes end, and wait until the guardian's parent has ended."""
        self._socket.close()
        os.waitpid(self._parent, 0)


def _become_parent(requests: socket.socket, binder: BinderProgram, late_modules: Collection[str]) -> None:
    """Fork the guardian, and wait until it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _rename([sys.executable, "-m", "headwater.replica", "waiting", sys.argv[1]])
    guardian = os.fork()
    if not guardian:
        _run_forked(lambda: _become_guardian(requests, binder, late_modules))
    requests.close()
    os.waitpid(guardian, 0)


def _run_forked(run: Callable[[], None]) -> NoReturn:
    """Run a function in a forked process, and end the process."""
    try:
        run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _become_guardian(requests: socket.socket, binder: BinderProgram, late_modules: Collection[str]) -> None:
    """Fork a replica's host, wait for a request, and execute the guardian. Returns if there is no request, or if the
    supervisor doesn't send `GO`."""
    os.setsid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    requests.send(str(os.getpid()).encode())
    to_host, from_guardian = _socket_pair()
    host = os.fork()
    if not host:
        requests.close()
        to_host.close()
        _run_forked(lambda: _become_host(from_guardian, binder, late_modules))
    from_guardian.close()
    to_host.recv(len(READY))  # until the host has a session
    data, fds = _request(requests, to_host)
    requests.close()
    if data:
        request = msgspec.json.decode(data, type=ForkRequest)
        status, command, output = fds
        _print_to(output)
        if os.read(command, len(GO)) == GO:  # otherwise the supervisor doesn't wait any more
            os.chdir(request.directory)
            _share_priority(host)
            socket.send_fds(to_host, [data], [status, 1])
            places = {STATUS: str(status), COMMAND: str(command), HOST: str(host)}
            for descriptor in (status, command):
                os.set_inheritable(descriptor, True)
            arguments = [places.get(argument, argument) for argument in request.guardian]
            _change_environment({**binder.changes, "TMPDIR": f"{request.directory}/tmp"})
            os.execv(arguments[0], arguments)
    to_host.close()
    os.waitpid(host, 0)


def _become_host(requests: socket.socket, program: BinderProgram, late_modules: Collection[str]) -> None:
    """Fork a replica's binder, wait for a request, and run the host. Returns if there is no request."""
    os.setsid()
    host, connection = socket.socketpair()
    binder = os.fork()
    if not binder:
        requests.close()
        host.close()
        _run_forked(lambda: _become_binder(program, connection))
    connection.close()
    requests.send(READY)
    data, fds = _request(requests, host)
    requests.close()
    if not data:
        os.kill(binder, signal.SIGKILL)  # it has nothing to clean up, and may be importing
        os.waitpid(binder, 0)
        return
    request = msgspec.json.decode(data, type=ForkRequest)
    status, output = fds
    _share_priority(binder)
    _print_to(output)
    socket.send_fds(host, [b"\0"], [1])  # see `headwater.wire.link.Link.receive_descriptor`
    if sys.path[0] == str(Path.cwd()):  # unless Python is told not to look in the working folder
        sys.path[0] = request.directory
    os.chdir(request.directory)
    os.environ.update(request.variables)
    fds = [status, host.detach()]
    command = ["headwater.replica", request.name, request.directory, *map(str, fds)]
    if _hides(request.user_paths, late_modules):
        _execute(sys.executable, command, fds)
    _run(command)


def _become_binder(program: BinderProgram, connection: socket.socket) -> None:
    fd = connection.detach()
    command = [program.module, str(fd)]
    _change_environment(program.changes)
    if program.python != sys.executable or decides_modules(program.changes):
        _execute(program.python, command, [fd])
    _run(command)


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _request(requests: socket.socket, child: socket.socket) -> tuple[bytes, list[int]]:
    """Wait for a request, and return it with its descriptors. It is empty if the parent or the child has ended; what a
    child sends is left for later."""
    awaited = [requests, child]
    while requests not in select.select(awaited, [], [])[0]:
        if not child.recv(1, socket.MSG_PEEK):
            return b"", []
        awaited.remove(child)
    data, fds, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 3)
    return data, fds


def _print_to(output: int) -> None:
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)


def _share_priority(pid: int) -> None:
    """Give a process the priority of this process, and its session the priority of this process's session; see
    `headwater_server.process.priority`."""
    with contextlib.suppress(OSError):
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            os.sched_setscheduler(thread, os.sched_getscheduler(0), os.sched_getparam(0))
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, 0))
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(Path("/proc/self/autogroup").read_text().split()[-1])


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
    """Whether a folder has an entry with the name of one of these modules, and would hide that module."""
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
