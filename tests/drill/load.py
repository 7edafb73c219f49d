"""Clients that keep their connections and ask again and again, and what they lose."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator

PAUSE_S = 0.005
ANSWER_WITHIN_S = 10.0


class Load:
    """What all clients have seen so far."""

    def __init__(self) -> None:
        self.answered = 0
        self.lost: list[str] = []
        """Why, of each request without its answer."""
        self._lock = threading.Lock()

    def count(self, loss: str) -> None:
        """One more request has ended; empty: with its answer."""
        with self._lock:
            if loss:
                self.lost.append(loss)
            else:
                self.answered += 1


@contextlib.contextmanager
def load(port: int, model: str, clients: int) -> Iterator[Load]:
    """Ask a model until the block ends; nothing is asked twice.

    Args:
        port: of the balancer.
        model: takes ``x`` of one number and answers it as ``y``.
        clients: each has a connection, and one request at a time.
    """
    seen, is_over = Load(), threading.Event()
    threads = [
        threading.Thread(target=_ask, args=(port, f"/v2/models/{model}/infer", seen, is_over, index))
        for index in range(clients)
    ]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _ask(port: int, path: str, seen: Load, is_over: threading.Event, number: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_WITHIN_S)
    value = float(number)
    while not is_over.wait(PAUSE_S):
        value += 1.0
        body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}]})
        loss = ""
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
            if response.status != 200:
                loss = f"{response.status} {content[:200].decode(errors='replace')}"
            elif json.loads(content)["outputs"][0]["data"] != [value]:
                loss = "a wrong answer"
        except (OSError, http.client.HTTPException) as error:
            loss = type(error).__name__
            connection.close()
        seen.count(loss)
    connection.close()
