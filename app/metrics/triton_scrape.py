"""What the replicas' Tritons say of themselves, asked all at once and for a bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:  # imported by the first scrape: a worker that is never scraped doesn't pay for it
    import httpx

__all__ = ["TritonAnswer", "TritonTarget", "ask_tritons"]

ASK_TIMEOUT_S: Final = 1.0
"""For all of them together."""
SIZE_LIMIT_BYTES: Final = 1024 * 1024


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
    clients = await asyncio.to_thread(_clients, targets)
    tasks = [asyncio.create_task(_ask(client)) for client in clients]
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


def _clients(targets: Sequence[TritonTarget]) -> list[httpx.AsyncClient]:
    """One for each; takes a while the first time, so not on the event loop."""
    import httpx

    return [
        httpx.AsyncClient(
            base_url="http://replica",
            transport=httpx.AsyncHTTPTransport(verify=False, uds=str(Path(target.http_socket).with_name("m"))),
            trust_env=False,
        )
        for target in targets
    ]


async def _ask(client: httpx.AsyncClient) -> str:
    """The metrics of one Triton.

    Raises:
        httpx.HTTPError: it isn't there, or answers something else.
        ValueError: it says too much, or no text.
    """
    async with client, client.stream("GET", "/metrics") as response:
        response.raise_for_status()
        text = bytearray()
        async for part in response.aiter_bytes():
            text += part
            if len(text) > SIZE_LIMIT_BYTES:
                raise ValueError(f"expected at most {SIZE_LIMIT_BYTES} bytes, got more")
        return text.decode()
