"""Calls to a replica that answers in frames: Triton's gRPC, with a single bidirectional stream for all calls.

A decoupled model can only be called over a stream, and a message on a shared stream costs a fraction of a gRPC call.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator
from typing import Any, Final

import grpc.aio
import msgspec
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from headwater.wire.report import HEADWATER, CallNote
from headwater_server.errors import CallableFailed, HeadwaterError, ReplicaLost, ReplicaUnreachable
from headwater_server.transport.address import ClientTls, is_local
from headwater_server.transport.channel import StreamChannel, Taken
from headwater_server.transport.replica_protocol import FrameRequest
from headwater_server.transport.segments import RemoteSegment
from headwater_server.transport.triton_http import TritonClient, refusal

__all__ = ["FrameClient", "open_channel"]

logger = logging.getLogger("headwater.frames")

_OPTIONS: Final = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
_FINAL: Final = "triton_final_response"
_CHANNEL: Final = "channel-"
"""Prefix of the names of messages that open a channel or acknowledge its frames."""
_POST: Final = "-post"
"""Suffix of the names of messages that acknowledge frames."""
_numbers = itertools.count()


class _UnreadAnswers:
    """A call's unread answers: frames, then its end, which is an error or None.

    An `asyncio.Queue` would take 3 KB for as long as an idle stream lasts.
    """

    __slots__ = ("_answers", "_reader", "has_answer", "is_accepted", "is_sent", "taken")

    def __init__(self, taken: Taken | None = None) -> None:
        self._answers: list[bytes | HeadwaterError | None] = []
        self._reader: asyncio.Future[None] | None = None
        """Set while a reader waits for the next answer."""
        self.is_sent = False
        """Whether the replica may have received the call."""
        self.has_answer = False
        """Whether a frame came as a direct answer to the call, rather than over the channel."""
        self.is_accepted = False
        """Whether the replica has certainly received the call."""
        self.taken = taken
        """Set if the call's frames come over the channel."""

    def put(self, answer: bytes | HeadwaterError | None) -> None:
        """Append an answer."""
        self._answers.append(answer)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> bytes | HeadwaterError | None:
        """Wait for the next answer."""
        while not self._answers:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._answers.pop(0)


def open_channel(address: str, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """Open a gRPC channel to a replica. It connects with its first call.

    Args:
        address: see `headwater_server.transport.address`.
        tls: the cluster's TLS; not used for a unix socket.
    """
    if tls is None or is_local(address):
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    options = [*_OPTIONS, ("grpc.ssl_target_name_override", tls.server_name)]
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


class FrameClient:
    """Calls a model of a replica's Triton.

    Args:
        model: the model's name.
        address: address of Triton's gRPC, or of the port in front of it; see `headwater_server.transport.address`.
        token: Triton's access token.
        tls: the cluster's TLS.
    """

    def __init__(self, model: str, address: str, token: str, tls: ClientTls | None = None) -> None:
        self._model = model
        self._is_remote = not is_local(address)
        self._segments = TritonClient(model, address, token, tls)
        """Client that places segments; it connects only for this."""
        self._channel = open_channel(address, tls)
        stub = pb_grpc.GRPCInferenceServiceStub(self._channel)
        self._stream: Any = stub.ModelStreamInfer(metadata=(("triton-grpc-protocol-triton-access-token", token),))
        self._calls: dict[str, _UnreadAnswers] = {}
        self._outgoing: asyncio.Queue[pb.ModelInferRequest] = asyncio.Queue()
        self._is_connected = False
        self._is_ended = False
        self._nothing = FrameRequest([], CallNote())
        """A no-op request: even a message that only cancels a stream must have inputs. Without inputs until `open`."""
        self._stream_channel: StreamChannel | None = None
        """The channel that carries streams, while it is open; None: the next stream opens a channel."""
        self._channel_name = ""
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
        self._closing: asyncio.Task[None] | None = None

    def open(self, nothing: FrameRequest, *, streams: bool = False) -> None:
        """See `FrameReplicaClient.open`."""
        self._nothing = nothing
        if streams:
            self._stream_channel = self._open_channel()
        else:
            self._outgoing.put_nowait(self._message("open", nothing))

    async def frames(self, name: str, request: FrameRequest) -> AsyncGenerator[bytes, None]:
        """See `FrameReplicaClient.frames`."""
        if self._is_ended:
            raise ReplicaUnreachable("the replica ended")
        is_stream = bool(request.note.stream)
        if is_stream:
            channel = self._stream_channel = self._stream_channel or self._open_channel()
            request.note.channel = channel.note
        call = self._calls[name] = _UnreadAnswers(Taken() if is_stream else None)
        self._outgoing.put_nowait(self._message(name, request))
        del request  # its tensors are in the message
        try:
            while (answer := await call.get()) is not None:
                if isinstance(answer, HeadwaterError):
                    raise answer
                if call.taken is not None and call.taken.add(len(answer)):
                    channel.note_taken(name, call.taken)
                yield answer
                del answer  # the next answer may take long
        finally:
            del self._calls[name]

    def placed(self, segment: RemoteSegment) -> contextlib.AbstractAsyncContextManager[str]:
        """See `FrameReplicaClient.placed`."""
        return self._segments.placed(segment)

    def cancel(self, name: str) -> None:
        """See `FrameReplicaClient.cancel`."""
        if not self._is_ended:
            self._send_note(f"cancel-{name}", CallNote(cancel=name))

    def close(self) -> None:
        """See `FrameReplicaClient.close`."""
        self._end()
        self._segments.close()
        for task in self._tasks:
            task.cancel()
        if self._closing is None:
            self._closing = asyncio.create_task(self._channel.close())

    async def _write(self) -> None:
        try:
            while True:
                message = await self._outgoing.get()
                call = self._calls.get(message.id) or _UnreadAnswers()
                # If a write on an open stream fails, the replica may have read the message all the same.
                call.is_sent = self._is_connected
                await self._stream.write(message)
                call.is_sent = self._is_connected = True
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # `_read` logs the reason
        except Exception:
            logger.exception("model %s: writing a call failed", self._model)
        finally:
            self._end()
            self._stream.cancel()

    async def _read(self) -> None:
        try:
            async for message in self._stream:
                self._take(message)
        except grpc.aio.AioRpcError as error:
            logger.debug("model %s: the gRPC stream to its replica ended: %s", self._model, error.details())
        finally:
            self._end()

    def _take(self, message: Any) -> None:
        response = message.infer_response
        call = self._calls.get(response.id)
        if response.id.startswith(_CHANNEL):
            self._take_from_channel(message)
        elif call is None:  # its reader has left, or it never had a reader
            if message.error_message:
                logger.debug("model %s, call %s: %s", self._model, response.id, message.error_message)
        elif message.error_message:
            call.put(refusal(message.error_message))
        else:
            call.is_sent = True
            for raw in response.raw_output_contents:
                call.has_answer = True
                call.put(raw)
            # A call whose frames come over the channel also ends there, unless the replica answered it directly.
            if response.parameters[_FINAL].bool_param:
                call.is_accepted = True
                if call.taken is None or call.has_answer:
                    call.put(None)

    def _open_channel(self) -> StreamChannel:
        name = f"{_CHANNEL}{next(_numbers)}"
        channel = StreamChannel(
            lambda note: self._send_note(name + _POST, CallNote(channel=note)), is_leased=self._is_remote
        )
        self._send_note(name, CallNote(channel=channel.opening()))
        self._channel_name = name
        return channel

    def _take_from_channel(self, message: Any) -> None:
        """Handle an answer to a message that opened a channel or acknowledged frames: a parcel, an error, or the end of
        the message's answers."""
        response = message.infer_response
        channel = self._stream_channel
        is_post = response.id == self._channel_name + _POST
        if channel is None or not (is_post or response.id == self._channel_name):  # from an earlier channel
            return
        try:
            for raw in response.raw_output_contents:
                for name, frame in channel.open_parcel(raw):
                    call = self._calls.get(name)
                    if call is not None:
                        call.is_accepted = True
                        call.put(frame)
        except ValueError as error:
            self._drop_channel(CallableFailed(f"model `{self._model}`: {error}"))
            return
        if message.error_message:
            self._drop_channel(refusal(message.error_message))
        elif response.parameters[_FINAL].bool_param:
            if is_post:
                channel.end_post()
            else:
                self._drop_channel(ReplicaLost("the replica closed the channel that carried the stream"))

    def _drop_channel(self, error: HeadwaterError) -> None:
        """End the channel's streams with an error; the next stream opens a new channel."""
        if self._stream_channel is not None:
            self._stream_channel.close()
        self._stream_channel = None
        for call in self._calls.values():
            if call.taken is None:
                continue
            # The error is about the channel's last message. A call that was accepted did reach the replica.
            if call.is_accepted and isinstance(error, ReplicaUnreachable):
                call.put(ReplicaLost("the replica ended while it had the request"))
            else:
                call.put(error.again())

    def _send_note(self, name: str, note: CallNote) -> None:
        """Send a no-op request with a note."""
        self._outgoing.put_nowait(self._message(name, FrameRequest(self._nothing.inputs, note)))

    def _end(self) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        if self._stream_channel is not None:
            self._stream_channel.close()
        for call in self._calls.values():
            call.put(
                ReplicaLost("the replica ended while it had the request")
                if call.is_sent
                else ReplicaUnreachable("the replica ended")
            )

    def _message(self, name: str, request: FrameRequest) -> pb.ModelInferRequest:
        message = pb.ModelInferRequest(model_name=self._model, id=name)
        message.parameters[HEADWATER].string_param = msgspec.json.encode(request.note).decode()
        # Without this parameter Triton sends no separate message at the end of an answer.
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        for spec, datatype, shape, pieces in request.inputs:
            message.inputs.add(name=spec, datatype=datatype, shape=shape)
            message.raw_input_contents.append(bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces))
        return message
