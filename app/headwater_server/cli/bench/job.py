"""Describes a run: the requests and the server, the number of connections or the rate, and the duration."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple
from urllib.parse import quote, urlsplit

from headwater_server.cli.bench.request_bodies import Body
from headwater_server.cli.bench.slo import Limits

__all__ = ["PATHS", "Job", "Load", "RequestSet"]

PATHS: Final = {
    "infer": "/v2/models/{model}/infer",
    "stream": "/v2/models/{model}/generate_stream",
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
}
"""The routes by mode. The answers to ``infer`` are complete; the other routes stream events."""


@dataclass(frozen=True)
class RequestSet:
    """The requests of a run, which go to one route of one server. Plain data, so that it can be sent to another
    process.

    Args:
        url: the server's base, such as ``http://127.0.0.1:8000``; its path, if any, is put before the route's path.
        model: the model's name.
        bodies: the bodies of the requests, sent in turn.
        mode: a key of `PATHS`.
        key: an API key; empty: no key is sent.
        timeout_s: maximum time of a request, counted like its latency.
    """

    url: str
    model: str
    bodies: tuple[Body, ...]
    mode: str = "infer"
    key: str = ""
    timeout_s: float = 30.0

    @property
    def path(self) -> str:
        """The route's path."""
        return PATHS[self.mode].format(model=quote(self.model, safe=""))

    def requests(self) -> list[bytes]:
        """A complete HTTP request for each body, as bytes."""
        server = urlsplit(self.url)
        host = server.netloc.rpartition("@")[2]
        accept = "*/*" if self.mode == "infer" else "text/event-stream"
        shared = f"POST {server.path.rstrip('/')}{self.path} HTTP/1.1\r\nHost: {host}\r\nAccept: {accept}\r\n"
        if self.key:
            shared += f"Authorization: Bearer {self.key}\r\n"
        requests = []
        for body in self.bodies:
            about = "Content-Type: application/json\r\n"
            if body.json_length is not None:
                about = "Content-Type: application/octet-stream\r\n"
                about += f"Inference-Header-Content-Length: {body.json_length}\r\n"
            head = f"{shared}{about}Content-Length: {len(body.content)}\r\n\r\n"
            requests.append(head.encode("latin-1") + body.content)
        return requests


class Load(NamedTuple):
    """The amount of load. Exactly one of the fields is 0."""

    connections: int = 0
    """Number of connections of a closed loop."""
    rate_per_s: float = 0.0
    """Average rate of an open loop."""

    def __str__(self) -> str:
        if self.connections:
            return f"{self.connections} connection{'s' if self.connections != 1 else ''}"
        return f"{self.rate_per_s:g}/s"


@dataclass(frozen=True)
class Job:
    """A run, or the part of a run that a generator process makes."""

    target: RequestSet
    load: Load
    seconds: float
    """Duration of the measurement in seconds; requests sent in it count."""
    warmup_s: float = 1.0
    """Duration of the warm-up in seconds; requests sent in it don't count."""
    arrivals: str = "poisson"
    """The schedule of an open loop; see `headwater_server.cli.bench.open_loop.arrival_times`."""
    max_connections: int = 1024
    """Maximum number of connections of an open loop. When all are busy, a request waits, and its latency still counts
    from its due time."""
    seed: int = 0
    """Seed of the arrivals of an open loop."""
    limits: Limits = field(default_factory=Limits)
    begin_s: float = 0.0
    """Time of `time.perf_counter` at which the warm-up begins, so that several processes begin together; 0: at once."""

    def parts(self, count: int, begin_s: float) -> list[Job]:
        """Split the job into jobs for ``count`` processes, or for fewer if there are fewer connections than processes.
        All begin at ``begin_s``."""
        connections, rate = self.load
        total_connections = connections or self.max_connections
        count = min(count, total_connections)
        shares = [total_connections // count + (place < total_connections % count) for place in range(count)]
        return [
            replace(
                self,
                load=Load(share) if connections else Load(rate_per_s=rate / count),
                max_connections=share,
                seed=self.seed + place,
                begin_s=begin_s,
            )
            for place, share in enumerate(shares)
        ]
