"""Everything that is served, by name: the configuration as it holds now, and its replica sets and pipelines."""

from __future__ import annotations

from typing import NamedTuple

from app.config.overlay import FIELD, check_allowed, lay_over, parse_overlay
from app.config.schema import Config, Deployment
from app.config.sections import ReplicaBounds
from app.errors import BadRequest, Conflict
from app.supervisor.graph_state import GraphState
from app.supervisor.host import Host
from app.supervisor.preflight import runtime_dir_problems
from app.supervisor.replica_set import ReplicaSet

__all__ = ["Deployments", "Kept", "config_of"]


class Kept(NamedTuple):
    """What goes by a name."""

    config: Deployment | None
    sets: list[tuple[ReplicaSet, ReplicaBounds]]
    """With the bounds that an operator may have set."""
    graph: GraphState | None


class Deployments:
    """What there is to serve; loads with a configuration of their own change it.

    Args:
        config: what the server was started with.
        host: who has the replicas.
    """

    def __init__(self, config: Config, host: Host) -> None:
        self._first = config
        self._host = host
        self.config = config
        """As it holds now. The server's section never changes."""
        self.graphs: dict[str, GraphState] = {}
        """Pipelines whose steps are deployments, by name."""
        self.sets: dict[str, ReplicaSet] = {}
        """Deployments that have replicas of their own, by name."""
        for name in config.deployments:
            self._make(name)

    def is_added(self, name: str) -> bool:
        """Whether the server's own configuration doesn't have it."""
        return name not in self._first.deployments

    def own_sets(self, name: str) -> list[ReplicaSet]:
        """The replica sets that go by a name: a deployment's one, or those of a pipeline's own steps."""
        if name in self.graphs:
            return [one for one in self.sets.values() if one.part_of == name]
        found = self.sets.get(name)
        return [] if found is None else [found]

    def proposed(self, name: str, text: object) -> Deployment:
        """A deployment with what came with a load laid over it; nothing is changed.

        Args:
            name: the deployment's, which may be new.
            text: JSON of a deployment's section.

        Raises:
            Forbidden: the server's ``allow_load`` doesn't let it in.
            BadRequest: it is wrong.
        """
        fields = parse_overlay(text)
        check_allowed(self._first, name, fields)
        proposed = lay_over(self._first, self.config, name, fields)
        # A name that makes a socket's path too long shows only when a model that says it is ready is called.
        for problem in runtime_dir_problems(proposed.server, proposed.all_deployments()):
            raise BadRequest(f"{FIELD}: {problem}", field=FIELD)
        return proposed.deployments[name]

    def is_alike(self, name: str, config: Deployment) -> bool:
        """Whether it stays what it is, so that replicas of both configurations can serve beside each other."""
        now = self.config.deployments.get(name)
        return now is not None and _kind(now) == _kind(config)

    def adopt(self, name: str, config: Deployment) -> None:
        """Let a configuration hold for a deployment; if that isn't alike, no replica of it may run."""
        is_alike = self.is_alike(name, config)
        if not is_alike:
            self._drop(name)
        self.config = self.config.model_copy(update={"deployments": {**self.config.deployments, name: config}})
        if not is_alike:
            self._make(name)
            return
        if name in self.graphs:
            self.graphs[name].config = config
        for one in self.own_sets(name):
            one.configure(config_of(one, config))

    def kept(self, name: str) -> Kept:
        """What goes by a name now, for `restore`."""
        sets = [(one, one.bounds) for one in self.own_sets(name)]
        return Kept(self.config.deployments.get(name), sets, self.graphs.get(name))

    def restore(self, name: str, kept: Kept) -> None:
        """Have what went by a name before it was adopted anew, and of which no replica has run since."""
        self._drop(name)
        others = {other: one for other, one in self.config.deployments.items() if other != name or kept.config}
        if kept.config is not None:
            others[name] = kept.config
            for one, bounds in kept.sets:
                self.sets[one.name] = one
                one.configure(config_of(one, kept.config))
                one.bounds = bounds
            if kept.graph is not None:
                self.graphs[name] = kept.graph
                kept.graph.config = kept.config
        self.config = self.config.model_copy(update={"deployments": others})

    def forget(self, name: str) -> None:
        """Forget a deployment that was added, and of which no replica runs.

        Raises:
            Conflict: a pipeline needs it.
        """
        self.check_unneeded(name)
        for one in self.own_sets(name):
            self._host.memory.forget(one.name)
        self._drop(name)
        left = {other: one for other, one in self.config.deployments.items() if other != name}
        self.config = self.config.model_copy(update={"deployments": left})

    def check_unneeded(self, name: str) -> None:
        """See whether an added deployment can be forgotten.

        Raises:
            Conflict: a pipeline has it as a step.
        """
        for graph in self.graphs.values():
            if graph.name != name and name in graph.deployments.values():
                raise Conflict(f"model `{name}`: the pipeline `{graph.name}` has it as a step; unload that first")

    def _make(self, name: str) -> None:
        config = self.config.deployments[name]
        if config.is_graph:
            self.graphs[name] = GraphState(name, config)
        for own, deployment in config.with_replicas(name).items():
            self.sets[own] = ReplicaSet(own, deployment, self._host, name if config.is_graph else None)

    def _drop(self, name: str) -> None:
        for one in self.own_sets(name):
            del self.sets[one.name]
        self.graphs.pop(name, None)


def config_of(replicas: ReplicaSet, config: Deployment) -> Deployment:
    """A replica set's own configuration, of the one of the deployment that it serves or is a step of."""
    return config if replicas.part_of is None else config.step(replicas.name.removeprefix(f"{replicas.part_of}."))


def _kind(deployment: Deployment) -> object:
    """What of a deployment can't change while it is served: a pipeline's plan, or the way in which it is called."""
    pipeline = deployment.pipeline
    return pipeline.spec() if pipeline is not None and deployment.is_graph else deployment.is_language_model
