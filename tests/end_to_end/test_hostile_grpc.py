"""gRPC clients that are too many, say nothing, or break the rules: each is refused, and others are answered."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Callable, Iterator

import grpc
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from tests.running import Running, leaves_nothing, wait_for

MAX_CONNECTIONS = 40
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 7, 8
END_STREAM, END_HEADERS = 1, 4
AFTER_STATUS, REFUSED_STREAM = 0, 7


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    config = {
        "deployments": {"tuned": {"model": "typed:Tuned"}},
        "server": {"grpc_port": 0, "max_connections": MAX_CONNECTIONS, "client_timeout_s": 2},
    }
    with leaves_nothing(config) as server:
        yield server


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2 (RFC 9113, section 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def call_of(method: str, stream: int) -> bytes:
    """The headers of a call (RFC 7541: literals without indexing), whose message is still to come."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/inference.GRPCInferenceService/{method}",
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    texts = (text.encode() for field in fields.items() for text in field)
    literals = [bytes((len(text),)) + text for text in texts]
    block = b"".join(b"\0" + name + value for name, value in zip(literals[::2], literals[1::2], strict=True))
    return frame(HEADERS, END_HEADERS, stream, block)


class RawRpc:
    """A connection for frames that no client of gRPC would send."""

    def __init__(self, running: Running, first: bytes) -> None:
        host, _, port = running.grpc_address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 30)
        self.socket.sendall(first)
        self._stream = self.socket.makefile("rb")

    def frames(self) -> Iterator[tuple[int, int, bytes]]:
        """Kind, stream and payload of each frame, until the server closes the connection."""
        try:
            while head := self._stream.read(9):
                yield head[3], int.from_bytes(head[5:9], "big"), self._stream.read(int.from_bytes(head[:3], "big"))
        except ConnectionResetError:
            return

    def close(self) -> None:
        self._stream.close()
        self.socket.close()


def is_live(running: Running) -> bool:
    """Whether a client with a connection of its own is answered."""
    with grpc.insecure_channel(running.grpc_address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            return bool(pb_grpc.GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest(), timeout=10).live)
        except grpc.RpcError:
            return False


@pytest.fixture
def connect(running: Running) -> Iterator[Callable[..., RawRpc]]:
    """Opens connections, which the test's end closes."""
    with contextlib.ExitStack() as opened:

        def made(first: bytes = PREFACE + frame(SETTINGS)) -> RawRpc:
            return opened.enter_context(contextlib.closing(RawRpc(running, first)))

        yield made


class TestConnections:
    def test_one_too_many_is_closed_at_once(self, running: Running, connect: Callable[..., RawRpc]) -> None:
        def accepted() -> RawRpc | None:
            connection = connect()
            return connection if next(connection.frames(), None) else None

        held = [wait_for(accepted) for _ in range(MAX_CONNECTIONS)]
        assert list(connect().frames()) == []
        assert not is_live(running)
        assert running.is_ready()  # over HTTP
        held.pop().close()
        wait_for(lambda: is_live(running))

    @pytest.mark.parametrize("first", [b"", PREFACE], ids=["nothing", "preface"])
    def test_silent_ones_are_closed_in_time(
        self, running: Running, connect: Callable[..., RawRpc], first: bytes
    ) -> None:
        silent = [connect(first) for _ in range(2 * MAX_CONNECTIONS)]
        for connection in silent:
            assert all(kind in (SETTINGS, GOAWAY, WINDOW_UPDATE) for kind, _, _ in connection.frames())
        wait_for(lambda: is_live(running))


class TestFrames:
    def test_streams_beyond_the_limit_are_refused(self, running: Running, connect: Callable[..., RawRpc]) -> None:
        raw = connect()
        raw.socket.sendall(frame(SETTINGS, 1))
        streams = range(1, 20_001, 2)
        for stream in streams:
            raw.socket.sendall(call_of("ModelInfer", stream))
        for kind, stream, payload in raw.frames():
            if kind == RST_STREAM:
                assert int.from_bytes(payload, "big") in (REFUSED_STREAM, AFTER_STATUS)
                if stream == streams[-1]:
                    break
        assert running.is_ready()  # over HTTP
        raw.close()
        wait_for(lambda: is_live(running))

    @pytest.mark.parametrize(
        "sent",
        [
            frame(DATA, END_STREAM, 1, b"x" * 100),
            frame(HEADERS, END_HEADERS, 1, b"\xff" * 100),
            frame(HEADERS, END_HEADERS, 2),
            frame(SETTINGS, 0, 0, b"\0\4\xff\xff\xff\xff"),
            b"\xff\xff\xff" + b"\0" * 100,
        ],
        ids=["data without a call", "headers", "an even stream", "window", "length"],
    )
    def test_frames_that_break_the_rules(self, running: Running, connect: Callable[..., RawRpc], sent: bytes) -> None:
        raw = connect()
        raw.socket.sendall(sent)
        raw.socket.shutdown(socket.SHUT_WR)
        assert all(kind != DATA for kind, _, _ in raw.frames())
        assert is_live(running)

    def test_a_client_that_reads_no_answer_holds_up_no_other(
        self, running: Running, connect: Callable[..., RawRpc]
    ) -> None:
        deaf = connect(PREFACE + frame(SETTINGS, 0, 0, b"\0\4" + bytes(4)))  # a window of 0 bytes
        for stream in range(1, MAX_CONNECTIONS, 2):
            deaf.socket.sendall(call_of("ServerMetadata", stream) + frame(DATA, END_STREAM, stream, bytes(5)))
        answers = (stream for kind, stream, _ in deaf.frames() if kind == HEADERS)
        assert len(set(itertools.islice(answers, MAX_CONNECTIONS // 2))) == MAX_CONNECTIONS // 2
        assert is_live(running)


def test_an_unknown_service(running: Running) -> None:
    with grpc.insecure_channel(running.grpc_address) as channel:
        for method in ("/inference.Nothing/ModelInfer", "/", "//", f"/{'a' * 10_000}/b"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(method)(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, method[:40]


def test_metadata_beyond_the_limit(running: Running) -> None:
    with tritonclient.grpc.InferenceServerClient(running.grpc_address) as client:
        with pytest.raises(tritonclient.grpc.InferenceServerException) as caught:
            client.is_server_live(headers={"x-much": "a" * 40_000})
        assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        assert client.is_server_live()
