"""Serves PyTriton scripts with PyTriton alone, in one server: ``python -m tests.bare_pytriton MODEL,... SCRIPT...``.

Each script runs as it is. All are bound to one ``Triton``, a few at once, since that takes seconds each.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from benchmarks.servers import free_port
from headwater_server.binder.environment import library_path
from tests.running import wait_for
from tests.traces import remove_backend_folders

__all__ = ["Bare", "serve_bare"]

START_TIMEOUT_S = 300.0
HANGS_AFTER_S = 100.0
"""After so long PyTriton is started anew."""
BOUND_AT_ONCE = 3
STARTS = 4
"""How often PyTriton is started: it ends if a model waits longer than 1 s for its configuration."""


class Bare(NamedTuple):
    """Where it is served."""

    url: str
    grpc_url: str


@contextlib.contextmanager
def serve_bare(scripts: Sequence[Path], models: Collection[str], log: Path) -> Iterator[Bare]:
    """The scripts under PyTriton alone. At the end it is killed: after errors a stop takes 30 s.

    Args:
        scripts: their paths; modules are found in the folder of each.
        models: those to serve of them.
        log: for what they print.
    """
    began_s = ready_s = time.time()
    ports = {kind: str(free_port()) for kind in ("HTTP_PORT", "GRPC_PORT", "METRICS_PORT")}
    settings = {f"PYTRITON_TRITON_CONFIG_{kind}": port for kind, port in ports.items()}

    def start() -> subprocess.Popen[bytes]:
        with log.open("w") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.bare_pytriton", ",".join(models), *map(str, scripts)],
                cwd=Path(__file__).parents[1],
                env={**os.environ, **settings, "LD_LIBRARY_PATH": library_path(os.environ)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    process, started_s = start(), time.monotonic()
    starts = itertools.count(2)
    bare = Bare(f"http://127.0.0.1:{ports['HTTP_PORT']}", f"grpc://127.0.0.1:{ports['GRPC_PORT']}")

    def is_ready() -> bool:
        nonlocal process, started_s
        if time.monotonic() - started_s > HANGS_AFTER_S:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.poll() is not None:
            assert next(starts) <= STARTS, log.read_text()[-3000:]
            process, started_s = start(), time.monotonic()
        with contextlib.suppress(httpx.TransportError):
            return all(httpx.get(f"{bare.url}/v2/models/{one}/ready").status_code == 200 for one in models)
        return False

    try:
        wait_for(is_ready, START_TIMEOUT_S, "PyTriton's models", 0.2)
        ready_s = time.time()
        yield bare
    finally:
        left = _traces(process.pid)
        with contextlib.suppress(ProcessLookupError):  # it has ended, and whoever waits says why
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for path in left:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        remove_backend_folders(began_s, ready_s)


def _traces(pid: int) -> set[Path]:
    """What a killed PyTriton leaves: its workspace, folders of models, and shared memory."""
    found: set[str] = set()
    if not psutil.pid_exists(pid):  # it ended by itself, and has swept up
        return set()
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.Error, OSError):
            command = " ".join(process.cmdline())
            found.update(re.findall(r"/tmp/folder\w+", command))
            found.update(re.findall(r"(/\S*?/\.cache/pytriton/workspace_\w+|/tmp/pytriton\w+)", command))
            found.update(re.findall(r"/dev/shm/[^ \n]+", Path(f"/proc/{process.pid}/maps").read_text()))
    return {path for path in map(Path, found) if path.exists()}


def main() -> None:
    """Serve the scripts until killed."""
    import pytriton.triton

    models, *scripts = sys.argv[1:]
    bindings: list[dict[str, Any]] = []
    """The arguments of each `bind`."""
    served = threading.Event()

    class Recorder:
        """What a script gets as `Triton`."""

        def __init__(self, **_: Any) -> None:
            """All is served by one."""

        def __enter__(self) -> Recorder:
            return self

        def __exit__(self, *_: object) -> None:
            """The others still serve."""

        def bind(self, *given: Any, **named: Any) -> None:
            """Note a model."""
            arguments = inspect.signature(server.bind).bind(*given, **named).arguments
            if arguments["model_name"] in models.split(","):
                bindings.append(arguments)

        def serve(self) -> None:
            """Serve until the process is killed."""
            served.set()
            threading.Event().wait()

    server = pytriton.triton.Triton()
    # PyTriton's configurations are complete: without this Triton starts each model once more to ask for its own.
    # private: `TritonConfig` has no such option
    server._triton_server_config["strict-model-config"] = True
    with server:
        pytriton.triton.Triton = Recorder
        for path in scripts:
            served.clear()
            sys.argv[:] = [path]
            sys.path.insert(0, str(Path(path).parent))
            script = threading.Thread(target=runpy.run_path, args=(path,), kwargs={"run_name": "__main__"}, daemon=True)
            script.start()
            wait_for(lambda: served.is_set() or not script.is_alive(), START_TIMEOUT_S, path)  # noqa: B023
            if not served.is_set():
                sys.exit(f"{path} ended without serve()")
        first, *others = bindings
        server.bind(**first)  # starts what the others share
        with ThreadPoolExecutor(BOUND_AT_ONCE) as pool:  # each waits for seconds
            for bound in [pool.submit(server.bind, **arguments) for arguments in others]:
                bound.result()
        server.serve()


if __name__ == "__main__":
    main()
