"""The client of a replica, against a server that misbehaves on a real unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headwater_server.codecs.tensors import RawTensor
from headwater_server.errors import CallableFailed, ReplicaLost, ReplicaUnreachable
from headwater_server.transport.triton_http import TritonClient

HEAD = b'{"inputs":[]}'
JSON = (
    b'{"model_name":"m","outputs":[{"name":"y","datatype":"UINT8","shape":[1,2],'
    b'"parameters":{"binary_data_size":2}},{"name":"z","datatype":"UINT8","shape":[1,1],'
    b'"parameters":{"binary_data_size":1}}]}'
)


class Seen(list[bytes]):
    """Requests that the server has read."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.connections = 0

    def add(self, request: bytes) -> None:
        self.append(request)
        self.first.set()


def answer(body: bytes, status: bytes = b"200 OK", json_length: int = len(JSON)) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\nInference-Header-Content-Length: %d\r\n\r\n%s" % (
        status,
        len(body),
        json_length,
        body,
    )


@contextlib.asynccontextmanager
async def triton(*answers: bytes | None) -> AsyncIterator[tuple[TritonClient, Seen]]:
    """A client of a server that gives these answers in turn (None: it hangs up)."""
    replies = iter(answers)
    seen = Seen()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.startswith(b"Content-L"))
                seen.add(head + await reader.readexactly(length))
                reply = next(replies)
                if reply is None:
                    break
                writer.write(reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        path = str(Path(folder) / "h")
        server = await asyncio.start_unix_server(serve, path)
        client = TritonClient("m", f"unix:{path}", "secret")
        try:
            yield client, seen
        finally:
            client.close()
            server.close()


async def test_tensors_come_back_and_the_connection_is_used_again() -> None:
    async with triton(*[answer(JSON + b"hi!")] * 3) as (client, seen):
        for _ in range(3):
            outputs = await client.infer(HEAD, [b"ab", memoryview(b"c")])
            assert outputs == {"y": RawTensor("UINT8", (1, 2), b"hi"), "z": RawTensor("UINT8", (1, 1), b"!")}
        assert seen[0].startswith(b"POST /v2/models/m/infer HTTP/1.1\r\n")
        assert b"triton-access-token: secret\r\n" in seen[0]
        assert b"Inference-Header-Content-Length: 13\r\n" in seen[0]
        assert seen[0].endswith(HEAD + b"abc")
        assert seen.connections == 1


async def test_an_error_is_one_line_of_what_triton_said() -> None:
    refusal = b'{"error":"no such input\\nTraceback (most recent call last)"}'
    async with triton(answer(refusal, b"400 Bad Request")) as (client, _seen):
        with pytest.raises(CallableFailed, match=r"refused the call: no such input$"):
            await client.infer(HEAD, [])


async def test_an_error_in_another_form_is_shown_as_it_is() -> None:
    status = b"503 Service Unavailable"
    async with triton(answer(b"Busy", status), answer(b'{"reason": "busy"}', status)) as (client, _seen):
        for _ in range(2):
            with pytest.raises(CallableFailed, match=r'refused the call: (Busy|{"reason": "busy"})$'):
                await client.infer(HEAD, [])


async def test_a_stub_that_triton_finds_dead_means_that_the_replica_is_lost() -> None:
    refusal = b'{"error":"Stub process \'m_0_0\' is not healthy."}'
    async with triton(answer(refusal, b"500 Internal Server Error")) as (client, _seen):
        with pytest.raises(ReplicaLost):
            await client.infer(HEAD, [])


async def test_a_triton_that_ends_has_not_had_the_call() -> None:
    """Its host was killed: it unloads its models before it goes."""

    refusal = b'{"error":"Request for unknown model: \'m\' has no available versions"}'
    async with triton(answer(refusal, b"400 Bad Request")) as (client, _seen):
        with pytest.raises(ReplicaUnreachable):
            await client.infer(HEAD, [])


@pytest.mark.parametrize("reply", [None, b"nonsense\r\n\r\n"])
async def test_a_replica_that_hangs_up_or_talks_nonsense_is_lost(reply: bytes | None) -> None:
    async with triton(reply) as (client, _seen):
        with pytest.raises(ReplicaLost):
            await client.infer(HEAD, [])


async def test_closing_ends_calls_under_way_and_refuses_others() -> None:
    async with triton(b"") as (client, seen):
        call = asyncio.create_task(client.infer(HEAD, []))
        await seen.first.wait()
        client.close()
        with pytest.raises(ReplicaLost):
            await call
        with pytest.raises(ReplicaLost):
            await client.infer(HEAD, [])


async def test_closing_ends_calls_that_are_still_connecting() -> None:
    async with triton() as (client, seen):
        call = asyncio.create_task(client.infer(HEAD, []))
        await asyncio.sleep(0)
        client.close()
        with pytest.raises(ReplicaUnreachable):
            await call
        assert seen == []


async def test_a_cancelled_call_does_not_leave_its_answer_to_the_next() -> None:
    async with triton(b"", answer(JSON + b"hi!")) as (client, seen):
        call = asyncio.create_task(client.infer(HEAD, []))
        await seen.first.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        outputs = await client.infer(HEAD, [])
        assert bytes(outputs["y"].data) == b"hi"
        assert seen.connections == 2


async def test_a_socket_that_is_not_there_means_a_lost_replica() -> None:
    with pytest.raises(ReplicaLost):
        await TritonClient("m", "unix:/nonexistent/h", "t").infer(HEAD, [])
