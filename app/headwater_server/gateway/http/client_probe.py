"""Notices whether a client that has ended its input is still there."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import Final

from headwater_server.gateway.http.exchange import Exchange

__all__ = ["ClientProbe"]

_FIRST_PROBE_S: Final = 0.25
"""Seconds from the end of a client's input to the first probe of whether the client is there. Each further wait is
twice as long."""

_RESET_AFTER_S: Final = 0.05
"""Seconds from a probe to the check of whether the client has answered with a reset."""


class ClientProbe:
    """Probes a client from the end of its input on, and aborts the connection once the client has reset it.

    Args:
        transport: the connection.
        running: returns the request that the application handles, if any.
    """

    def __init__(self, transport: asyncio.Transport, running: Callable[[], Exchange | None]) -> None:
        self._transport = transport
        self._running = running
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(_FIRST_PROBE_S, self._probe, _FIRST_PROBE_S)

    def cancel(self) -> None:
        """Stop probing."""
        self._timer.cancel()

    def _probe(self, waited_s: float) -> None:
        """Send a probe; send another after twice ``waited_s``."""
        if not self._has_left() and (running := self._running()) is not None:
            running.probe()
            self._timer = self._loop.call_later(_RESET_AFTER_S, self._probe_later, 2 * waited_s)

    def _probe_later(self, wait_s: float) -> None:
        if not self._has_left():
            self._timer = self._loop.call_later(wait_s, self._probe, wait_s)

    def _has_left(self) -> bool:
        """End the connection if the client has reset it. Returns whether the client has."""
        if is_reset := _is_reset(self._transport):
            self._transport.abort()
        return is_reset


def _is_reset(transport: asyncio.Transport) -> bool:
    """Whether the other side has ended both directions, according to the kernel."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), 0)
    return bool(poll.poll(0))
