"""What the replicas' Tritons say of themselves, asked all at once and for a bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["TritonAnswer", "TritonTarget", "ask_tritons"]

logger = logging.getLogger("headwater.metrics")

ASK_TIMEOUT_S: Final = 1.0
"""For all of them together."""
SIZE_LIMIT_BYTES: Final = 1024 * 1024
_REQUEST: Final = b"GET /metrics HTTP/1.1\r\nHost: replica\r\nConnection: close\r\n\r\n"


class TritonTarget(NamedTuple):
    """One replica."""

    deployment: str
    replica: str
    http_socket: str
    """Of its Triton; that for metrics lies beside it."""


class TritonAnswer(NamedTuple):
    """What came of asking one."""

    target: TritonTarget
    text: str | None
    """None: nothing, within the time."""


async def ask_tritons(targets: Sequence[TritonTarget], timeout_s: float = ASK_TIMEOUT_S) -> list[TritonAnswer]:
    """Ask all of them, and leave out who doesn't answer in time: it may have stopped, or be on its way out."""
    if not targets:
        return []
    tasks = [asyncio.create_task(_ask(Path(target.http_socket).with_name("m"))) for target in targets]
    try:
        await asyncio.wait(tasks, timeout=timeout_s)
    finally:
        for task in tasks:
            task.cancel()
    texts = await asyncio.gather(*tasks, return_exceptions=True)
    return [
        TritonAnswer(target, text if isinstance(text, str) else None)
        for target, text in zip(targets, texts, strict=True)
    ]


async def _ask(path: Path) -> str:
    """The metrics of one Triton.

    Raises:
        OSError: it isn't there.
        ValueError: it says something else.
    """
    reader, writer = await asyncio.open_unix_connection(path, limit=SIZE_LIMIT_BYTES)
    try:
        writer.write(_REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise ValueError(f"expected status 200, got {head[:40]!r}")
        lines = (line.partition(b":") for line in head.split(b"\r\n")[1:])
        fields = {name.strip().lower(): value.strip() for name, _, value in lines}
        size = int(fields[b"content-length"])
        if size > SIZE_LIMIT_BYTES:
            raise ValueError(f"expected at most {SIZE_LIMIT_BYTES} bytes, got {size}")
        return (await reader.readexactly(size)).decode()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
