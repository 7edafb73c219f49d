"""A connection from the supervisor or a gateway to an agent. If it breaks, it is opened again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import msgspec

from headwater_server.cluster.agent_messages import (
    AGENT,
    BEAT_S,
    Adapters,
    AgentHello,
    AgentState,
    Ask,
    Beat,
    Order,
    Said,
    encode,
)
from headwater_server.cluster.dial import connected, within
from headwater_server.security.peer_tls import PeerTls
from headwater_server.transport.address import CONNECT_TIMEOUT_S, TOKEN_HEADER

__all__ = ["AgentLink"]

logger = logging.getLogger("headwater")

MISSED_BEATS: Final = 3
"""An agent is out of reach after a silence of this many times `BEAT_S`."""
RETRY_S: Final = 0.5
REFUSALS: Final = 2
"""Number of refused connections in a row after which a supervisor takes the agent for ended. A gateway keeps trying:
its network may refuse a connection although the agent runs."""


class AgentLink:
    """Listens to an agent, and for a supervisor gives it orders. Everything happens in one event loop.

    Args:
        address: the replica's port.
        token: the replica's token.
        epoch: the supervisor's epoch; 0: a gateway, which only listens.
        tls: the cluster's TLS; None: plain text.
        order_token: the token that allows the supervisor to give orders; see `AgentHello.token`.
        on_state: called with each state.
        on_beat: called with each sign of life.
        on_open: called each time a connection is open, so that orders can be given.
        on_reach: called with False when the agent gets out of reach, and with True when it is in reach again. At first
            it counts as in reach.
    """

    def __init__(
        self,
        address: str,
        token: str,
        epoch: int,
        tls: PeerTls | None,
        *,
        order_token: str = "",
        on_state: Callable[[AgentState], None] = lambda state: None,
        on_beat: Callable[[Beat], None] = lambda beat: None,
        on_open: Callable[[], None] = lambda: None,
        on_reach: Callable[[bool], None] = lambda is_reachable: None,
    ) -> None:
        self.has_ended = False
        """Whether the agent has ended: nobody listens at its port. Never with epoch 0."""
        self._address = address
        self._token = token
        self._epoch = epoch
        self._order_token = order_token
        self._tls = tls
        self._on_state = on_state
        self._on_beat = on_beat
        self._on_open = on_open
        self._on_reach = on_reach
        self._is_reachable = True
        self._refusals = 0
        self._writer: asyncio.StreamWriter | None = None
        self._asked: dict[int, asyncio.Future[Said]] = {}
        self._number = 0

    async def run(self) -> None:
        """Listen until cancelled, or until the agent has ended."""
        while not self.has_ended:
            try:
                await self._talk()
            except ConnectionRefusedError:
                self._refusals += 1
                # A gateway keeps trying: the supervisor's routing table says when the replica is gone.
                self.has_ended = self._refusals >= REFUSALS and self._epoch > 0
            except (OSError, EOFError, asyncio.TimeoutError, ValueError, msgspec.MsgspecError) as error:
                logger.debug("%s: %s", self._address, error)
                self._refusals = 0
            finally:
                self._writer = None
                for future in self._asked.values():
                    if not future.done():
                        future.set_exception(ConnectionError("its node can't be reached"))
            self._note_reach(False)
            if not self.has_ended:
                await asyncio.sleep(RETRY_S)

    def tell(self, message: Order | Adapters) -> None:
        """Send a message to the agent; without a connection it is dropped."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode(message))

    async def ask_vllm(self, url: str, body: str, timeout_s: float) -> tuple[int, bytes]:
        """See `ReplicaHandle.ask_vllm`."""
        if self._writer is None:
            raise ConnectionError("its node can't be reached")
        number = self._number = self._number + 1
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self._writer.write(encode(Ask(number, url, body, timeout_s)))
        try:
            said = await asyncio.wait_for(future, timeout_s + CONNECT_TIMEOUT_S)
        except asyncio.TimeoutError as error:
            raise ConnectionError(f"no answer within {timeout_s:g} s") from error
        finally:
            del self._asked[number]
        if not said.status:
            raise ConnectionError(said.text)
        return said.status, said.text.encode()

    async def _talk(self) -> None:
        async with connected(self._address, self._tls) as (reader, writer):
            writer.write(f"GET /control HTTP/1.1\r\nHost: replica\r\n{TOKEN_HEADER}: {self._token}\r\n\r\n".encode())
            head = await within(CONNECT_TIMEOUT_S, reader.readuntil(b"\r\n\r\n"))
            if b" 101 " not in head.partition(b"\r\n")[0]:
                raise ValueError(f"expected 101, got {head[:80]!r}")
            writer.write(encode(AgentHello(self._epoch, self._order_token)))
            self._writer, self._refusals = writer, 0
            self._on_open()
            while True:
                try:
                    line = await within(MISSED_BEATS * BEAT_S, reader.readline())
                except asyncio.TimeoutError:
                    self._note_reach(False)
                    continue
                if not line:
                    raise EOFError("closed")
                self._note_reach(True)
                self._take(AGENT.decode(line))

    def _take(self, message: AgentState | Beat | Said) -> None:
        if isinstance(message, Said):
            future = self._asked.get(message.number)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, Beat):
            self._on_beat(message)
        else:
            self._on_state(message)

    def _note_reach(self, is_reachable: bool) -> None:
        if is_reachable is not self._is_reachable:
            self._is_reachable = is_reachable
            self._on_reach(is_reachable)
