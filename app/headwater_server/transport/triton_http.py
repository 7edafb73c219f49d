"""Unary calls to a replica: Triton's HTTP, with binary tensors.

A call costs the gateway a quarter of the CPU time of a gRPC call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import msgspec

from headwater.wire.triton_words import SHARED_MEMORY_FULL, is_ending, is_process_lost, is_shared_memory_full
from headwater_server.codecs.tensors import RawTensor
from headwater_server.errors import (
    RETRY_AFTER_LOST_S,
    CallableFailed,
    HeadwaterError,
    ReplicaLost,
    ReplicaUnreachable,
    SharedMemoryFull,
)
from headwater_server.transport.address import TOKEN_HEADER, UNSENT_HEADER, ClientTls, dial
from headwater_server.transport.http_connection import HttpConnection
from headwater_server.transport.segments import KEPT_FOR_S, RemoteSegment

__all__ = ["TritonClient", "refusal"]


class _BinarySize(msgspec.Struct):
    binary_data_size: int


class _OutputHeader(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: _BinarySize


class _TritonReply(msgspec.Struct):
    outputs: list[_OutputHeader] = []
    error: str = ""


_reply_decoder = msgspec.json.Decoder(_TritonReply)


class TritonClient:
    """Calls a model of a replica's Triton.

    Args:
        model: the model's name.
        address: address of Triton's HTTP, or of the port in front of it; see `headwater_server.transport.address`.
        token: Triton's access token.
        tls: the cluster's TLS.
    """

    def __init__(self, model: str, address: str, token: str, tls: ClientTls | None = None) -> None:
        self._address = address
        self._tls = tls
        self._idle: list[_TritonConnection] = []
        self._all: set[_TritonConnection] = set()
        self._closed = False
        self._head = (
            f"POST /v2/models/{model}/infer HTTP/1.1\r\n"
            "Host: replica\r\n"
            f"{TOKEN_HEADER}: {token}\r\n"
            "Inference-Header-Content-Length: %d\r\n"
            "Content-Length: %d\r\n%b\r\n"
        ).encode()
        self._segment_head = (
            f"POST /segment HTTP/1.1\r\nHost: replica\r\n{TOKEN_HEADER}: {token}\r\n"
            "Content-Length: %d\r\nHeadwater-Segment: %d %d\r\n\r\n"
        ).encode()

    async def infer(
        self, head: bytes, data: Sequence[bytes | memoryview], segment: RemoteSegment | None = None
    ) -> dict[str, RawTensor]:
        """See `ReplicaClient.infer`."""
        connection = await self._connection()
        length = len(head) + sum(map(len, data))
        if segment is None:
            pieces = [self._head % (len(head), length, b""), head, *data]
        else:
            sizes = b"Headwater-Segment: %d %d\r\n" % (segment.inputs_bytes, segment.size_bytes)
            first = self._head % (len(head), length + segment.inputs_bytes, sizes)
            pieces = [first, *segment.pieces, head, *data]
        try:
            status, json_length, body = await connection.exchange(pieces)
        except BaseException:
            # A connection whose exchange was cancelled can't be reused.
            connection.close()
            raise
        if connection.is_kept and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()
        if connection.is_unsent:
            raise ReplicaUnreachable(_reason(body))
        if status != 200:
            raise refusal(_reason(body))
        if segment is not None and connection.shared_length:
            segment.answer = memoryview(body)[len(body) - connection.shared_length :]
        return _tensors(body, json_length)

    @contextlib.asynccontextmanager
    async def placed(self, segment: RemoteSegment) -> AsyncIterator[str]:
        """Send a segment, and yield its path on the replica's machine until the block ends; see
        `FrameReplicaClient.placed`."""
        connection = await self._connection()
        sizes = segment.inputs_bytes, segment.inputs_bytes, segment.size_bytes
        try:
            status, _, body = await connection.exchange([self._segment_head % sizes, *segment.pieces])
            if status != 200:
                raise (ReplicaUnreachable if connection.is_unsent else CallableFailed)(_reason(body))
            yield body.decode()
        except BaseException:
            connection.close()  # the replica may still write to the segment
            raise
        connection.placed += 1
        self._idle.append(connection)
        # The port keeps the segment until the connection is used again or closed.
        asyncio.get_running_loop().call_later(KEPT_FOR_S, self._drop, connection, connection.placed)

    def _drop(self, connection: _TritonConnection, placed: int) -> None:
        """Close a connection, unless it is in use or has placed another segment since."""
        if connection.placed == placed and connection in self._idle:
            self._idle.remove(connection)
            connection.close()

    def close(self) -> None:
        """See `ReplicaClient.close`."""
        self._closed = True
        for connection in list(self._all):
            connection.close()
        self._idle.clear()

    async def _connection(self) -> _TritonConnection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_lost:
                return connection
        if not self._closed:
            connection = await dial(self._address, lambda: _TritonConnection(self._all), self._tls)
            if not self._closed:
                return connection
            connection.close()
        raise ReplicaUnreachable("the replica ended")


class _TritonConnection(HttpConnection):
    """A connection to a replica's Triton, or to the port in front of it.

    Args:
        registry: all open connections of the client.
    """

    def __init__(self, registry: set[_TritonConnection]) -> None:
        super().__init__()
        self._registry = registry
        self._waiter: asyncio.Future[tuple[int, int, bytes]] | None = None
        self._json_length = 0
        self.shared_length = 0
        """Bytes at the end of the last answer that the replica left in the segment."""
        self.is_unsent = False
        """Whether the replica's port could not pass the request on."""
        self.placed = 0
        """Number of segments placed over this connection."""

    async def exchange(self, pieces: Sequence[bytes | memoryview]) -> tuple[int, int, bytes]:
        """Send a request. Returns the answer's status, the length of its JSON part (0: the whole body) and its body.

        Raises:
            ReplicaUnreachable: the connection ended before the request was sent.
            ReplicaLost: the connection ended before the answer was complete.
        """
        if self.is_lost:
            raise ReplicaUnreachable("the replica ended")
        self._waiter = asyncio.get_running_loop().create_future()
        self._json_length = self.shared_length = 0
        self.begin(pieces)
        return await self._waiter

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._registry.add(self)

    def ended(self, error: Exception | None) -> None:
        self._registry.discard(self)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ReplicaLost("the replica ended while it had the request"))

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"inference-header-content-length":
            self._json_length = int(value)
        elif name == b"headwater-answer":
            self.shared_length = int(value)
        elif name == UNSENT_HEADER:
            self.is_unsent = True

    def answered(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result((self.status, self._json_length, self.take_body()))


def _tensors(body: bytes, json_length: int) -> dict[str, RawTensor]:
    reply = _reply_decoder.decode(body[:json_length] if json_length else body)
    view = memoryview(body)
    offset = json_length
    tensors = {}
    for output in reply.outputs:
        end = offset + output.parameters.binary_data_size
        tensors[output.name] = RawTensor(output.datatype, tuple(output.shape), view[offset:end])
        offset = end
    return tensors


def refusal(reason: str) -> HeadwaterError:
    """The error for a call that Triton refused: `ReplicaLost`, `ReplicaUnreachable`, `SharedMemoryFull`, or
    `CallableFailed` with the first line of Triton's reason. A traceback may follow that line."""
    first_line = reason.splitlines()[0][:500] if reason else "no reason given"
    if is_process_lost(first_line):  # Triton noticed this before the guardian did
        return ReplicaLost("the replica ended while it had the request")
    if is_ending(first_line):
        return ReplicaUnreachable("the replica is ending")
    if is_shared_memory_full(first_line):
        return SharedMemoryFull(SHARED_MEMORY_FULL, retry_after_s=RETRY_AFTER_LOST_S)
    return CallableFailed(f"the replica refused the call: {first_line}")


def _reason(body: bytes) -> str:
    with contextlib.suppress(msgspec.MsgspecError):
        if reason := _reply_decoder.decode(body).error:
            return reason
    return body.decode(errors="replace")
