"""A replica's port: what it refuses, and what it passes on. Most tests run on both event loops."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from benchmarks.certificates import authority, issue
from headwater.signature import Signature, TensorSpec
from headwater.wire.report import HEADWATER, CallNote
from headwater.wire.shared_memory import ELSEWHERE, MappedCall
from headwater_server.cluster import port as port_module
from headwater_server.cluster import port_connection
from headwater_server.cluster.port import Port
from headwater_server.codecs.tensors import InferRequest, OutputWish, RawTensor
from headwater_server.config.deployment_kinds import VLLM
from headwater_server.control.routing import ReplicaRoute
from headwater_server.errors import ConfigError, ReplicaLost, ReplicaUnreachable
from headwater_server.security.peer_tls import PeerTls
from headwater_server.supervisor.kind_programs import program_of
from headwater_server.transport import triton_http
from headwater_server.transport.address import host_and_port
from headwater_server.transport.batch import encode_batch
from headwater_server.transport.frames import FrameClient
from headwater_server.transport.relay_client import RelayClient
from headwater_server.transport.segments import RemoteSegment, RemoteSegments, Segments
from headwater_server.transport.triton_http import TritonClient
from tests.app.cluster.stand_in import until
from tests.app.transport import test_frames as frames
from tests.app.vllm import stand_in as vllm

TOKEN = "secret"
NEEDS_OPENSSL = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
SIGNATURE = Signature(
    name="m",
    inputs=(TensorSpec("x", "FP32", (-1,)), TensorSpec("t", "BYTES", (1,))),
    outputs=(TensorSpec("y", "FP32", (-1,)),),
    max_batch_size=4,
)
IMAGE = np.random.default_rng(7).standard_normal((1, 150_529)).astype(np.float32)
"""Its size is no multiple of the alignment."""
OK = b'{"outputs":[{"name":"z","datatype":"UINT8","shape":[1,2],"parameters":{"binary_data_size":2}}]}'


@pytest.fixture(params=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Both event loops."""
    return "asyncio", {"use_uvloop": request.param == "uvloop"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Certificates: two peers, one for another name, one of another authority."""
    base = tmp_path_factory.mktemp("certificates")
    signer, stranger = authority(base), authority(base, "stranger")
    return {
        "port": issue(signer, base / "port"),
        "gateway": issue(signer, base / "gateway"),
        "other-name": issue(signer, base / "other-name", name="DNS:other"),
        "stranger": issue(stranger, base / "stranger-peer"),
    }


class Replica:
    """What stands behind a port: Triton's HTTP."""

    def __init__(self) -> None:
        self.connections = 0
        self.requests: list[tuple[bytes, bytes]] = []
        self.answer: Callable[[bytes, bytes], bytes | None] = lambda head, body: answer(OK + b"hi", len(OK))
        """Of a head and a body; None: it hangs up."""
        self.is_reading = asyncio.Event()
        self.is_reading.set()
        self.gone = asyncio.Event()
        """Set when a connection has ended."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                await self.is_reading.wait()
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.startswith(b"Content-L"))
                body = await reader.readexactly(length)
                self.requests.append((head, body))
                said = self.answer(head, body)
                if said is None:
                    break
                writer.write(said)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.gone.set()
            writer.close()


def answer(body: bytes, json_length: int, status: str = "200 OK") -> bytes:
    lengths = f"Content-Length: {len(body)}\r\nInference-Header-Content-Length: {json_length}"
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{lengths}\r\n\r\n".encode() + body


async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A control connection that says nothing."""


@contextlib.asynccontextmanager
async def opened(
    *, tls: PeerTls | None = None, on_control: port_module.OnControl = ignore, grpc: bool = False, **options: Any
) -> AsyncIterator[tuple[Port, str, Replica]]:
    """A port, its address, and what is behind it."""
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        replica = Replica()
        server = await asyncio.start_unix_server(replica.serve, Path(folder) / "h")
        route = ReplicaRoute("m-1", f"unix:{folder}/h", TOKEN, f"unix:{folder}/g" if grpc else "")
        port = Port("m", route, tls=tls, on_control=on_control, **options)
        try:
            yield port, await port.start("127.0.0.1"), replica
        finally:
            await port.close()
            server.close()


async def exchange(address: str, raw: bytes) -> tuple[bytes, bytes]:
    """Send bytes. Returns the status line and the rest of all that comes until the port closes."""
    reader, writer = await asyncio.open_connection(*host_and_port(address))
    writer.write(raw)
    try:
        found = await reader.read()
    finally:
        writer.close()
    line, _, rest = found.partition(b"\r\n")
    return line, rest


def head(line: str = "POST /v2/models/m/infer", token: str = TOKEN, **headers: object) -> bytes:
    named = {"triton-access-token": token, **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items() if value != "")
    return f"{line} HTTP/1.1\r\nHost: replica\r\n{lines}\r\n".encode()


async def test_calls_go_to_triton_over_one_connection() -> None:
    async with opened() as (_, address, replica):
        client = TritonClient("m", address, TOKEN)
        for _ in range(3):
            found = await client.infer(b'{"inputs":[]}', [b"ab", memoryview(b"c")])
            assert found == {"z": RawTensor("UINT8", (1, 2), b"hi")}
        client.close()
        assert replica.connections == 1
        said, body = replica.requests[0]
        assert said.startswith(b"POST /v2/models/m/infer HTTP/1.1\r\n")
        assert b"\r\ntriton-access-token: secret\r\n" in said
        assert b"\r\nInference-Header-Content-Length: 13\r\n" in said
        assert body == b'{"inputs":[]}abc'


REFUSED = {
    "no token": (head(token=""), b"401"),
    "a wrong token": (head(token="secre"), b"401"),
    "control without the token": (head("GET /control", token="x"), b"401"),
    "another model": (head("POST /v2/models/n/infer", content_length=0), b"404"),
    "the replica's id": (head("POST /v2/models/m-1/infer", content_length=0), b"404"),
    "a version": (head("POST /v2/models/m/versions/1/infer", content_length=0), b"404"),
    "dots": (head("POST /v2/models/../models/m/infer", content_length=0), b"404"),
    "encoded": (head("POST /v2/models/%6d/infer", content_length=0), b"404"),
    "a query": (head("POST /v2/models/m/infer?x=1", content_length=0), b"404"),
    "an absolute URI": (head("POST http://replica/v2/models/m/infer", content_length=0), b"404"),
    "Triton's other routes": (head("POST /v2/repository/models/m/unload", content_length=0), b"404"),
    "another method": (head("GET /v2/models/m/infer"), b"405"),
    "control by POST": (head("POST /control", content_length=0), b"405"),
    "no length": (head(), b"400"),
    "a negative length": (head(content_length=-1), b"400"),
    "chunks": (head(transfer_encoding="chunked"), b"400"),
    "chunks and a length": (head(transfer_encoding="chunked", content_length=3), b"400"),
    "two lengths": (head(content_length=3, Content_Length=4), b"400"),
    "another upgrade": (head(content_length=0, upgrade="h2c"), b"400"),
    "JSON beyond the body": (head(content_length=3, inference_header_content_length=4), b"400"),
    "a segment beyond the body": (head(content_length=3, headwater_segment="64 9000"), b"400"),
    "a segment without space": (head(content_length=64, headwater_segment="64 64"), b"400"),
    "a segment of words": (head(content_length=64, headwater_segment="../../x 64"), b"400"),
    "too large a segment": (head(content_length=64, inference_header_content_length=0,
                                 headwater_segment=f"64 {1 << 40}"), b"413"),
    "no HTTP": (b"nonsense\r\n\r\n", b"400"),
    "HTTP/1.0": (b"POST /v2/models/m/infer HTTP/1.0\r\n\r\n", b"400"),
    "a folded header": (head().replace(b"Host: replica", b"Host: a\r\n b"), b"400"),
    "a bare line feed": (head().replace(b"Host: replica", b"Host: a\nX: b"), b"400"),
    "a space before the colon": (head().replace(b"Host:", b"Host :"), b"400"),
    "too long a head": (b"POST /" + b"x" * 20_000, b"431"),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "status"), REFUSED.values(), ids=REFUSED)
async def test_what_is_refused_reaches_no_replica(raw: bytes, status: bytes) -> None:
    async with opened() as (_, address, replica):
        line, rest = await exchange(address, raw)
        assert line.startswith(b"HTTP/1.1 " + status)
        assert b"\r\nConnection: close\r\n" in rest
        assert set(msgspec.json.decode(rest.partition(b"\r\n\r\n")[2])) == {"error"}
        assert replica.connections == 0


async def test_bytes_beyond_the_body_end_the_call() -> None:
    async with opened() as (_, address, replica):
        replica.answer = lambda head, body: b""  # it computes
        line, _ = await exchange(address, head(content_length=2, inference_header_content_length=2) + b"{}more")
        assert line.startswith(b"HTTP/1.1 400")
        assert not replica.requests


@pytest.mark.parametrize("raw", [b"", b"POST /v2", head(content_length=9)])
async def test_who_sends_nothing_more_is_cut(raw: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_connection, "HEAD_TIMEOUT_S", 0.05)
    monkeypatch.setattr(port_connection, "STALLED_S", 0.05)

    async with opened() as (port, address, _):
        with contextlib.suppress(ConnectionResetError):
            assert await exchange(address, raw) == (b"", b"")
        assert not port.connections


async def test_a_connection_may_be_idle_after_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_connection, "HEAD_TIMEOUT_S", 0.05)

    async with opened() as (port, address, replica):
        client = TritonClient("m", address, TOKEN)
        await client.infer(b"{}", [])
        (connection,) = port.connections
        later = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.1, later.set_result, None)
        await later
        assert port.connections == {connection}
        await client.infer(b"{}", [])
        client.close()
        assert replica.connections == 1


async def test_a_replica_that_is_gone_never_had_the_call() -> None:
    async with opened() as (port, address, _):
        port.route = ReplicaRoute("m-1", "unix:/nonexistent/h", TOKEN)
        for token in (TOKEN, "of another replica at this address"):
            with pytest.raises(ReplicaUnreachable):
                await TritonClient("m", address, token).infer(b"{}", [])
    with pytest.raises(ReplicaUnreachable):
        await TritonClient("m", address, TOKEN).infer(b"{}", [])


@pytest.mark.parametrize("said", [None, b"nonsense\r\n\r\n", answer(OK, len(OK)) + b"and more"])
async def test_a_replica_that_hangs_up_or_talks_nonsense_is_lost(said: bytes | None) -> None:
    async with opened() as (_, address, replica):
        replica.answer = lambda head, body: said
        with pytest.raises(ReplicaLost) as caught:
            await TritonClient("m", address, TOKEN).infer(b"{}", [])
        assert not isinstance(caught.value, ReplicaUnreachable)


async def test_a_call_that_is_given_up_is_given_up_at_the_replica() -> None:
    async with opened() as (_, address, replica):
        replica.answer = lambda head, body: b""
        client = TritonClient("m", address, TOKEN)
        call = asyncio.create_task(client.infer(b"{}", []))
        await until(lambda: len(replica.requests) == 1)
        call.cancel()
        await replica.gone.wait()
        client.close()


def segment_call(parameter: str = "") -> tuple[bytes, list[bytes | memoryview], RemoteSegment]:
    """A call with a large input, a text and an expected large answer, as a dispatcher makes it."""
    segments = Segments()
    segments.note_answer([RawTensor("FP32", IMAGE.shape, IMAGE.tobytes())], 1)
    inputs = {"x": RawTensor("FP32", IMAGE.shape, IMAGE.tobytes()), "t": RawTensor("BYTES", (1, 1), b"\2\0\0\0ab")}
    asked = InferRequest("", inputs, 1, [OutputWish("y", True)], {"p": parameter}, {})
    found, data, segment = encode_batch(SIGNATURE, [(asked, inputs, 1)], segments=RemoteSegments(segments))
    assert isinstance(segment, RemoteSegment)
    return found, data, segment


def note_of(head: bytes, body: bytes) -> Any:
    """A call's note, as the replica has it."""
    length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.startswith(b"Inference-Header"))
    return msgspec.json.decode(msgspec.json.decode(body[:length])["parameters"][HEADWATER], type=CallNote)


def doubled(head: bytes, body: bytes) -> bytes:
    """What a replica answers that doubles an image in its call's segment."""
    mapped = MappedCall(note_of(head, body).shared)
    assert mapped.leave({"y": mapped.input(SIGNATURE.inputs[0]) * 2}) == {"y"}
    return answer(OK + b"hi", len(OK))


@pytest.mark.parametrize("secured", [False, pytest.param(True, marks=NEEDS_OPENSSL)])
async def test_large_tensors_go_through_a_segment_of_the_replicas_machine(
    secured: bool, folders: dict[str, Path]
) -> None:
    async with opened(tls=PeerTls(folders["port"]) if secured else None) as (_, address, replica):
        replica.answer = doubled
        client = TritonClient("m", address, TOKEN, PeerTls(folders["gateway"]) if secured else None)
        for _ in range(3):
            text, data, segment = segment_call()
            found = await client.infer(text, data, segment)
            assert bytes(found["z"].data) == b"hi"
            (output,) = segment.outputs(SIGNATURE).values()
            assert output.shape == IMAGE.shape
            assert bytes(output.data) == (IMAGE * 2).tobytes()
        client.close()
        assert replica.connections == 1
        assert len(replica.requests[0][1]) < 2000  # nothing large went through Triton
        paths = {note_of(*one).shared.path for one in replica.requests}
        assert len(paths) == 1  # the file was used again


async def test_a_client_can_not_choose_the_segments_path() -> None:
    async with opened() as (_, address, replica):
        replica.answer = doubled
        client = TritonClient("m", address, TOKEN)
        text, data, segment = segment_call(f'"path":"{ELSEWHERE}"')
        await client.infer(text, data, segment)
        client.close()
        assert segment.outputs(SIGNATURE)
        assert replica.requests[0][1].count(ELSEWHERE.encode()) == 1  # what the parameter says


async def test_a_segment_of_a_failed_call_is_not_used_again() -> None:
    async with opened() as (port, address, replica):
        replica.answer = lambda head, body: None
        text, data, segment = segment_call()
        with pytest.raises(ReplicaLost):
            await TritonClient("m", address, TOKEN).infer(text, data, segment)
        await until(lambda: not port.connections and not port.files.used)
        assert not port.files.free
        replica.answer = doubled
        text, data, segment = segment_call()
        client = TritonClient("m", address, TOKEN)
        await client.infer(text, data, segment)
        client.close()
        await until(lambda: len(port.files.free) == 1)


async def test_a_segment_for_a_call_over_grpc_is_kept_until_the_next_request() -> None:
    async with opened(grpc=True) as (port, address, replica):
        client = TritonClient("m", address, TOKEN)
        paths = []
        for _ in range(2):
            segment = segment_call()[2]
            async with client.placed(segment) as path:
                shared = msgspec.structs.replace(segment.shared(), path=path)
                assert np.array_equal(MappedCall(shared).input(SIGNATURE.inputs[0]), IMAGE)
            assert len(port.files.used) == 1
            paths.append(path)
        assert paths[0] == paths[1]
        with pytest.raises(ZeroDivisionError):
            async with client.placed(segment_call()[2]):
                raise ZeroDivisionError  # the call failed
        await until(lambda: not port.files.used)
        assert not port.files.free
        client.close()
        assert replica.connections == 0


async def test_a_connection_that_has_placed_a_segment_is_not_kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_http, "KEPT_FOR_S", 0.01)

    async with opened(grpc=True) as (port, address, _):
        client = TritonClient("m", address, TOKEN)
        async with client.placed(segment_call()[2]):
            pass
        await until(lambda: not port.connections and not port.files.used)
        client.close()


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (head("GET /segment"), b"405"),
        (head("POST /segment", content_length=64), b"400"),
        (head("POST /segment", content_length=64, headwater_segment="32 9000"), b"400"),
        (head("POST /segment", content_length=64, headwater_segment="64 64"), b"400"),
        (head("POST /segment", content_length=64, headwater_segment=f"64 {1 << 40}"), b"413"),
        (head("POST /segment", token="x", content_length=64, headwater_segment="64 9000"), b"401"),
    ],
)
async def test_no_segment_of_other_sizes(raw: bytes, status: bytes) -> None:
    async with opened(grpc=True) as (port, address, _):
        assert (await exchange(address, raw))[0].startswith(b"HTTP/1.1 " + status)
        assert not port.files.used


@pytest.mark.slow
async def test_a_replica_that_reads_slowly_slows_the_client() -> None:
    async with opened() as (_, address, replica):
        replica.is_reading.clear()
        size = 64 * 1024 * 1024
        reader, writer = await asyncio.open_connection(*host_and_port(address))
        writer.write(head(content_length=size, inference_header_content_length=2))
        body = memoryview(bytes(size))
        sent = 0
        while sent < size:
            writer.write(body[sent : sent + (1 << 20)])
            sent += 1 << 20
            try:
                await asyncio.wait_for(writer.drain(), 0.5)
            except asyncio.TimeoutError:
                break
        assert sent < size // 2  # the rest waits at the client
        replica.is_reading.set()
        writer.write(body[sent:])
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        assert len(replica.requests[0][1]) == size
        writer.close()


async def test_a_client_that_does_not_read_is_cut_and_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_connection, "STALLED_S", 0.2)

    async with opened() as (port, address, replica):
        large = bytes(64 * 1024 * 1024)
        replica.answer = lambda head, body: answer(OK + (large if body == b"{}large" else b"hi"), len(OK))
        _, writer = await asyncio.open_connection(*host_and_port(address), limit=1024)
        writer.write(head(content_length=7, inference_header_content_length=2) + b"{}large")
        client = TritonClient("m", address, TOKEN)
        await until(lambda: len(replica.requests) == 1)
        assert bytes((await client.infer(b"{}", []))["z"].data) == b"hi"
        await replica.gone.wait()
        await until(lambda: len(port.connections) == 1)
        assert bytes((await client.infer(b"{}", []))["z"].data) == b"hi"
        client.close()
        writer.transport.abort()


async def test_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "MOST_CONNECTIONS", 1)

    async with opened() as (port, address, _):
        first, second = (TritonClient("m", address, TOKEN) for _ in range(2))
        await first.infer(b"{}", [])
        with pytest.raises(ReplicaUnreachable):
            await second.infer(b"{}", [])
        first.close()
        await until(lambda: not port.connections)
        await second.infer(b"{}", [])
        second.close()


@pytest.mark.slow
@NEEDS_OPENSSL
@pytest.mark.parametrize("who", ["nobody", "plain", "stranger", "other-name"])
async def test_who_has_no_certificate_of_the_cluster_gets_nowhere(who: str, folders: dict[str, Path]) -> None:
    async with opened(tls=PeerTls(folders["port"])) as (_, address, replica):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(folders["gateway"] / "ca.crt")
        if who in folders:
            context.load_cert_chain(folders[who] / "tls.crt", folders[who] / "tls.key")
        said = b""
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(
                *host_and_port(address),
                ssl=None if who == "plain" else context,
                server_hostname=None if who == "plain" else "headwater",
            )
            writer.write(head(content_length=2, inference_header_content_length=2) + b"{}")
            try:
                said = await reader.read()
            finally:
                writer.transport.abort()
        if who == "other-name":
            assert said.startswith(b"HTTP/1.1 403")
        else:
            assert said == b""
        assert replica.connections == 0


@NEEDS_OPENSSL
async def test_a_port_of_another_authority_gets_no_request(folders: dict[str, Path]) -> None:
    async with opened(tls=PeerTls(folders["stranger"])) as (_, address, replica):
        with pytest.raises(ReplicaUnreachable, match=r"can't be trusted: CERTIFICATE_VERIFY_FAILED"):
            await TritonClient("m", address, TOKEN, PeerTls(folders["gateway"])).infer(b"{}", [])
        assert replica.connections == 0


@pytest.mark.parametrize("secured", [False, pytest.param(True, marks=NEEDS_OPENSSL)])
async def test_frames_are_relayed(secured: bool, folders: dict[str, Path]) -> None:
    async with opened(grpc=True, tls=PeerTls(folders["port"]) if secured else None) as (port, address, replica):
        standing = frames.Triton()
        server = grpc.aio.server()
        pb_grpc.add_GRPCInferenceServiceServicer_to_server(standing, server)
        server.add_insecure_port(port.route.grpc_address)
        await server.start()
        client = FrameClient("m", address, TOKEN, PeerTls(folders["gateway"]) if secured else None)
        call = frames.call(client, "one")
        assert (await standing.next()).id == "one"
        assert standing.metadata["triton-grpc-protocol-triton-access-token"] == TOKEN
        standing.say(frames.frame("one", b"1" * 1_000_000), frames.final("one"))
        assert await call == [b"1" * 1_000_000]
        client.open(frames.NOTHING, streams=True)
        opening = msgspec.json.decode((await standing.next()).parameters[HEADWATER].string_param, type=CallNote)
        assert opening.channel is not None
        assert opening.channel.pid < 0  # it has a lease
        call = frames.call(client, "two")
        await standing.next()
        (connection,) = port.connections
        connection.abort()
        with pytest.raises(ReplicaLost):
            await call
        client.close()
        await server.stop(None)
        assert replica.connections == 0


async def test_a_replica_without_grpc_relays_none() -> None:
    async with opened() as (_, address, replica):
        with contextlib.suppress(ConnectionResetError):
            assert await exchange(address, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") == (b"", b"")
        assert replica.connections == 0


async def test_a_vllm_is_relayed_with_the_token_on_its_routes_only() -> None:
    async with vllm.stand_ins("a") as found:
        standing = found["a"]
        port = Port(
            "m", ReplicaRoute("a", f"unix:{standing.path}", TOKEN), relayed=program_of(VLLM).relayed, on_control=ignore
        )
        address = await port.start("127.0.0.1")
        for raw, status in (
            (head("POST /v1/completions", token="", content_length=2) + b"{}", b"401"),
            (head("POST /v1/load_lora_adapter", content_length=2) + b"{}", b"404"),
            (head("GET /v1/completions/../load_lora_adapter"), b"404"),
            (head("POST /v1/completions", transfer_encoding="chunked"), b"400"),
        ):
            assert (await exchange(address, raw))[0].startswith(b"HTTP/1.1 " + status)
        assert standing.connections == 0
        with pytest.raises(ReplicaUnreachable):
            await (await RelayClient(address, "of another replica").connect()).send("POST", "/v1/completions", b"{}")
        client = RelayClient(address, TOKEN)
        for _ in range(2):
            upstream = await client.connect()
            await upstream.send("POST", "/v1/completions", b'{"prompt": "x"}')
            assert upstream.status == 200
            assert (await upstream.whole()).endswith(b"data: [DONE]\n\n")
            upstream.release()
        assert standing.connections == 1

        async def begin(exchange: vllm.Exchange) -> None:
            exchange.begin()
            exchange.event(b"first")
            await exchange.left()

        standing.script = begin
        upstream = await client.connect()
        await upstream.send("POST", "/v1/completions", b'{"prompt": "x"}')
        assert b"first" in await upstream.read()
        upstream.close()  # cancels
        await standing.exchanges[-1].left()
        client.close()
        await port.close()


@pytest.mark.parametrize("is_hasty", [False, True], ids=["after the answer", "at once"])
@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (head("POST /v1/load_lora_adapter", content_length=2) + b"{}", b"404"),
        (head("POST /v1/completions", token="", content_length=2) + b"{}", b"401"),
        (head("POST /v1/completions", token="secre", content_length=2) + b"{}", b"401"),
        (head("POST /v1/completions", transfer_encoding="chunked"), b"400"),
        (b"PRI * HTTP/2.0\r\n\r\n" + head("POST /v1/load_lora_adapter", content_length=2) + b"{}", b"400"),
    ],
    ids=["path", "no token", "token", "framing", "HTTP/2"],
)
async def test_a_later_request_to_a_vllm_is_checked_as_the_first(raw: bytes, status: bytes, is_hasty: bool) -> None:
    async with vllm.stand_ins("a") as found:
        standing = found["a"]
        route = ReplicaRoute("a", f"unix:{standing.path}", TOKEN, f"unix:{standing.path}")
        port = Port("m", route, relayed=program_of(VLLM).relayed, on_control=ignore)
        reader, writer = await asyncio.open_connection(*host_and_port(await port.start("127.0.0.1")))
        first = head("POST /v1/completions", content_length=15) + b'{"prompt": "x"}'
        if is_hasty:
            writer.write(first + raw)
        else:
            writer.write(first[:20])
            writer.write(first[20:])
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            writer.write(raw[:20])
            writer.write(raw[20:])
        assert (await reader.read()).startswith(b"HTTP/1.1 " + status)
        assert [one.path for one in standing.exchanges] == ["/v1/completions"] * (not is_hasty)
        writer.close()
        await port.close()


@pytest.mark.parametrize("secured", [False, pytest.param(True, marks=NEEDS_OPENSSL)])
async def test_a_control_connection_is_handed_over(secured: bool, folders: dict[str, Path]) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (line := await reader.readline()) not in (b"", b"end\n"):
            writer.write(b"you said " + line)

    tls = PeerTls(folders["port"]) if secured else None
    options: dict[str, Any] = {}
    if secured:
        options = {"ssl": PeerTls(folders["gateway"]).client_context(), "server_hostname": "headwater"}
    async with opened(on_control=echo, tls=tls) as (port, address, replica):
        reader, writer = await asyncio.open_connection(*host_and_port(address), **options)
        writer.write(head("GET /control") + b"one\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        assert await reader.readline() == b"you said one\n"
        writer.write(b"two\n")
        assert await reader.readline() == b"you said two\n"
        writer.write(b"end\n")
        assert await reader.read() == b""
        writer.close()
        assert replica.connections == 0
        assert not port.connections


async def test_without_tls_it_listens_on_loopback_only() -> None:
    port = Port("m", ReplicaRoute("m-1", "unix:/nonexistent/h", TOKEN), on_control=ignore)
    with pytest.raises(ConfigError, match=r"^cluster\.tls: expected a folder .* at 0\.0\.0\.0, got none"):
        await port.start("0.0.0.0")
    await port.close()


async def test_closing_ends_everything() -> None:
    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with opened(on_control=wait) as (port, address, replica):
        replica.answer = lambda head, body: b""
        reader, writer = await asyncio.open_connection(*host_and_port(address))
        writer.write(head("GET /control"))
        await reader.readuntil(b"\r\n\r\n")
        call = asyncio.create_task(TritonClient("m", address, TOKEN).infer(b"{}", []))
        await until(lambda: len(replica.requests) == 1)
        await port.close()
        with pytest.raises(ReplicaLost):
            await call
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        with pytest.raises(OSError):  # noqa: PT011 - of any kind
            await asyncio.open_connection(*host_and_port(address))


@pytest.mark.parametrize("turns", range(6))
async def test_closing_ends_a_connection_that_is_being_opened(turns: int) -> None:
    async with opened() as (port, address, _):
        with socket.create_connection(host_and_port(address)) as client:
            client.setblocking(False)
            for _ in range(turns):
                await asyncio.sleep(0)
            await port.close()
            with contextlib.suppress(ConnectionResetError):  # it was not accepted
                assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 5) == b""
