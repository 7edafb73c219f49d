"""The supervisor: starts, watches and replaces replicas and gateway workers; holds no tensor."""

from __future__ import annotations

from collections.abc import Callable

from app.config.schema import Config
from app.control.server import ControlServer
from app.supervisor.front import Front
from app.supervisor.host import Host
from app.supervisor.orchestrator import Orchestrator
from app.supervisor.replica_memory import ReplicaMemory
from inference.signature import Signature

__all__ = ["Supervisor"]


class Supervisor(Front):
    """Runs a configuration on this machine until a signal stops it.

    Args:
        config: what to serve.
        user_paths: put first on every replica's ``sys.path``.
        on_serving: see `Front`.
    """

    def __init__(
        self,
        config: Config,
        user_paths: tuple[str, ...],
        on_serving: Callable[[str, list[tuple[str, Signature | None, str]]], None],
    ) -> None:
        control = ControlServer(lambda command: self.orchestrator.answer(command))
        host = Host(ReplicaMemory.of(config.server), user_paths, control.drain, lambda: self.on_change())
        self.orchestrator = Orchestrator(config, host, control, lambda shares: self.observer.see_utilization(shares))
        super().__init__(config, on_serving, control, host, self.orchestrator)
