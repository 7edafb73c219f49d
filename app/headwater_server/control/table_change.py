"""Changes from a routing table to the next. The supervisor sends them to workers that have the earlier table.

A table has some 150 bytes for each replica. A change has only the replicas that were added, removed or changed; all
replicas of a deployment if their order changed in another way. If any other field of a deployment changed, it also has
all fields of the deployment except the replicas.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, RoutingTable

__all__ = ["DeploymentChange", "ReplicaChange", "TableChange"]


class ReplicaChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """The changes in a list of replicas."""

    gone: tuple[str, ...] = ()
    """Ids of removed replicas."""
    changed: tuple[ReplicaRoute, ...] = ()
    """Changed replicas; each replaces the replica with the same id."""
    new: tuple[ReplicaRoute, ...] = ()
    """New replicas, appended to the list."""

    @classmethod
    def between(cls, before: Sequence[ReplicaRoute], after: Sequence[ReplicaRoute]) -> ReplicaChange:
        """The change from the list ``before`` to the list ``after``. If removing, changing and appending don't produce
        the order of ``after``, all replicas are removed and appended."""
        if before is after:
            return NO_CHANGE
        had = {route.id: route for route in before}
        has = {route.id for route in after}
        change = cls(
            tuple(id for id in had if id not in has),
            tuple(route for route in after if route.id in had and route != had[route.id]),
            tuple(route for route in after if route.id not in had),
        )
        if [route.id for route in change.applied(before)] != [route.id for route in after]:  # in another order
            return cls(gone=tuple(had), new=tuple(after))
        return change

    def applied(self, replicas: Sequence[ReplicaRoute]) -> tuple[ReplicaRoute, ...]:
        """The list after the change."""
        if self.gone:
            gone = set(self.gone)
            replicas = [route for route in replicas if route.id not in gone]
        if self.changed:
            changed = {route.id: route for route in self.changed}
            replicas = [changed.get(route.id, route) for route in replicas]
        return (*replicas, *self.new)

    def __bool__(self) -> bool:
        """Whether anything changed."""
        return bool(self.gone or self.changed or self.new)


NO_CHANGE = ReplicaChange()


class DeploymentChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """The changes in a deployment."""

    name: str
    route: DeploymentRoute | None = None
    """The deployment without its replicas, if it is new or any field except the replicas changed; otherwise None."""
    replicas: ReplicaChange = NO_CHANGE
    retiring: ReplicaChange = NO_CHANGE

    @classmethod
    def between(cls, before: DeploymentRoute | None, after: DeploymentRoute) -> DeploymentChange:
        """The change from a state of a deployment to the next; ``before`` is None for a new deployment."""
        had = before or DeploymentRoute(after.name, after.state)
        rest = _without_replicas(after)
        return cls(
            after.name,
            None if before is not None and rest == _without_replicas(before) else rest,
            ReplicaChange.between(had.replicas, after.replicas),
            ReplicaChange.between(had.retiring, after.retiring),
        )

    def applied(self, before: DeploymentRoute | None) -> DeploymentRoute:
        """The deployment after the change; ``before`` is None for an unknown deployment.

        Raises:
            ValueError: the deployment is unknown, and `route` is None.
        """
        rest = self.route or before
        if rest is None:
            raise ValueError(f"expected a change of a known deployment, got a change of {self.name!r}")
        had = before or rest
        replicas = self.replicas.applied(had.replicas) if self.replicas else had.replicas
        retiring = self.retiring.applied(had.retiring) if self.retiring else had.retiring
        return msgspec.structs.replace(rest, replicas=replicas, retiring=retiring)

    def __bool__(self) -> bool:
        """Whether anything changed."""
        return self.route is not None or bool(self.replicas) or bool(self.retiring)


class TableChange(msgspec.Struct, frozen=True, omit_defaults=True, tag="change"):
    """The changes in the table. ``draining`` and ``leaving`` have the values of the later table."""

    epoch: int
    """The epoch of both tables."""
    since: int
    """The version of the earlier table."""
    version: int
    """The version of the later table."""
    draining: bool = False
    leaving: bool = False
    names: tuple[str, ...] | None = None
    """Names of all deployments in their order; None if neither names nor order changed."""
    deployments: tuple[DeploymentChange, ...] = ()
    """Changes of new and changed deployments."""

    @classmethod
    def between(cls, before: RoutingTable, after: RoutingTable) -> TableChange:
        """The change from a table to a later table of the same epoch."""
        had = {route.name: route for route in before.deployments}
        names = tuple(route.name for route in after.deployments)
        changes = (DeploymentChange.between(had.get(route.name), route) for route in after.deployments)
        return cls(
            after.epoch,
            before.version,
            after.version,
            after.draining,
            after.leaving,
            None if names == tuple(had) else names,
            tuple(change for change in changes if change),
        )

    def follows(self, table: RoutingTable) -> bool:
        """Whether it is a change of exactly this table."""
        return (self.epoch, self.since) == table.age

    def applied(self, before: RoutingTable) -> RoutingTable:
        """The table after the change. The change must follow the table ``before``. Unchanged deployments and replicas
        stay the same objects.

        Raises:
            ValueError: the change refers to a deployment that the table doesn't have.
        """
        routes = {route.name: route for route in before.deployments}
        for change in self.deployments:
            routes[change.name] = change.applied(routes.get(change.name))
        names = tuple(routes) if self.names is None else self.names
        deployments = tuple(routes[name] for name in names)
        return RoutingTable(deployments, self.draining, self.leaving, self.epoch, self.version)


def _without_replicas(route: DeploymentRoute) -> DeploymentRoute:
    return msgspec.structs.replace(route, replicas=(), retiring=())
