"""Hosts one vLLM: starts it, warms it up, watches that it makes progress, and ends it.

Started by `app.process.guardian` as ``python -m app.process.vllm_host PYTHON NAME FOLDER STATUS_FD``, under Headwater's
own Python; FOLDER holds ``spec.json`` (`ReplicaSpec`). vLLM is its child, in the guardian's group. Reports on the pipe,
as every replica does.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from app.process.interpreter import InterpreterError
from app.process.vllm import VllmInstall, find_vllm, folder_problem, serve_command, serve_environment
from inference.errors import LoadError
from inference.reference import find_folder
from inference.signature import VllmSpec, text_signature
from inference.wire.handshake import ReplicaSpec, ReplicaStatus

__all__ = ["Progress", "main"]

PR_SET_PDEATHSIG: Final = 1
READY_FILE: Final = "ready"
SOCKET: Final = "h"
"""The name of vLLM's socket in the replica's folder."""
POLL_S: Final = 0.25
ASK_TIMEOUT_S: Final = 5.0
WARMUP_TIMEOUT_S: Final = 300.0
"""The first request for log probabilities may compile."""
END_TIMEOUT_S: Final = 5.0
"""How long vLLM may take to end after SIGTERM; the guardian then kills the group."""
LOOKS: Final = 4
"""How often progress is looked at in the time that a step may take."""
_METRIC: Final = re.compile(rb"^vllm:([a-z_]+)(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)
_BLOCKS: Final = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)


class Progress:
    """Whether an engine makes progress: by the tokens that it has counted, and by probes while nothing is counted.

    Args:
        max_step_s: how long it may make none, with a request under way.
    """

    def __init__(self, max_step_s: float) -> None:
        self._max_step_s = max_step_s
        self._tokens = -1.0
        self._since_s: float | None = None
        """Since when a probe has gone unanswered and nothing was counted."""

    def look(self, tokens: float | None, *, is_probed: bool, now_s: float) -> bool:
        """Note what was found. Returns whether the engine hangs.

        Args:
            tokens: those counted so far, of prompts and answers; None: vLLM didn't say.
            is_probed: whether a probe is under way.
            now_s: a monotonic time.
        """
        if tokens is not None and tokens != self._tokens:
            self._tokens = tokens
            self._since_s = None
        elif tokens is not None and not is_probed:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        return self._since_s is not None and now_s - self._since_s >= self._max_step_s


class _Connection(http.client.HTTPConnection):
    """HTTP on a unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("replica", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Failed(Exception):
    """vLLM can't serve."""


class Host:
    """One vLLM and its child processes.

    Args:
        spec: what to serve.
        directory: the replica's folder.
        status_fd: where status lines go.
    """

    def __init__(self, spec: ReplicaSpec, directory: Path, status_fd: int) -> None:
        self._spec = spec
        self._directory = directory
        self._status_fd = status_fd
        self._stop = threading.Event()
        self._probe: threading.Thread | None = None
        self._server: subprocess.Popen[bytes]

    def report(self, status: ReplicaStatus) -> None:
        """Write a status line."""
        with contextlib.suppress(OSError):  # the supervisor is gone; the guardian will end us
            os.write(self._status_fd, msgspec.json.encode(status) + b"\n")

    def run(self, python: str) -> None:
        """Serve until SIGTERM.

        Raises:
            InterpreterError: there is no vLLM.
            LoadError: the folder is no model's.
            Failed: vLLM ended, or does not answer as expected.
        """
        signal.signal(signal.SIGTERM, self._on_sigterm)
        spec = self._spec
        self.report(ReplicaStatus("progress", "looking for vLLM"))
        install = find_vllm(python, os.environ)
        folder = find_folder(spec.model, [spec.working_dir, *spec.user_paths])
        problem = folder_problem(folder, spec.options, install)
        if problem is not None:
            raise LoadError(problem)
        self._start(install, folder)
        self._await_health()
        self.report(ReplicaStatus("progress", "warming up"))
        self._warm_up()
        signature = text_signature(spec.name, folder, vllm=self._capacity(install))
        device = "cpu" if install.is_cpu else (spec.device if spec.device.startswith("cuda") else "cuda")
        (self._directory / READY_FILE).touch()
        facts = {"device": device, "vllm": install.version}
        self.report(ReplicaStatus("ready", signature=msgspec.to_builtins(signature), facts=facts))
        self._watch()
        self._end()
        self.report(ReplicaStatus("unloaded"))

    def _on_sigterm(self, number: int, frame: object) -> None:
        if not (self._directory / READY_FILE).exists():
            os._exit(0)
        self._stop.set()

    def _start(self, install: VllmInstall, folder: Path) -> None:
        spec = self._spec
        path = self._directory / SOCKET
        path.unlink(missing_ok=True)
        self._server = subprocess.Popen(
            serve_command(install, folder, spec.name, path, spec.options, spec.adapters),
            cwd=self._directory,
            env=serve_environment(os.environ, self._directory, spec.device, spec.options, install),
            stdin=subprocess.DEVNULL,
        )
        self.report(ReplicaStatus("progress", f"starting vLLM {install.version}"))

    def _await_health(self) -> None:
        """Wait until vLLM answers; `load_timeout_s` of the deployment bounds it."""
        while True:
            self._check_alive("before it was ready")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._ask("GET", "/health")[0] == 200:
                    return
            time.sleep(POLL_S)

    def _warm_up(self) -> None:
        for more in ({}, {"logprobs": 1}):
            status, answer = self._generate(WARMUP_TIMEOUT_S, max_tokens=2, **more)
            if status != 200:
                raise Failed(f"the warm-up request was answered with {status}: {answer[:500].decode(errors='replace')}")

    def _generate(self, timeout_s: float, **fields: object) -> tuple[int, bytes]:
        body = {"model": self._spec.name, "prompt": "Hello", "temperature": 0, **fields}
        return self._ask("POST", "/v1/completions", json.dumps(body), timeout_s=timeout_s)

    def _capacity(self, install: VllmInstall) -> VllmSpec:
        models = json.loads(self._ask("GET", "/v1/models")[1])
        found = _BLOCKS.search(self._ask("GET", "/metrics")[1])
        labels = dict(re.findall(rb'([a-z_]+)="(\d+)"', found[1])) if found is not None else {}
        blocks, size = (int(labels.get(name, 0)) for name in (b"num_gpu_blocks", b"block_size"))
        return VllmSpec(
            max_sequences=self._spec.options["max_num_seqs"],
            context_length=models["data"][0]["max_model_len"],
            cache_tokens=blocks * size,
            version=install.version,
        )

    def _watch(self) -> None:
        """Return when vLLM is to end.

        Raises:
            Failed: it has ended, or makes no progress.
        """
        max_step_s = self._spec.options["max_step_s"]
        progress = Progress(max_step_s * (LOOKS - 1) / LOOKS)
        next_s = 0.0
        while not self._stop.wait(POLL_S):
            self._check_alive("although nobody ended it")
            now_s = time.monotonic()
            if now_s < next_s:
                continue
            next_s = now_s + max_step_s / LOOKS
            if progress.look(self._tokens(), is_probed=self._is_probing(), now_s=now_s):
                raise Failed(f"its engine has made no progress for options.max_step_s = {max_step_s:g} s")
            if not self._is_probing():
                self._probe = threading.Thread(target=self._send_probe, daemon=True)
                self._probe.start()

    def _is_probing(self) -> bool:
        return self._probe is not None and self._probe.is_alive()

    def _send_probe(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._generate(self._spec.options["max_step_s"] * 2, max_tokens=1)

    def _tokens(self) -> float | None:
        """The tokens that the engine has counted so far; None if vLLM doesn't answer."""
        try:
            text = self._ask("GET", "/metrics")[1]
        except (OSError, http.client.HTTPException):
            return None
        counted = {b"generation_tokens_total", b"prompt_tokens_total"}
        return sum(float(value) for name, value in _METRIC.findall(text) if name in counted)

    def _check_alive(self, when: str) -> None:
        status = self._server.poll()
        if status is not None:
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
            raise Failed(f"vLLM's server {how} {when}")

    def _end(self) -> None:
        self._server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs if streams are under way
            self._server.wait(END_TIMEOUT_S)

    def _ask(
        self, method: str, path: str, body: str | None = None, *, timeout_s: float = ASK_TIMEOUT_S
    ) -> tuple[int, bytes]:
        connection = _Connection(self._directory / SOCKET, timeout_s)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def main() -> None:
    """Entry point; see the module's docstring."""
    python, _, folder, status_fd = sys.argv[1:]
    # End with the guardian: if it is killed, nothing else would sweep up this process group.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    directory = Path(folder)
    spec = msgspec.json.decode((directory / "spec.json").read_bytes(), type=ReplicaSpec)
    os.set_inheritable(int(status_fd), False)
    host = Host(spec, directory, int(status_fd))
    try:
        host.run(python)
    except (InterpreterError, LoadError) as error:
        is_permanent = getattr(error, "is_permanent", True)
        host.report(ReplicaStatus("failed", str(error), "its vLLM can't be started", is_permanent=is_permanent))
        sys.exit(1)
    except Failed as error:
        event: Any = "ending" if (directory / READY_FILE).exists() else "failed"
        host.report(ReplicaStatus(event, str(error)))
        sys.exit(1)


if __name__ == "__main__":
    main()
