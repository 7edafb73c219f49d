"""The supervisor: starts, watches and replaces replicas and gateway workers; holds no tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from headwater.errors import Problem
from headwater.signature import Signature
from headwater_server.config.schema import Config
from headwater_server.control.control_server import ControlServer
from headwater_server.control.load import together
from headwater_server.control.messages import ReplicaLoss
from headwater_server.control.routing import DeploymentRoute, State
from headwater_server.supervisor import preflight
from headwater_server.supervisor.autoscaler import Autoscaler
from headwater_server.supervisor.canary import Canaries
from headwater_server.supervisor.child_processes import ChildProcesses, until
from headwater_server.supervisor.deployments import Deployments
from headwater_server.supervisor.front import Front
from headwater_server.supervisor.handle import ReplicaHandle
from headwater_server.supervisor.lifecycle import Lifecycle
from headwater_server.supervisor.memory_budget import ReplicaMemory
from headwater_server.supervisor.preloaded import Preloads
from headwater_server.supervisor.reloader import Reloader
from headwater_server.supervisor.slot import REPLICA_END_TIMEOUT_S
from headwater_server.supervisor.states import VersionsState
from headwater_server.telemetry.observer import ReplicaView

__all__ = ["Orchestrator", "Supervisor"]

OUT_OF_ORDER: Final = 2
"""A replica that a worker loses this many times in a row, without an answer in between, is ended. The worker waits
before it retries a lost replica (`headwater_server.dispatch.pool.LOST_RETRY_S`); a replica that did end is gone by
then."""


class Orchestrator:
    """Runs a configuration's deployments.

    Args:
        config: the configuration to serve.
        children: starts replicas.
        control: has the gateway workers' loads and tallies.
        on_utilization: see `Autoscaler`.
        read: reads the configuration again, to reload changed deployments; None: nothing is watched.
        config_file: the file that the configuration is read from, if any.
    """

    def __init__(
        self,
        config: Config,
        children: ChildProcesses,
        control: ControlServer,
        on_utilization: Callable[[Mapping[str, float]], None] = lambda shares: None,
        read: Callable[[], Config] | None = None,
        config_file: Path | None = None,
    ) -> None:
        self._preloads = Preloads(children)
        self.deployments = Deployments(config, children, self._preloads)
        self._config = config
        self.sets = self.deployments.sets
        self._composites = self.deployments.composites
        self._children = children
        self.lifecycle = Lifecycle(self.deployments, children)
        self._autoscaler = Autoscaler(
            self.sets, lambda: together(control.loads()), self.lifecycle.is_busy, children, on_utilization
        )
        self._canaries = Canaries(self.deployments, lambda: control.tallies, self.lifecycle.is_busy, children)
        self._reloader = (
            None if read is None else Reloader(read, config_file, self.deployments, self.lifecycle, children)
        )

    async def prepare(self) -> None:
        """See `headwater_server.supervisor.front.Backend`. Returns at once, since the routes are known. Starts the
        processes that fork replicas; the first starts of replicas wait for these processes."""
        self._preloads.start(self._config.all_deployments().values())

    def start(self, running: Mapping[str, Collection[ReplicaHandle]] | None = None) -> None:
        """Start all wanted replicas, and keep them running.

        Args:
            running: replicas that serve already, by deployment.
        """
        for name, replicas in self.sets.items():
            if not replicas.is_set_aside:
                replicas.start((running or {}).get(name, ()))
        self._children.spawn(self._autoscaler.run())
        if self._reloader is not None:
            self._children.spawn(self._reloader.run())
        self._children.spawn(self._canaries.run())

    async def end(self, is_hurried: Callable[[], bool]) -> None:
        """Stop all replicas. Replicas that take too long are killed; all are killed at once if ``is_hurried`` returns
        true."""
        replicas = self._children.replicas
        for replica in replicas.values():
            replica.stop()
        await until(lambda: is_hurried() or not replicas, REPLICA_END_TIMEOUT_S)
        for replica in replicas.values():
            replica.kill()

    def note_loss(self, loss: ReplicaLoss) -> None:
        """Pass the report to `Crashes.note`; a report on an unknown deployment is ignored."""
        if (replicas := self.sets.get(loss.model)) is not None:
            replicas.crashes.note(loss, replicas.config.max_crashes)

    @property
    def is_decided(self) -> bool:
        """See `ReplicaSet.is_decided`: whether it holds for every deployment with replicas."""
        return all(replica_set.is_decided for replica_set in self.sets.values())

    @property
    def failure(self) -> str:
        """Why no deployment serves any more: all have FAILED by themselves. Empty while a deployment serves or may
        still start; always empty if files are watched, since a changed file may repair a deployment."""
        if self._reloader is not None or not all(map(self._has_given_up, self.deployments.config.deployments)):
            return ""
        served = [self.deployments.served(name) for name in self.deployments.config.deployments]
        return "; ".join(f"{model.name}: {model.failure or model.reason}" for model in served)

    def replica_views(self) -> list[ReplicaView]:
        """All replicas that have not ended."""
        return [
            ReplicaView(replica.id.rpartition("-")[0], replica.id, replica.group, replica.batch_limit)
            for replica in self._children.replicas.values()
        ]

    def problems(self) -> Iterable[Problem]:
        """Problems of this machine that prevent replicas of the server's configuration from running."""
        deployments = self._config.all_deployments().values()
        # Without shared memory Triton would end with a mere bus error.
        return [*preflight.region_problems(deployments), *preflight.temporary_folder_problems(deployments)]

    def warnings(self) -> Iterable[Problem]:
        """Shortcomings of this machine that don't prevent replicas from running."""
        signatures = {
            name: replica_set.signature for name, replica_set in self.sets.items() if replica_set.signature is not None
        }
        return preflight.shared_memory_warnings(self._config.all_deployments(), signatures)

    def routes(self, workers: int) -> list[DeploymentRoute]:
        """The routes of all deployments, as each of ``workers`` gateway workers gets them. Steps follow their
        pipelines, and versions their deployments."""
        sets = {name: replicas.route(workers) for name, replicas in self.sets.items()}
        for composite in self._composites.values():
            composite.update(sets)
        routes = [*sets.values(), *(composite.route(workers) for composite in self._composites.values())]
        order = {name: index for index, name in enumerate(self.deployments.config.deployments)}
        return sorted(routes, key=lambda route: (order[route.part_of or route.name], route.part_of is not None))

    def _has_given_up(self, name: str) -> bool:
        """Whether a deployment has FAILED by itself, is not tried again, and no operator's command is about to change
        that."""
        if self.lifecycle.is_busy(name):
            return False
        composite = self._composites.get(name)
        if composite is None:
            return self.sets[name].has_given_up
        parts = [self.sets[part] for part in composite.deployments.values()]
        if isinstance(composite, VersionsState):
            return composite.is_loaded and all(replica_set.has_given_up for replica_set in parts)
        by_command = not composite.is_loaded or any(
            replica_set.state is State.FAILED and not replica_set.has_given_up for replica_set in parts
        )
        return composite.state is State.FAILED and not by_command


class Supervisor(Front):
    """Runs a configuration on this machine; see `Front`.

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
        control = ControlServer(lambda command: self.orchestrator.lifecycle.answer(command), on_lost=self._note_loss)
        children = ChildProcesses(ReplicaMemory.of(config.server), user_paths, control.drain, lambda: self.on_change())
        self.orchestrator = Orchestrator(
            config, children, control, lambda shares: self.observer.see_utilization(shares), read, config_file
        )
        super().__init__(config, on_serving, control, children, self.orchestrator)

    def _note_loss(self, loss: ReplicaLoss) -> None:
        """Note a worker's loss of a replica. A replica that the worker loses `OUT_OF_ORDER` times in a row is ended, if
        it still runs."""
        self.orchestrator.note_loss(loss)
        replica = self._children.replicas.get(loss.replica)
        if loss.times >= OUT_OF_ORDER and replica is not None and not replica.ending.is_set():
            replica.reason = f"a gateway worker lost it {loss.times} times in a row, although it ran"
            replica.kill()
