"""Publishes the supervisor's metrics of deployments, replicas and gateway workers: workers read them for scrapes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from headwater_server.control.routing import DeploymentRoute, State
from headwater_server.process.proc import GroupUse, group_uses
from headwater_server.telemetry.catalogue import CATALOGUE
from headwater_server.telemetry.ledger import Ledger
from headwater_server.telemetry.logs import count_dropped_lines
from headwater_server.telemetry.model_counts import ModelCounts
from headwater_server.telemetry.recorder import recorder, use
from headwater_server.telemetry.store import SeriesKey

__all__ = ["DeploymentView", "Observer", "ReplicaView", "deployment_view"]

logger = logging.getLogger("headwater")

MEASURE_EVERY_S: Final = 5.0


class DeploymentView(NamedTuple):
    """A deployment's state, the number of its ready replicas, and the number of replicas that it should have."""

    name: str
    state: State
    ready: int = 0
    wanted: int = 0


class ReplicaView(NamedTuple):
    """A replica that has not ended."""

    deployment: str
    id: str
    group: int
    """The replica's process group; 0: its processes have not started."""
    batch_limit: int = 0
    """The most rows, or sequences, that the replica computes at once since its device ran out of memory; 0: as many as
    configured."""
    use: GroupUse | None = None
    """Threads, memory and GPU use of the replica's processes, as another machine measured them. None: they are measured
    here, by ``group``."""


class Observer:
    """Counts changes of state, and publishes the current state of deployments and replicas.

    Args:
        folder: the folder for the files, which is created here; None: metrics are off, and counts stay in memory.

    Raises:
        OSError: the folder can't be created.
    """

    def __init__(self, folder: Path | None) -> None:
        self._ledger = Ledger(folder) if folder is not None else None
        if self._ledger is not None:
            use(self._ledger.store)
            count_dropped_lines(self._ledger.store)
        self.model_counts = ModelCounts(folder)
        """The files of the models' custom metrics."""
        self._workers: dict[int, Path] = {}
        self._states: dict[str, State] = {}
        self._deployments: dict[SeriesKey, int] = {}
        self._utilization: dict[SeriesKey, int] = {}
        self._replicas: dict[SeriesKey, int] = {}

    def restore(self) -> None:
        """Create removed files again; see `Ledger.restore`. Does nothing if metrics are off.

        Raises:
            OSError: a file can't be created.
        """
        if self._ledger is not None:
            self._ledger.restore()
            self.model_counts.restore()
            use(self._ledger.store)
            count_dropped_lines(self._ledger.store)
            self._write()

    @property
    def is_damaged(self) -> bool:
        """Whether the supervisor's file was removed; False if metrics are off."""
        return self._ledger is not None and self._ledger.is_damaged

    def has_file(self, index: int) -> bool:
        """False if the counts file of the gateway worker with this index was removed; else True."""
        path = self._workers.get(index)
        return path is None or path.exists()

    def start_worker(self, index: int) -> str:
        """Prepare for a new gateway worker with this index. Returns the path of its counts file; empty if metrics are
        off.

        Raises:
            OSError: the file can't be created.
        """
        self.end_worker(index)  # an earlier worker with this index may have failed to start
        if self._ledger is None:
            return ""
        path = self._workers[index] = self._ledger.add_worker(index)
        return str(path)

    def end_worker(self, index: int) -> None:
        """Keep the counts of the gateway worker with this index, which has ended. Without such a worker, do nothing."""
        path = self._workers.pop(index, None)
        if self._ledger is None or path is None:
            return
        if lost := self._ledger.end_worker(path):
            logger.error("gateway worker %d ended with %d requests in flight, which are lost", index, lost)

    def see_deployments(self, views: Iterable[DeploymentView]) -> None:
        """Update the metrics of all deployments after a deployment has changed. Each state change is counted once."""
        values: dict[SeriesKey, int] = {}
        states: dict[str, State] = {}
        for view in views:
            before = self._states.get(view.name, view.state)
            if view.state is not before:
                labels = view.name, before.value, view.state.value
                recorder().count("headwater_deployment_state_transitions", *labels)
            states[view.name] = view.state
            for state in State:
                values[SeriesKey("headwater_deployment_state", (view.name, state.value))] = int(state is view.state)
            values[SeriesKey("headwater_replicas_ready", (view.name,))] = view.ready
            values[SeriesKey("headwater_replicas_wanted", (view.name,))] = view.wanted
        self._states = states
        if values != self._deployments:
            self._deployments = values
            self._write()

    def see_utilization(self, shares: Mapping[str, float]) -> None:
        """Update each deployment's utilization: the share of its replicas' capacity in use, 0 to 1."""
        values = dict(_share("headwater_utilization", (name,), share) for name, share in shares.items())
        if values != self._utilization:
            self._utilization = values
            self._write()

    def see_replicas(self, views: Iterable[ReplicaView]) -> None:
        """Measure the threads, memory and GPU use of all replicas with processes. Takes a millisecond or more. The
        values are published with the next update of any other metric, or by `watch`."""
        replicas = [view for view in views if view.group or view.use is not None]
        uses = group_uses({view.group for view in replicas if view.use is None})
        values: dict[SeriesKey, int] = {}
        for view in replicas:
            used = view.use or uses[view.group]
            labels = view.deployment, view.id
            values[SeriesKey("headwater_replica_threads", labels)] = used.threads
            values[SeriesKey("headwater_replica_resident_memory_bytes", labels)] = used.resident_bytes
            values[SeriesKey("headwater_replica_batch_limit", labels)] = view.batch_limit
            if used.gpu_bytes is not None:
                values[SeriesKey("headwater_replica_gpu_memory_bytes", labels)] = used.gpu_bytes
                values.update([_share("headwater_replica_gpu_utilization", labels, used.gpu_utilization)])
        self._replicas = values

    async def watch(self, replicas: Callable[[], Iterable[ReplicaView]]) -> None:
        """Measure the replicas every `MEASURE_EVERY_S` seconds, forever; return at once if metrics are off."""
        while self._ledger is not None:
            try:
                await asyncio.to_thread(self.see_replicas, list(replicas()))
            except (OSError, ValueError, IndexError) as error:  # serving doesn't depend on the measurements
                logger.error("metrics: can't measure the replicas: %s", error)
            self._write()
            await asyncio.sleep(MEASURE_EVERY_S)

    def _write(self) -> None:
        if self._ledger is not None:
            self._ledger.write_state({**self._deployments, **self._utilization, **self._replicas})


def deployment_view(route: DeploymentRoute) -> DeploymentView:
    """The `DeploymentView` of a deployment in the routing table."""
    wanted = route.wanted if route.has_replicas and not route.is_set_aside else 0
    return DeploymentView(route.name, route.state, len(route.replicas), wanted)


def _share(name: str, labels: tuple[str, ...], share: float) -> tuple[SeriesKey, int]:
    """A gauge's key, and the integer that is stored for a share, 0 to 1."""
    return SeriesKey(name, labels), round(share / CATALOGUE[name].scale)
