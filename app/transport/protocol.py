"""See app/transport/protocol.py."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from app.codecs.tensors import RawTensor
from inference.wire.report import CallNote

__all__ = ["FrameReplicaClient", "FrameRequest", "ReplicaClient"]


class FrameRequest(msgspec.Struct):
    """A call of a replica that answers in frames."""

    inputs: list[tuple[str, str, list[int], list[bytes | memoryview]]]
    """Name, datatype, shape with the batch axis, and bytes in pieces."""
    note: CallNote
    """What the hidden parameter says."""


class ReplicaClient(Protocol):
    """What the gateway needs of a replica, whatever engine it runs on."""

    async def infer(self, head: bytes, data: Sequence[bytes | memoryview]) -> dict[str, RawTensor]:
        """One call.

        Args:
            head: the request's JSON, all tensors binary in both directions.
            data: the inputs' bytes in order, in any number of pieces.

        Returns:
            The outputs, by name.

        Raises:
            ReplicaUnreachable: the replica was gone before it had the call.
            ReplicaLost: it went away before it answered.
            CallableFailed: it answered with an error.
        """
        ...

    def close(self) -> None:
        """End all connections; calls under way raise `ReplicaLost`."""
        ...


class FrameReplicaClient(Protocol):
    """What the gateway needs of a replica that answers in frames (`inference.wire.frame`)."""

    def open(self, nothing: FrameRequest, *, streams: bool = False) -> None:
        """Make the way to the replica ready, so that the first call needn't. Comes before any other method, once.

        Args:
            nothing: a request that asks for nothing; what comes back is dropped, an error too.
            streams: whether calls will be streams. The replica then ends those that this process had there by a former
                client.
        """
        ...

    def frames(self, name: str, request: FrameRequest) -> AsyncGenerator[bytes, None]:
        """One call. A stream, by its note, waits for whoever doesn't take what it says.

        Args:
            name: of the call, unique among all.
            request: what to ask.

        Returns:
            The frames as they come; it ends when the replica has said all.

        Raises:
            ReplicaUnreachable: the replica was gone before it had the call.
            ReplicaLost: it went away before it had said all.
            CallableFailed: it answered with an error.
        """
        ...

    def cancel(self, name: str) -> None:
        """Ask the replica to end a stream; what it still says of it is dropped."""
        ...

    def close(self) -> None:
        """End all calls; those under way raise `ReplicaLost`."""
        ...
