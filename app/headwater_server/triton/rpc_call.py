"""A request that is relayed to a replica's Triton over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import grpc
import grpc.aio

from headwater_server.errors import RETRY_AFTER_LOST_S, HeadwaterError, ReplicaLost, ReplicaUnreachable
from headwater_server.transport.frames import open_channel
from headwater_server.transport.relay_client import LOST
from headwater_server.triton.relayed_calls import RelayedCall, ReplicaChoice, RpcRefused, TritonReplica
from headwater_server.triton.sequence_turn import SequenceTurn

__all__ = ["RpcCall", "RpcRequest", "channel_of"]

_SERVICE: Final = "/inference.GRPCInferenceService/"

_Answer = TypeVar("_Answer")


def channel_of(replica: TritonReplica) -> grpc.aio.Channel:
    """The channel to a replica's Triton; opened when it is first needed."""
    if replica.channel is None:
        replica.channel = open_channel(replica.route.grpc_address)
    return replica.channel


class RpcRequest(NamedTuple):
    """A ``ModelInferRequest``."""

    message: Any
    raw: bytes
    """The message as it came."""

    def with_parameters(self, more: Mapping[str, Any]) -> RpcRequest:
        """The request with further parameters."""
        if not more:
            return self
        message = type(self.message)()
        message.CopyFrom(self.message)
        for name, value in more.items():
            field = "bool_param" if isinstance(value, bool) else "int64_param"
            setattr(message.parameters[name], field, value)
        return RpcRequest(message, message.SerializeToString())


class RpcCall(RelayedCall):
    """A request over gRPC. Arguments as for `RelayedCall`, and:

    Args:
        metadata: the call's metadata.
    """

    def __init__(
        self,
        replicas: ReplicaChoice,
        key: str,
        timeout_s: float,
        turn: SequenceTurn | None,
        metadata: Sequence[tuple[str, str]],
    ) -> None:
        self._rpc: Any = None
        self._metadata = metadata
        super().__init__(replicas, key, timeout_s, turn)

    async def answer(self, request: RpcRequest) -> bytes:
        """The serialized ``ModelInferResponse``.

        Raises:
            HeadwaterError: there is no replica, the replica is lost, or `fail` was called.
            RpcRefused: Triton refuses the request, or the model failed.
        """

        async def ask(replica: TritonReplica) -> bytes:
            method = channel_of(replica).unary_unary(f"{_SERVICE}ModelInfer")
            rpc = self._rpc = method(self._changed(request).raw, metadata=self._metadata)
            return await self._awaited(replica, rpc)

        return await self._offer(ask)

    async def answers(self, request: RpcRequest) -> AsyncGenerator[bytes, None]:
        """The serialized ``ModelStreamInferResponse`` messages, as they come. The deadline is the longest time without
        a message. Raises the same errors as `answer`."""

        async def only() -> AsyncIterator[bytes]:
            yield self._changed(request).raw

        async def ask(replica: TritonReplica) -> Any:
            method = channel_of(replica).stream_stream(f"{_SERVICE}ModelStreamInfer")
            rpc = self._rpc = method(only(), metadata=self._metadata)
            return await self._awaited(replica, rpc.read())

        answer = await self._offer(ask)
        replica = self.replica
        assert replica is not None
        while answer is not grpc.aio.EOF:
            self.rest()
            yield answer
            self.watch()
            try:
                answer = await self._awaited(replica, self._rpc.read())
            except HeadwaterError as error:
                self._raise_failure()
                self._lose(error)
                raise

    async def _awaited(self, replica: TritonReplica, result: Awaitable[_Answer]) -> _Answer:
        """A result of the call.

        Raises:
            HeadwaterError: the replica is lost, or `fail` was called.
            RpcRefused: Triton's refusal.
        """
        try:
            return await result
        except asyncio.CancelledError:
            self._raise_failure()
            if replica.channel is None:  # it was closed, which cancels its calls
                raise ReplicaLost(LOST, retry_after_s=RETRY_AFTER_LOST_S) from None
            raise
        except grpc.aio.AioRpcError as error:
            self._raise_failure()
            details = error.details() or ""
            if replica.channel is not None and replica.channel.get_state() is grpc.ChannelConnectivity.READY:
                raise RpcRefused(error.code().value[0], details) from None
            if "failed to connect" in details:
                raise ReplicaUnreachable("the replica ended", retry_after_s=RETRY_AFTER_LOST_S) from None
            raise ReplicaLost(LOST, retry_after_s=RETRY_AFTER_LOST_S) from None

    def _cut(self) -> None:
        if self._rpc is not None:
            self._rpc.cancel()

    def _leave(self) -> None:
        super()._leave()
        if self._rpc is not None:
            self._rpc.cancel()
            self._rpc = None
