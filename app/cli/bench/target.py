"""The requests sent to a server, encoded before the load begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlsplit

from app.errors import CommandError

__all__ = ["KINDS", "Body", "Target"]

KINDS: Final = ("infer", "generate", "chat", "completions")
"""Kinds of answers: a whole one, or the events of ``generate_stream`` or of one of OpenAI's two APIs."""


@dataclass(frozen=True)
class Body:
    """One request's body."""

    content: bytes
    json_length: int | None = None
    """The number of bytes that are JSON; None: all."""


@dataclass(frozen=True)
class Target:
    """Requests to one route of one server, all of the same kind. Plain data, so that it can go to another process.

    Args:
        url: the server's base, such as ``http://127.0.0.1:8000``; a path in it comes before the route's.
        path: the route's path.
        bodies: sent in turn.
        kind: one of `KINDS`.
        key: an API key; empty: none.
        timeout_s: how long one request may take, counted like its latency.
    """

    url: str
    path: str
    bodies: tuple[Body, ...]
    kind: str = "infer"
    key: str = ""
    timeout_s: float = 30.0

    @classmethod
    def infer(
        cls, url: str, model: str, bodies: Sequence[Body | bytes], *, key: str = "", timeout_s: float = 30.0
    ) -> Target:
        """Unary requests of the Open Inference Protocol."""
        plain = tuple(body if isinstance(body, Body) else Body(body) for body in bodies)
        return cls(url, f"/v2/models/{quote(model, safe='')}/infer", plain, "infer", key, timeout_s)

    @property
    def is_stream(self) -> bool:
        """Whether answers are streams of events."""
        return self.kind != "infer"

    @property
    def host(self) -> str:
        """The host to connect to."""
        return _split(self.url)[1]

    @property
    def port(self) -> int:
        """The port to connect to."""
        return _split(self.url)[2]

    @property
    def is_tls(self) -> bool:
        """Whether the server speaks HTTPS."""
        return _split(self.url)[0] == "https"

    def requests(self) -> list[bytes]:
        """Whole HTTP requests, one for each body."""
        _, host, port, prefix = _split(self.url)
        name = f"[{host}]" if ":" in host else host
        accept = "text/event-stream" if self.is_stream else "*/*"
        shared = f"POST {prefix}{self.path} HTTP/1.1\r\nHost: {name}:{port}\r\nAccept: {accept}\r\n"
        if self.key:
            shared += f"Authorization: Bearer {self.key}\r\n"
        raw = []
        for body in self.bodies:
            if body.json_length is None:
                about = "Content-Type: application/json\r\n"
            else:
                about = (
                    f"Content-Type: application/octet-stream\r\nInference-Header-Content-Length: {body.json_length}\r\n"
                )
            raw.append(f"{shared}{about}Content-Length: {len(body.content)}\r\n\r\n".encode("latin-1") + body.content)
        return raw


def _split(url: str) -> tuple[str, str, int, str]:
    """Scheme, host, port and path of a server's base.

    Raises:
        CommandError: the URL isn't an HTTP or HTTPS one with a host.
    """
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        scheme, host, port = "", None, None
    if scheme not in ("http", "https") or not host:
        raise CommandError(f"URL: expected a server's address such as http://127.0.0.1:8000, got {url!r}")
    return scheme, host, port or (443 if scheme == "https" else 80), parts.path.rstrip("/")
