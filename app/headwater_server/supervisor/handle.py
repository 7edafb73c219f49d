"""What a replica set needs of a replica, on this machine or on another one."""

from __future__ import annotations

import asyncio
from typing import Protocol

from headwater.signature import Signature
from headwater_server.control.routing import ReplicaRoute
from headwater_server.process.proc import GroupUse

__all__ = ["ReplicaHandle"]


class ReplicaHandle(Protocol):
    """One replica, from its launch to its end."""

    id: str
    device: str
    """The device that it was placed on; see `facts` for what ``auto`` became."""
    adapters: dict[str, str]
    """Folders of the LoRA adapters that it has once it is ready, by name; see
    `headwater_server.supervisor.adapters.fit`."""
    signature: Signature | None
    facts: dict[str, str]
    batch_limit: int
    """The most rows, or sequences, that fit in its device's memory at once; 0: no limit is known."""
    reason: str
    """Why it failed or ended, as far as known."""
    is_permanent: bool
    """Whether another start would fail in the same way."""
    is_shortage: bool
    """Whether its start failed because the machine lacked something."""
    ready: asyncio.Future[bool]
    """True once it serves; False if it ends before."""
    ending: asyncio.Event
    """Set as soon as it can no longer be used."""
    exited: asyncio.Future[None]
    """Done when nothing of it runs any more."""

    @property
    def group(self) -> int:
        """The process group of its host; 0: there is none yet, or none on this machine."""
        ...

    @property
    def is_reachable(self) -> bool:
        """Whether requests reach it: a replica on another machine may be out of reach for a while."""
        ...

    @property
    def is_cut_off(self) -> bool:
        """Whether its folder or its socket in it is missing, on this machine, although it has not ended."""
        ...

    @property
    def has_place(self) -> bool:
        """Whether it has been placed on a machine; until then no start has failed, if it ends."""
        ...

    @property
    def is_lost_with_node(self) -> bool:
        """Whether its machine was lost, or the way there, rather than the replica itself."""
        ...

    async def wait_for_place(self, timeout_s: float) -> None:
        """Wait until it has a place, it has ended, or the time is over."""
        ...

    def stop(self) -> None:
        """Ask for an orderly end: the callable's `unload()` runs first."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    def account(self) -> str:
        """The reason; with the last lines of its log, unless the replica itself gave the reason."""
        ...

    def cause(self) -> str:
        """Why it failed, in the words for clients: class and message of the error, if it was one."""
        ...

    def route(self) -> ReplicaRoute:
        """How gateway workers reach it."""
        ...

    async def use(self) -> GroupUse:
        """What its processes use now.

        Raises:
            OSError: that can't be measured.
        """
        ...

    async def remains(self) -> list[str]:
        """What is left of it, in words, some seconds after its end at most."""
        ...

    async def ask_vllm(self, url: str, body: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of vLLM's answer to a POST of JSON.

        Raises:
            OSError: it didn't answer in time.
            http.client.HTTPException: likewise.
        """
        ...
