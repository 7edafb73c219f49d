"""A replica's host: loads a model, answers the calls of its embedded Triton, and ends on SIGTERM.

Run as ``python -m headwater.replica NAME FOLDER STATUS_FD BINDER_FD`` (`headwater_server.process.launcher`), or in a
process that `headwater.replica.preloaded` forked; FOLDER holds ``spec.json`` (`ReplicaSpec`). Reports on the pipe
STATUS_FD, one JSON `ReplicaStatus` a line. Work that needs PyTriton is left to the binder (`headwater_server.binder`),
at the other end of the socket BINDER_FD.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from headwater import tuning
from headwater.environment import imported_versions
from headwater.errors import DeclarationError, ModelError
from headwater.model_metrics import metrics
from headwater.replica.binder_client import BinderClient, BinderFailed
from headwater.replica.imported import imported_files
from headwater.runtime.request_log import RequestFilter
from headwater.runtime.watchdog import WATCHDOG_FILE, Watchdog
from headwater.tuning import keep_freed_memory
from headwater.user_folders import put_on_path
from headwater.wire.handshake import ReplicaSpec, ReplicaStatus, failure_of
from headwater.wire.link import Link

__all__ = ["main"]

PR_SET_PDEATHSIG = 1
READY_FILE = "ready"
LARGE_EXAMPLE_BYTES = 64 * 1024
SIGNAL_CHECK_S = 1.0
"""Maximum delay of a signal that arrives just before a wait begins, because such a signal does not end the wait."""


def main() -> None:
    """Run the replica until SIGTERM or a failure. The process ends with status 0 after SIGTERM, 1 if the replica can't
    start, and 70 if the replica can't continue."""
    # End with the guardian: if the guardian is killed, nothing else would end this process group.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    keep_freed_memory()
    faulthandler.enable()
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RequestFilter())
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s%(request)s", handlers=[handler]
    )
    directory = Path(sys.argv[2])
    spec = msgspec.json.decode((directory / "spec.json").read_bytes(), type=ReplicaSpec)
    status_fd, binder = int(sys.argv[3]), BinderClient(Link(int(sys.argv[4])), directory)
    os.set_inheritable(status_fd, False)

    reporting = threading.RLock()

    def report(status: ReplicaStatus) -> None:
        with reporting, contextlib.suppress(BrokenPipeError):  # the supervisor is gone; the guardian will end us
            os.write(status_fd, msgspec.json.encode(status) + b"\n")

    def fail(error: Exception) -> None:
        status = error.status if isinstance(error, BinderFailed) else failure_of(error)
        explained_causes = (type(None), ImportError, SyntaxError, DeclarationError)
        if not isinstance(error, ModelError) or not isinstance(error.__cause__, explained_causes):
            traceback.print_exception(error)  # shows where in the user's code the error arose
        reporting.acquire()  # held until the end, so that no other thread reports anything after the failure
        report(msgspec.structs.replace(status, imported=imported_files(spec.user_paths, error)))
        sys.stderr.flush()
        os._exit(1)

    stop = _stop_on_sigterm(directory)
    binder.watch(fail)
    try:
        _serve(spec, directory, binder, report, stop)
    except Exception as error:
        fail(error)


def _stop_on_sigterm(directory: Path) -> threading.Event:
    """An event that SIGTERM sets once the replica serves. Before that SIGTERM ends the process at once, without calls
    of `unload`.

    A handler is used instead of a signal mask, because Triton and the callable's processes would inherit a mask.
    """
    stop = threading.Event()

    def on_sigterm(number: int, frame: object) -> None:
        if not (directory / READY_FILE).exists():
            os._exit(0)
        stop.set()

    signal.signal(signal.SIGTERM, on_sigterm)
    return stop


def _serve(
    spec: ReplicaSpec,
    directory: Path,
    binder: BinderClient,
    report: Callable[[ReplicaStatus], None],
    stop: threading.Event,
) -> None:
    def progress(stage: str) -> None:
        report(ReplicaStatus("progress", stage))

    from headwater.replica.probe_call import write_probe
    from headwater.replica.served import load_served
    from headwater.runtime.capacity import Capacity

    metrics.open(Path(spec.counts) if spec.counts else None, spec.name)
    put_on_path(spec.user_paths)
    os.chdir(spec.working_dir)
    watch = Watchdog(directory / WATCHDOG_FILE, spec.max_compute_s or 0).call
    capacity = Capacity(lambda text, rows: report(ReplicaStatus("limited", text, batch_limit=rows)))
    served = load_served(spec, progress, _end_soon, watch, capacity, binder.bind)
    signature = served.signature
    progress("starting Triton")
    skips_slow = spec.warmup_batch_sizes is None and not served.compiled
    with metrics.muted():
        served.answer_calls(directory)
        binder_facts = binder.warm_up(signature, served.warmup_sizes, report, skips_slow=skips_slow)
    served.end_warm_up()
    tuning.settle()
    write_probe(directory, signature, spec.token, spec.load_timeout_s)
    (directory / READY_FILE).touch()  # from now on the guardian inspects the group, and stops it with SIGTERM
    if len(msgspec.json.encode(signature.example)) > LARGE_EXAMPLE_BYTES:  # too long to show; the warm-up has used it
        signature = msgspec.structs.replace(signature, example=None)
    facts = {"device": served.device, **imported_versions(), **binder_facts}
    imported = imported_files(spec.user_paths)
    report(ReplicaStatus("ready", signature=msgspec.to_builtins(signature), facts=facts, imported=imported))

    while not stop.wait(SIGNAL_CHECK_S):
        pass
    served.unload()
    report(ReplicaStatus("unloaded"))
    sys.stdout.flush()
    sys.stderr.flush()
    # The guardian ends the whole group at once, including Triton, which takes 5 s and more to stop by itself.
    os._exit(0)


def _end_soon(reason: str) -> None:
    """End the process after 0.5 s, in which the answer with the reason is sent."""

    def end() -> None:
        time.sleep(0.5)
        print(f"ending, it can't go on: {reason}", file=sys.stderr, flush=True)
        os._exit(70)

    threading.Thread(target=end, daemon=True).start()


if __name__ == "__main__":
    main()
