"""Stands in for vLLM: takes its command line, and answers on its socket with the standard library alone.

`environment` makes an interpreter that has it under the name of vLLM. What it does wrong is in the variable
``STAND_IN``, words between spaces, and in files that a test puts into the replica's folder, in which it runs:

- ``refuses-arguments``, ``raises``, ``engine-raises``, ``ends-silently``: how it ends before it is ready;
- ``dies-in-warm-up``: with the first completion;
- ``classifies``: it has neither completions nor embeddings;
- ``ignores-sigterm``;
- ``freeze``: no completion is answered and nothing is counted; with ``metrics`` in the file, ``/metrics`` hangs too;
- ``full``: completions are refused with 503, and nothing is counted;
- ``prefill``: no completion is answered, but the cache fills;
- ``exit``: the server ends with code 0.

An adapter says, token for token, what its file of weights has; the model says "a".

It has a child process named ``VLLM::Worker``, which maps a segment.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.server
import json
import os
import signal
import socketserver
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing import shared_memory
from pathlib import Path
from types import MappingProxyType

__all__ = ["NOT_OFFERED", "NOT_OFFERED_BODY", "VERSION", "environment", "main"]

VERSION = "0.32.0+cpu"
NOT_OFFERED = (
    "/inference/v1/generate", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/abort_requests", "/collective_rpc",
    "/sleep", "/wake_up", "/reset_prefix_cache", "/start_profile", "/scale_elastic_ep", "/v1/chat/completions/render",
)  # fmt: skip
"""Routes of vLLM that Headwater doesn't have. A route that Headwater gets leaves this list in the same commit."""
NOT_OFFERED_BODY = {"model": "tiny", "prompt": "x", "input": "x"}
PREFIX = "(EngineCore pid=7) ERROR 11-22 13:52:06 [core.py:1510] "
PR_SET_NAME = 15


def environment(folder: Path, version: str = VERSION, name: str = "vllm") -> Path:
    """Make an environment with it in a folder. Returns its interpreter."""
    package = folder / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for one in (package, package.parent, package.parent.parent):
        (one / "__init__.py").touch()
    (package / "api_server.py").symlink_to(Path(__file__).resolve())
    metadata = folder / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "site"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128
    tokens = 0
    prefilled = 0
    adapters: Mapping[str, str] = MappingProxyType({})
    """What each adapter says, by name."""
    pools = False
    """Whether it gives embeddings: as ``--runner`` says, or a file of sentence-transformers in the model's folder."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def address_string(self) -> str:
        return "gateway"

    def log_message(self, *_: object) -> None:
        """Write no access log."""

    def do_GET(self) -> None:
        """Answer /health, /v1/models and /metrics."""
        if self.path == "/metrics":
            if _file("freeze") == "metrics":
                time.sleep(600)
            if _file("prefill") is not None:
                self.server.prefilled += 1
            text = (
                f'vllm:generation_tokens_total{{engine="0"}} {self.server.tokens}\n'
                f'vllm:kv_cache_usage_perc{{engine="0"}} {self.server.prefilled / 1000}\n'
                'vllm:cache_config_info{block_size="16",num_gpu_blocks="64"} 1.0\n'
            )
            self._answer(200, text.encode())
        else:
            self._answer(200, json.dumps({"data": [{"id": "m", "max_model_len": 512}]}).encode())

    def do_POST(self) -> None:
        """Answer a completion with one token, or with tokens for ever; or with an embedding for each input."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/load_lora_adapter":
            self.server.adapters = {**self.server.adapters, body["lora_name"]: _weights(body["lora_path"])}
            self._answer(200, b"")
            return
        if self.path == "/v1/unload_lora_adapter":
            self.server.adapters = {k: v for k, v in self.server.adapters.items() if k != body["lora_name"]}
            self._answer(200, b"")
            return
        if (self.path == "/v1/embeddings") != self.server.pools or "classifies" in os.environ.get("STAND_IN", ""):
            self._answer(404, b'{"detail": "Not Found"}')
            return
        if "dies-in-warm-up" in os.environ.get("STAND_IN", ""):
            # As a worker writes that has no name yet.
            prefix = PREFIX.replace("EngineCore", "VllmWorker-0")
            sys.stdout.write(f"{prefix}torch.OutOfMemoryError: no memory for the key/value cache\r\n")
            sys.stdout.flush()
            os._exit(0)
        if _file("full") is not None:
            self._answer(503, b"{}")
            return
        while _file("freeze") is not None or _file("prefill") is not None:
            time.sleep(0.02)
        if self.server.pools:
            self.server.tokens += 1
            inputs = body["input"] if isinstance(body["input"], list) else [body["input"]]
            data = [{"index": n, "embedding": [float(len(one)), 0.5]} for n, one in enumerate(inputs)]
            self._answer(200, json.dumps({"data": data, "usage": {"prompt_tokens": len(data)}}).encode())
            return
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        text = self.server.adapters.get(body.get("model"), "a")
        choice = {"index": 0, "text": text, "finish_reason": None, "logprobs": None}
        answer = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
        if not body.get("stream"):
            self.server.tokens += 1
            choice["finish_reason"] = "length"
            self._answer(200, json.dumps({**answer, "usage": usage}).encode())
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has left
            while True:
                if _file("freeze") is None:
                    self.server.tokens += 1
                    self.wfile.write(b"data: " + json.dumps({**answer, "usage": usage}).encode() + b"\n\n")
                time.sleep(0.02)

    def _answer(self, status: int, body: bytes) -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)


def _file(name: str) -> str | None:
    try:
        return Path(name).read_text()
    except OSError:
        return None


def _weights(folder: str) -> str:
    return Path(folder, "adapter_model.safetensors").read_text()


def _begin_worker() -> None:
    """Start the worker, with a segment as vLLM's processes share."""
    segment = shared_memory.SharedMemory(create=True, size=4096)
    Path("segment").write_text(segment.name)
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_NAME, b"VLLM::Worker")
        Path("worker").write_text(str(os.getpid()))
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.05)
        time.sleep(600)  # as vLLM's do when their server is killed


def main() -> None:
    """Serve."""
    arguments = dict(one.removeprefix("--").partition("=")[::2] for one in sys.argv[1:])
    Path("seen.json").write_text(json.dumps({"arguments": arguments, "environment": dict(os.environ)}))
    faults = os.environ.get("STAND_IN", "").split()
    if "refuses-arguments" in faults:
        print("usage: api_server.py [-h]\napi_server.py: error: argument --dtype: invalid choice: 'x'", flush=True)
        sys.exit(2)
    if "raises" in faults:
        raise KeyError("invalid tool call parser: x")
    if "engine-raises" in faults:
        print(f"{PREFIX}Traceback (most recent call last):\n{PREFIX}torch.OutOfMemoryError: no memory", flush=True)
        raise RuntimeError("Engine core initialization failed. See root cause above.")
    if "ends-silently" in faults:
        print("the last thing that it said", flush=True)
        os._exit(3)
    if "ignores-sigterm" in faults:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    _begin_worker()
    server = _Server(arguments["uds"], _Handler)
    modules = sys.argv[sys.argv.index("--lora-modules") + 1 :] if "--lora-modules" in sys.argv else []
    named = (json.loads(one) for one in modules)
    server.adapters = {one["name"]: _weights(one["path"]) for one in named}
    found = "pooling" if Path(arguments["model"], "modules.json").exists() else "generate"
    server.pools = (found if arguments["runner"] == "auto" else arguments["runner"]) == "pooling"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while _file("exit") is None:
        time.sleep(0.02)
    os._exit(0)


if __name__ == "__main__":
    main()
