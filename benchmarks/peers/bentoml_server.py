"""A peer: BentoML, one worker with its adaptive batching, as its documentation shows.

``python -m benchmarks.peers.bentoml_server SCENARIO PORT``. A batchable API gets lists that BentoML joins and cuts, so
a request's body is the same as elsewhere, the list ``inputs`` of one tensor, but an answer is a list of one answer.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import bentoml

from benchmarks.peers.work import MAX_BATCH_SIZE, Message, path_of, work

SCENARIO = os.environ.setdefault("BENCHMARK_SCENARIO", sys.argv[1])
MAX_LATENCY_MS = 60_000
"""Beyond what a batch is expected to take BentoML answers 503; so long it never does."""


@bentoml.service(workers=1, threads=1, traffic={"timeout": 60}, logging={"access": {"enabled": False}})
class Service:
    """The scenario's model."""

    def __init__(self) -> None:
        self._work = work(SCENARIO)

    @bentoml.api(  # type: ignore[untyped-decorator]  # BentoML is not installed where types are checked
        batchable=True, batch_dim=0, max_batch_size=MAX_BATCH_SIZE[SCENARIO], max_latency_ms=MAX_LATENCY_MS,
        route=path_of(SCENARIO),
    )  # fmt: skip
    def infer(self, inputs: list[dict[str, Any]]) -> list[Message]:
        return self._work.answers([self._work.row({"inputs": [tensor]}) for tensor in inputs])


if __name__ == "__main__":
    target = "benchmarks.peers.bentoml_server:Service"
    command = ["serve", target, "--host", "127.0.0.1", "--port", sys.argv[2]]
    os.execv(sys.executable, [sys.executable, "-m", "bentoml", *command])
