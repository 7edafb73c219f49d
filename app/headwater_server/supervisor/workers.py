"""The gateway worker processes: starts, pings and replaces them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from io import FileIO
from typing import Final

import msgspec

from headwater_server.config.schema import Config
from headwater_server.config.sections import Tls
from headwater_server.control.control_server import ControlServer
from headwater_server.control.messages import WorkerSettings
from headwater_server.security.kept_files import KeptFiles
from headwater_server.security.peer_tls import check_peer_files, peer_files
from headwater_server.security.tls import Certificate
from headwater_server.supervisor.host import Backoff, Host, kill
from headwater_server.telemetry.observer import Observer
from headwater_server.telemetry.recorder import recorder

__all__ = ["Workers"]

logger = logging.getLogger("headwater")

PING_EVERY_S: Final = 1.0
TIMEOUT_S: Final = 10.0
"""A worker that answers no ping for this many seconds, counted in pings every `PING_EVERY_S`, is killed and
replaced."""


class Workers:
    """All gateway workers of a server."""

    def __init__(self, config: Config, host: Host, control: ControlServer, observer: Observer) -> None:
        self.pids: dict[int, int] = {}
        """Process ids of the running workers, by index."""
        self._leaving: set[int] = set()
        """Process ids of workers that were asked to end."""
        self._config = config
        self._host = host
        self._control = control
        self._observer = observer
        self._kept: dict[str, KeptFiles] = {}
        """Copies of the certificates that a worker reads when it starts, by field of `WorkerSettings`."""
        if (tls := config.server.tls) is not None:
            pair = [tls.certificate, tls.key]
            self._kept["kept_tls"] = KeptFiles(pair, lambda paths: Certificate(Tls(certificate=paths[0], key=paths[1])))
        if config.cluster is not None and config.cluster.tls is not None:
            self._kept["kept_cluster_tls"] = KeptFiles(peer_files(config.cluster.tls), check_peer_files)

    def start(self, listener: socket.socket) -> None:
        """Have tasks start the workers, which accept connections from the listener, and replace workers that end, until
        the server stops."""
        cluster = self._config.cluster
        settings = WorkerSettings(
            control=str(self._host.folder / "control"),
            server=self._config.server.model_dump(mode="json"),
            security=self._config.security.model_dump(mode="json"),
            cluster_tls=str(cluster.tls) if cluster is not None and cluster.tls is not None else "",
        )
        for index in range(self._config.server.workers):
            self._host.spawn(self._keep(index, listener, settings))

    def kill(self) -> None:
        """Kill all workers that still run."""
        for pid in self.pids.values():
            kill(pid)

    def replace_those_without_files(self, *, all: bool = False) -> None:
        """Have workers with a removed file of counts, or all workers, end (SIGTERM); they are then replaced."""
        for index, pid in self.pids.items():
            if (all or not self._observer.has_file(index)) and pid not in self._leaving:
                self._leaving.add(pid)
                logger.warning("gateway worker %d (%d) is replaced, since files of it were removed", index, pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    async def watch(self) -> None:
        """Kill workers with an event loop that hangs; they are replaced. Copy new certificates."""
        while True:
            self.end_silent()
            for kept in self._kept.values():
                kept.renew()
            await asyncio.sleep(PING_EVERY_S)

    def end_silent(self) -> None:
        """Ping all workers, and kill workers that have not answered for too long."""
        unanswered = self._control.ping()
        for index, pid in self.pids.items():
            # Counted in pings, not by a clock: while the supervisor itself is stopped, no worker can answer it.
            if unanswered.get(pid, 0) * PING_EVERY_S >= TIMEOUT_S:
                text = "gateway worker %d (%d) has given no sign of life for %g s: killing it"
                logger.error(text, index, pid, TIMEOUT_S)
                kill(pid)

    async def _keep(self, index: int, listener: socket.socket, settings: WorkerSettings) -> None:
        backoff = Backoff()
        with open(os.memfd_create("reason"), "w+b", buffering=0) as reason:  # noqa: ASYNC230 - it is in memory
            while not self._host.is_stopping:
                began_s = time.monotonic()
                try:
                    process = self._start(index, listener, settings, reason)
                except OSError as error:
                    logger.error("gateway worker %d can't be started: %s", index, error)
                else:
                    self.pids[index] = process.pid
                    code = await self._host.follow(process, f"gateway worker {index}")
                    del self.pids[index]
                    self._observer.end_worker(index)
                    if self._host.is_stopping:
                        return
                    self._leaving.discard(process.pid)
                    reason.seek(0)
                    why = signal.strsignal(-code) if code < 0 else reason.read().decode()
                    logger.error("gateway worker %d ended with %d%s; starting another", index, code, why and f": {why}")
                    recorder().count("headwater_worker_restarts")
                await self._host.wait_for_stop(backoff.after(time.monotonic() - began_s))

    def _start(
        self, index: int, listener: socket.socket, settings: WorkerSettings, reason: FileIO
    ) -> subprocess.Popen[bytes]:
        """Start a worker. If it ends by itself, it writes the reason to the file ``reason``.

        Raises:
            OSError: the process can't be started.
        """
        reason.seek(0)
        reason.truncate()
        kept = {}
        for field, files in self._kept.items():
            files.renew()
            kept[field] = list(map(str, files.copies))
        worker_settings = msgspec.structs.replace(
            settings, index=index, metrics=self._observer.start_worker(index), **kept
        )
        # In memory, since a worker must be able to start while the disk is full.
        with open(os.memfd_create("settings", os.MFD_CLOEXEC), "wb", buffering=0) as file:
            file.write(msgspec.json.encode(worker_settings))
            fds = (file.fileno(), listener.fileno(), reason.fileno())
            return subprocess.Popen(
                [sys.executable, "-m", "headwater_server.gateway.worker", settings.control, *map(str, fds)],
                cwd=self._host.folder,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "TOKENIZERS_PARALLELISM": "false",  # batches of one
                },
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
