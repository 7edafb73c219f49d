"""A peer: LitServe, one worker that batches, as its documentation shows.

``python -m benchmarks.peers.litserve_server SCENARIO PORT``; its faster queue (ZeroMQ) is on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import litserve

from benchmarks.peers.token_events import END, event_of, last_event, token_count
from benchmarks.peers.work import BATCH_WAIT_MS, MAX_BATCH_SIZE, Message, path_of, work


class JsonApi(litserve.LitAPI):  # type: ignore[misc]  # LitServe is not in the environment that types are checked in
    """Scenarios in JSON."""

    def __init__(self, scenario: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._scenario = scenario

    def setup(self, device: str) -> None:
        self._work = work(self._scenario)

    # LitServe makes the route of these two annotations; without them it reads JSON, and validates no answer.
    def decode_request(self, request):  # type: ignore[no-untyped-def]
        return self._work.row(request)

    def batch(self, inputs: list[Any]) -> list[Any]:
        return inputs

    def predict(self, x: list[Any]) -> list[Message]:
        return self._work.answers(x)

    def unbatch(self, output: list[Message]) -> list[Message]:
        return output

    def encode_response(self, output):  # type: ignore[no-untyped-def]
        return output


class StreamApi(litserve.LitAPI):  # type: ignore[misc]
    """Token streams: one event a token, all streams of a batch in step."""

    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request):  # type: ignore[no-untyped-def]
        return token_count(request)

    def batch(self, inputs: list[int]) -> list[int]:
        return inputs

    def predict(self, x: list[int]) -> Iterator[list[str]]:
        for token in range(max(x)):
            yield [event_of(token, count) if token < count else "" for count in x]
        yield [last_event(count) for count in x]
        yield [END for _ in x]

    def unbatch(self, output: Iterator[list[str]]) -> Iterator[list[str]]:
        yield from output

    def encode_response(self, output):  # type: ignore[no-untyped-def]
        for events in output:
            yield [f"data: {event}\n\n" if event else "" for event in events]


def main() -> None:
    """Serve until SIGINT."""
    scenario, port = sys.argv[1], int(sys.argv[2])
    settings: dict[str, Any] = {
        "max_batch_size": MAX_BATCH_SIZE.get(scenario, 64),
        "batch_timeout": BATCH_WAIT_MS.get(scenario, 1) / 1000,
        "api_path": path_of(scenario),
    }
    api = StreamApi(stream=True, **settings) if scenario == "streams" else JsonApi(scenario, **settings)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=60, fast_queue=True)
    server.run(host="127.0.0.1", port=port, log_level="warning", access_log=False, generate_client_file=False)


if __name__ == "__main__":
    main()
