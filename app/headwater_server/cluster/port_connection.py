"""A connection to a replica's port: its requests are checked, and then passed to the replica."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import re
from collections.abc import Callable, Collection
from typing import Any, Final, Protocol, cast

from headwater.wire.shared_memory import ANSWER_HEAD_BYTES, ELSEWHERE, left_bytes
from headwater_server.cluster.request_head import MOST_HEAD_BYTES, Refusal, RequestHead
from headwater_server.control.routing import ReplicaRoute
from headwater_server.deadline_timer import DeadlineTimer
from headwater_server.errors import ReplicaUnreachable
from headwater_server.transport.address import TOKEN_HEADER, dial
from headwater_server.transport.segments import LARGEST_REMOTE_BYTES, SegmentFiles

__all__ = ["HEAD_TIMEOUT_S", "READ_BYTES", "PortConnection", "PortState"]

logger = logging.getLogger("headwater.port")

ANSWER_HEADER: Final = "Headwater-Answer"
"""Header with the number of bytes behind Triton's answer that the replica left in the segment."""
HEAD_TIMEOUT_S: Final = 5.0
"""Seconds within which a request's head must arrive, and a connection's first byte."""
STALLED_S: Final = 10.0
"""Seconds that a client may read nothing of an answer, or send nothing of an unfinished body."""
LINGER_S: Final = 1.0
"""Seconds that a refused client's bytes are still read, so that the client gets the refusal."""
READ_BYTES: Final = 256 * 1024
MOST_JSON_BYTES: Final = 16 * 1024 * 1024
"""Limit of the JSON of a call with a segment: the JSON is held until it is complete, to put in the segment's path."""
_END: Final = b"\r\n\r\n"
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *([0-9]+)\r\n", re.IGNORECASE)
_ENDS: Final = re.compile(rb"\r\nconnection: *close\r\n", re.IGNORECASE)


class PortState(Protocol):
    """State that a port's connections share."""

    name: str
    route: ReplicaRoute
    relayed: Collection[tuple[str, str]]
    """Methods and paths of requests that are relayed as they are; empty: only calls of Triton come."""
    files: SegmentFiles
    buffer: bytearray
    """Receive buffer of `READ_BYTES`. Bytes read into it are consumed before the next connection is read."""
    connections: set[PortConnection]

    def is_peer(self, transport: asyncio.BaseTransport) -> bool:
        """Whether the other side belongs to the cluster."""
        ...

    def control(self, transport: asyncio.Transport, first: bytes) -> None:
        """Take over a connection to ``/control``; ``first`` has the bytes that came after the request's head."""
        ...

    def spawn(self, work: Any) -> None:
        """Run a coroutine until it ends or the port closes."""
        ...


class _ReplicaConnection(asyncio.Protocol):
    """The connection to the replica that is paired with a client's connection."""

    def __init__(self, owner: PortConnection) -> None:
        self._owner = owner
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._owner.take_answer(data)

    def pause_writing(self) -> None:
        self._owner.hold(is_held=True)

    def resume_writing(self) -> None:
        self._owner.hold(is_held=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.lose_replica(self)


class _Patience:
    """Ends a connection whose client doesn't read."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None
        self._left = 0

    def begin(self) -> None:
        """Start the timer: the client reads more slowly than the port writes."""
        self._left = self._transport.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(STALLED_S, self._look)

    def end(self) -> None:
        """Stop the timer: the client has read most of the data, or the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if self._transport.get_write_buffer_size() >= self._left:
            self._transport.abort()
        else:
            self.begin()


class _PortSegment:
    """A segment of this machine, for the inputs of a call, which arrive bit by bit, and for its outputs.

    Args:
        files: the port's segments.
        inputs_bytes: the size of the inputs, which begin the segment.
        size_bytes: the segment's size.

    Raises:
        Refusal: the sizes are wrong, or this machine has no memory for the segment.
    """

    def __init__(self, files: SegmentFiles, inputs_bytes: int, size_bytes: int) -> None:
        if inputs_bytes + ANSWER_HEAD_BYTES > size_bytes:
            raise Refusal("400 Bad Request", "Headwater-Segment: expected space for an answer behind the inputs")
        if size_bytes > LARGEST_REMOTE_BYTES:
            raise Refusal("413 Content Too Large", f"expected a segment of at most {LARGEST_REMOTE_BYTES} bytes")
        try:
            self._file, self._memory = files.take(size_bytes)
        except OSError as error:
            message = f"the machine has no memory for a segment: {error.strerror}"
            raise Refusal("503 Service Unavailable", message, unsent=True) from error
        self._file.is_spoiled = True  # until it has answered, the replica may write at any time
        self._memory[inputs_bytes : inputs_bytes + 4] = bytes(4)  # no outputs yet
        self._inputs_bytes = inputs_bytes
        self._filled = 0
        """Bytes of the inputs received so far."""

    @property
    def path(self) -> bytes:
        """The segment's path, for the replica."""
        return self._file.path.encode()

    @property
    def missing(self) -> memoryview:
        """The memory for the inputs' bytes that have not arrived; empty once all have arrived."""
        return self._memory[self._filled : self._inputs_bytes]

    def fill(self, data: bytes) -> bytes:
        """Copy in bytes of the inputs. Returns the bytes behind the inputs."""
        count = min(len(data), len(self.missing))
        self.missing[:count] = data[:count]
        self.note_filled(count)
        return data[count:]

    def note_filled(self, count: int) -> None:
        """Note that the first ``count`` bytes of `missing` have been written."""
        self._filled += count

    def settle(self) -> None:
        """Note that the replica is done with the segment, so that its memory may be used again."""
        self._file.is_spoiled = False

    def outputs(self) -> memoryview:
        """The bytes that the replica left behind the inputs."""
        return self._memory[self._inputs_bytes :][: left_bytes(self._memory, self._inputs_bytes)]


class _CallAnswer:
    """The answer to a call, as it arrives from the replica.

    Args:
        segment: the call's segment, if it has one.
    """

    def __init__(self, segment: _PortSegment | None) -> None:
        self.is_last = False
        """Whether the replica closes its connection after the answer."""
        self.outputs = memoryview(b"")
        """Bytes of the segment that follow the answer."""
        self._segment = segment
        self._head: bytearray | None = bytearray()
        """The answer's head, while it is incomplete; otherwise None."""
        self._body_left = 0
        """Bytes of the answer's body that have not arrived."""

    @property
    def has_begun(self) -> bool:
        """Whether the client has got the head."""
        return self._head is None

    @property
    def is_complete(self) -> bool:
        """Whether the whole answer has arrived."""
        return self._head is None and not self._body_left

    def take(self, data: bytes) -> bytes:
        """Take bytes from the replica. Returns the bytes for the client.

        Raises:
            ValueError: the data don't belong to a valid answer.
        """
        head = b""
        if self._head is not None:
            self._head += data
            end = self._head.find(_END) + len(_END)
            if end < len(_END):
                if len(self._head) > MOST_HEAD_BYTES:
                    raise ValueError(f"expected an answer's head of at most {MOST_HEAD_BYTES} bytes")
                return b""
            head, data = bytes(self._head[:end]), bytes(self._head[end:])
            self._head = None
            head = self._begin(head)
        self._body_left -= len(data)
        if self._body_left < 0:
            raise ValueError("expected an answer of its Content-Length, got more")
        return head + data

    def _begin(self, head: bytes) -> bytes:
        """Parse the head of the replica's answer. Returns the head for the client."""
        length = _LENGTH.search(head)
        if length is None:
            raise ValueError("expected an answer with a Content-Length")
        self._body_left = int(length[1])
        self.is_last = _ENDS.search(head) is not None
        if self._segment is None or not head.startswith(b"HTTP/1.1 200 "):
            return head
        self._segment.settle()
        self.outputs = self._segment.outputs()
        count = len(self.outputs)
        if not count:
            return head
        lengths = b"\r\nContent-Length: %d\r\n%s: %d\r\n" % (self._body_left + count, ANSWER_HEADER.encode(), count)
        return head[: length.start()] + lengths + head[length.end() :]


class PortConnection(asyncio.BufferedProtocol):
    """A client's connection, with at most one request at a time, or with relayed bytes of gRPC."""

    def __init__(self, port: PortState) -> None:
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._patience: _Patience
        self._replica: _ReplicaConnection | None = None
        self._read: Callable[[bytes], None] = self._read_head
        """Handles the bytes that arrive."""
        self._gathered = bytearray()
        self._waiting: list[bytes] = []
        """Data for the replica while the connection to it is being opened."""
        self._body_left = 0
        """Bytes of the request's body that have not been sent on; in a relay of the whole request."""
        self._segment: _PortSegment | None = None
        self._json_length = 0
        self._answer: _CallAnswer | None = None
        """The answer to a call that the replica has, or will get; None: there is no call."""
        self._is_placing = False
        """Whether the inputs of ``POST /segment`` are arriving."""
        self._is_relay = False
        """Whether the replica's answers are passed on unread."""
        self._address = port.route.http_address
        self._deadline_s = math.inf
        self._timer = DeadlineTimer(lambda: self._deadline_s, self.abort)

    # From the client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._patience = _Patience(self._transport)
        self._port.connections.add(self)
        tls = transport.get_extra_info("ssl_object")
        if not self._port.is_peer(transport):
            self._refuse(Refusal("403 Forbidden", "certificate: expected the cluster's certificate, got another name"))
        elif tls is not None and tls.selected_alpn_protocol() == "h2":
            self._relay_grpc(b"")
        else:
            self._expect_within(HEAD_TIMEOUT_S)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._segment is not None and (missing := self._segment.missing):
            return missing
        return memoryview(self._port.buffer)

    def buffer_updated(self, nbytes: int) -> None:
        if self._segment is not None and self._segment.missing:
            self._segment.note_filled(nbytes)
            self._expect_within(STALLED_S)
            self._note_filled()
            return
        try:
            self._read(bytes(memoryview(self._port.buffer)[:nbytes]))
        except Refusal as refusal:
            self._refuse(refusal)

    def eof_received(self) -> bool:
        return False  # closes the connection

    def connection_lost(self, exc: Exception | None) -> None:
        self._port.connections.discard(self)
        self._patience.end()
        self._timer.cancel()
        self._leave_replica()

    def abort(self) -> None:
        """End the connection at once."""
        self._transport.abort()

    def _read_head(self, data: bytes) -> None:
        is_first = not self._gathered
        self._gathered += data
        end = self._gathered.find(_END)
        if (end if end >= 0 else len(self._gathered)) > MOST_HEAD_BYTES:
            raise Refusal("431 Request Header Fields Too Large", f"head: expected at most {MOST_HEAD_BYTES} bytes")
        if end < 0:
            if is_first:
                self._expect_within(HEAD_TIMEOUT_S)
            return
        raw = bytes(self._gathered)
        self._gathered = bytearray()
        # gRPC without TLS. It is taken only as the first request: later bytes would go to the replica's HTTP
        # connection.
        if raw.startswith(b"PRI * HTTP/2.0\r\n") and self._replica is None and not self._waiting:
            self._relay_grpc(raw)
            return
        head, rest = RequestHead(raw[:end]), raw[end + len(_END) :]
        token = head.header(TOKEN_HEADER).encode("latin-1")
        if not hmac.compare_digest(token, self._port.route.token.encode()):
            # A gateway with another token is looking for a replica that had this address earlier.
            raise Refusal("401 Unauthorized", f"{TOKEN_HEADER}: expected this replica's token", unsent=True)
        self._expect_within(None)
        if self._segment is not None:  # placed by an earlier request, for a call that has been answered
            self._segment.settle()
            self._segment = None
        if head.path == "/control":
            self._begin_control(head, rest)
        elif head.path == "/segment" and self._port.route.grpc_address:
            self._begin_place(head, rest)
        elif self._port.relayed:
            self._relay_request(head, raw[: end + len(_END)], rest)
        else:
            self._begin_call(head, rest)

    def _begin_control(self, head: RequestHead, rest: bytes) -> None:
        if head.method != "GET":
            raise Refusal("405 Method Not Allowed", "method: expected GET")
        if head.length:
            raise Refusal("400 Bad Request", "content-length: expected no body")
        self._port.connections.discard(self)
        self._timer.cancel()
        self._leave_replica()
        self._port.control(self._transport, rest)

    def _begin_call(self, head: RequestHead, rest: bytes) -> None:
        if head.path != f"/v2/models/{self._port.name}/infer":
            raise Refusal("404 Not Found", "path: expected the path of this replica's model")
        if head.method != "POST":
            raise Refusal("405 Method Not Allowed", "method: expected POST")
        length, json_length = head.length, head.json_length
        inputs_bytes, size_bytes = head.segment or (0, 0)
        if json_length + inputs_bytes > length:
            raise Refusal("400 Bad Request", "content-length: expected at least the sum of the other lengths, got less")
        self._body_left = length - inputs_bytes
        if not head.segment:
            self._send(_call_head(self._port, json_length, length))
            self._read = self._read_body
        else:
            if json_length > MOST_JSON_BYTES:
                raise Refusal("413 Content Too Large", f"expected JSON of at most {MOST_JSON_BYTES} bytes")
            rest = self._fill_segment(_PortSegment(self._port.files, inputs_bytes, size_bytes), rest)
            self._json_length = json_length
            self._read = self._read_json
        self._answer = _CallAnswer(self._segment)
        if rest or not self._body_left:
            self._read(rest)

    def _begin_place(self, head: RequestHead, rest: bytes) -> None:
        """Take a segment for a call that comes over gRPC. It is kept until this connection's next request or end."""
        if head.method != "POST":
            raise Refusal("405 Method Not Allowed", "method: expected POST")
        inputs_bytes, size_bytes = head.segment or (0, 0)
        if not inputs_bytes or inputs_bytes != head.length:
            raise Refusal("400 Bad Request", "Headwater-Segment: expected the body's length and the segment's")
        rest = self._fill_segment(_PortSegment(self._port.files, inputs_bytes, size_bytes), rest)
        self._is_placing = True
        self._read = self._read_body  # accepts no further bytes
        self._note_filled()
        if rest:
            self._read(rest)

    def _fill_segment(self, segment: _PortSegment, rest: bytes) -> bytes:
        """Keep a segment, and copy in the inputs' bytes that have arrived. Returns the bytes behind the inputs."""
        self._segment = segment
        self._expect_within(STALLED_S)
        return segment.fill(rest)

    def _note_filled(self) -> None:
        """Answer with a segment's path, once its inputs have arrived."""
        assert self._segment is not None
        if not self._is_placing or self._segment.missing:
            return
        self._is_placing = False
        path = self._segment.path
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(path), path))
        self._expect_within(None)
        self._read = self._read_head

    def _read_json(self, data: bytes) -> None:
        """Gather the JSON of a call whose segment has all inputs, and send it on with the segment's path in it."""
        self._gathered += data
        self._expect_within(STALLED_S)
        if len(self._gathered) < self._json_length:
            return
        assert self._segment is not None
        text, rest = bytes(self._gathered[: self._json_length]), bytes(self._gathered[self._json_length :])
        self._gathered = bytearray()
        # The last occurrence: a client's parameters may contain this text, and stand before it.
        before, marker, after = text.rpartition(ELSEWHERE.encode())
        if not marker:
            raise Refusal("400 Bad Request", "JSON: expected the place of the segment's path, got none")
        text = before + self._segment.path + after
        self._body_left -= self._json_length
        self._send(_call_head(self._port, len(text), len(text) + self._body_left) + text)
        self._read = self._read_body
        if rest or not self._body_left:
            self._read_body(rest)

    def _read_body(self, data: bytes) -> None:
        self._body_left -= len(data)
        if self._body_left < 0:
            raise Refusal("400 Bad Request", "body: expected as many bytes as Content-Length says, got more")
        self._expect_within(STALLED_S if self._body_left else None)
        if data:
            self._send(data)

    # Relays

    def _relay_grpc(self, first: bytes) -> None:
        """Relay all bytes in both directions from here on. Without a gRPC address the connection is aborted."""
        address = self._port.route.grpc_address
        if not address:
            self._transport.abort()
            return
        self._expect_within(None)
        self._is_relay = True
        self._address = address
        self._read = self._send
        self._send(first)

    def _relay_request(self, head: RequestHead, raw: bytes, rest: bytes) -> None:
        """Relay a request unchanged, and all bytes of its answer."""
        if (head.method, head.path) not in self._port.relayed:
            raise Refusal("404 Not Found", "path: expected a path of vLLM that gateways request")
        self._body_left = len(raw) + head.length
        self._is_relay = True
        self._read = self._read_relayed
        self._read_relayed(raw + rest)

    def _read_relayed(self, data: bytes) -> None:
        """Relay the rest of a request. Bytes behind it are the next request, which is checked in the same
        way."""
        taken, rest = data[: self._body_left], data[self._body_left :]
        self._body_left -= len(taken)
        self._expect_within(STALLED_S if self._body_left else None)
        self._send(taken)
        if not self._body_left:
            self._read = self._read_head
            if rest:
                self._read_head(rest)

    # The replica

    def _send(self, data: bytes) -> None:
        """Send data to the replica, and connect to it first if necessary."""
        if self._replica is not None:
            self._replica.transport.write(data)
            return
        self._waiting.append(data)
        if len(self._waiting) == 1:
            self.hold(is_held=True)
            self._port.spawn(self._dial())

    async def _dial(self) -> None:
        try:
            replica = await dial(self._address, lambda: _ReplicaConnection(self))
            if replica.transport.is_closing():  # the replica has ended meanwhile
                raise ReplicaUnreachable("the replica ended")
        except ReplicaUnreachable as error:
            if not self._is_relay:
                self._refuse(Refusal("502 Bad Gateway", error.message, unsent=True))
            else:
                self._transport.abort()
            return
        waiting, self._waiting = self._waiting, []
        if self._transport.is_closing() or not waiting:  # the client has left, or was refused
            replica.transport.abort()
            return
        self._replica = replica
        replica.transport.writelines(waiting)
        self.hold(is_held=False)

    def hold(self, *, is_held: bool) -> None:
        """Stop reading from the client while the replica doesn't take the data; or resume reading."""
        if self._transport.is_closing():
            return
        if is_held:
            self._expect_within(None)
            self._transport.pause_reading()
        else:
            self._expect_within(STALLED_S if self._body_left > 0 else None)
            self._transport.resume_reading()

    def take_answer(self, data: bytes) -> None:
        """Handle data from the replica."""
        if self._is_relay:
            self._transport.write(data)
            return
        answer = self._answer
        try:
            if answer is None:
                raise ValueError("expected no answer to no request")
            self._transport.write(answer.take(data))
        except ValueError as error:
            logger.warning("%s: a call was cut off: %s", self._port.route.id, error)
            self._transport.abort()
            return
        if not answer.is_complete:
            return
        self._transport.write(answer.outputs)
        self._segment = self._answer = None
        if answer.is_last or self._body_left:  # replied before it had the whole body
            self._transport.close()
        else:
            self._read = self._read_head

    def lose_replica(self, replica: _ReplicaConnection) -> None:
        """Handle the end of the connection to the replica."""
        if replica is not self._replica:  # this side had left it
            return
        self._replica = None
        if self._is_relay:
            self._transport.close()
        elif self._answer is not None:  # whether the replica handled the request is unknown
            self._transport.abort()

    def _leave_replica(self) -> None:
        """Close the connection to the replica, and drop its request."""
        self._answer = None
        self._segment = None  # its memory stays spoiled, unless the replica was done with it
        self._waiting = []
        replica, self._replica = self._replica, None
        if replica is not None:
            replica.transport.close() if self._is_relay else replica.transport.abort()

    # The client

    def pause_writing(self) -> None:
        if self._replica is not None:
            self._replica.transport.pause_reading()
        self._patience.begin()

    def resume_writing(self) -> None:
        self._patience.end()
        if self._replica is not None:
            self._replica.transport.resume_reading()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer with an error, and end the connection once the client has had time to read the answer. If an answer
        has begun, the connection is aborted."""
        has_begun = self._answer is not None and self._answer.has_begun
        self._leave_replica()
        if has_begun:
            self._transport.abort()
            return
        self._read = lambda data: None
        self._transport.write(refusal.encoded())
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self.hold(is_held=False)
        self._expect_within(LINGER_S)

    # Deadlines

    def _expect_within(self, limit_s: float | None) -> None:
        """Abort the connection unless this is called again within the limit. None: no limit."""
        self._deadline_s = math.inf if limit_s is None else self._loop.time() + limit_s
        self._timer.start()


def _call_head(port: PortState, json_length: int, length: int) -> bytes:
    """The head of the request to Triton."""
    return (
        f"POST /v2/models/{port.name}/infer HTTP/1.1\r\nHost: replica\r\n{TOKEN_HEADER}: {port.route.token}\r\n"
        f"Inference-Header-Content-Length: {json_length}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()
