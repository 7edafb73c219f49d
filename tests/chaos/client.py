"""A client that asks one thing over a connection of its own, and may behave as badly as clients do."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from dataclasses import dataclass
from typing import Final

from tests.chaos.asks import DEADLINE_S, WHATEVER, Ask
from tests.chaos.reply import Reply

__all__ = ["CLIENT_TIMEOUT_S", "GRACE_S", "Manner", "Result", "choose_manner", "send"]

GRACE_S: Final = 10.0
"""What a request may take beyond its deadline. A stopped replica or gateway worker is noticed after 1.25 s, what it
had ends within another second, another worker is there after 0.5 s and its start; the rest is for clients, servers and
starting replicas that share the machine's cores. A request that nobody ends would take for ever."""
CLIENT_TIMEOUT_S: Final = 3.0
"""The server's ``client_timeout_s``."""
_SLOW_S: Final = 0.8
_SMALL_BYTES: Final = 4096
"""Of a slow reader's buffers."""

Manner = str
"""How a client behaves.

``plain``; ``slow sender``, whose body takes a while; ``stalled sender``, whose body stops half-way; ``slow reader``,
which stops for a while; ``stuck reader``, which stops for longer than it may; ``leaves sending``, in the middle of its
body; ``leaves waiting``; ``leaves reading``, in the middle of the answer.
"""


@dataclass
class Result:
    """What became of one request."""

    ask: Ask
    manner: Manner
    how: str
    """``answered``; ``left``; ``broken``: the connection ended before the answer did; ``hung``."""
    began_s: float
    ended_s: float = 0.0
    """By the monotonic clock."""
    outcome: str = ""
    """As the metrics call it, if the client can know."""
    fault: str = ""
    """What is wrong with it."""

    @property
    def is_counted(self) -> bool:
        """Whether the metrics must have it: under ``/v1`` the body has the deployment's name."""
        return self.ask.is_counted and not (self.manner == "stalled sender" and self.ask.path.startswith("/v1/"))


def choose_manner(chance: random.Random, ask: Ask) -> Manner:
    """One at random that goes with what is asked."""
    if ask.what in ("cancelled by id", "bad body"):
        return "plain"
    bad = ("slow sender", "stalled sender", "leaves sending", "leaves waiting", "leaves reading", "slow reader")
    weights = [5, 0.6, 4, 5, 5, 4]
    if len(ask.body) > 20_000 and ask.streams:
        return chance.choice(("plain", "slow reader", "stuck reader", "leaves reading"))
    return chance.choices(("plain", *bad), (100 - sum(weights), *weights))[0]


async def send(address: tuple[str, int], ask: Ask, manner: Manner, wait_s: float) -> Result:
    """Ask.

    Args:
        address: the server's.
        ask: what.
        manner: how.
        wait_s: how long one that ``leaves waiting`` waits.
    """
    result = Result(ask, manner, "hung", time.monotonic())
    pauses_s = {"slow sender": _SLOW_S, "stalled sender": CLIENT_TIMEOUT_S, "slow reader": _SLOW_S}.get(manner, 0)
    pauses_s += 2 * CLIENT_TIMEOUT_S if manner == "stuck reader" else 0
    connection = _Connection(address, small=manner.endswith("reader"))
    try:
        talk = _converse(connection, ask, manner, wait_s, address)
        reply = await asyncio.wait_for(talk, DEADLINE_S + GRACE_S + pauses_s)
        if reply is None:
            result.how = "left"
        else:
            result.how = "answered"
            _judge(result, reply)
    except asyncio.TimeoutError:
        result.fault = f"hung for {time.monotonic() - result.began_s:.1f} s"
    except (OSError, EOFError) as error:
        result.how = "broken"
        result.fault = f"the connection broke: {type(error).__name__}: {error}"
    except Exception as error:  # a request's boundary: what can't be read is a wrong answer
        result.how = "broken"
        result.fault = f"unreadable: {type(error).__name__}: {error}"
    finally:
        connection.abort()
    result.ended_s = time.monotonic()
    return result


def _judge(result: Result, reply: Reply) -> None:
    ask = result.ask
    result.outcome = reply.outcome
    may = {"client_error"} if result.manner == "stalled sender" else ask.may
    if reply.outcome and reply.outcome not in may | WHATEVER:
        result.fault = f"expected {' or '.join(sorted(may))}, got {reply.outcome}: {reply.status} {reply.message}"
    elif reply.outcome in ("ok", "") and result.manner != "stalled sender":
        result.fault = ask.check(reply)


async def _converse(
    connection: _Connection, ask: Ask, manner: Manner, wait_s: float, address: tuple[str, int]
) -> Reply | None:
    """Send and read; None: the client left."""
    await connection.open()
    half = len(ask.body) // 2
    connection.write(_head(ask))
    if manner == "slow sender":
        for begin, end in ((0, half), (half, len(ask.body) - 1), (len(ask.body) - 1, len(ask.body))):
            connection.write(ask.body[begin:end])
            await asyncio.sleep(_SLOW_S / 3)
    elif manner in ("stalled sender", "leaves sending"):
        connection.write(ask.body[:half])
    else:
        connection.write(ask.body)
    if manner.startswith("leaves") and manner != "leaves reading":
        await connection.drain()
        await asyncio.sleep(wait_s)
        return None
    reply = await connection.head()
    if manner == "leaves reading":
        await connection.body(reply, first_only=True)
        return None
    if manner.endswith("reader"):
        await asyncio.sleep(_SLOW_S if manner == "slow reader" else 2 * CLIENT_TIMEOUT_S)
    if ask.what == "cancelled by id" and reply.status == 200:
        await connection.body(reply, first_only=True)
        await _cancel(address, (ask.headers or {})["X-Request-Id"])
    await connection.body(reply)
    reply.take_events()
    return reply


async def _cancel(address: tuple[str, int], request_id: str) -> None:
    """Cancel a request by its id; it may have ended."""
    connection = _Connection(address)
    with contextlib.suppress(OSError, EOFError):  # that worker may be the next that is killed
        await connection.open()
        connection.write(
            f"POST /v2/requests/{request_id}/cancel HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n"
            "Connection: close\r\n\r\n".encode()
        )
        await connection.body(await connection.head())
    connection.abort()


def _head(ask: Ask) -> bytes:
    # Without `Connection: close`, as clients do: a server that answers before the body is there (503) and closes then
    # may take its answer back, since TCP resets a connection on which more comes.
    headers = {
        "Host": "test",
        "Content-Type": "application/json",
        "Content-Length": str(len(ask.body)),
        **(ask.headers or {}),
    }
    lines = [f"POST {ask.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


class _Connection:
    """HTTP over one TCP connection.

    Args:
        address: the server's.
        small: whether its buffers are, so that the server notices that nobody reads.
    """

    def __init__(self, address: tuple[str, int], *, small: bool = False) -> None:
        self._address = address
        self._small = small
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Connect."""
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            made.setblocking(False)
            if self._small:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BYTES)
            await asyncio.get_running_loop().sock_connect(made, self._address)
            limit = _SMALL_BYTES if self._small else 2**16
            self._reader, self._writer = await asyncio.open_connection(sock=made, limit=limit)
        except BaseException:
            made.close()
            raise

    def abort(self) -> None:
        """Leave, whatever is under way."""
        if self._writer is not None:
            self._writer.transport.abort()

    def write(self, data: bytes) -> None:
        """Send, without waiting."""
        assert self._writer is not None
        self._writer.write(data)

    async def drain(self) -> None:
        """Wait until it is sent."""
        assert self._writer is not None
        await self._writer.drain()

    async def head(self) -> Reply:
        """The beginning of an answer.

        Raises:
            EOFError: the connection has ended.
        """
        status = (await self._line()).split(" ", 2)[1]
        headers = {}
        while line := await self._line():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        return Reply(int(status), headers)

    async def body(self, reply: Reply, *, first_only: bool = False) -> None:
        """Read what follows, or of an answer in chunks the first of them.

        Raises:
            EOFError: the connection has ended.
        """
        if "content-length" in reply.headers:
            reply.body += await self._reader.readexactly(int(reply.headers["content-length"]))
            return
        while size := int(await self._line(), 16):
            reply.body += await self._reader.readexactly(size)
            await self._reader.readexactly(2)
            if first_only:
                return

    async def _line(self) -> str:
        line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError("in a line")
        return line.decode().rstrip("\r\n")
