"""One run: which requests are sent to which server, by how many connections or at which rate, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple
from urllib.parse import quote, urlsplit

from headwater_server.cli.bench.bodies import Body
from headwater_server.cli.bench.limits import Limits

__all__ = ["PATHS", "Job", "Load", "Target"]

PATHS: Final = {
    "infer": "/v2/models/{model}/infer",
    "stream": "/v2/models/{model}/generate_stream",
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
}
"""The routes by mode. ``infer`` has whole answers; the others' are streams of events."""


@dataclass(frozen=True)
class Target:
    """Requests to one route of one server. Plain data, so that it can go to another process.

    Args:
        url: the server's base, such as ``http://127.0.0.1:8000``; a path in it comes before the route's.
        model: the model's name.
        bodies: sent in turn.
        mode: one of `PATHS`.
        key: an API key; empty: none.
        timeout_s: how long one request may take, counted like its latency.
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
        """Whole HTTP requests, one for each body."""
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
    """The amount of load; one of the fields is 0."""

    connections: int = 0
    """For a closed loop."""
    rate_per_s: float = 0.0
    """For an open loop."""

    def __str__(self) -> str:
        if self.connections:
            return f"{self.connections} connection{'s' if self.connections != 1 else ''}"
        return f"{self.rate_per_s:g}/s"


@dataclass(frozen=True)
class Job:
    """One run of one process."""

    target: Target
    load: Load
    seconds: float
    """How long to send requests that count."""
    warmup_s: float = 1.0
    """How long to send requests before those."""
    arrivals: str = "poisson"
    """For an open loop, see `headwater_server.cli.bench.open_loop.arrival_times`."""
    max_connections: int = 1024
    """For an open loop: when all are busy, a request waits for one; its latency still counts from its due time."""
    seed: int = 0
    limits: Limits = field(default_factory=Limits)
    begin_s: float = 0.0
    """`time.perf_counter` at which the warm-up begins, for several processes to begin together; 0: at once."""

    def parts(self, count: int, begin_s: float) -> list[Job]:
        """The same load as jobs for this many processes, or for fewer if there aren't enough connections."""
        connections, rate = self.load
        most = connections or self.max_connections
        count = min(count, most)
        shares = [most // count + (place < most % count) for place in range(count)]
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
