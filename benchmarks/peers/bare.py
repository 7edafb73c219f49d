"""The models alone: the right answers, and how fast one process computes batch after batch with no server around it.

``python -m benchmarks.peers.bare SCENARIO`` reads jobs, JSON lines, and answers each with one. From texts to arrays,
tokenization included, encoding of answers not.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.fanout_servers import ONE_THREAD
from benchmarks.peers.work import MAX_BATCH_SIZE, Message, work
from benchmarks.stream_child import Child, give_back

__all__ = ["Bare"]


class Bare(Child):
    """The process."""

    def __init__(self, scenario: str) -> None:
        super().__init__("benchmarks.peers.bare", [scenario], ONE_THREAD)

    def answers(self, messages: Sequence[Message]) -> list[dict[str, list[float]]]:
        """What is right, by output, one after the other."""
        found: list[dict[str, list[float]]] = self._ask({"messages": list(messages)})
        return found

    def per_s(self, messages: Sequence[Message], seconds: float) -> float:
        """Rows a second, in full batches, over these messages again and again."""
        return float(self._ask({"messages": list(messages), "seconds": seconds}))

    def _ask(self, job: dict[str, Any]) -> Any:
        self.send(json.dumps(job).encode())
        return json.loads(self.receive())


def main() -> None:
    """Do jobs until the input ends."""
    scenario = sys.argv[1]
    todo = work(scenario)
    size = MAX_BATCH_SIZE[scenario]
    for line in sys.stdin.buffer:
        job = json.loads(line)
        rows = [_row(todo, scenario, message) for message in job["messages"]]
        if "seconds" not in job:
            found: Any = [
                {name: array[0].ravel().tolist() for name, array in todo.batch([row]).items()} for row in rows
            ]
        else:
            done, started = 0, time.perf_counter()
            while time.perf_counter() - started < job["seconds"]:
                todo.batch([rows[(done + index) % len(rows)] for index in range(size)])
                done += size
            found = done / (time.perf_counter() - started)
        give_back(json.dumps(found).encode())


def _row(todo: Any, scenario: str, message: Message) -> Any:
    if scenario != "image":
        return todo.row(message)
    return np.array(message["inputs"][0]["data"], np.float32).reshape(3, 224, 224)


if __name__ == "__main__":
    main()
