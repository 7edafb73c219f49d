"""A client's connection, which is uvicorn's with bounds on what the application doesn't see, and how many there may be.

The bounds are on the size of a request's head and the time it may take, since the application sees a request only once
its head is complete; on the time that the rest of a body may take after the answer; and on an answer that the client
doesn't read. A client that pipelines is read no further while its requests wait. What is refused without the
application is refused in its turn, after the answers to the requests before it. One connection too many replaces the
one that has been idle longest.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import re
import resource
import sys
import termios
from collections import deque
from typing import Any, Final, Protocol
from urllib.parse import unquote

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from app.dispatch.deadlines import TIMER_RESOLUTION_S
from app.errors import BadRequest, BodyTooSlow, HeadersTooLarge, HeadwaterError, Unavailable
from app.gateway.http.entry import MAX_HEADER_BYTES, RequestRecords
from app.gateway.http.exchange import Exchange
from app.gateway.http.replies import error_reply

__all__ = ["BoundedConnection", "Closable", "Connections", "allow_open_files"]


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


_SLASH: Final = ord("/")

_ESCAPED_SLASH: Final = re.compile("%2f", re.IGNORECASE)

_PIECE_BYTES: Final = 16 * 1024
"""How much is parsed at once: as many requests as fit into this may wait behind the one under way."""


class BoundedConnection(HttpToolsProtocol):
    """One connection.

    Args:
        head_timeout_s: how long a request's line and headers may take from their first byte, what of its body comes
            after its answer, and a client that reads nothing of an answer.
        others: of this worker.
        records: log and count what is refused without the application.
        arguments: uvicorn's.
    """

    # With these in its dict, too, it had more names than objects of a class share: 1 KB more for each connection.
    __slots__ = (
        "_head_bytes", "_head_timeout_s", "_head_timer", "_idle_since_s", "_idle_timer", "_in_head", "_others",
        "_records", "_refusal", "_rest_timer", "_running", "_unparsed", "_unread_timer",
    )  # fmt: skip

    def __init__(
        self, *, head_timeout_s: float, others: Connections, records: RequestRecords, **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self._head_timeout_s = head_timeout_s
        self._others = others
        self._records = records
        self._rest_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._idle_since_s: float | None = None
        self._running: Exchange | None = None
        """Of the request that the application has; others may wait behind it."""
        self._head_bytes = 0
        """Of what is being parsed, since the last byte of a body or the last end of a message."""
        self._in_head = False
        self._unparsed: bytes | memoryview = b""
        """What came behind requests that wait."""
        self._refusal: HeadwaterError | None = None
        """Ends the connection after the answers under way; nothing more is parsed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give it the time of an idle connection for its first byte; requests find ``abort`` in their state."""
        super().connection_made(transport)
        self.flow = _PipelineFlow(transport, self.pipeline)
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
        """Parse it, unless requests wait already."""
        if self._refusal is None:
            self._parse(data if not self._unparsed else bytes(self._unparsed) + data)

    def _parse(self, data: bytes | memoryview) -> None:
        """Parse piece by piece as long as no request waits; then see whether a head is still incomplete."""
        self._unparsed = b""
        if len(data) > _PIECE_BYTES:
            data = memoryview(data)
        while data and not self.pipeline:
            piece = data[:_PIECE_BYTES]
            taken = len(piece)
            self._head_bytes += taken
            would_upgrade = False
            try:
                try:
                    self.parser.feed_data(piece)
                except httptools.HttpParserUpgrade as stop:
                    taken, would_upgrade = stop.args[0], True
                if would_upgrade:
                    self._ignore_upgrade()
            except httptools.HttpParserError as error:
                self._refuse(_unparsable(error))
                return
            data = data[taken:]
            if self._head_bytes > MAX_HEADER_BYTES:
                self._refuse(HeadersTooLarge(f"headers: expected at most {MAX_HEADER_BYTES} bytes, got more"))
                return
        self._unparsed = data
        if self._in_head and self._head_timer is None and not self.pipeline:
            late = BodyTooSlow(f"headers: expected all of them within {self._head_timeout_s:g} s")
            self._head_timer = self.loop.call_later(self._head_timeout_s, self._refuse, late)

    def _ignore_upgrade(self) -> None:
        """Take the request's head as if it asked for no other protocol (RFC 9110, 7.8).

        The parser stops behind such a head and says nothing of its body: another one reads the head without the
        ``Upgrade`` header, and then what follows.
        """
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def on_message_begin(self) -> None:
        """The parser is at a request's first byte."""
        self._in_head = True
        self._head_bytes = 0
        self._idle_since_s = None
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The parser is behind a request's headers."""
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise httptools.HttpParserInvalidMethodError
            return  # they come again, see `_ignore_upgrade`
        self._end_head()
        if self.url[0] != _SLASH and httptools.parse_url(self.url).path is None:
            raise httptools.HttpParserInvalidURLError("a target without a path")
        self._others.begin(self)
        super().on_headers_complete()
        if b"%" in self.url:
            # An escaped slash is a part of a name (RFC 3986, 2.2); decoded, it would pass for a separator.
            kept = _ESCAPED_SLASH.sub("%252F", self.scope["raw_path"].decode("ascii"))
            self.scope["path"] = unquote(kept)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Start the application on a request, which finds an `Exchange` in its scope."""
        exchange = self._running = Exchange(cycle)
        task = exchange.task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_body(self, body: bytes) -> None:
        """The parser is at a piece of a request's body."""
        self._head_bytes = 0
        if self._running is None or not self._running.takes_piece(body):
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The parser is behind a request's body."""
        if self._in_head:  # of one that would upgrade
            return
        self._end_rest()
        self._head_bytes = 0
        # uvicorn says neither where the answer came first.
        self.cycle.more_body = False
        self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        """An answer is complete, if perhaps not its request's body."""
        self.server_state.total_requests += 1
        if self._running is not None:
            self._running.end()
            self._running = None
        if not self.transport.is_closing():
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
            elif self._refusal is not None:
                self._write_refusal(self._refusal)
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
        if not self.pipeline and not self.transport.is_closing():
            if self._unparsed or self._in_head:
                self._parse(self._unparsed)
            self.flow.resume_reading()

    def abort(self) -> None:
        """See `app.gateway.http.connection.Closable`."""
        self.transport.abort()

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
        """Answer what is being parsed without the application, in its turn, and close the connection."""
        self._end_head()
        if self.transport.is_closing():
            return
        self._refusal = error
        self._unparsed = b""
        running = self._running
        in_body = self.cycle is not None and self.cycle.more_body
        if in_body and self.pipeline:
            self.pipeline.popleft()  # the request whose body it is
        elif in_body and (running is None or self.cycle.response_started):
            self.transport.close()  # it has its answer, or a part of one
        elif in_body and running is not None:
            running.lose()
            self._write_refusal(error)
        elif running is None:
            self._write_refusal(error)

    def _write_refusal(self, error: HeadwaterError) -> None:
        """With an id and a line of the access log, as every answer. Nothing else of its request is sure."""
        scope: dict[str, Any] = {
            "type": "http", "method": "-", "path": "-", "query_string": b"", "headers": [], "client": self.client,
            "state": {"error": error},
        }  # fmt: skip
        record = self._records.begin(scope)
        body, headers = error_reply(error, "").content()
        lines = [STATUS_LINE[error.status][:-2], *(b"%s: %s" % pair for pair in (*headers, *record.headers()))]
        lines += [b"content-length: %d" % len(body), b"connection: close", b"", body]
        self.transport.write(b"\r\n".join(lines))
        self.transport.close()
        self._records.end(record, scope, error.status)


class _PipelineFlow(FlowControl):
    """Resumes reading only where no request waits in the pipeline, whoever asks for it."""

    def __init__(self, transport: asyncio.Transport, pipeline: deque[Any]) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        """See `FlowControl`."""
        if not self._pipeline:
            super().resume_reading()


def _unparsable(error: httptools.HttpParserError) -> BadRequest:
    """What the client is told of bytes that the parser, or the one of targets, refuses."""
    if isinstance(error, httptools.HttpParserCallbackError):
        cause = error.__context__
        if isinstance(cause, httptools.HttpParserInvalidMethodError):
            return BadRequest("request: expected another method than CONNECT, since this server is no proxy")
        if isinstance(cause, httptools.HttpParserInvalidURLError):
            return BadRequest("request: expected a target with a path, such as /v2")
        if cause is not None:
            raise cause  # a fault of ours: the event loop logs it and closes the connection
    return BadRequest(f"request: expected HTTP/1.1, but its parser says: {error}")


def _unacknowledged(transport: asyncio.Transport) -> int:
    """How many bytes the kernel holds that the client hasn't taken: to see that it reads, if slowly, where the kernel
    takes more from us in large steps only."""
    try:
        found = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, b"\0" * 4)
    except OSError:
        return 0
    return int.from_bytes(found, sys.byteorder)
