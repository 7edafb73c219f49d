"""Models with custom metrics, and with what they are told of requests."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headwater import BadInput, Embedding, Model, Request, Tensor

Floats = npt.NDArray[np.float32]
logger = logging.getLogger(__name__)


class Counting(Model):
    """Returns its rows, and counts them by their sign."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)

    def load(self, device: str) -> None:
        """Declare the metrics."""
        self.rows = self.metrics.counter("rows", "Rows computed.", labels=["sign"])
        self.last = self.metrics.gauge("last", "The last value.")
        self.values = self.metrics.histogram("values", "All values.", buckets=[0, 10])

    def __call__(self, x: Floats) -> dict[str, Any]:
        """Count, then answer."""
        for value in x[:, 0].tolist():
            self.rows.inc(sign="minus" if value < 0 else "plus")
            self.values.observe(value)
            self.last.set(value)
        return {"y": x}


class BadName(Counting):
    """Declares a metric with a name that Prometheus doesn't take."""

    def load(self, device: str) -> None:
        """Declare it."""
        self.metrics.counter("rows-done", "Rows computed.")


class Told(Model):
    """Returns what it is told of each row's request, and the number of rows of the call; logs a line for each call."""

    inputs = (Tensor("text", "BYTES", [1]),)
    outputs = (Tensor("told", "BYTES", [1]), Tensor("embedding", "FP32", [2]))
    takes_requests = True
    embedding = Embedding(input="text", output="embedding")

    def __init__(self, takes_s: float = 0.0) -> None:
        self._takes_s = takes_s

    def __call__(self, text: Any, requests: list[Request]) -> dict[str, Any]:
        """Describe, after a while in which others come to wait."""
        time.sleep(self._takes_s)
        logger.warning("computed %d rows for %s", len(text), sorted({request.id for request in requests}))
        told = [[json.dumps({**msgspec.to_builtins(request), "rows": len(text)}).encode()] for request in requests]
        return {"told": np.array(told, object), "embedding": np.zeros((len(text), 2), np.float32)}


class Billing(Model):
    """Sets the header ``x-cost`` to the number of its request's rows in the call, and another if the text says its
    name; the text ``bad`` is an error, and a number an error with this status."""

    inputs = (Tensor("text", "BYTES", [1]),)
    outputs = (Tensor("empty", "INT64", [-1]), Tensor("embedding", "FP32", [2]))
    takes_requests = True
    embedding = Embedding(input="text", output="embedding")

    def __call__(self, text: Any, requests: list[Request]) -> dict[str, Any]:
        """Bill."""
        for (said,), request in zip(text, requests, strict=True):
            if said == b"bad":
                raise BadInput("text: expected a good one")
            if said.isdigit():
                raise BadInput("text: expected no number", status=int(said))
            request.response_headers["x-cost"] = str(requests.count(request))
            if said.startswith(b"x-"):
                request.response_headers[said.decode()] = "a\r\nb" if said == b"x-team" else "1"
        return {"empty": np.zeros((len(text), 0), np.int64), "embedding": np.zeros((len(text), 2), np.float32)}


class ToldAgain(Model):
    """A step after `Told`: what it is told itself."""

    inputs = (Tensor("told", "BYTES", [1]),)
    outputs = (Tensor("again", "BYTES", [1]),)
    takes_requests = True

    def __call__(self, told: Any, requests: list[Request]) -> dict[str, Any]:
        """Describe."""
        return {"again": np.array([[msgspec.json.encode(request)] for request in requests], object)}


class ToldOften(Model):
    """Streams what it is told."""

    inputs = (Tensor("text", "BYTES", [1]),)
    outputs = (Tensor("told", "BYTES", [1]),)
    takes_requests = True

    def __call__(self, text: Any, requests: list[Request]) -> Iterator[dict[str, Any]]:
        """Describe, twice."""
        for _ in range(2):
            logger.warning("yields for %s", requests[0].id)
            yield {"told": np.array([[msgspec.json.encode(requests[0])]], object)}
