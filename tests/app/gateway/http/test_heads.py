"""What is read from a request's head costs a small multiple of it, whatever its bytes."""

from __future__ import annotations

import gc
import tracemalloc
from urllib.parse import unquote

import pytest
from starlette.types import ASGIApp, Message

from tests.app.telemetry.stand_in import Gateway

SIZES = (4_000, 30_000)
TIMES = 200
"""Objects and log lines that quote a part of the head."""
ELSE_BYTES = 500_000
"""What a request takes that has nothing hostile."""
INFER = "/v2/models/m/infer"
HEADERS = {
    "authorization": b"Bearer a ",
    "x-api-key": b"a",
    "x-request-id": b"a",
    "traceparent": b"00-",
    "tracestate": b"a=b,",
    "host": b"a.",
    "origin": b"http://a",
    "content-type": b"application/json;",
    "content-encoding": b"gzip,",
    "accept-encoding": b"gzip;q=0.1,",
    "inference-header-content-length": b"1",
    "cookie": b"a=b;",
    "forwarded": b"for=a,",
    "x-forwarded-for": b"1.1.1.1,",
    "access-control-request-headers": b"a,",
    "if-none-match": b'"a",',
}


async def peak_bytes(method: str, target: str, headers: dict[str, bytes]) -> int:
    """Ask twice, and measure the second time. The answer must be none of a server's faults."""
    lines = [(name.encode(), value) for name, value in {"host": b"gateway", **headers}.items()]

    async def ask(app: ASGIApp) -> None:
        raw, _, query = target.encode().partition(b"?")
        scope = {
            "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "root_path": "",
            "path": unquote(raw.decode()), "raw_path": raw, "query_string": query, "headers": lines,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "asgi": {"version": "3.0"},
        }  # fmt: skip
        statuses = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"{}"}

        async def send(message: Message) -> None:
            statuses.append(message.get("status", 0))

        await app(scope, receive, send)
        assert 200 <= statuses[0] < 500

    app = Gateway().app
    await ask(app)
    gc.collect()
    tracemalloc.start()
    try:
        await ask(app)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", HEADERS)
async def test_a_long_header_costs_a_small_multiple_of_it(name: str, size: int) -> None:
    value = HEADERS[name] * (size // len(HEADERS[name]))
    assert await peak_bytes("POST", INFER, {name: value}) <= TIMES * size + ELSE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
async def test_many_headers_cost_a_small_multiple_of_them(size: int) -> None:
    headers = {f"a{number:x}": b"" for number in range(size // 8)}
    assert await peak_bytes("POST", INFER, headers) <= TIMES * size + ELSE_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("part", ["/", "%2f", "a=b&", "%"])
@pytest.mark.parametrize("start", [INFER + "?", "/v2/models/"])
async def test_a_long_path_or_query_costs_a_small_multiple_of_it(start: str, part: str, size: int) -> None:
    path = start + part * (size // len(part))
    assert await peak_bytes("POST", path, {}) <= TIMES * size + ELSE_BYTES
