"""The connections of a gateway worker: how many there may be, and which has to go when there are too many."""

from __future__ import annotations

import logging
import resource
from typing import Final, Protocol

__all__ = ["Closable", "Connections", "allow_open_files"]

logger = logging.getLogger("headwater")

OTHER_FILES: Final = 512
"""Open files of a worker besides its clients' connections: of replicas, the event loop, logs, limits of keys."""


class Closable(Protocol):
    """A connection."""

    def abort(self) -> None:
        """End it at once."""
        ...


class Connections:
    """Knows the connections, and makes room for a new one by ending the one that has been idle longest.

    So nobody can keep others out by holding connections on which he asks nothing.

    Args:
        limit: how many there may be.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._busy: set[Closable] = set()
        self._idle: dict[Closable, None] = {}
        """Without a request under way, the longest so first."""

    def add(self, connection: Closable) -> bool:
        """A connection was made. False: there is no room, since a request is under way on each of the others."""
        if len(self._busy) + len(self._idle) >= self._limit:
            oldest = next(iter(self._idle), None)
            if oldest is None:
                return False
            del self._idle[oldest]
            oldest.abort()
        self._idle[connection] = None
        return True

    def remove(self, connection: Closable) -> None:
        """A connection has ended. One that had to go, or found no room, is forgotten already."""
        self._idle.pop(connection, None)
        self._busy.discard(connection)

    def begin(self, connection: Closable) -> None:
        """A request has come, its head complete."""
        if connection in self._idle:
            del self._idle[connection]
            self._busy.add(connection)

    def end(self, connection: Closable) -> None:
        """All that was asked is answered."""
        if connection in self._busy:
            self._busy.discard(connection)
            self._idle[connection] = None


def allow_open_files(connections: int) -> int:
    """Have this process open as many files as so many connections take. Returns how many connections it can have."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if most != resource.RLIM_INFINITY and wanted > most:
        possible = max(1, most - OTHER_FILES)
        logger.warning(
            "server.max_connections: a gateway worker may open %d files here, so it takes at most %d connections; "
            "raise the hard limit (ulimit -Hn, LimitNOFILE=, docker run --ulimit nofile=...)", most, possible,
        )  # fmt: skip
        connections, wanted = possible, most
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    return connections
