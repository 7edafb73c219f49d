"""Hosts one vLLM: starts it, warms it up, watches that it makes progress, and ends it.

Started by `headwater_server.process.guardian` as ``python -m headwater_server.process.vllm_host PYTHON NAME FOLDER
STATUS_FD``, under Headwater's own Python and environment; FOLDER holds ``spec.json`` (`ReplicaSpec`). vLLM is its
child, in the guardian's group, and has the deployment's environment. Reports on the pipe, as every replica does.
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
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final

import msgspec

from headwater.errors import LoadError, Problem, text_for_clients
from headwater.reference import find_folder
from headwater.signature import VllmSpec, text_signature
from headwater.wire.handshake import ReplicaSpec, ReplicaStatus
from headwater_server.process.adapters import Adapter, find_adapters, lora_rank
from headwater_server.process.interpreter import InterpreterError
from headwater_server.process.launcher import with_changes
from headwater_server.process.vllm import (
    VllmInstall,
    ask_vllm,
    device_problem,
    find_vllm,
    folder_problem,
    serve_command,
    serve_environment,
)

__all__ = ["Progress", "main"]

PR_SET_PDEATHSIG: Final = 1
READY_FILE: Final = "ready"
SOCKET: Final = "h"
"""The name of vLLM's socket in the replica's folder."""
POLL_S: Final = 0.25
ASK_TIMEOUT_S: Final = 4.0
WARMUP_TIMEOUT_S: Final = 300.0
"""The first request for log probabilities may compile."""
END_TIMEOUT_S: Final = 5.0
"""How long vLLM may take to end after SIGTERM; the guardian then kills the group."""
LOOKS: Final = 8
"""How often progress is looked at in the time that a step may take."""
MISSED: Final = 6
"""So many looks in a row without progress mean that the engine hangs: between 6 and 7 intervals after the last."""
EXIT_S: Final = 2.0
"""How long a server whose engine has failed may take to end, and what it wrote to be read."""
RECENT_S: Final = 30.0
"""An error that vLLM wrote before this is not why it ends."""
USAGE_ERROR: Final = 2
"""The exit status of a program that refuses its arguments."""
ERROR_CHARACTERS: Final = 500
_METRIC: Final = re.compile(rb"\nvllm:([a-z_]+)(?:\{[^}\n]*\})? ([0-9.e+-]+)")
_COUNTED: Final = frozenset(
    {
        b"generation_tokens_total", b"prompt_tokens_total", b"kv_cache_usage_perc", b"num_requests_running",
        b"num_requests_waiting",
    }
)  # fmt: skip
"""What the engine reports after each step. The cache fills while a long prompt is read, of which no token is counted
before its end."""
_BLOCKS: Final = re.compile(rb"\nvllm:cache_config_info\{([^\n]*)\}")
_PREFIX: Final = re.compile(r"\([\w-]+ pid=\d+\) (?:[A-Z]+ \S+ \S+ \[[^\]]*\] )?")
"""Of a line of vLLM's processes, the server's own traceback excepted."""
_ERROR: Final = re.compile(r"(?:\S+: error: |(?:\w+\.)*(?=\w*(?:Error|Exception)(?:: |$)))(.+)")
"""A traceback's last line, or what `argparse` says."""
_REFUSED: Final = ("ValidationError", "ValueError", "KeyError")
"""The server's own errors over its arguments and the model's folder."""


class Progress:
    """Whether an engine makes progress: what it counts changes from one look to the next. When nothing has changed, a
    probe is sent before the next look, so that an engine that works has something to count.

    Looks are counted, rather than time, so that a pause of the whole machine is no reason to end a replica.
    """

    def __init__(self) -> None:
        self.missed = 0
        """Looks since the last progress."""
        self._counted: tuple[float, ...] | None = None

    def look(self, counted: tuple[float, ...]) -> bool:
        """Note what has been counted so far. Returns whether the engine hangs."""
        self.missed = self.missed + 1 if counted == self._counted else 0
        self._counted = counted
        return self.missed >= MISSED


class Output:
    """What vLLM writes: passed on to the log, and searched for the error that ended it.

    Args:
        stream: read in a thread to its end.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._error = ""
        self._noted_s = 0.0
        self._is_servers = False
        """Whether the error is the server's own, not one of its engine's processes."""
        self._details = 0
        """How many of the next lines belong to the error."""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def error(self) -> str:
        """The error just written, on one line: class and message; empty: there is none."""
        self._thread.join(EXIT_S)  # processes that haven't ended hold the stream open
        return self._error[:ERROR_CHARACTERS] if time.monotonic() - self._noted_s < RECENT_S else ""

    @property
    def is_refusal(self) -> bool:
        """Whether the server refused what it was to serve, which another start would not change."""
        return self._is_servers and self._error.startswith(_REFUSED)

    def _read(self) -> None:
        for line in self._stream:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            self._search(line.decode(errors="replace").rstrip())

    def _search(self, line: str) -> None:
        prefix = _PREFIX.match(line)
        text = line[prefix.end() :] if prefix is not None else line
        if (found := _ERROR.match(text)) is not None and "root cause" not in text:  # that refers to an earlier error
            self._error, self._noted_s, self._is_servers = found[1], time.monotonic(), prefix is None
            self._details = 2 if "validation error" in text else 0
        elif self._details:
            self._details -= 1
            self._error += "" if text.strip().startswith("For further information") else f": {text.strip()}"


class Failed(Exception):
    """vLLM can't serve, or go on."""

    def __init__(self, reason: str, error: str = "", *, is_permanent: bool = False) -> None:
        super().__init__(f"{reason}: {error}" if error else reason)
        self.error = error
        """vLLM's own."""
        self.is_permanent = is_permanent


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
        self._answered = 0
        """Probes that were answered."""
        self._counted: tuple[float, ...] = ()
        """What the engine has counted, as far as is known."""
        self._embedding_length = 0
        """Of a model that gives embeddings."""
        self._server: subprocess.Popen[bytes]
        self._output: Output

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
        environ = with_changes(os.environ, spec.environment)
        install = find_vllm(python, environ)
        search = [spec.working_dir, *spec.user_paths]
        folder = find_folder(spec.model, search)
        problem = device_problem(spec.device, environ, spec.options, install)
        problem = problem or folder_problem(folder, spec.options, install)
        if problem is not None:
            raise LoadError(problem)
        adapters = find_adapters(spec.adapters, search)
        self._start(install, folder, adapters, environ)
        self._await_health()
        self.report(ReplicaStatus("progress", "warming up"))
        try:
            self._warm_up()
            vllm = self._capacity(install, lora_rank(spec.options, adapters))
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            raise self._failed(f"a request before it was ready failed: {type(error).__name__}: {error}") from None
        signature = text_signature(spec.name, folder, vllm=vllm)
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

    def _start(
        self, install: VllmInstall, folder: Path, adapters: Mapping[str, Adapter], environ: Mapping[str, str]
    ) -> None:
        spec = self._spec
        path = self._directory / SOCKET
        path.unlink(missing_ok=True)
        self._server = subprocess.Popen(
            serve_command(install, folder, spec.name, path, spec.options, adapters),
            cwd=self._directory,
            env=serve_environment(environ, self._directory, spec.device, spec.options, install),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._server.stdout is not None
        self._output = Output(self._server.stdout)
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
        """Send requests such as will come. Which of its routes vLLM has says what the model does."""
        status, answer = self._generate(WARMUP_TIMEOUT_S, max_tokens=2)
        if status == 404:
            status, answer = self._embed(WARMUP_TIMEOUT_S)
            if status == 404:
                runner = self._spec.options["runner"]
                reason = f"with options.runner = {runner} this model neither generates text nor gives embeddings"
                fix = "generate or pooling" if runner == "auto" else "another"
                raise LoadError(Problem("vLLM", reason, f"set options.runner to {fix}, or serve another model"))
            if status == 200:
                self._embedding_length = len(json.loads(answer)["data"][0]["embedding"])
        elif status == 200 and self._spec.options["max_logprobs"]:
            status, answer = self._generate(WARMUP_TIMEOUT_S, max_tokens=2, logprobs=1)
        if status != 200:
            text = answer[:ERROR_CHARACTERS].decode(errors="replace")
            raise self._failed(f"a request before it was ready was answered with {status}: {text}")

    def _generate(self, timeout_s: float, **fields: object) -> tuple[int, bytes]:
        body = {"model": self._spec.name, "prompt": "Hello", "temperature": 0, **fields}
        return self._ask("POST", "/v1/completions", json.dumps(body), timeout_s=timeout_s)

    def _embed(self, timeout_s: float) -> tuple[int, bytes]:
        body = {"model": self._spec.name, "input": "Hello"}
        return self._ask("POST", "/v1/embeddings", json.dumps(body), timeout_s=timeout_s)

    def _capacity(self, install: VllmInstall, max_lora_rank: int) -> VllmSpec:
        models = json.loads(self._ask("GET", "/v1/models")[1])
        found = _BLOCKS.search(b"\n" + self._ask("GET", "/metrics")[1])
        labels = dict(re.findall(rb',([a-z_]+)="(\d+)"', b"," + found[1])) if found is not None else {}
        blocks, size = (int(labels.get(name, 0)) for name in (b"num_gpu_blocks", b"block_size"))
        return VllmSpec(
            max_sequences=self._spec.options["max_num_seqs"],
            context_length=models["data"][0]["max_model_len"],
            cache_tokens=blocks * size if blocks > 1 else 0,  # an encoder keeps none, and says 1 block
            version=install.version,
            max_lora_rank=max_lora_rank,
            max_requests=self._spec.options["max_num_queued_reqs"],
            embedding_length=self._embedding_length,
        )

    def _watch(self) -> None:
        """Return when vLLM is to end.

        Raises:
            Failed: it has ended, or makes no progress.
        """
        max_step_s = self._spec.options["max_step_s"]
        interval_s = max_step_s / LOOKS
        progress = Progress()
        next_s = 0.0
        while not self._stop.wait(min(POLL_S, interval_s)):
            self._check_alive("although nobody ended it")
            now_s = time.monotonic()
            if now_s < next_s:
                continue
            next_s = now_s + interval_s
            self._count(interval_s / 2)
            if progress.look((self._answered, *self._counted)):
                raise Failed(f"its engine has made no progress within options.max_step_s = {max_step_s:g} s")
            if progress.missed and (self._probe is None or not self._probe.is_alive()):
                self._probe = threading.Thread(target=self._send_probe, daemon=True)
                self._probe.start()

    def _send_probe(self) -> None:
        # A full queue refuses it, which is no sign of progress.
        with contextlib.suppress(OSError, http.client.HTTPException):
            max_step_s = self._spec.options["max_step_s"]
            asked = self._embed(max_step_s) if self._embedding_length else self._generate(max_step_s, max_tokens=1)
            if asked[0] == 200:
                self._answered += 1

    def _count(self, timeout_s: float) -> None:
        """Look what the engine has counted; without an answer, the last one stays."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            text = self._ask("GET", "/metrics", timeout_s=min(ASK_TIMEOUT_S, timeout_s))[1]
            self._counted = tuple(float(value) for name, value in _METRIC.findall(b"\n" + text) if name in _COUNTED)

    def _check_alive(self, when: str) -> None:
        status = self._server.poll()
        if status is not None:
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
            error = self._output.error()
            is_permanent = status == USAGE_ERROR or self._output.is_refusal
            raise Failed(f"vLLM's server {how} {when}", error, is_permanent=is_permanent)

    def _failed(self, reason: str) -> Failed:
        """The error for a vLLM that fails a request, or ends because its engine has failed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(EXIT_S)
        return Failed(reason, self._output.error())

    def _end(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # as it does while it has requests
            print(f"vLLM has not ended {END_TIMEOUT_S:g} s after SIGTERM; its processes are killed", flush=True)

    def _ask(
        self, method: str, path: str, body: str | None = None, *, timeout_s: float = ASK_TIMEOUT_S
    ) -> tuple[int, bytes]:
        return ask_vllm(self._directory / SOCKET, method, path, body, timeout_s)


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
    except InterpreterError as error:
        cause = f"its vLLM can't be started: {error.reason}"
        host.report(ReplicaStatus("failed", str(error), text_for_clients(cause), is_permanent=error.is_permanent))
        sys.exit(1)
    except LoadError as error:
        host.report(ReplicaStatus("failed", str(error), text_for_clients(error.problem.reason), is_permanent=True))
        sys.exit(1)
    except Failed as error:
        if (directory / READY_FILE).exists() or not error.error:
            # Where vLLM's own words are not found, the last lines of the log go with the reason.
            host.report(ReplicaStatus("ending", str(error)))
        else:
            cause = text_for_clients(f"vLLM ended before it was ready: {error.error}")
            host.report(ReplicaStatus("failed", str(error), cause, is_permanent=error.is_permanent))
        sys.exit(1)


if __name__ == "__main__":
    main()
