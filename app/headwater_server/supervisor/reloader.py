"""Reloads deployments when their files change, for development: ``headwater serve --reload``."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from headwater.reference import kind_and_path, parse_reference
from headwater_server.config.deployment_kinds import kind_of
from headwater_server.config.schema import Config, Deployment
from headwater_server.control.messages import Command
from headwater_server.control.routing import State
from headwater_server.errors import ConfigError
from headwater_server.security.file_watch import POLL_S, FileWatch
from headwater_server.supervisor.child_processes import ChildProcesses
from headwater_server.supervisor.deployments import Deployments
from headwater_server.supervisor.lifecycle import Lifecycle
from headwater_server.supervisor.preflight import runtime_dir_problems

__all__ = ["Reloader", "files_of_model"]

logger = logging.getLogger("headwater")


class Reloader:
    """Watches the configuration and the files of its deployments. If a reload beside the old replicas fails, these go
    on serving.

    Args:
        read: reads the configuration again; raises `ConfigError`.
        config_file: the file that the configuration is read from, if any.
        deployments: the present deployments.
        lifecycle: loads, reloads and unloads deployments.
        children: knows the files that replicas have imported.
    """

    def __init__(
        self,
        read: Callable[[], Config],
        config_file: Path | None,
        deployments: Deployments,
        lifecycle: Lifecycle,
        children: ChildProcesses,
    ) -> None:
        self._read = read
        self._config_file = None if config_file is None else config_file.absolute()
        self._deployments = deployments
        self._lifecycle = lifecycle
        self._children = children
        self._first = deployments.config
        self._wanted: Mapping[str, Deployment] = deployments.config.deployments
        """The deployments of the configuration as last read."""
        self._adopted = dict(self._wanted)
        """The deployments as the reloader last loaded or reloaded them; at first as the server started them."""
        self._since_s = time.time()
        """Earliest time at which the serving replicas may have read their files. Some files become known only after
        they have been imported."""
        self._watch = FileWatch(self._files())

    async def run(self) -> None:
        """Reload changed deployments until the server stops. Changes are collected until a poll finds no further
        change, so that files that change together cause a single reload."""
        changed: set[Path] = set()
        while not self._children.is_stopping:
            await self._children.wait_for_stop(POLL_S)
            now = self._watch.changed()
            self._watch.watch(self._files(), self._since_s)
            changed |= now
            if changed and not now and not self._children.is_stopping:
                self._since_s = time.time()
                await self._take(changed)
                changed = set()

    async def _take(self, changed: set[Path]) -> None:
        affected = {name for name in self._wanted if changed & self._files_of(name)}
        if self._config_file in changed:
            self._read_again()
        for name, section in self._wanted.items():
            is_changed = self._adopted.get(name) != section
            if not is_changed and (name not in affected or self._is_unloaded(name)):
                continue
            is_loaded = any(replica_set.is_loaded for replica_set in self._deployments.own_sets(name))
            if await self._carry_out("reload" if is_loaded else "load", name, section if is_changed else None):
                self._adopted[name] = section
        # In reverse order, since a pipeline must be unloaded before the deployments that are its steps.
        for name in reversed([name for name in self._adopted if name not in self._wanted]):
            if await self._carry_out("unload", name, None):
                del self._adopted[name]

    def _is_unloaded(self, name: str) -> bool:
        """Whether an operator has unloaded a deployment. It stays unloaded until its section changes."""
        sets = self._deployments.own_sets(name)
        return all(not replica_set.is_loaded and replica_set.state is State.UNAVAILABLE for replica_set in sets)

    def _read_again(self) -> None:
        try:
            config = self._read()
            for problem in runtime_dir_problems(self._first.server, config.all_deployments()):
                raise ConfigError(str(problem))
        except ConfigError as error:
            logger.error("the changed configuration is invalid; keeping the previous configuration: %s", error)
            return
        for section in ("server", "security", "cluster"):
            if getattr(config, section) != getattr(self._first, section):
                logger.warning("the configuration's section `%s` has changed: restart the server to adopt it", section)
        self._wanted = config.deployments
        self._deployments.rebase(config)

    async def _carry_out(self, action: str, name: str, section: Deployment | None) -> bool:
        """Carry out a command. Returns whether it succeeded; if not, the error is logged."""
        answer = await self._lifecycle.answer(Command(0, action, name), section, "since files have changed")
        if answer.status == 200:
            logger.info("%s: %s done, after %.1f s", name, action, answer.content["took_s"])
            return True
        logger.error("%s: %s failed: %s", name, action, answer.content["error"])
        return False

    def _files(self) -> set[Path]:
        config_files = set() if self._config_file is None else {self._config_file}
        return config_files.union(*map(self._files_of, self._wanted))

    def _files_of(self, name: str) -> set[Path]:
        """The files of a deployment: files that its models name, and modules that its replicas have imported."""
        deployment = self._wanted[name]
        files = set()
        for model in (deployment.model, *(step.model for step in deployment.steps.values())):
            files |= files_of_model(model or "", self._children.search)
        for set_name in deployment.with_replicas(name):
            files |= {Path(file) for file in self._children.imported.get(set_name, ())}
        return files


def files_of_model(model: str, search: list[str]) -> set[Path]:
    """The files that a deployment's ``model`` may mean, whether they exist or not: a module, a file, or the files of a
    folder.

    Args:
        model: the reference; empty if there is no model.
        search: the folders to search.
    """
    _, path = kind_and_path(model)
    if kind_of(model).names_folder:
        package, path = parse_reference(model)
        if package:  # an installed package, which nobody edits
            return set()
    if path:
        places = {Path(folder).absolute() / os.path.expanduser(path) for folder in search}
        files = set(places)
        for place in places:
            with contextlib.suppress(OSError):  # it is no folder, or was removed meanwhile
                files.update(place.iterdir())
        return files
    module = model.partition(":")[0].replace(".", "/")
    ends = (f"{module}.py", f"{module}/__init__.py") if module else ()
    return {Path(folder).absolute() / end for folder in search for end in ends}
