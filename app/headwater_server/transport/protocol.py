"""What the gateway needs of a replica's client, for whole answers and for answers in frames."""

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
    """Name, datatype, shape with the batch axis, and bytes in pieces."""
    note: CallNote
    """The content of the hidden parameter."""


class ReplicaClient(Protocol):
    """Calls a replica that answers whole."""

    async def infer(
        self, head: bytes, data: Sequence[bytes | memoryview], segment: RemoteSegment | None = None
    ) -> dict[str, RawTensor]:
        """Make one call.

        Args:
            head: the request's JSON, all tensors binary in both directions.
            data: the inputs' bytes in order, in any number of pieces.
            segment: of a call to a replica on another machine; it gets its answer.

        Returns:
            The outputs, by name.

        Raises:
            ReplicaUnreachable: the replica was gone before it received the call.
            ReplicaLost: the replica ended before it answered.
            CallableFailed: the replica answered with an error.
        """
        ...

    def close(self) -> None:
        """End all connections; calls under way raise `ReplicaLost`."""
        ...


class FrameReplicaClient(Protocol):
    """Calls a replica that answers in frames (`headwater.wire.frame`)."""

    def open(self, nothing: FrameRequest, *, streams: bool = False) -> None:
        """Connect, so that the first call needn't. Call this once, before any other method.

        Args:
            nothing: a no-op request; its answer is dropped, even an error.
            streams: whether calls will be streams; the replica then ends those of a former client of this process.
        """
        ...

    def frames(self, name: str, request: FrameRequest) -> AsyncGenerator[bytes, None]:
        """Make one call under a unique name. If its note makes it a stream, the replica waits for a slow reader.

        Returns:
            The frames as they come, until the answer is complete.

        Raises:
            ReplicaUnreachable: the replica was gone before it received the call.
            ReplicaLost: the replica ended before its answer was complete.
            CallableFailed: the replica answered with an error.
        """
        ...

    def placed(self, segment: RemoteSegment) -> contextlib.AbstractAsyncContextManager[str]:
        """A segment's path on the replica's machine, until the block ends; if it fails, nobody uses the memory again.

        Raises:
            HeadwaterError: as `frames`.
        """
        ...

    def cancel(self, name: str) -> None:
        """Ask the replica to end a stream; further frames of it are dropped."""
        ...

    def close(self) -> None:
        """End all calls; those under way raise `ReplicaLost`."""
        ...
