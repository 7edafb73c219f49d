"""The interface of a replica, on this machine or on another machine, as replica sets use it."""

from __future__ import annotations

import asyncio
from typing import Protocol

from headwater.signature import Signature
from headwater_server.control.routing import ReplicaRoute
from headwater_server.process.proc import GroupUse

__all__ = ["ReplicaHandle"]


class ReplicaHandle(Protocol):
    """A replica, from its launch to its end."""

    id: str
    device: str
    """The device that it was placed on; `facts` has the device that ``auto`` became."""
    adapters: dict[str, str]
    """Folders of its LoRA adapters by name, as the configuration has them: the adapters that it is started with,
    changed later by `headwater_server.supervisor.adapters.fit`."""
    signature: Signature | None
    """None until it is ready."""
    facts: dict[str, str]
    """See `headwater.wire.handshake.ReplicaStatus.facts`; empty until it is ready."""
    batch_limit: int
    """Maximum number of rows, or sequences, that fit in its device's memory at once; 0: no limit is known."""
    reason: str
    """Why it failed or ended, for operators; empty while no reason is known."""
    is_permanent: bool
    """Whether another start would fail in the same way."""
    is_shortage: bool
    """Whether its start failed because the machine lacked a resource."""
    ready: asyncio.Future[bool]
    """True once the replica is ready; False if it ends before that."""
    ending: asyncio.Event
    """Set as soon as the replica can no longer be used."""
    exited: asyncio.Future[None]
    """Done when the replica is no longer followed: its processes have ended, or could not be ended or reached in time;
    see `remains`."""

    @property
    def group(self) -> int:
        """The process group of its host; 0 before the host has started, or if an agent runs the replica."""
        ...

    @property
    def is_reachable(self) -> bool:
        """Whether requests reach it: a replica on another machine may be out of reach for a while."""
        ...

    @property
    def is_cut_off(self) -> bool:
        """Whether its folder or socket on this machine is missing although the replica has not ended."""
        ...

    @property
    def has_place(self) -> bool:
        """Whether it has been placed on a machine. A replica that ends before that does not count as a failed start."""
        ...

    @property
    def is_lost_with_node(self) -> bool:
        """Whether its machine, or the connection to the machine, was lost rather than the replica itself. Of use only
        once the replica has ended."""
        ...

    async def wait_for_place(self, timeout_s: float) -> None:
        """Wait until the replica is placed or has ended, for ``timeout_s`` at most."""
        ...

    def stop(self) -> None:
        """Ask for an orderly end: the callable's `unload()` runs first, for a limited time. Before the replica is ready
        it ends at once."""
        ...

    def kill(self) -> None:
        """End the replica at once."""
        ...

    def account(self) -> str:
        """The reason, and the last lines of its log unless the replica itself gave the reason. For operators; empty if
        neither is known."""
        ...

    def cause(self) -> str:
        """Why it failed, in words for clients: class and message of the exception, if there was an exception. Never
        empty."""
        ...

    def route(self) -> ReplicaRoute:
        """How gateway workers reach it. To be called only once it is ready."""
        ...

    async def use(self) -> GroupUse:
        """Threads, memory and GPU time that its processes use now; zeros if no process runs.

        Raises:
            OSError: the use can't be measured.
        """
        ...

    async def remains(self) -> list[str]:
        """Descriptions of everything that is left of the replica after its end; empty: nothing is left. Takes some
        seconds at most."""
        ...

    async def ask_vllm(self, url: str, body: str, timeout_s: float) -> tuple[int, bytes]:
        """POST JSON to the path ``url`` of vLLM. Returns the status and body of the answer.

        Raises:
            OSError: vLLM can't be reached, or didn't answer in time.
            http.client.HTTPException: vLLM's answer is incomplete or invalid.
        """
        ...
