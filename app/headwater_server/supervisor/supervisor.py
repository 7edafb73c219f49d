"""The supervisor: starts, watches and replaces replicas and gateway workers; holds no tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from headwater.signature import Signature
from headwater_server.config.schema import Config
from headwater_server.control.control_server import ControlServer
from headwater_server.control.messages import ReplicaLoss
from headwater_server.supervisor.front import Front
from headwater_server.supervisor.host import Host
from headwater_server.supervisor.orchestrator import Orchestrator
from headwater_server.supervisor.preloaded import Preloads
from headwater_server.supervisor.replica_memory import ReplicaMemory

__all__ = ["Supervisor"]

OUT_OF_ORDER: Final = 2
"""A replica that a worker loses this many times in a row, without an answer in between, is ended. The worker waits
before it retries a lost replica (`headwater_server.dispatch.pool.LOST_RETRY_S`); a replica that did end is gone by
then."""


class Supervisor(Front):
    """Runs a configuration on this machine until a signal stops it.

    Args:
        config: the configuration to serve.
        user_paths: folders of the user's modules, for every replica's ``sys.path``.
        on_serving: see `Front`.
        read: reads the configuration again, to reload changed deployments; None: nothing is watched.
        config_file: the file that the configuration is read from, if any.
    """

    def __init__(
        self,
        config: Config,
        user_paths: tuple[str, ...],
        on_serving: Callable[[str, list[tuple[str, Signature | None, str]]], None],
        read: Callable[[], Config] | None = None,
        config_file: Path | None = None,
    ) -> None:
        control = ControlServer(lambda command: self.orchestrator.answer(command), on_lost=self._note_loss)
        host = Host(ReplicaMemory.of(config.server), user_paths, control.drain, lambda: self.on_change())
        self.orchestrator = Orchestrator(
            config, host, control, lambda shares: self.observer.see_utilization(shares), read, config_file
        )
        super().__init__(config, on_serving, control, host, self.orchestrator)

    def _note_loss(self, loss: ReplicaLoss) -> None:
        """Note that a worker lost a replica. If a replica is lost again while it still runs, it is out of order and is
        ended."""
        self.orchestrator.note_loss(loss)
        replica = self._host.replicas.get(loss.replica)
        if loss.times >= OUT_OF_ORDER and replica is not None and not replica.ending.is_set():
            replica.reason = f"a gateway worker lost it {loss.times} times in a row, although it ran"
            replica.kill()

    async def run(self) -> int:
        """See `Front`."""
        self._host.forks = Preloads(self._host, self._config.all_deployments().values())
        return await super().run()
