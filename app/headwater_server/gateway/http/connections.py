"""The number of connections of a worker: which connection makes room for a new one."""

from __future__ import annotations

import logging
import resource
from typing import Final, Protocol

__all__ = ["Closable", "Connections", "allow_open_files"]

logger = logging.getLogger("headwater")

OTHER_FILES: Final = 512
"""Open files of a worker besides its clients' connections: replicas, event loop, logs, limits of keys."""
SPARE_PLACES: Final = 32
"""Connections beyond the limit, for health checks. Their files are among `OTHER_FILES`."""


class Closable(Protocol):
    """A connection."""

    def abort(self) -> None:
        """End it at once."""
        ...


class Connections:
    """Tracks connections, and ends one that is not busy where a new one would exceed the limit.

    A connection is busy from the end of a request's body to the end of its answer. Of the others, the one whose last
    answer or last complete head is oldest makes room; so neither idle connections nor slow bodies keep others out.
    Where all are busy a new connection gets one of a few spare places, from which only health checks are answered.

    Args:
        limit: how many there may be, without those in spare places.
    """

    def __init__(self, limit: int) -> None:
        self.is_closing = False
        """Whether each ends with its next answer, so that its client connects to another server."""
        self._limit = limit
        self._busy: set[Closable] = set()
        self._idle: dict[Closable, None] = {}
        """Connections that have no complete request, in the order in which they make room."""
        self._spare: dict[Closable, None] = {}
        """Connections in spare places, oldest first."""

    def add(self, connection: Closable) -> None:
        """Add a connection that was accepted just now."""
        if self._has_room():
            self._idle[connection] = None
            return
        if len(self._spare) >= SPARE_PLACES:
            oldest = next(iter(self._spare))
            del self._spare[oldest]
            oldest.abort()
        self._spare[connection] = None

    def admit(self, connection: Closable) -> bool:
        """A request's head is complete. Returns whether its connection has a place of its own, maybe since now."""
        if connection not in self._spare:
            return True
        if not self._has_room():
            return False
        del self._spare[connection]
        self._idle[connection] = None
        return True

    def read(self, connection: Closable) -> None:
        """A request's head is complete, and its body is not."""
        if connection in self._idle:
            del self._idle[connection]
            self._idle[connection] = None

    def begin(self, connection: Closable) -> None:
        """A request is complete, with its body."""
        if connection in self._idle:
            del self._idle[connection]
            self._busy.add(connection)

    def end(self, connection: Closable) -> None:
        """All requests of a connection are answered."""
        if connection in self._busy:
            self._busy.discard(connection)
            self._idle[connection] = None

    def remove(self, connection: Closable) -> None:
        """Remove a connection that has ended; no error if it is not tracked."""
        self._busy.discard(connection)
        self._idle.pop(connection, None)
        self._spare.pop(connection, None)

    def _has_room(self) -> bool:
        """Whether another connection has a place; ends one that is not busy if need be."""
        if len(self._busy) + len(self._idle) < self._limit:
            return True
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        del self._idle[oldest]
        oldest.abort()
        return True


def allow_open_files(connections: int) -> int:
    """Raise this process's limit of open files for that many connections. Returns how many it can have."""
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
