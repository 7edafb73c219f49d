"""A peer: mosec, one worker with dynamic batching, as its documentation shows.

``python -m benchmarks.peers.mosec_server SCENARIO PORT``. Its JSON without the indentation that mosec adds, which
would cost the standard library's encoder its C part.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from mosec import Server, SSEWorker, Worker

from benchmarks.peers.token_events import END, event_of, last_event, token_count
from benchmarks.peers.work import BATCH_WAIT_MS, MAX_BATCH_SIZE, ImageWork, Message, path_of, work

CAPACITY = 4096
SCENARIO = "BENCHMARK_SCENARIO"
"""How a worker, a process of its own, is told."""


class JsonWorker(Worker):  # type: ignore[misc]  # mosec is not in the environment that types are checked in
    """Scenarios in JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._work = work(os.environ[SCENARIO])

    def forward(self, data: list[Message]) -> list[Message]:
        return self._work.answers([self._work.row(message) for message in data])

    def serialize(self, data: Any) -> bytes:
        return json.dumps(data).encode()


class BinaryWorker(Worker):  # type: ignore[misc]
    """Images: bytes in, bytes out."""

    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        self._work = ImageWork()

    def deserialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: list[bytes]) -> list[bytes]:
        return self._work.binary_answers(data)

    def serialize(self, data: bytes) -> bytes:
        return data


class StreamWorker(SSEWorker):  # type: ignore[misc]
    """Token streams: one event a token, all streams of a batch in step."""

    def forward(self, data: list[Message]) -> list[str]:
        counts = [token_count(message) for message in data]
        for token in range(max(counts)):
            for index, count in enumerate(counts):
                if token < count:
                    self.send_stream_event(event_of(token, count), index)
        for index, count in enumerate(counts):
            self.send_stream_event(last_event(count), index)
            self.send_stream_event(END, index)
        return ["" for _ in data]


def main() -> None:
    """Serve until SIGINT."""
    scenario, port = sys.argv[1], sys.argv[2]
    os.environ[SCENARIO] = scenario
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", port, "--capacity", str(CAPACITY), "--timeout", "60000"]
    sys.argv += ["--log-level", "warning"]
    server = Server()
    worker = {"image": BinaryWorker, "streams": StreamWorker}.get(scenario, JsonWorker)
    size = MAX_BATCH_SIZE.get(scenario, 64)
    # 1 is the least that mosec takes; 0 stands for its default of 10.
    wait_ms = BATCH_WAIT_MS.get(scenario, 1)
    server.append_worker(worker, max_batch_size=size, max_wait_time=wait_ms, route=path_of(scenario))
    server.run()


if __name__ == "__main__":
    main()
