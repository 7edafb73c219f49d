"""Hosts a vLLM: starts it, warms it up, checks that it makes progress, and ends it.

Started by `headwater_server.process.guardian` as ``python -m headwater_server.process.vllm_host PYTHON NAME FOLDER
STATUS_FD``, under Headwater's Python and environment; FOLDER holds ``spec.json`` (`ReplicaSpec`). vLLM is its child, in
the guardian's group, and has the deployment's environment. The host reports its status on the pipe STATUS_FD, as every
replica's host does.
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
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final

import msgspec

from headwater.errors import LoadError, Problem, shortage_of, text_for_clients
from headwater.reference import find_folder
from headwater.signature import VllmSpec, text_signature
from headwater.wire.handshake import ReplicaSpec, ReplicaStatus, failure_of
from headwater_server.process.adapter_folders import Adapter, find_adapters, lora_rank
from headwater_server.process.interpreter import InterpreterError
from headwater_server.process.launcher import with_changes
from headwater_server.process.socket_http import ask_socket
from headwater_server.process.vllm_program import (
    VllmInstall,
    device_problem,
    find_vllm,
    folder_problem,
    serve_command,
    serve_environment,
)

__all__ = ["EngineProgress", "main"]

PR_SET_PDEATHSIG: Final = 1
READY_FILE: Final = "ready"
"""File that the host creates in the replica's folder when vLLM is ready, as every replica does."""
SOCKET: Final = "h"
"""The name of vLLM's socket in the replica's folder."""
POLL_S: Final = 0.25
ASK_TIMEOUT_S: Final = 4.0
WARMUP_TIMEOUT_S: Final = 300.0
"""Limit of a warm-up request. It is long because the first request for log probabilities may compile code."""
END_TIMEOUT_S: Final = 5.0
"""Time in which vLLM must end after SIGTERM; then the guardian kills the group."""
LOOKS: Final = 8
"""Progress checks within ``options.max_step_s``, the longest time that a step may take. After so many consecutive
checks without progress the engine counts as hung: `LOOKS` to `LOOKS` + 1 intervals after the last progress."""
EXIT_S: Final = 2.0
"""Time to wait for the end of a server whose engine has failed, and then for the rest of its output."""
RECENT_S: Final = 30.0
"""Age beyond which an error in vLLM's output is not taken as the reason of its end."""
USAGE_ERROR: Final = 2
"""Exit status of a program that rejects its arguments."""
ERROR_CHARACTERS: Final = 500
"""Maximum length of an error from vLLM's output, and of an answer that an error quotes."""
_METRIC: Final = re.compile(rb"\nvllm:([a-z_]+)(?:\{[^}\n]*\})? ([0-9.e+-]+)")
_COUNTED: Final = frozenset(
    {
        b"generation_tokens_total", b"prompt_tokens_total", b"kv_cache_usage_perc", b"num_requests_running",
        b"num_requests_waiting",
    }
)  # fmt: skip
"""Metrics that the engine updates after each step. The cache usage is among them because the tokens of a long prompt
are counted only when the whole prompt has been read, while the cache fills during the reading."""
_BLOCKS: Final = re.compile(rb"\nvllm:cache_config_info\{([^\n]*)\}")
"""The labels of the metric that has the cache's number of blocks and the tokens of a block."""
_PREFIX: Final = re.compile(r"\([\w-]+ pid=\d+\) (?:[A-Z]+ \S+ \S+ \[[^\]]*\] )?")
"""Prefix of the lines that vLLM's processes write. Lines of a traceback of the API server itself have no prefix."""
_ERROR: Final = re.compile(r"(?:\S+: error: |(?:\w+\.)*(?=\w*(?:Error|Exception)(?:: |$)))(.+)")
"""The last line of a traceback, or an error message of `argparse`. The group is the exception's class, without modules,
and its message; of `argparse` only the message."""
_REFUSED: Final = ("ValidationError", "ValueError", "KeyError")
"""Classes of the errors that the API server itself raises about its arguments or the model's folder."""


class EngineProgress:
    """Decides whether an engine makes progress: its counters must change within `LOOKS` checks. When no counter has
    changed, the host sends a probe request before the next check, so that the counters of a working engine change.

    Checks are counted instead of time, so that a pause of the whole machine doesn't end a replica.
    """

    def __init__(self) -> None:
        self.missed = 0
        """Consecutive checks at which no counter had changed."""
        self._counted: tuple[float, ...] | None = None

    def look(self, counted: tuple[float, ...]) -> bool:
        """Record the engine's counters. Returns whether the engine hangs."""
        self.missed = self.missed + 1 if counted == self._counted else 0
        self._counted = counted
        return self.missed >= LOOKS


class VllmOutput:
    """The output of vLLM: copied to stdout, which is the replica's log, and searched for the error that ended vLLM.

    Args:
        stream: vLLM's output; a thread reads it to its end.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._error = ""
        self._noted_s = 0.0
        self._is_servers = False
        """Whether the API server itself wrote the error, rather than a process of its engine."""
        self._details = 0
        """Number of following lines that belong to the error."""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def error(self) -> str:
        """The latest error on one line, class and message (see `_ERROR`), cut at `ERROR_CHARACTERS`; empty if vLLM
        wrote no error in the last `RECENT_S`. Waits up to `EXIT_S` for the end of the output."""
        self._thread.join(EXIT_S)  # the stream stays open until all of vLLM's processes have ended
        return self._error[:ERROR_CHARACTERS] if time.monotonic() - self._noted_s < RECENT_S else ""

    @property
    def is_refusal(self) -> bool:
        """Whether the latest error is the API server's rejection of its arguments or of the model (`_REFUSED`), so that
        another start would fail in the same way. False for errors of `argparse`, which have status `USAGE_ERROR`."""
        return self._is_servers and self._error.startswith(_REFUSED)

    def _read(self) -> None:
        for line in self._stream:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            self._search(line.decode(errors="replace").rstrip())

    def _search(self, line: str) -> None:
        prefix = _PREFIX.match(line)
        text = line[prefix.end() :] if prefix is not None else line
        if (match := _ERROR.match(text)) is not None and "root cause" not in text:  # refers to an earlier error
            self._error, self._noted_s, self._is_servers = match[1], time.monotonic(), prefix is None
            self._details = 2 if "validation error" in text else 0
        elif self._details:
            self._details -= 1
            self._error += "" if text.strip().startswith("For further information") else f": {text.strip()}"


class Failed(Exception):
    """vLLM can't start serving, or can't continue."""

    def __init__(self, reason: str, error: str = "", *, is_permanent: bool = False) -> None:
        super().__init__(f"{reason}: {error}" if error else reason)
        self.error = error
        """The error message from vLLM's output; empty if there is none."""
        self.is_permanent = is_permanent
        """Whether another start would fail in the same way."""


class VllmHost:
    """Starts, watches and ends a vLLM, and reports its status.

    Args:
        spec: the model and its options.
        directory: the replica's folder.
        status_fd: descriptor to which status lines are written.
    """

    def __init__(self, spec: ReplicaSpec, directory: Path, status_fd: int) -> None:
        self._spec = spec
        self._directory = directory
        self._status_fd = status_fd
        self._stop = threading.Event()
        self._probe: threading.Thread | None = None
        self._answered = 0
        """Number of answered probes."""
        self._counted: tuple[float, ...] = ()
        """The engine's counters, as of the last successful query."""
        self._embedding_length = 0
        """Length of the model's embeddings; 0 if it generates text."""
        self._server: subprocess.Popen[bytes]
        self._output: VllmOutput

    def report(self, status: ReplicaStatus) -> None:
        """Write a status line."""
        with contextlib.suppress(OSError):  # the supervisor is gone; the guardian will end this process
            os.write(self._status_fd, msgspec.json.encode(status) + b"\n")

    def run(self, python: str) -> None:
        """Serve until SIGTERM. A SIGTERM before vLLM is ready ends the process at once, with status 0.

        Args:
            python: path of the interpreter that has vLLM.

        Raises:
            InterpreterError: the interpreter has no usable vLLM.
            LoadError: a folder is missing, vLLM can't serve the model or its adapters, or the device is wrong.
            Failed: vLLM ended, or does not answer as expected.
            OSError, RuntimeError: a process or thread can't be started, or a file can't be written.
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
        self._output = VllmOutput(self._server.stdout)
        self.report(ReplicaStatus("progress", f"starting vLLM {install.version}"))

    def _await_health(self) -> None:
        """Wait until vLLM reports that it is healthy. The supervisor bounds the wait by the deployment's
        `load_timeout_s`.

        Raises:
            Failed: vLLM has ended.
        """
        while True:
            self._check_alive("before it was ready")
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._ask("GET", "/health")[0] == 200:
                    return
            time.sleep(POLL_S)

    def _warm_up(self) -> None:
        """Send requests like the clients' requests. The routes that vLLM serves show whether the model generates text
        or gives embeddings.

        Raises:
            LoadError: vLLM serves neither route for this model.
            Failed: vLLM answered with an error.
            OSError, http.client.HTTPException: vLLM didn't answer.
        """
        status, answer = self._generate(WARMUP_TIMEOUT_S, max_tokens=2)
        if status == 404:
            status, answer = self._embed(WARMUP_TIMEOUT_S)
            if status == 404:
                runner = self._spec.options["runner"]
                reason = f"with options.runner = {runner} this model neither generates text nor serves embeddings"
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
        match = _BLOCKS.search(b"\n" + self._ask("GET", "/metrics")[1])
        labels = dict(re.findall(rb',([a-z_]+)="(\d+)"', b"," + match[1])) if match is not None else {}
        blocks, size = (int(labels.get(name, 0)) for name in (b"num_gpu_blocks", b"block_size"))
        return VllmSpec(
            max_sequences=self._spec.options["max_num_seqs"],
            context_length=models["data"][0]["max_model_len"],
            cache_tokens=blocks * size if blocks > 1 else 0,  # an encoder has no cache, and reports 1 block
            version=install.version,
            max_lora_rank=max_lora_rank,
            max_requests=self._spec.options["max_num_queued_reqs"],
            embedding_length=self._embedding_length,
        )

    def _watch(self) -> None:
        """Watch vLLM. Returns when the host is asked to stop.

        Raises:
            Failed: vLLM has ended, or makes no progress.
        """
        max_step_s = self._spec.options["max_step_s"]
        interval_s = max_step_s / LOOKS
        progress = EngineProgress()
        next_s = 0.0
        while not self._stop.wait(min(POLL_S, interval_s)):
            self._check_alive("without a request to end")
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
        # A full queue refuses the probe, so a refusal is no sign of progress.
        with contextlib.suppress(OSError, http.client.HTTPException):
            max_step_s = self._spec.options["max_step_s"]
            answer = self._embed(max_step_s) if self._embedding_length else self._generate(max_step_s, max_tokens=1)
            if answer[0] == 200:
                self._answered += 1

    def _count(self, timeout_s: float) -> None:
        """Query the engine's counters; without an answer, the values of the last query stay."""
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
        """The error to raise when a request of the warm-up fails. Waits up to `EXIT_S` for vLLM's end: if its engine
        has failed, vLLM ends, and the reason is in its output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(EXIT_S)
        return Failed(reason, self._output.error())

    def _end(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # vLLM may not end while it has requests
            print(f"vLLM has not ended {END_TIMEOUT_S:g} s after SIGTERM; its processes are killed", flush=True)

    def _ask(
        self, method: str, path: str, body: str | None = None, *, timeout_s: float = ASK_TIMEOUT_S
    ) -> tuple[int, bytes]:
        return ask_socket(self._directory / SOCKET, method, path, body, timeout_s)


def main() -> None:
    """Entry point; see the module's docstring."""
    python, _, folder, status_fd = sys.argv[1:]
    # End with the guardian, even if the guardian is killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    directory = Path(folder)
    spec = msgspec.json.decode((directory / "spec.json").read_bytes(), type=ReplicaSpec)
    os.set_inheritable(int(status_fd), False)
    host = VllmHost(spec, directory, int(status_fd))
    try:
        host.run(python)
    except InterpreterError as error:
        cause = f"its vLLM can't be started: {error.reason}"
        lacks = shortage_of(error.__cause__ or error) is not None
        host.report(ReplicaStatus("failed", str(error), text_for_clients(cause), error.is_permanent, lacks))
        sys.exit(1)
    except LoadError as error:
        host.report(failure_of(error))
        sys.exit(1)
    except Failed as error:
        if (directory / READY_FILE).exists() or not error.error:
            # Without an error from vLLM's output, the supervisor adds the last lines of the log to the reason.
            host.report(ReplicaStatus("ending", str(error)))
        else:
            cause = text_for_clients(f"vLLM ended before it was ready: {error.error}")
            host.report(ReplicaStatus("failed", str(error), cause, is_permanent=error.is_permanent))
        sys.exit(1)
    except (OSError, RuntimeError) as error:
        traceback.print_exception(error)
        host.report(failure_of(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
