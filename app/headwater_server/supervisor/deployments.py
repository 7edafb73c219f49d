"""All deployments by name: the present configuration, the replica sets, and the pipelines and deployments with
versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headwater_server.config.overlay import FIELD, check_allowed, lay_over, parse_overlay
from headwater_server.config.schema import Config, Deployment
from headwater_server.errors import BadRequest, Conflict
from headwater_server.supervisor.child_processes import ChildProcesses
from headwater_server.supervisor.kind_programs import fixed_parts, made_composite
from headwater_server.supervisor.preflight import runtime_dir_problems
from headwater_server.supervisor.preloaded import Preloads
from headwater_server.supervisor.replica_set import ReplicaSet
from headwater_server.supervisor.script_settings import Scripts
from headwater_server.supervisor.states import Composite

__all__ = ["Deployments", "config_of"]


class Deployments:
    """The server's deployments, as commands and rollbacks have changed them.

    The *server's configuration*, as it was last read, remains beside the present configuration; see `rebase`.
    """

    def __init__(self, config: Config, children: ChildProcesses, preloads: Preloads | None = None) -> None:
        self._first = config
        self._children = children
        self._preloads = preloads
        self.config = config
        """The present configuration. Its section ``server`` never changes."""
        self.composites: dict[str, Composite] = {}
        """Pipelines whose steps are deployments, and deployments with versions, by name."""
        self.sets: dict[str, ReplicaSet] = {}
        """Replica sets by name: deployments with replicas, versions, and steps of pipelines."""
        for name in config.deployments:
            self._make(name)

    def base_of(self, adapter: str) -> str | None:
        """The name of the deployment with an adapter of this name, in the present configuration or in the server's
        configuration; None: there is no such adapter."""
        for config in (self.config, self._first):
            for name, deployment in config.deployments.items():
                if adapter in deployment.adapters and name in self.sets:
                    return name
        return None

    def with_adapter(self, name: str, adapter: str, *, is_loaded: bool) -> Deployment:
        """The deployment with an adapter added, if ``is_loaded``, or removed. The folder of an added adapter is taken
        from the server's configuration, which must name the adapter."""
        now = self.config.deployments[name]
        adapters = dict(now.adapters)
        if is_loaded:
            adapters[adapter] = self._first.deployments[name].adapters[adapter]
        else:
            del adapters[adapter]
        return now.with_adapters(adapters)

    def served(self, name: str) -> ReplicaSet | Composite:
        """The state of a deployment, pipeline or version."""
        return self.composites.get(name) or self.sets[name]

    def own_sets(self, name: str) -> list[ReplicaSet]:
        """The replica sets of a deployment: its single set, the sets of its versions, or the sets of steps that a
        pipeline defines itself."""
        if name in self.composites:
            return [replica_set for replica_set in self.sets.values() if replica_set.part_of == name]
        return [self.sets[name]] if name in self.sets else []

    def first(self, name: str) -> Deployment | None:
        """The deployment in the server's configuration; None if it is not there, as when a load added it."""
        return self._first.deployments.get(name)

    def proposed(self, name: str, text: object, scripts: Scripts | None = None) -> Deployment:
        """The configuration of a deployment: its section in the server's configuration, if it has a section there,
        merged with a section in JSON. Nothing is changed.

        Args:
            name: the deployment's name.
            text: the section.
            scripts: the PyTriton scripts of the merged and of the server's deployment; the fields of the former take
                the place of the fields of the latter, under the section. None: the fields that the server's
                deployment's scripts set stay.

        Raises:
            Forbidden: the server's ``allow_load`` doesn't permit it.
            BadRequest: the text or the merged configuration is invalid.
        """
        fields = parse_overlay(text)
        check_allowed(self._first, name, fields)
        proposed = lay_over(self._first, self.config, name, fields)
        if scripts is not None:
            original = self.first(name)
            base = {} if original is None else scripts.taken_out(original)
            proposed = lay_over(self._first, self.config, name, fields, base)
            base = scripts.laid_under(proposed.deployments[name])
            proposed = lay_over(self._first, self.config, name, {}, base)
        # Otherwise a name that makes a socket path too long would show only at the first call.
        for problem in runtime_dir_problems(proposed.server, proposed.all_deployments()):
            raise BadRequest(f"{FIELD}: {problem}", field=FIELD)
        return proposed.deployments[name]

    def rebase(self, config: Config) -> None:
        """Take a configuration that was read again as the server's configuration: its deployments, and its default
        Python for other deployments. The present deployments don't change yet."""
        self._first = self._first.model_copy(update={"python": config.python, "deployments": dict(config.deployments)})

    def is_alike(self, name: str, config: Deployment) -> bool:
        """Whether `adopt` may change a deployment to ``config`` while its replicas run."""
        now = self.config.deployments.get(name)
        return now is not None and fixed_parts(now) == fixed_parts(config)

    def adopt(self, name: str, config: Deployment) -> Callable[[], None]:
        """Add a deployment, or change its configuration. Unless it `is_alike`, no replica of the deployment may run.

        Returns a function that undoes the change, bounds included, as long as no replica has run since.
        """
        before, composite = self.config.deployments.get(name), self.composites.get(name)
        sets = [(replica_set, replica_set.bounds) for replica_set in self.own_sets(name)]
        undo_composite: Callable[[], None] | None = None

        def undo() -> None:
            self._drop(name)
            self._configure(name, before)
            for replica_set, bounds in sets:
                self.sets[replica_set.name] = replica_set
                if before is not None:
                    replica_set.configure(config_of(replica_set, before))
                replica_set.bounds = bounds
            if composite is not None and before is not None:
                self.composites[name] = composite
                if undo_composite is not None:
                    undo_composite()

        if self.is_alike(name, config):
            self._configure(name, config)
            if composite is not None:
                undo_composite = composite.adopt(config)
            for replica_set, _ in sets:
                replica_set.configure(config_of(replica_set, config))
        else:
            self._drop(name)
            self._configure(name, config)
            self._make(name)
        return undo

    def adopt_versions(self, name: str, config: Deployment, fresh: Mapping[str, ReplicaSet]) -> None:
        """Change the configuration of a serving deployment with versions; ``fresh`` has the replica sets of new
        versions.

        Replica sets of removed versions stay until `drop_set`.
        """
        self._configure(name, config)
        self.composites[name].adopt(config)
        self.sets.update(fresh)
        for set_name, deployment in config.with_replicas(name).items():
            self.sets[set_name].configure(deployment)

    def drop_set(self, replica_set: ReplicaSet) -> None:
        """Remove the replica set of a version after its replicas have ended."""
        self._children.memory.forget(replica_set.name)
        del self.sets[replica_set.name]

    def made(self, name: str, config: Deployment) -> dict[str, ReplicaSet]:
        """Make replica sets for a deployment, its versions or its steps, by name. They are not added to `sets`."""
        part_of = None if config.kind.has_replicas else name
        return {
            set_name: ReplicaSet(
                set_name,
                deployment,
                self._children,
                part_of,
                set_name.removeprefix(f"{name}.") if config.versions else "",
                self._preloads,
            )
            for set_name, deployment in config.with_replicas(name).items()
        }

    def restore(self, config: Config) -> None:
        """Adopt the whole configuration that operators' commands had left under an earlier supervisor. No replica may
        run yet."""
        for name in [name for name in self.config.deployments if name not in config.deployments]:
            self._drop(name)
            self._configure(name, None)
        for name, deployment in config.deployments.items():
            if self.config.deployments.get(name) != deployment:
                self.adopt(name, deployment)

    def forget(self, name: str) -> None:
        """Remove a deployment that a load added. No replica of it may run.

        Raises:
            Conflict: a pipeline uses it as a step.
        """
        self.check_unneeded(name)
        for replica_set in self.own_sets(name):
            self._children.memory.forget(replica_set.name)
        self._drop(name)
        self._configure(name, None)

    def check_unneeded(self, name: str) -> None:
        """Raise `Conflict` if another deployment, a pipeline, uses the added deployment as a step."""
        for composite in self.composites.values():
            if composite.name != name and name in composite.deployments.values():
                raise Conflict(f"model `{name}`: the pipeline `{composite.name}` has it as a step; unload that first")

    def _configure(self, name: str, config: Deployment | None) -> None:
        """Put a deployment into the configuration, or remove it."""
        deployments = dict(self.config.deployments)
        if config is not None:
            deployments[name] = config
        else:
            del deployments[name]
        self.config = self.config.model_copy(update={"deployments": deployments})

    def _make(self, name: str) -> None:
        config = self.config.deployments[name]
        if (composite := made_composite(name, config)) is not None:
            self.composites[name] = composite
        self.sets.update(self.made(name, config))

    def _drop(self, name: str) -> None:
        for replica_set in self.own_sets(name):
            del self.sets[replica_set.name]
        self.composites.pop(name, None)


def config_of(replicas: ReplicaSet, config: Deployment) -> Deployment:
    """A replica set's configuration, given the configuration of its deployment or pipeline."""
    return config if replicas.part_of is None else config.part(replicas.name.removeprefix(f"{replicas.part_of}."))
