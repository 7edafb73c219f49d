"""The supervisor's view of a deployment with versions: its state, and how requests are shared among the versions."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headwater_server.config.schema import Deployment
from headwater_server.config.sections import Traffic
from headwater_server.control.route_kinds import TrafficRoute, VersionsKind
from headwater_server.control.routing import DeploymentRoute, State
from headwater_server.errors import Conflict
from headwater_server.supervisor.composite import Composite

__all__ = ["VersionsState"]


class VersionsState(Composite):
    """A deployment with versions. Its state is the state of its default version."""

    parts = "versions"

    def __init__(self, name: str, config: Deployment) -> None:
        super().__init__(name, config)
        self.before: Traffic | None = None
        """The traffic before its last change; None: the traffic has not changed since the server's start."""
        self.rolled_back = ""
        """Which rollback the last change of the traffic was, and why; empty if it was no rollback."""

    @property
    def deployments(self) -> Mapping[str, str]:
        """See `Composite.deployments`."""
        return {version: f"{self.name}.{version}" for version in self.config.versions}

    def adopt(self, config: Deployment) -> None:
        """See `Composite.adopt`. If the traffic changes, the previous traffic is kept for a rollback."""
        before, after = self.config.shared_traffic, config.shared_traffic
        if before != after:
            self.before, self.rolled_back = before, ""
        super().adopt(config)

    def promoted(self, version: str) -> Deployment:
        """The configuration in which ``version`` answers all requests and is the default.

        Raises:
            Conflict: there is no such version.
        """
        if version not in self.config.versions:
            versions = ", ".join(f"`{name}`" for name in self.config.versions)
            raise Conflict(f"model `{self.name}`, version: expected one of {versions}, got {version[:100]!r}")
        return self._with(self.config.shared_traffic, {version: 1.0}, version)

    def traffic_before(self, *, is_undo: bool) -> Deployment:
        """The configuration with the traffic before its last change.

        Args:
            is_undo: whether to undo a rollback rather than another change.

        Raises:
            Conflict: the traffic has not changed; its last change was a rollback and ``is_undo`` is not set; its last
                change was no rollback and ``is_undo`` is set; or a version is gone that had a share or was the
                default before the change.
        """
        if self.before is None:
            raise Conflict(f"model `{self.name}`: its traffic has not changed, so there is nothing to go back to")
        if self.rolled_back and not is_undo:
            back = ", ".join(f"{100 * share:g} % to {version}" for version, share in self.before.shares.items())
            raise Conflict(
                f"model `{self.name}`: the last change of its traffic was a rollback: {self.rolled_back}; "
                f"`headwater rollback {self.name} --undo` takes it back and gives {back}"
            )
        if is_undo and not self.rolled_back:
            raise Conflict(
                f"model `{self.name}`: expected a rollback as the last change of its traffic, which --undo takes back; "
                "it was another change, which a rollback without --undo takes back"
            )
        needed = {self.before.default, *(version for version, share in self.before.shares.items() if share)}
        if gone := sorted(needed - self.config.versions.keys()):
            role = "had a share of the traffic" if self.before.shares.get(gone[0]) else "was the default"
            raise Conflict(f"model `{self.name}`: version `{gone[0]}`, which {role} then, is gone")
        return self._with(self.before, self.before.shares, self.before.default)

    @property
    def is_watched(self) -> bool:
        """Whether versions other than the default have a share that an automatic rollback may take from them."""
        traffic = self.config.shared_traffic
        return traffic.rollback is not None and traffic.shares[traffic.default] < 1

    def default_alone(self) -> Deployment:
        """The configuration in which the default version answers all requests."""
        traffic = self.config.shared_traffic
        return self._with(traffic, {traffic.default: 1.0}, traffic.default)

    def _with(self, settings: Traffic, shares: Mapping[str, float], default: str) -> Deployment:
        shared = {version: shares.get(version, 0.0) for version in self.config.versions}
        fields = {**settings.settings, **shared, "default": default}
        if shared.get(settings.shadow) != 0:  # the shadow version has a share now, or is gone
            fields.pop("shadow", None)
        return self.config.with_traffic(Traffic.model_validate(fields))

    def update(self, deployments: Mapping[str, DeploymentRoute]) -> None:
        """See `Composite.update`. The state is the state of the default version. In READY the reason names the versions
        that are not READY. A reason begins with the rollback, if the last change of the traffic was a rollback."""
        if not self.is_loaded:
            return
        versions = {version: deployments[name] for version, name in self.deployments.items()}
        default = self.config.shared_traffic.default
        route = versions[default]
        self.signature = None if route.signature is None else msgspec.structs.replace(route.signature, name=self.name)
        if route.state is not State.READY:
            reason = "; ".join(filter(None, (self.rolled_back, f"version `{default}`: {route.reason}")))
            self.enter(route.state, reason, f"version `{default}`: {route.cause}")
            return
        away = {version: route for version, route in versions.items() if route.state is not State.READY}
        reason = "; ".join(f"version `{name}` is {route.state.value}: {route.reason}" for name, route in away.items())
        cause = "; ".join(f"version `{name}` is {route.state.value}: {route.cause}" for name, route in away.items())
        self.enter(State.READY, "; ".join(filter(None, (self.rolled_back, reason or "all versions ready"))), cause)

    def route(self, workers: int) -> DeploymentRoute:
        """The route that each of ``workers`` gateway workers gets."""
        traffic = self.config.shared_traffic
        before = {} if self.before is None else self.before.shares
        shared = TrafficRoute(
            traffic.shares, traffic.default, traffic.sticky, self.is_watched, traffic.shadow, before, self.rolled_back
        )
        first = next(iter(self.config.versions))
        takes_text = self.config.version(first).is_language_model
        return msgspec.structs.replace(super().route(workers), kind=VersionsKind(shared, takes_text))
