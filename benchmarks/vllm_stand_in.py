"""A stand-in for vLLM that computes nothing and sends its events at a set rate, each with the time at which it left.

It takes vLLM's place in a replica: `interpreter` makes what a deployment names as ``python``. Its streams are those of
``/v1/completions`` of vLLM 0.32, byte for byte but for the text, which is the time in nanoseconds.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path

from benchmarks.fanout_servers import ROOT

__all__ = ["interpreter"]

RATE = "STAND_IN_EVENTS_PER_S"
PACING = "STAND_IN_PACING"
SERVER_S = 45e-6
"""Between events of one step: what vLLM's server computes for each, measured on the machine of docs/benchmarks.md."""
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_METRICS = (
    b'vllm:cache_config_info{block_size="16",num_gpu_blocks="4096"} 1.0\n'
    b'vllm:num_requests_running{engine="0"} 0.0\nvllm:generation_tokens_total{engine="0"} %d\n'
)
_CHUNK = (
    b'data: {"id":"%b","object":"text_completion","created":1763800000,"model":"%b","choices":[{"index":0,"text":'
    b'"%b","logprobs":null,"finish_reason":%b,"stop_reason":null,"prompt_token_ids":null,'
    b'"token_ids":null}],"usage":{"prompt_tokens":3,"total_tokens":%d,"completion_tokens":%d}}\n\n'
)
_LAST = (
    b'data: {"id":"%b","object":"text_completion","created":1763800000,"model":"%b","choices":[],"usage":'
    b'{"prompt_tokens":3,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":0}},'
    b'"system_fingerprint":"vllm-0.32.0-f7167081"}\n\n'
    b"data: [DONE]\n\n"
)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def interpreter(folder: Path, events_per_s: float, pacing: str) -> Path:
    """Make an interpreter whose vLLM is the stand-in.

    Args:
        folder: where it is made.
        events_per_s: of each stream.
        pacing: ``steps``: the events of all streams leave one after the other, `SERVER_S` apart, as those of an
            engine's step do; ``spread``: evenly in time.
    """
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(f"import sys\nsys.path.append({str(ROOT)!r})\n"
                                           "from benchmarks.vllm_stand_in import main\nmain()\n")  # fmt: skip
    about = folder / "vllm-0.32.0+cpu.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    path = folder / "python"
    path.write_text(
        f"#!/bin/sh\nexport PYTHONPATH='{folder}' {RATE}={events_per_s} {PACING}={pacing}\n"
        f"exec '{sys.executable}' \"$@\"\n"
    )
    path.chmod(0o755)
    return path


class _Stream:
    """An answer under way."""

    def __init__(self, connection: socket.socket, id: bytes, model: bytes, tokens: int) -> None:
        self.done = threading.Event()
        self._connection = connection
        self._id = id
        self._model = model
        self._tokens = tokens
        self._sent = 0

    def step(self) -> bool:
        """Send the next event. Returns whether that was the last one, or nobody reads them."""
        self._sent += 1
        usage = 3 + self._sent, self._sent
        is_last = self._sent == self._tokens
        event = _CHUNK % (
            self._id, self._model, b"%d " % time.perf_counter_ns(), b'"length"' if is_last else b"null", *usage
        )  # fmt: skip
        data = b"%x\r\n%b\r\n" % (len(event), event)
        if is_last:
            event = _LAST % (self._id, self._model, *usage)
            data += b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)
        try:
            self._connection.sendall(data)
        except OSError:
            is_last = True
        if is_last:
            self.done.set()
        return is_last


class _Engine(threading.Thread):
    """Sends the events of all streams."""

    def __init__(self, events_per_s: float, is_spread: bool) -> None:
        super().__init__(daemon=True)
        self.tokens = 0
        self._step_s = 1 / events_per_s
        self._is_spread = is_spread
        self._streams: list[_Stream] = []

    def add(self, stream: _Stream) -> None:
        """Take on a stream."""
        self._streams.append(stream)

    def run(self) -> None:
        due_s = time.perf_counter()
        while True:
            streams = list(self._streams)
            gap_s = self._step_s / len(streams) if streams and self._is_spread else SERVER_S
            for place, stream in enumerate(streams):
                self._sleep_until(due_s + place * gap_s)
                if stream.step():
                    self._streams.remove(stream)
            self.tokens += len(streams)
            due_s = max(due_s + self._step_s, time.perf_counter())
            self._sleep_until(due_s)

    def _sleep_until(self, when_s: float) -> None:
        while (left_s := when_s - time.perf_counter()) > 0:
            if left_s > SERVER_S:  # otherwise compute, as vLLM's server does
                time.sleep(left_s)


def _serve(connection: socket.socket, engine: _Engine) -> None:
    """Answer the requests of a connection."""
    rest = b""
    while True:
        while b"\r\n\r\n" not in rest:
            data = connection.recv(1 << 16)
            if not data:
                return
            rest += data
        head, _, rest = rest.partition(b"\r\n\r\n")
        found = _LENGTH.search(head)
        size = int(found[1]) if found is not None else 0
        while len(rest) < size:
            rest += connection.recv(1 << 16)
        body, rest = rest[:size], rest[size:]
        path = head.split(b" ", 2)[1]
        asked = json.loads(body) if body else {}
        if asked.get("stream"):
            connection.sendall(_HEAD)
            stream = _Stream(connection, b"cmpl-%b" % os.urandom(16).hex().encode(), asked["model"].encode(),
                             asked["max_tokens"])  # fmt: skip
            engine.add(stream)
            stream.done.wait()
            continue
        answer = {
            b"/metrics": _METRICS % engine.tokens,
            b"/v1/models": b'{"data":[{"max_model_len":100000}]}',
            b"/v1/completions": b'{"choices":[{"text":""}],"usage":{"prompt_tokens":1,"completion_tokens":1}}',
        }.get(path, b"")
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))


def main() -> None:
    """Serve in vLLM's place until SIGTERM."""
    (path,) = (one.partition("=")[2] for one in sys.argv if one.startswith("--uds="))
    engine = _Engine(float(os.environ[RATE]), os.environ[PACING] == "spread")
    engine.start()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(128)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_serve, args=(connection, engine), daemon=True).start()


if __name__ == "__main__":
    main()
