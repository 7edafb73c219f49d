"""The connections of a gateway worker: how many there may be, and which has to go when there are too many.

A client's connection: uvicorn's own, with bounds on what the application doesn't see.

These are the size of a request's head and the time it may take, since the application sees a request only once its head
is complete; the time that what is left of a body may take after the answer; an answer that the client doesn't read; and
how many connections there are.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import resource
import sys
import termios
from typing import Any, Final, Protocol

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from app.dispatch.deadlines import TIMER_RESOLUTION_S
from app.errors import BadRequest, BodyTooSlow, HeadersTooLarge, HeadwaterError, Unavailable
from app.gateway.http.exchange import Exchange
from app.gateway.http.replies import error_reply
from app.telemetry.recorder import UNMATCHED, recorder

__all__ = ["MAX_HEADER_BYTES", "BoundedConnection", "Closable", "Connections", "allow_open_files"]


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


MAX_HEADER_BYTES: Final = 32 * 1024
"""Of a request's headers and its path together."""


class BoundedConnection(HttpToolsProtocol):
    """One connection.

    Args:
        head_timeout_s: how long a request's line and headers may take from their first byte, what of its body comes
            after its answer, and a client that reads nothing of an answer.
        others: of this worker.
        arguments: uvicorn's.
    """

    # With these in its dict, too, it had more names than objects of a class share: 1 KB more for each connection.
    __slots__ = (
        "_head_bytes", "_head_timeout_s", "_head_timer", "_idle_since_s", "_idle_timer", "_in_head", "_others",
        "_rest_timer", "_running", "_unread_timer",
    )  # fmt: skip

    def __init__(self, *, head_timeout_s: float, others: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._head_timeout_s = head_timeout_s
        self._others = others
        self._rest_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since_s: float | None = None
        self._running: Exchange | None = None
        """Of the request that the application has; others may wait behind it."""
        self._head_bytes = 0
        self._in_head = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give it the time of an idle connection for its first byte; requests find ``abort`` in their state."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, "abort": transport.abort}
        self._note_idle()
        if not self._others.add(self):
            self._refuse(Unavailable("the server has as many connections as it takes (server.max_connections)"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the head that was under way."""
        self._end_head()
        self._end_rest()
        for timer in (self._unread_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        self._others.remove(self)
        super().connection_lost(exc)
        if self._running is not None:
            self._running.lose()
            self._running.end()
            self._running = None

    def data_received(self, data: bytes) -> None:
        """Parse; then see whether a head is still incomplete."""
        was_in_head = self._in_head
        self._idle_since_s = None
        super().data_received(data)
        if not self._in_head:
            if self.cycle is None or self.cycle.response_complete:  # these bytes were no request's
                self._note_idle()
            return
        if was_in_head:
            self._head_bytes += len(data)
        if self._head_bytes > MAX_HEADER_BYTES:
            self._refuse(HeadersTooLarge(f"headers: expected at most {MAX_HEADER_BYTES} bytes, got more"))
        elif self._head_timer is None:
            error = BodyTooSlow(f"headers: expected all of them within {self._head_timeout_s:g} s")
            self._head_timer = self.loop.call_later(self._head_timeout_s, self._refuse, error)

    def on_message_begin(self) -> None:
        """The parser is at a request's first byte."""
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The parser is behind a request's headers."""
        self._end_head()
        self._others.begin(self)
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Start the application on a request, which finds an `Exchange` in its scope."""
        exchange = self._running = Exchange(cycle)
        task = exchange.task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_body(self, body: bytes) -> None:
        """The parser is at a piece of a request's body."""
        if self._running is None or not self._running.takes_piece(body):
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The parser is behind a request's body."""
        self._end_rest()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer is complete, if perhaps not its request's body."""
        self.server_state.total_requests += 1
        if self._running is not None:
            self._running.end()
            self._running = None
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
            else:
                self._note_idle()
        if self._unread_timer is None and self.transport.get_write_buffer_size():
            self._watch_reading(None)
        if self.cycle.response_complete:  # there is no other request behind it
            self._others.end(self)
            if self.cycle.more_body and not self.transport.is_closing():
                # Not at once: the client would lose the answer if it is still sending.
                self._end_rest()
                self._rest_timer = self.loop.call_later(self._head_timeout_s, self.abort)

    def abort(self) -> None:
        """See `app.gateway.http.connection.Closable`."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(BadRequest(f"request: {msg}"))

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_rest(self) -> None:
        if self._rest_timer is not None:
            self._rest_timer.cancel()
            self._rest_timer = None

    def _watch_reading(self, unread_before: int | None) -> None:
        """End a connection whose client takes nothing of what is ready for it: a closed one, too, would wait for it."""
        self._unread_timer = None
        waiting = self.transport.get_write_buffer_size()
        unread = waiting + _unacknowledged(self.transport)
        if waiting and unread == unread_before:
            self.abort()
        elif waiting:
            self._unread_timer = self.loop.call_later(self._head_timeout_s, self._watch_reading, unread)

    # uvicorn makes a timer after each answer and cancels it with the next request. Here one goes on as long as there
    # are answers, and looks when it is due how long the connection has been idle.

    def _note_idle(self) -> None:
        self._idle_since_s = self.loop.time()
        if self._idle_timer is None and not self.transport.is_closing():
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._end_if_idle)

    def _end_if_idle(self) -> None:
        self._idle_timer = None
        if self._idle_since_s is None:  # a request is under way, and its answer makes the next timer
            return
        left_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        if left_s < TIMER_RESOLUTION_S:
            self.timeout_keep_alive_handler()
        else:
            self._idle_timer = self.loop.call_later(left_s, self._end_if_idle)

    def _refuse(self, error: HeadwaterError) -> None:
        """Answer without the application, and close the connection."""
        self._end_head()
        if self.transport.is_closing():
            return
        recorder().http_requests(UNMATCHED, error.status).add()
        body, headers = error_reply(error, "").content()
        lines = [b"HTTP/1.1 %d" % error.status, *(b"%s: %s" % pair for pair in headers)]
        lines += [b"content-length: %d" % len(body), b"connection: close", b"", body]
        self.transport.write(b"\r\n".join(lines))
        self.transport.close()


def _unacknowledged(transport: asyncio.Transport) -> int:
    """How many bytes the kernel holds that the client hasn't taken: to see that it reads, if slowly, where the kernel
    takes more from us in large steps only."""
    try:
        found = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, b"\0" * 4)
    except OSError:
        return 0
    return int.from_bytes(found, sys.byteorder)
