"""Fetches what requests for vLLM name by URL, from the hosts that the operator allows (``options.media_hosts``).

vLLM itself fetches nothing. This module is imported at the first such request, because httpx takes 6 MB and a tenth of
a second.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from binascii import b2a_base64
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Final

import anyio
import httpx

from headwater_server.codecs.faults import at, shown
from headwater_server.errors import HeadwaterError
from headwater_server.vllm.media_parts import Media

__all__ = ["MediaFetcher"]

FETCH_S: Final = 10.0
"""Maximum seconds of a fetch, its redirects included."""
CONNECT_S: Final = 3.0
"""Maximum seconds of a connection to one of a host's addresses."""
MAX_BYTES: Final = 32 * 2**20
"""Maximum size of what is fetched from a URL."""
MAX_ALL_BYTES: Final = 64 * 2**20
"""Maximum size of what is fetched for a request."""
MAX_REDIRECTS: Final = 3
MAX_ADDRESSES: Final = 4
"""Number of a host's addresses that are tried."""
MAX_AT_ONCE: Final = 32
"""Maximum number of fetches at once."""
MAX_AT_ONCE_PER_REQUEST: Final = 8
HELD_BYTES: Final = 3
"""Bytes of memory for each byte that is fetched: its base64, and that in the body for vLLM."""

Resolver = Callable[[str, int], Awaitable[list[str]]]

_PORTS: Final = {"http": 80, "https": 443}
_TYPE: Final = re.compile(r"[a-z]+/[a-z0-9.+-]{1,60}")
_GLOBAL_UNICAST: Final = ipaddress.IPv6Network("2000::/3")


class MediaFetcher:
    """Fetches media by HTTP. Nothing is kept: neither answers, nor connections, nor cookies.

    Args:
        resolve: finds the addresses of a host's name, for a port.
        connect: makes the transport of a request; default: HTTP/1.1 without a proxy, which verifies servers by the
            certificates of certifi, or of ``SSL_CERT_FILE``.
    """

    def __init__(
        self, resolve: Resolver | None = None, connect: Callable[[], httpx.AsyncBaseTransport] | None = None
    ) -> None:
        self._resolve = resolve or _resolve
        self._connect = connect or partial(httpx.AsyncHTTPTransport, verify=httpx.create_ssl_context())
        self._places = anyio.CapacityLimiter(MAX_AT_ONCE)

    async def fetch(self, media: Media, hosts: Collection[str], take: Callable[[int], None]) -> None:
        """Fetch the `Media.links` of a request, each URL once, and put them into the request.

        Args:
            media: the request's media.
            hosts: the allowed hosts, as `headwater_server.config.vllm_options.VllmOptions.media_hosts`.
            take: called with a number of bytes before they are held; an error that it raises ends all fetches.

        Raises:
            BadRequest: a URL isn't allowed, can't be fetched, has too many bytes, or isn't what the part expects.
            HeadwaterError: an error from ``take``.
        """
        paths = {link.url: link.path for link in reversed(media.links)}
        for url, path in paths.items():
            _checked_url(path, url, hosts)
        fetched: dict[str, str] = {}
        faults: list[HeadwaterError] = []
        places = anyio.CapacityLimiter(MAX_AT_ONCE_PER_REQUEST)
        total = 0

        def take_piece(path: str, size: int) -> None:
            nonlocal total
            total += size
            if total > MAX_ALL_BYTES:
                raise at(path, None, f"expected at most {MAX_ALL_BYTES} bytes from all URLs together, got more")
            take(HELD_BYTES * size)

        async def fetch_one(path: str, url: str) -> None:
            try:
                async with places, self._places:
                    fetched[url] = await self._fetched(path, url, hosts, take_piece)
            except HeadwaterError as error:
                faults.append(error)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for url, path in paths.items():
                group.start_soon(fetch_one, path, url)
        if faults:
            raise faults[0]

        def put() -> None:
            for link in media.links:
                media.put(link, fetched[link.url])

        await asyncio.to_thread(put)

    async def _fetched(self, path: str, url: str, hosts: Collection[str], take: Callable[[str, int], None]) -> str:
        """What a URL stands for, as a ``data:`` URL."""
        host = ""
        try:
            with anyio.fail_after(FETCH_S):
                for _ in range(MAX_REDIRECTS + 1):
                    target, host = _checked_url(path, url, hosts)
                    addresses = await self._addresses(path, target)
                    # A connection for each: a kept connection is verified for the host that it was made for only.
                    async with self._connect() as transport:
                        answer = await _answer(transport, target, addresses)
                        try:
                            if not answer.has_redirect_location:
                                return await _read(path, host, answer, take)
                            url = str(target.join(answer.headers["location"]))
                        finally:
                            await answer.aclose()
        except TimeoutError:
            raise at(path, None, f"expected an answer of {host} within {FETCH_S:g} s") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise at(path, None, f"{host} can't be reached: {error}") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise at(path, None, f"{host} gave an answer that can't be read ({type(error).__name__})") from None
        raise at(path, None, f"expected at most {MAX_REDIRECTS} redirects, got more")

    async def _addresses(self, path: str, target: httpx.URL) -> list[str]:
        """The addresses to connect to. An address in the URL itself is one that the operator has allowed.

        Raises:
            BadRequest: the host's name can't be resolved, or has an address that isn't public.
        """
        if _address(target.host) is not None:
            return [target.host]
        name = target.raw_host.decode("ascii")
        try:
            addresses = await self._resolve(name, target.port or _PORTS[target.scheme])
        except (OSError, UnicodeError):
            addresses = []
        if not addresses:
            raise at(path, None, f"expected a host that can be found, got {shown(name)}")
        if not all(map(_is_public, addresses)):
            raise at(path, None, f"expected a host whose addresses are all public, got {shown(name)}")
        return addresses[:MAX_ADDRESSES]


async def _resolve(name: str, port: int) -> list[str]:
    rows = await asyncio.get_running_loop().getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in rows]


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_public(text: str) -> bool:
    """Whether an address belongs to a single machine of the internet, and to no private, local or special network. Of
    IPv6, addresses that stand for IPv4 addresses don't count as public, either."""
    address = _address(text)
    if address is None or not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return True
    return address in _GLOBAL_UNICAST and address.sixtofour is None and address.teredo is None


def _checked_url(path: str, url: str, hosts: Collection[str]) -> tuple[httpx.URL, str]:
    """A URL that may be fetched, and its host as messages show it: without what may be secret.

    Raises:
        BadRequest: it isn't an HTTP URL of an allowed host.
    """
    try:
        target = httpx.URL(url)
        host = target.raw_host.decode("ascii").rstrip(".")
    except (httpx.InvalidURL, UnicodeError):
        raise at(path, None, "expected a URL of http, https or data, got a malformed URL") from None
    if target.scheme not in _PORTS or not host:
        raise at(
            path, None, f"expected a URL of http, https or data, got one that begins {shown(url.partition(':')[0])}"
        )
    if target.userinfo:
        raise at(path, None, "expected a URL without a user name and password")
    address = _address(host)
    if address is not None:
        host = address.compressed if address.version == 4 else f"[{address.compressed}]"
    port = target.port or _PORTS[target.scheme]
    if f"{host}:{port}" not in hosts and (host not in hosts or port not in _PORTS.values()):
        raise at(path, None, f"expected a host that this server may fetch from, got {shown(f'{host}:{port}')}")
    return target, host


async def _answer(transport: httpx.AsyncBaseTransport, target: httpx.URL, addresses: list[str]) -> httpx.Response:
    """The answer of the first address that can be reached. The name in the URL is what a certificate must have."""
    headers = {"Host": target.netloc.decode("ascii"), "Accept-Encoding": "identity", "User-Agent": "headwater"}
    timeouts = {"connect": CONNECT_S, "read": FETCH_S, "write": FETCH_S, "pool": FETCH_S}
    extensions = {"sni_hostname": target.raw_host.decode("ascii").rstrip("."), "timeout": timeouts}
    for place, address in enumerate(addresses, 1):
        request = httpx.Request("GET", target.copy_with(host=address), headers=headers, extensions=extensions)
        try:
            return await transport.handle_async_request(request)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            if place == len(addresses):
                raise
    raise AssertionError("there are no addresses")


async def _read(path: str, host: str, answer: httpx.Response, take: Callable[[str, int], None]) -> str:
    """The body of an answer, as a ``data:`` URL of the answer's type."""
    if answer.status_code != 200:
        raise at(path, None, f"{host} answered with the status {answer.status_code}, expected 200")
    encoding = answer.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise at(path, None, f"{host} answered with the encoding {shown(encoding)}, expected none")
    pieces, rest, size = [], b"", 0
    declared = answer.headers.get("content-length", "")
    async for piece in answer.aiter_raw():
        size += len(piece)
        if size > MAX_BYTES or (declared.isdecimal() and int(declared) > MAX_BYTES):
            raise at(path, None, f"expected at most {MAX_BYTES} bytes, got more from {host}")
        take(path, len(piece))
        rest += piece
        whole = len(rest) // 3 * 3
        pieces.append(b2a_base64(rest[:whole], newline=False))
        rest = rest[whole:]
    if not size:
        raise at(path, None, f"{host} answered without data")
    pieces.append(b2a_base64(rest, newline=False))
    type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    type = type if _TYPE.fullmatch(type) else "application/octet-stream"
    return f"data:{type};base64,{b''.join(pieces).decode('ascii')}"
