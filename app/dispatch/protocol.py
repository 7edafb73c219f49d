"""Waits until nothing of a deployment is in flight in a gateway worker, and ends what takes too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final, Protocol

from app.control.messages import Drained
from app.errors import HeadwaterError

__all__ = ["Drainable", "Fail", "drain"]

POLL_S: Final = 0.02

Fail = Callable[[HeadwaterError], None]
"""Ends one request with an error."""


class Drainable(Protocol):
    """A dispatcher."""

    def under_way(self, replicas: Collection[str] | None) -> list[Fail]:
        """Of each request that isn't answered yet, what ends it.

        Args:
            replicas: ids; only what these have. None: everything, what waits in a queue included.
        """
        ...


async def drain(
    dispatcher: Drainable, replicas: Collection[str] | None, timeout_s: float, error: HeadwaterError
) -> Drained:
    """Wait until what is in flight is answered; after ``timeout_s`` end the rest with this error."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    before = len(dispatcher.under_way(replicas))
    while (left := dispatcher.under_way(replicas)) and loop.time() < deadline_s:  # noqa: ASYNC110 - only at an unload
        await asyncio.sleep(POLL_S)
    for fail in left:
        fail(error.again())
    return Drained(max(0, before - len(left)), len(left))
