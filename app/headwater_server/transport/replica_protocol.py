"""Protocols of a replica's clients, as the gateway uses them: for whole answers, and for answers in frames."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from headwater.wire.report import CallNote
from headwater_server.codecs.tensors import RawTensor
from headwater_server.transport.segments import RemoteSegment

__all__ = ["FrameReplicaClient", "FrameRequest", "ReplicaClient"]


class FrameRequest(msgspec.Struct):
    """A call to a replica that answers in frames."""

    inputs: list[tuple[str, str, list[int], list[bytes | memoryview]]]
    """Inputs: name, datatype, shape with the batch axis, and bytes in pieces."""
    note: CallNote
    """Content of the hidden parameter `headwater.wire.report.HEADWATER`."""


class ReplicaClient(Protocol):
    """Calls a replica that answers whole."""

    async def infer(
        self, head: bytes, data: Sequence[bytes | memoryview], segment: RemoteSegment | None = None
    ) -> dict[str, RawTensor]:
        """Make a call.

        Args:
            head: the request's JSON, with every tensor binary in both directions.
            data: the inputs' bytes in order, in any number of pieces.
            segment: for a call to a replica on another machine: the large inputs. On return it holds the large outputs.

        Returns:
            The outputs, by name.

        Raises:
            ReplicaUnreachable: the replica was gone before it received the call.
            ReplicaLost: the replica ended before it answered.
            SharedMemoryFull: /dev/shm of the replica's machine has no capacity for the call's tensors.
            CallableFailed: the replica answered with another error.
        """
        ...

    def close(self) -> None:
        """End all connections; calls in flight raise `ReplicaLost`, later calls `ReplicaUnreachable`."""
        ...


class FrameReplicaClient(Protocol):
    """Calls a replica that answers in frames (`headwater.wire.frame`)."""

    def open(self, nothing: FrameRequest, *, streams: bool = False) -> None:
        """Connect early, so that the first call doesn't have to. Call this at most once, before any other method.

        Args:
            nothing: a no-op request; its answer is dropped, even if it is an error. Its inputs are kept for `cancel`.
            streams: whether calls will be streams. The replica then ends the streams of an earlier client of this
                process.
        """
        ...

    def frames(self, name: str, request: FrameRequest) -> AsyncGenerator[bytes, None]:
        """Make a call under a unique name. If the call's note makes it a stream, the replica waits for a slow reader.

        Returns:
            The frames as they arrive, until the answer is complete.

        Raises:
            ReplicaUnreachable: the replica was gone before it received the call.
            ReplicaLost: the replica ended before its answer was complete.
            SharedMemoryFull: /dev/shm of the replica's machine has no capacity for the call's tensors.
            CallableFailed: the replica answered with another error.
        """
        ...

    def placed(self, segment: RemoteSegment) -> contextlib.AbstractAsyncContextManager[str]:
        """Send a segment to the replica's machine, and yield its path there.

        The path is valid until the block ends. If the block raises, the file is never used for another call.

        Raises:
            HeadwaterError: the same errors as of `frames`.
        """
        ...

    def cancel(self, name: str) -> None:
        """Ask the replica to end a stream, and return at once. Frames that are on their way still arrive. Nothing
        happens if there is no such stream."""
        ...

    def close(self) -> None:
        """End all calls: calls in flight raise `ReplicaLost`, calls that were not sent yet and later calls
        `ReplicaUnreachable`."""
        ...
