"""A peer: Ray Serve, one replica with ``serve.batch``, as its documentation shows, on a Ray of its own.

``python -m benchmarks.peers.ray_server SCENARIO PORT``; tuned for throughput as its guide to performance says.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

os.environ.setdefault("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import serve

from benchmarks.peers.work import MAX_BATCH_SIZE, Message, path_of, work

BATCH_WAIT_S = 0.001
MAX_ONGOING = 4096


def main() -> None:
    """Serve until SIGINT."""
    scenario, port = sys.argv[1], int(sys.argv[2])
    size = MAX_BATCH_SIZE[scenario]

    @serve.deployment(max_ongoing_requests=MAX_ONGOING)
    class Deployment:
        def __init__(self) -> None:
            self._work = work(scenario)

        @serve.batch(max_batch_size=size, batch_wait_timeout_s=BATCH_WAIT_S)  # type: ignore[untyped-decorator]
        async def _batched(self, messages: list[Message]) -> list[Message]:
            return self._work.answers([self._work.row(message) for message in messages])

        async def __call__(self, request: Any) -> Any:
            return await self._batched(await request.json())

    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONPATH": os.getcwd()}
    ray.init(include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": threads})
    deployed: Any = Deployment  # what Ray makes of it; it is not in the environment that types are checked in
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(deployed.bind(), route_prefix=path_of(scenario))
        threading.Event().wait()
    except KeyboardInterrupt:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
