"""Reading request bodies."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Any

import pytest
from starlette.types import Receive, Scope

from headwater_server.codecs.memory import object_bytes
from headwater_server.errors import (
    BadRequest,
    BodyTooLarge,
    BodyTooSlow,
    ClientGone,
    HeadwaterError,
    Unavailable,
    UnsupportedMediaType,
)
from headwater_server.gateway.http.bodies import BodyReader, decoded
from headwater_server.gateway.http.body_budget import SMALL_BYTES, BodyBudget, BodyLease, release_body
from headwater_server.gateway.http.endpoint import Endpoint, EndpointRoute
from headwater_server.gateway.http.entry import INFER_PATH, Entry, RequestRecords
from headwater_server.gateway.http.event_stream import StreamLimits
from headwater_server.gateway.http.replies import Reply
from tests.app.serving import connect, serving, until

LIMIT = 1000


def read(*chunks: bytes | None, timeout_s: float = 5, **headers: str) -> bytes:
    """Read a body that arrives in chunks; None stands for the client's end, and after the last chunk nothing comes."""
    messages: list[dict[str, Any]] = []
    for index, chunk in enumerate(chunks):
        if chunk is None:
            messages.append({"type": "http.disconnect"})
        else:
            messages.append({"type": "http.request", "body": chunk, "more_body": index + 1 < len(chunks)})
    if "stalls" in headers:
        headers.pop("stalls")
        messages[-1]["more_body"] = True

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "headers": pairs}
    return asyncio.run(BodyReader(LIMIT, timeout_s).read(scope, receive))[0]


def test_chunks_are_joined() -> None:
    assert read(b"ab", b"", b"c") == b"abc"


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "application/octet-stream"])
def test_json_and_octets_are_taken(kind: str) -> None:
    assert read(b"{}", content_type=kind) == b"{}"


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize("kind", [FORM, f"{FORM}; charset=utf-8", None])
def test_what_curl_says_and_no_type_are_taken_but_not_of_a_web_page(kind: str | None) -> None:
    headers: dict[str, Any] = {} if kind is None else {"content_type": kind}
    assert read(b"{}", content_length="2", **headers) == b"{}"
    for origin in ("http://elsewhere", "null"):
        lengths: tuple[dict[str, Any], ...] = ({"content_length": "2"}, {"transfer_encoding": "chunked"})
        for length in lengths:
            with pytest.raises(UnsupportedMediaType, match="a web page must say so"):
                read(b"{}", **headers, **length, origin=origin)


def test_a_page_need_not_say_the_type_of_no_body() -> None:
    assert read(b"", origin="http://here", content_length="0") == read(b"", origin="http://here") == b""


@pytest.mark.parametrize("kind", ["text/plain", "none", "multipart/form-data", ""])
def test_other_types_are_not(kind: str) -> None:
    with pytest.raises(UnsupportedMediaType, match="Content-Type: expected application/json"):
        read(b"{}", content_type=kind)


@pytest.mark.parametrize("length", ["1001", "1001 ", "1001\t"])
def test_a_length_over_the_limit_is_refused_before_a_byte_is_read(length: str) -> None:
    with pytest.raises(BodyTooLarge, match=r"expected at most 1000 bytes .*got 1001"):
        read(content_length=length)


def test_a_body_without_a_length_is_refused_as_soon_as_it_is_over() -> None:
    with pytest.raises(BodyTooLarge):
        read(b"x" * 600, b"x" * 600, stalls="yes")


def test_a_body_that_does_not_arrive_is_given_up() -> None:
    with pytest.raises(BodyTooSlow, match=r"within 0\.01 s"):
        read(b"x", timeout_s=0.01, stalls="yes")


@pytest.mark.parametrize("chunks", [(None,), (b"x", None)])
def test_a_client_that_goes_away_is_noticed(chunks: tuple[bytes | None, ...]) -> None:
    with pytest.raises(ClientGone):
        read(*chunks)


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_compressed_bodies_are_unpacked(encoding: str, pack: Any) -> None:
    assert read(pack(b"hello" * 100), content_encoding=encoding) == b"hello" * 100


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (gzip.compress(b"x" * 1001, mtime=0), BodyTooLarge, "at most 1000 bytes"),
        (gzip.compress(b"\0" * 500_000, mtime=0), BodyTooLarge, "at most 1000 bytes"),
        (gzip.compress(b"hello", mtime=0)[:-4], BadRequest, "cut short"),
        (gzip.compress(b"hello", mtime=0) + b"more", BadRequest, "bytes follow"),
        (b"not gzip at all", BadRequest, "not valid gzip data"),
        (b"", BadRequest, "cut short"),
    ],
)
def test_what_can_not_be_unpacked_is_said(body: bytes, error: type[HeadwaterError], message: str) -> None:
    with pytest.raises(error, match=message):
        read(body, content_encoding="gzip")


def test_an_unknown_encoding_is_refused() -> None:
    with pytest.raises(UnsupportedMediaType, match="Content-Encoding: expected gzip"):
        read(b"x", content_encoding="br")


# All bodies together


class Reads(Endpoint):
    """Reads a body and answers with its size, when the gate is open."""

    def __init__(self, budget: BodyBudget) -> None:
        self.gate = asyncio.Event()
        self._reader = BodyReader(4 * SMALL_BYTES, 60, budget)

    async def answer(self, scope: Scope, receive: Receive) -> Reply:
        body, _ = await self._reader.read(scope, receive)
        await self.gate.wait()
        return Reply(200, [b"%d" % len(body)], [])


def post(size: int, *, of: int | None = None, headers: bytes = b"", body: bytes = b"") -> bytes:
    """A request of which ``size`` bytes of the body are sent."""
    body = body or bytes(size)
    length = len(body) if of is None else of
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%b\r\n" % (length, headers)
    return head + body


@pytest.mark.parametrize("count", [8, 16])
async def test_unfinished_bodies_together_have_a_budget(count: int) -> None:
    budget = BodyBudget(4 * SMALL_BYTES)

    reads = Reads(budget)
    application = Entry(_unused, [EndpointRoute(INFER_PATH, reads)], RequestRecords(None, StreamLimits()))
    async with serving(application, timeout_s=60) as server:
        clients = [await connect(server.port) for _ in range(count)]
        for _, writer in clients:
            writer.write(post(2 * SMALL_BYTES, of=4 * SMALL_BYTES))
        refused = await asyncio.wait_for(clients[-1][0].readuntil(b"\r\n\r\n"), 30)
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 2" in refused
        assert budget.used <= budget.limit - budget.limit // 4
        reads.gate.set()
        reader, writer = await connect(server.port)  # small ones have room
        writer.write(post(1000))
        assert (await asyncio.wait_for(reader.readuntil(b"1000"), 30)).startswith(b"HTTP/1.1 200 ")
        for _, other in (*clients, (reader, writer)):
            other.close()
        await until(lambda: budget.used == 0)


@pytest.mark.parametrize("factor", [1, 2])
async def test_bodies_that_unpack_large_have_the_same_budget(factor: int) -> None:
    budget = BodyBudget(4 * SMALL_BYTES * factor)
    packed = gzip.compress(bytes(2 * SMALL_BYTES))

    reads = Reads(budget)
    application = Entry(_unused, [EndpointRoute(INFER_PATH, reads)], RequestRecords(None, StreamLimits()))
    async with serving(application, timeout_s=60) as server:
        clients = [await connect(server.port) for _ in range(6)]
        request = post(0, headers=b"Content-Encoding: gzip\r\n", body=packed)
        for _, writer in clients[:factor]:
            writer.write(request)
        # Of bodies that are unpacked at once each may have a part, and none all of what it needs.
        await until(lambda: budget.used >= 2 * SMALL_BYTES * factor)
        for _, writer in clients[factor:]:
            writer.write(request)
        reads.gate.set()
        answers = [await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30) for reader, _ in clients]
        statuses = {answer[9:12] for answer in answers}
        assert b"200" in statuses
        assert statuses <= {b"200", b"503"}
        for _, writer in clients:
            writer.close()
        await until(lambda: budget.used == 0)


def test_more_than_the_budget_is_refused_and_all_of_it_comes_back() -> None:
    budget = BodyBudget(1000)
    reader = BodyReader(2000, 5, budget)
    scope: dict[str, Any] = {"type": "http", "headers": [(b"content-encoding", b"gzip")], "state": {}}

    async def receive() -> Any:
        return {"type": "http.request", "body": gzip.compress(bytes(1500))}

    with pytest.raises(Unavailable, match="1000 bytes of memory") as caught:
        asyncio.run(reader.read(scope, receive))
    assert caught.value.retry_after_s == 2
    assert budget.used > 0
    release_body(scope)
    assert budget.used == 0


def scope_with(budget: BodyBudget) -> dict[str, Any]:
    return {"type": "http", "headers": [], "state": {"body": BodyLease(budget, budget.limit)}}


@pytest.mark.parametrize("size", [300_000, 3_000_000])
def test_what_a_body_is_decoded_to_has_the_same_budget(size: int) -> None:
    body = b"[%b1]" % (b"[]," * (size // 3))
    budget = BodyBudget(8 * object_bytes(body))
    scopes = [scope_with(budget) for _ in range(8)]

    async def main() -> list[Any]:
        return await asyncio.gather(*(decoded(len, body, scope) for scope in scopes), return_exceptions=True)

    answers = asyncio.run(main())
    refused = [answer for answer in answers if isinstance(answer, Unavailable)]
    assert len(refused) == 2  # a quarter is for small bodies
    assert answers.count(len(body)) == 6
    for scope in scopes:
        release_body(scope)
    assert budget.used == 0


def test_the_largest_body_can_be_decoded_where_a_worker_has_a_small_share() -> None:
    budget = BodyBudget(1000)
    scope = scope_with(budget)
    scope["state"]["body"].take(400, 400)
    assert asyncio.run(decoded(len, b"x", scope, lambda _: 10_000)) == 1
    assert budget.used == 500


def test_a_thread_that_outlives_its_request_takes_nothing_of_the_budget() -> None:
    budget = BodyBudget(1000)
    lease = BodyLease(budget, 1000)
    lease.take(10, 10)
    lease.release()
    with pytest.raises(ClientGone):
        lease.take(10, 20)
    assert budget.used == 0


async def _unused(*_: Any) -> None:
    raise AssertionError("only the endpoint is asked")
