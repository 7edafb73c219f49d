"""The connections of a worker, their limit, and the choice of a connection to end when a new connection needs its
place."""

from __future__ import annotations

import logging
import resource
from typing import Final, Protocol

__all__ = ["Closable", "Connections", "allow_open_files"]

logger = logging.getLogger("headwater")

OTHER_FILES: Final = 512
"""Open files of a worker besides its clients' connections: for replicas, event loop, logs and limits of keys."""
SPARE_PLACES: Final = 32
"""Connections beyond the limit, for health checks. Their files are among `OTHER_FILES`."""


class Closable(Protocol):
    """A connection that can be ended at once."""

    def abort(self) -> None:
        """End the connection at once."""
        ...


class Connections:
    """Tracks connections. If a new connection would exceed the limit, it ends a connection that is not busy.

    A connection is busy from the end of a request's body to the end of its answer. Of the connections that are not
    busy, the connection for which the longest time has passed since it was accepted, answered, or got a part of a
    body is ended, so neither idle connections nor slow bodies block new clients. If all connections are busy, a new
    connection gets a spare place, from which only health checks are answered. If all spare places are taken, the
    oldest connection in them is ended.

    Args:
        limit: maximum number of connections, not counting the spare places.
    """

    def __init__(self, limit: int) -> None:
        self.is_closing = False
        """Whether each connection closes with its next answer, so that its client connects to another server."""
        self._limit = limit
        self._busy: set[Closable] = set()
        self._idle: dict[Closable, None] = {}
        """Connections without a complete request, in the order in which they are ended for new connections."""
        self._spare: dict[Closable, None] = {}
        """Connections in spare places, oldest first."""

    def add(self, connection: Closable) -> None:
        """Add a connection that was just accepted."""
        if self._has_room():
            self._idle[connection] = None
            return
        if len(self._spare) >= SPARE_PLACES:
            oldest = next(iter(self._spare))
            del self._spare[oldest]
            oldest.abort()
        self._spare[connection] = None

    def admit(self, connection: Closable) -> bool:
        """Note that a request's head is complete. Returns whether its connection has a regular place, which it may get
        only now."""
        if connection not in self._spare:
            return True
        if not self._has_room():
            return False
        del self._spare[connection]
        self._idle[connection] = None
        return True

    def read(self, connection: Closable) -> None:
        """Note that data have arrived of a request with a complete head and an incomplete body."""
        if connection in self._idle:
            del self._idle[connection]
            self._idle[connection] = None

    def begin(self, connection: Closable) -> None:
        """Note that a request is complete, with its body."""
        if connection in self._idle:
            del self._idle[connection]
            self._busy.add(connection)

    def end(self, connection: Closable) -> None:
        """Note that all requests of a connection are answered."""
        if connection in self._busy:
            self._busy.discard(connection)
            self._idle[connection] = None

    def remove(self, connection: Closable) -> None:
        """Remove a connection that has ended; no error if it is not tracked."""
        self._busy.discard(connection)
        self._idle.pop(connection, None)
        self._spare.pop(connection, None)

    def _has_room(self) -> bool:
        """Whether there is a place for another connection; ends a connection that is not busy if necessary."""
        if len(self._busy) + len(self._idle) < self._limit:
            return True
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        del self._idle[oldest]
        oldest.abort()
        return True


def allow_open_files(connections: int, ports: int) -> int:
    """Raise this process's limit of open files for this many connections to each of its ports. Returns how many
    connections to a port are possible: fewer, and at least 1, if the hard limit doesn't allow as many, which is also
    logged."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections * ports + OTHER_FILES
    if hard_limit != resource.RLIM_INFINITY and wanted > hard_limit:
        possible = max(1, (hard_limit - OTHER_FILES) // ports)
        logger.warning(
            "server.max_connections: a gateway worker may open %d files here, so it takes at most %d connections to a "
            "port; raise the hard limit (ulimit -Hn, LimitNOFILE=, docker run --ulimit nofile=...)",
            hard_limit, possible,
        )  # fmt: skip
        connections, wanted = possible, hard_limit
    if soft_limit != resource.RLIM_INFINITY and soft_limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard_limit))
    return connections
