"""Carries a call from Triton to the callable in the replica, and the answers back.

PyTriton sends a call through a message queue and three event loops, and ends each call with a second message, which
takes most of a small call's time. Here an instance of the model (`TritonPythonModel`, in a stub process of Triton)
writes the call to a unix socket. In the replica's host, the event loop of that instance (`headwater.replica.callee`)
reads the call from the socket and writes the answers to the socket.

A message is a head (`HEAD`: the call's number, the lengths of the JSON and of the data), the JSON, and the data: the
bytes of the tensors that the JSON describes, in the JSON's order. The JSON and each tensor are padded to a multiple of
16 bytes. The JSON of a call lists the requests that Triton merged, each with its tensors and with its parameters as
Triton passes them. The JSON of an answer lists the tensors for each of these requests. The JSON of an error is the
error's text. A call that is answered in frames ends with null or with an error. Tensors are described by name, dtype
(numpy's ``str``), shape and size in bytes; each ``BYTES`` element follows its length.

Triton runs a copy of this file, which can't import Headwater's modules: the file imports only the standard library,
numpy and, in Triton, ``triton_python_backend_utils``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

__all__ = [
    "HEAD", "Arrays", "Message", "TritonPythonModel", "describe", "install", "message", "read_body", "read_tensors",
    "socket_path", "tensors",
]  # fmt: skip

HEAD: Final = struct.Struct("<QIQ")
"""A message's head: the call's number, and the lengths of the JSON and of the data in bytes."""

_PIECE_BYTES: Final = 1 << 16
"""Up to this size of the data, joining a message's pieces is faster than writing each piece."""
_ALIGNED: Final = 16
"""Each tensor begins at a multiple of this number of bytes, so that its elements are aligned in memory."""
_LENGTH: Final = struct.Struct("<I")
_ENDED: Final = "the callable's process has ended"
"""`headwater.wire.triton_words` recognizes the error by this text."""

Arrays = Mapping[str, "np.ndarray[Any, np.dtype[Any]]"]
Pieces = list["bytes | memoryview"]
Body = bytes | bytearray | memoryview


class Message(NamedTuple):
    """A decoded message."""

    call: int
    """The call's number."""
    content: Any
    """The JSON, decoded."""
    body: Body
    """The JSON's text and the data."""
    start: int
    """Offset of the data in ``body``."""


def socket_path(directory: str, instance: int) -> str:
    """The path of the socket, in the replica's folder, over which an instance of the model reaches its callable."""
    return f"{directory}/c{instance}"


def install(script: Path) -> None:
    """Replace PyTriton's ``model.py`` in a model store with a copy of this file.

    Raises:
        OSError: the file can't be replaced.
    """
    script.unlink()  # PyTriton copies the file with its mode, which may be read-only
    script.write_bytes(Path(__file__).read_bytes())


class TritonPythonModel:
    """An instance of the model. Triton's Python backend finds the class by its name."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the model's configuration. The callable can't be reached yet: the first call connects."""
        import triton_python_backend_utils

        self._triton: Any = triton_python_backend_utils
        config = json.loads(args["model_config"])
        self._inputs: list[str] = [tensor["name"] for tensor in config["input"]]
        self._is_decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        instance = int(args["model_instance_name"].rpartition("_")[2])
        directory = config["parameters"]["workspace-path"]["string_value"].rpartition("/")[0]
        self._path = socket_path(directory, instance)
        self._socket: socket.socket | None = None
        self._numbers = itertools.count()
        self._open: dict[int, tuple[list[Any], list[Sequence[str]]]] = {}
        """Running calls that are answered in frames, by number: for each request its response sender, and its requested
        outputs."""

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Compute the requests that Triton merged. Returns their responses, or None if they are answered in frames.

        Raises:
            ConnectionError: the callable's process has ended, or can't be reached.
            TritonModelException: the callable failed, and the message is the text that it sent; or it answered another
                call.
        """
        call = next(self._numbers)
        content = []
        data: Pieces = []
        for request in requests:
            input_tensors = ((name, self._triton.get_input_tensor_by_name(request, name)) for name in self._inputs)
            inputs = {name: tensor.as_numpy() for name, tensor in input_tensors if tensor is not None}
            content.append((describe(inputs.items(), data), request.parameters()))
        wanted = [request.requested_output_names() for request in requests]
        if self._is_decoupled:
            self._open[call] = [request.get_response_sender() for request in requests], wanted
        try:
            if self._socket is None:
                self._socket = self._connected()
            for piece in message(call, content, data):
                self._socket.sendall(piece)
            if self._is_decoupled:
                return None
            answer = self._receive()
        except OSError as error:
            if self._is_decoupled and self._open.pop(call, None) is None:  # the thread that reads frames has ended it
                return None
            raise ConnectionError(_ENDED) from error
        if answer.call != call:
            self._disconnect()  # each later answer would belong to an earlier call
            raise self._triton.TritonModelException(f"expected the answer to call {call}, got that to {answer.call}")
        if isinstance(answer.content, str):
            raise self._triton.TritonModelException(answer.content)
        return self._responses(answer, wanted)

    def finalize(self) -> None:
        """Disconnect: the model is unloaded."""
        self._disconnect()

    def _disconnect(self) -> None:
        """Close the connection; the next call makes another."""
        if self._socket is None:
            return
        with contextlib.suppress(OSError):  # the other end may have closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        if not self._is_decoupled:  # the thread that reads frames closes its file itself
            self._file.close()
        self._socket.close()
        self._socket = None

    def _connected(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self._path)
        except OSError:
            connection.close()
            raise
        self._file = connection.makefile("rb", _PIECE_BYTES)
        if self._is_decoupled:
            threading.Thread(target=self._send_frames, name="frames", daemon=True).start()
        return connection

    def _send_frames(self) -> None:
        """Send the frames of all calls as they arrive, until the connection closes, which ends the open calls with an
        error. Runs in a thread."""
        try:
            while True:
                answer = self._receive()
                if answer.call not in self._open:  # the call has ended, because a response could not be sent
                    continue
                if not isinstance(answer.content, list):
                    self._end(answer.call, answer.content)
                    continue
                senders, wanted = self._open[answer.call]
                try:
                    for sender, response in zip(senders, self._responses(answer, wanted), strict=True):
                        sender.send(response)
                except Exception as error:  # e.g. Triton's error if the tensors don't fit into /dev/shm
                    self._end(answer.call, str(error))
        except OSError:
            for call in list(self._open):
                self._end(call, _ENDED)
        finally:
            self._file.close()

    def _end(self, call: int, error: str | None) -> None:
        """End a call that is answered in frames, with an error unless it is None."""
        senders, _ = self._open.pop(call, ([], []))  # absent: `execute` failed to send it
        for sender in senders:
            if error is not None:
                sender.send(self._triton.InferenceResponse(error=self._triton.TritonError(error)))
            sender.send(flags=self._triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _receive(self) -> Message:
        """Wait for the next message.

        Raises:
            OSError: the callable's process has ended.
        """
        head = self._file.read(HEAD.size)
        if len(head) == HEAD.size:
            call, length, more = HEAD.unpack(head)
            body = self._file.read(length + more)
            if len(body) == length + more:
                return read_body(call, body, length)
        raise ConnectionError(_ENDED)

    def _responses(self, answer: Message, wanted: Iterable[Sequence[str]]) -> list[Any]:
        start = answer.start
        responses = []
        for names, described in zip(wanted, answer.content, strict=True):
            outputs, start = tensors(described, answer.body, start)
            chosen = [self._triton.Tensor(name, array) for name, array in outputs.items() if name in names]
            responses.append(self._triton.InferenceResponse(chosen))
        return responses


def describe(arrays: Iterable[tuple[str, np.ndarray[Any, np.dtype[Any]]]], data: Pieces) -> list[Any]:
    """Describe named tensors for a message's JSON, and append their bytes to ``data``."""
    described = []
    for name, array in arrays:
        if array.dtype.hasobject:
            piece: bytes | memoryview = b"".join([_LENGTH.pack(len(element)) + element for element in array.flat])
        else:
            piece = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        size = len(piece)
        data.append(piece)
        if size % _ALIGNED:
            data.append(bytes(-size % _ALIGNED))
        described.append((name, array.dtype.str, array.shape, size))
    return described


def tensors(described: Iterable[Any], body: Body, start: int) -> tuple[dict[str, Any], int]:
    """Read described tensors from a body. Returns the arrays by name, and the offset at which the last tensor ends; see
    `read_tensors`."""
    arrays, end = read_tensors(described, body, start)
    return dict(arrays), end


def read_tensors(described: Iterable[Any], body: Body, start: int) -> tuple[list[tuple[str, Any]], int]:
    """Read described tensors from a body.

    Args:
        described: the descriptions, from `describe`.
        body: the message's body.
        start: the offset of the first tensor's bytes in ``body``.

    Returns:
        The names and arrays, which are views of ``body`` (except for ``BYTES``), read-only if ``body`` is, and the
        offset at which the last tensor ends.
    """
    arrays: list[tuple[str, Any]] = []
    for name, dtype, shape, size in described:
        end = start + size
        if dtype == "|O":
            array = np.array(list(_elements(body, start, end)), object)
        else:
            array = np.frombuffer(body, dtype, size // np.dtype(dtype).itemsize, start)
        arrays.append((name, array.reshape(shape)))
        start = end + -end % _ALIGNED
    return arrays, start


def _elements(body: Body, start: int, end: int) -> Iterable[bytes]:
    while start < end:
        (length,) = _LENGTH.unpack_from(body, start)
        start += _LENGTH.size + length
        yield bytes(body[start - length : start])


def message(call: int, content: Any, data: Pieces) -> Pieces:
    """Encode a message as pieces, to be written in their order."""
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % _ALIGNED)
    size = sum(map(len, data))
    pieces = [HEAD.pack(call, len(text), size), text, *data]
    return [b"".join(pieces)] if size <= _PIECE_BYTES else pieces


def read_body(call: int, body: Body, length: int) -> Message:
    """Decode the message of a call: ``body`` is the JSON, which has ``length`` bytes, and the data."""
    return Message(call, json.loads(bytes(body[:length])), body, length)
