"""What is fetched for requests to vLLM, from where, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater_server.errors import BadRequest, Unavailable
from headwater_server.vllm.media_fetch import (
    FETCH_S,
    MAX_ALL_BYTES,
    MAX_AT_ONCE,
    MAX_AT_ONCE_PER_REQUEST,
    MAX_BYTES,
    MAX_REDIRECTS,
    MediaFetcher,
)
from headwater_server.vllm.media_parts import HEAD_BYTES, MAX_ALL_PIXELS, MAX_PARTS, MAX_PIXELS
from headwater_server.vllm.requests import VllmRequest, read_request
from tests.app.serving import until
from tests.app.vllm.pictures import png, png_header

PICTURE = png(4, 3)
PUBLIC = "93.184.216.34"


def answer(body: bytes = PICTURE, type: str = "image/png", status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {type}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def redirect(location: str) -> bytes:
    return answer(b"", "text/plain", "302 Found", f"Location: {location}")


class Pictures:
    """A server on the loopback interface with an answer for each path; without one it doesn't answer."""

    def __init__(self, port: int, asked: list[str], open: set[asyncio.StreamWriter]) -> None:
        self.port = port
        self.answers: dict[str, bytes] = {}
        self.asked = asked
        """The heads of all requests."""
        self.open = open
        """Connections."""
        self.host = f"127.0.0.1:{port}"

    def url(self, path: str) -> str:
        return f"http://{self.host}{path}"


@contextlib.asynccontextmanager
async def pictures(tls: ssl.SSLContext | None = None) -> AsyncIterator[Pictures]:
    asked: list[str] = []
    open: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open.add(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            asked.append(head)
            path = head.split(" ")[1].partition("?")[0]
            if path in found.answers:
                writer.write(found.answers[path])
                with contextlib.suppress(TimeoutError):
                    await writer.drain()
            else:
                await reader.read()
        writer.close()
        open.discard(writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    found = Pictures(server.sockets[0].getsockname()[1], asked, open)
    try:
        yield found
    finally:
        server.close()
        await until(lambda: not open)


def asks(*urls: str, key: str = "image_url") -> VllmRequest:
    content = [{"type": key, key: {"url": url}} for url in urls]
    return read_request("chat", {"model": "m", "messages": [{"role": "user", "content": content}]}, fetches=True)


async def fetch(
    request: VllmRequest,
    *hosts: str,
    fetcher: MediaFetcher | None = None,
    take: Callable[[int], None] = lambda size: None,
) -> list[str]:
    """The URLs that vLLM gets."""
    assert request.media is not None
    await (fetcher or MediaFetcher()).fetch(request.media, hosts, take)
    return [part[part["type"]]["url"] for part in request.body["messages"][0]["content"]]


async def fault(request: VllmRequest, *hosts: str, **more: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        await fetch(request, *hosts, **more)
    assert caught.value.field is not None
    assert caught.value.message.startswith(f"{caught.value.field}: ")
    return caught.value.message


def resolves(*addresses: str) -> Callable[[str, int], Any]:
    async def resolve(name: str, port: int) -> list[str]:
        return list(addresses)

    return resolve


def unreached(request: httpx.Request) -> httpx.Response:
    raise AssertionError(f"expected no connection, got one to {request.url}")


def through(handler: Callable[[httpx.Request], httpx.Response], *addresses: str) -> MediaFetcher:
    """A fetcher with a network of our own, in which every name has these addresses."""
    return MediaFetcher(resolves(*addresses), partial(httpx.MockTransport, handler))


async def test_an_image_is_fetched_from_an_address_that_is_allowed() -> None:
    async with pictures() as server:
        server.answers = {"/a.png": answer(), "/b": answer(b"RIFF", "audio/x-wav; a=b")}
        taken: list[int] = []
        (url,) = await fetch(asks(server.url("/a.png?token=1")), server.host, take=taken.append)
        assert url == "data:image/png;base64," + base64.b64encode(PICTURE).decode()
        assert sum(taken) == 3 * len(PICTURE)
        (url,) = await fetch(asks(server.url("/b"), key="audio_url"), server.host)
        assert url == "data:audio/x-wav;base64,UklGRg=="
        assert server.asked[0].startswith("GET /a.png?token=1 HTTP/1.1\r\n")
        assert f"Host: {server.host}\r\n" in server.asked[0]
        assert "cookie" not in server.asked[0].lower()


async def test_a_url_that_is_named_twice_is_fetched_once() -> None:
    async with pictures() as server:
        server.answers = {"/a": answer(), "/b": answer(png(9, 9))}
        urls = await fetch(asks(*map(server.url, ("/a", "/b", "/a", "/a"))), server.host)
        assert urls[0] == urls[2] == urls[3] != urls[1]
        assert len(server.asked) == 2


@pytest.mark.parametrize("size", [1, 2, 3, 65_536, 200_001])
async def test_bytes_arrive_as_they_are(size: int) -> None:
    content = (bytes(range(256)) * (size // 256 + 1))[:size]
    async with pictures() as server:
        server.answers = {"/": answer(content, "video/mp4")}
        (url,) = await fetch(asks(server.url("/"), key="video_url"), server.host)
        assert base64.b64decode(url.removeprefix("data:video/mp4;base64,"), validate=True) == content


# Which hosts


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://other.example/x?secret", "got 'other.example:443'"),
        ("http://images.example.evil.com/x", "got 'images.example.evil.com:80'"),
        ("http://images.example:8080/x", "got 'images.example:8080'"),
        ("http://images.example:443@evil.com/secret", "without a user name and password"),
        ("http://user:secret@images.example/x", "without a user name and password"),
        ("http://evil.com\\@images.example/", "without a user name and password"),
        ("http://images.example%2eevil.com/", "expected a host that this server may fetch from"),
        ("http://localhost/", "got 'localhost:80'"),
        ("http://127.0.0.1/", "got '127.0.0.1:80'"),
        ("http://2130706433/", "expected a host that this server may fetch from"),
        ("http://0x7f.1/", "expected a host that this server may fetch from"),
        ("http://[::1]/", "got '[::1]:80'"),
        ("http://[::ffff:127.0.0.1]/", "expected a host that this server may fetch from"),
        ("http://[fe80::1%25eth0]/", "expected a "),
        ("http://169.254.169.254/latest/meta-data", "got '169.254.169.254:80'"),
        ("file:///etc/passwd", "expected a URL of http, https or data, got one that begins 'file'"),
        ("ftp://images.example/x", "got one that begins 'ftp'"),
        ("gopher://images.example:80/_x", "got one that begins 'gopher'"),
        ("//images.example/x", "expected a URL of http, https or data"),
        ("images.example/x", "expected a URL of http, https or data"),
        ("http://", "expected a URL of http, https or data"),
        ("http://images.example:99999999/", "expected a "),
        ("http://a\x00b/", "malformed URL"),
        ("http://[/", "expected a host that this server may fetch from"),
        ("http://images.example/" + "x" * 70_000, "malformed URL"),
        ("", "expected a URL of http, https or data"),
    ],
)
async def test_only_urls_of_allowed_hosts_are_fetched(url: str, said: str) -> None:
    fetcher = through(unreached, PUBLIC)
    found = await fault(asks("https://images.example/ok", url), "images.example", fetcher=fetcher)
    assert found.startswith("messages[0].content[1].image_url.url: ")
    assert said in found
    assert "secret" not in found


@pytest.mark.parametrize("host", ["images.example", "images.example:443", "IMAGES.example."])
async def test_an_allowed_name_is_asked_at_the_address_that_was_checked(host: str) -> None:
    asked: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, stream=httpx.ByteStream(PICTURE))

    url = f"https://{host}/x/y.png?q=1#f"
    await fetch(asks(url), "images.example", fetcher=through(handler, PUBLIC))
    (request,) = asked
    assert str(request.url) == f"https://{PUBLIC}/x/y.png?q=1#f"
    assert request.headers["host"].lower().rstrip(".") == "images.example"
    assert request.extensions["sni_hostname"] == "images.example"  # the name that the certificate must have


async def test_another_port_is_allowed_only_if_the_list_names_it() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.port == 8443
        return httpx.Response(200, stream=httpx.ByteStream(PICTURE))

    fetcher = through(handler, PUBLIC)
    await fetch(asks("https://images.example:8443/"), "images.example:8443", fetcher=fetcher)
    for url in ("https://images.example/", "https://images.example:8444/"):
        assert "may fetch from" in await fault(asks(url), "images.example:8443", fetcher=fetcher)


@pytest.mark.parametrize("address", [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::", "::1", "fe80::1", "fe80::1%eth0",
    "fc00::1", "fd12::1", "fec0::1", "ff02::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "64:ff9b::7f00:1",
    "2002:7f00:1::", "2001:0:7f00:1::", "100::1", "nonsense",
])  # fmt: skip
async def test_a_name_with_an_address_inside_is_refused(address: str) -> None:
    for addresses in ((address,), (PUBLIC, address), (address, PUBLIC)):
        found = await fault(asks("https://images.example/"), "images.example", fetcher=through(unreached, *addresses))
        assert "expected a host whose addresses are all public, got 'images.example'" in found
        assert address not in found


async def test_a_name_of_this_machine_is_refused_although_it_is_in_the_list() -> None:
    """With the machine's own resolver."""
    async with pictures() as server:
        found = await fault(asks(f"http://localhost:{server.port}/"), f"localhost:{server.port}")
        assert "addresses are all public" in found
        assert server.asked == []


async def test_a_name_that_is_not_found() -> None:
    async def fails(name: str, port: int) -> list[str]:
        raise OSError("no such name")

    for resolve in (fails, resolves()):
        fetcher = MediaFetcher(resolve, partial(httpx.MockTransport, unreached))
        assert "can be found, got 'images.example'" in await fault(
            asks("https://images.example/"), "images.example", fetcher=fetcher
        )
    assert "can be found" in await fault(asks(f"http://{'x' * 70}/"), "x" * 70)  # too long for the resolver


async def test_the_next_address_is_asked_if_one_can_not_be_reached() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.host == PUBLIC:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(200, stream=httpx.ByteStream(PICTURE))

    await fetch(asks("https://images.example/"), "images.example", fetcher=through(handler, PUBLIC, "8.8.8.8"))
    found = await fault(asks("https://images.example/"), "images.example", fetcher=through(handler, PUBLIC))
    assert "images.example can't be reached: refused" in found


# Redirects


async def test_redirects_are_followed_within_the_list() -> None:
    async with pictures() as server:
        server.answers = {
            "/a": redirect("/b?secret"),
            "/b": redirect(f"http://{server.host}/c"),
            "/c": redirect("d"),
            "/d": answer(),
            "/loop": redirect("/loop"),
            "/nowhere": answer(b"", "text/plain", "301 Moved"),
            "/broken": redirect("http://a\tb/"),
        }
        assert len(await fetch(asks(server.url("/a")), server.host)) == 1
        assert [head.split(" ")[1] for head in server.asked] == ["/a", "/b?secret", "/c", "/d"]
        server.asked.clear()
        assert "at most 3 redirects" in await fault(asks(server.url("/loop")), server.host)
        assert len(server.asked) == MAX_REDIRECTS + 1
        assert "the status 301, expected 200" in await fault(asks(server.url("/nowhere")), server.host)
        assert "be read (InvalidURL)" in await fault(asks(server.url("/broken")), server.host)


@pytest.mark.parametrize("location", [
    "http://169.254.169.254/latest/meta-data", "http://localhost/", "//10.0.0.1/", "https://other.example/",
    "http://127.0.0.1:1/", "file:///etc/passwd", "data:image/png;base64,AAAA", "http://u:p@127.0.0.1/",
])  # fmt: skip
async def test_a_redirect_out_of_the_list_is_refused(location: str) -> None:
    async with pictures() as server:
        server.answers = {"/": redirect(location)}
        found = await fault(asks(server.url("/")), server.host)
        assert found.startswith("messages[0].content[0].image_url.url: expected a ")
        assert len(server.asked) == 1


async def test_each_redirect_is_resolved_anew() -> None:
    """A name that has a public address first, and one inside later (DNS rebinding)."""
    addresses = iter([[PUBLIC], ["127.0.0.1"]])

    async def resolve(name: str, port: int) -> list[str]:
        return next(addresses)

    def handler(request: httpx.Request) -> httpx.Response:
        assert request.url.host == PUBLIC
        return httpx.Response(302, headers={"location": "/again"})

    fetcher = MediaFetcher(resolve, partial(httpx.MockTransport, handler))
    found = await fault(asks("https://images.example/"), "images.example", fetcher=fetcher)
    assert "addresses are all public" in found


# What comes back


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (answer(status="404 Not Found"), "127.0.0.1 answered with the status 404, expected 200"),
        (answer(status="206 Partial Content"), "status 206"),
        (answer(b""), "127.0.0.1 answered without data"),
        (answer(PICTURE, "image/png", "200 OK", "Content-Encoding: gzip"), "the encoding 'gzip', expected none"),
        (answer(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "expected an image in PNG, JPEG"),
        (answer(b"<html>"), "expected an image in PNG, JPEG, GIF, WebP or BMP"),
        (answer(png_header(60_000, 60_000)), "pixels, got 3600000000"),
        (f"HTTP/1.1 200 OK\r\nContent-Length: {MAX_BYTES + 1}\r\n\r\nx".encode(), f"at most {MAX_BYTES} bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(MAX_BYTES + 1), f"at most {MAX_BYTES} bytes, got more"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\ncut short", "can't be read (RemoteProtocolError)"),
        (b"SSH-2.0-OpenSSH\r\n", "can't be read (RemoteProtocolError)"),
        (b"", "can't be read (RemoteProtocolError)"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000, "can't be read (RemoteProtocolError)"),
    ],
    ids=range(13),
)
async def test_an_answer_that_is_no_image(raw: bytes, said: str) -> None:
    async with pictures() as server:
        server.answers = {"/": raw}
        assert said in await fault(asks(server.url("/?secret")), server.host)


async def test_the_type_of_a_recording_is_the_answers() -> None:
    async with pictures() as server:
        server.answers = {"/a": answer(b"x", "text/html"), "/b": answer(b"x", "audio/wav,x;base64")}
        for path in server.answers:
            found = await fault(asks(server.url(path), key="audio_url"), server.host)
            assert "expected data of a type audio/..." in found


async def test_nobody_listens() -> None:
    async with pictures() as server:
        pass
    assert "127.0.0.1 can't be reached" in await fault(asks(server.url("/")), server.host)


async def test_a_host_that_does_not_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater_server.vllm.media_fetch.FETCH_S", 0.05)
    async with pictures() as server:
        assert "expected an answer of 127.0.0.1 within 0.05 s" in await fault(asks(server.url("/")), server.host)
        await until(lambda: not server.open)


async def test_all_that_a_request_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater_server.vllm.media_fetch.MAX_ALL_BYTES", 3 * len(PICTURE) - 1)
    async with pictures() as server:
        server.answers = {f"/{n}": answer() for n in range(3)}
        urls = [server.url(path) for path in server.answers]
        await fetch(asks(*urls[:2]), server.host)
        assert "bytes from all URLs together, got more" in await fault(asks(*urls), server.host)


async def test_memory_that_is_used_up_ends_all_fetches() -> None:
    def take(size: int) -> None:
        raise Unavailable("no memory")

    async with pictures() as server:
        server.answers = {"/0": answer()}
        with pytest.raises(Unavailable, match="no memory"):
            await fetch(asks(*[server.url(f"/{n}") for n in range(5)]), server.host, take=take)
        await until(lambda: not server.open)


async def test_few_fetches_of_a_request_run_at_once() -> None:
    async with pictures() as server:
        urls = [server.url(f"/{n}") for n in range(50)]
        fetching = asyncio.create_task(fetch(asks(*urls), server.host))
        await until(lambda: len(server.asked) == MAX_AT_ONCE_PER_REQUEST)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(server.open) == MAX_AT_ONCE_PER_REQUEST
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        await until(lambda: not server.open)


async def test_proxies_and_credentials_of_the_environment_are_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login u password p\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with pictures() as server:
        server.answers = {"/": answer()}
        await fetch(asks(server.url("/")), server.host)
        assert "authorization" not in server.asked[0].lower()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
async def test_a_certificate_must_be_valid_for_the_host(tmp_path: Path) -> None:
    for name, alternative in (("right", "IP:127.0.0.1"), ("wrong", "DNS:other.example")):
        key, certificate = tmp_path / f"{name}.key", tmp_path / f"{name}.pem"
        await asyncio.to_thread(
            subprocess.run,
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj",
             f"/CN={name}", "-addext", f"subjectAltName={alternative}", "-days", "2", "-nodes", "-keyout", str(key),
             "-out", str(certificate)],
            check=True, capture_output=True,
        )  # fmt: skip
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        trusting = ssl.create_default_context(cafile=str(certificate))
        fetcher = MediaFetcher(connect=partial(httpx.AsyncHTTPTransport, verify=trusting))
        async with pictures(context) as server:
            server.answers = {"/": answer()}
            url = f"https://{server.host}/"
            if name == "right":
                await fetch(asks(url), server.host, fetcher=fetcher)
            else:
                found = await fault(asks(url), server.host, fetcher=fetcher)
                assert "CERTIFICATE_VERIFY_FAILED" in found
            assert "CERTIFICATE_VERIFY_FAILED" in await fault(asks(url), server.host)  # nobody known has signed it


def test_the_documented_bounds_are_the_codes() -> None:
    text = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    for bound in (
        f"{MAX_PARTS} in a request",
        f"{MAX_PIXELS:,} pixels by its header, which is in the first {HEAD_BYTES:,} bytes",
        f"{MAX_ALL_PIXELS:,} pixels in all",
        f"{MAX_BYTES >> 20} MiB from a URL, {MAX_ALL_BYTES >> 20} MiB for a request",
        f"; {FETCH_S:g} s |",
        f"{MAX_AT_ONCE_PER_REQUEST} of a request, {MAX_AT_ONCE} of a deployment in each worker",
    ):
        assert bound in text, bound
    assert "At most three redirects" in text
    assert MAX_REDIRECTS == 3
