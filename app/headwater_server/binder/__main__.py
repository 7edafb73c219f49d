"""A replica's binder: binds its model to an embedded Triton, becomes that Triton, and warms it up.

``python -m headwater_server.binder FD``, under Headwater's Python and in the supervisor's environment, is a child of
the replica's host (`headwater.replica`), which runs the model and imports nothing from PyTriton. The socket FD first
brings a descriptor for the printed output, and then the host's requests; see `headwater.wire.handshake`. The process
that becomes Triton can't warm Triton up, so it first forks a process that does the warm-up and then ends::

    guardian ── host ── binder, executes tritonserver ── stubs
        └──── adopts ──── warm-up, forked by the binder
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from headwater.environment import installed_version
from headwater.errors import EnvironmentUnfit, ModelError
from headwater.wire.handshake import OWN_SIDE, BindRequest, ReplicaSpec, ReplicaStatus, WarmUpRequest, failure_of
from headwater.wire.link import Link
from headwater_server.binder.environment import require, without_other_libraries
from headwater_server.binder.pytriton_clients import leave_out_clients

if TYPE_CHECKING:
    from headwater_server.binder.embedded_triton import EmbeddedTriton

__all__ = ["main"]

PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """Serve the host's requests. Never returns."""
    _end_with_host(signal.SIGKILL)
    link = Link(int(sys.argv[1]))
    _or_fail(link, lambda: _become_triton(link))


def _become_triton(link: Link) -> None:
    require()
    leave_out_clients()
    # Heavy imports come after the check of the environment, since the check's message is clearer than an import error.
    try:
        from headwater_server.binder.embedded_triton import OUTPUT_FILE, EmbeddedTriton
    except ImportError as error:
        reason = f"Headwater's own Python, {sys.executable}: PyTriton can't be imported: {error}"
        fix = without_other_libraries("install Headwater anew there, or into another environment")
        raise EnvironmentUnfit(f"{reason}; {fix}") from error

    _print_to(link.receive_descriptor())
    request = link.receive(BindRequest)
    directory = Path(request.directory)
    os.chdir(directory)
    os.environ["TMPDIR"] = str(directory / "tmp")
    tempfile.tempdir = None  # so that Python reads the variable again
    spec = msgspec.json.decode((directory / "spec.json").read_bytes(), type=ReplicaSpec)
    triton = EmbeddedTriton(directory, spec.token)
    triton.bind_signature(request.signature, instances=spec.instances, is_language_model=spec.is_language_model)
    command, environment = triton.command()
    pid = os.getpid()
    _fork_orphan(lambda: _or_fail(link, lambda: _warm_up(triton, pid, spec, link)))
    _print_to(os.open(directory / OUTPUT_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these signals, and Triton would inherit that
        signal.signal(number, signal.SIG_DFL)
    _end_with_host(signal.SIGTERM)  # SIGTERM, so that Triton removes its folders in /tmp
    os.execve(command[0], command, environment)


def _print_to(output: int) -> None:
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)


def _warm_up(triton: EmbeddedTriton, pid: int, spec: ReplicaSpec, link: Link) -> None:
    from headwater_server.binder import warmup, warmup_lm

    def progress(stage: str) -> None:
        link.send(ReplicaStatus("progress", stage))

    triton.wait(pid, spec.load_timeout_s)
    request = link.receive(WarmUpRequest)
    triton.wait(pid, spec.load_timeout_s)  # Triton may have ended since
    if spec.is_language_model:
        warmup_lm.warm_up(request.signature, triton, spec, progress)
    else:
        warmup.warm_up(request, triton, spec, lambda event, text: link.send(ReplicaStatus(event, text)))
    facts = {f"{OWN_SIDE}{name}": installed_version(name) or "unknown" for name in ("numpy", "nvidia-pytriton")}
    link.send(ReplicaStatus("done", facts={f"{OWN_SIDE}python": platform.python_version(), **facts}))
    os._exit(0)


def _or_fail(link: Link, run: Callable[[], None]) -> None:
    """Run a function that ends this process or executes another program; if it raises, send the error to the host and
    exit."""
    try:
        run()
    except Exception as error:
        try:
            link.send(failure_of(error))
            if not isinstance(error, (ModelError, OSError)):
                traceback.print_exc()
        except OSError:  # the host is gone
            pass
    sys.stderr.flush()
    os._exit(1)


def _fork_orphan(run: Callable[[], None]) -> None:
    """Run a function in a process that is not a child of this process: this process becomes Triton, which reaps no
    children.

    Raises:
        OSError: the process can't be forked, for example because the machine has too many processes.
    """
    if not (child := os.fork()):
        status = 0
        try:
            if not os.fork():
                run()
        except OSError as error:
            status = error.errno or 1
        finally:
            os._exit(status)
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise OSError(status, os.strerror(status))


def _end_with_host(number: int) -> None:
    """Have the kernel send this process a signal once its parent has ended; the setting survives execve."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


if __name__ == "__main__":
    main()
