"""The states of deployments: of a replica set, a pipeline of other deployments, and a deployment with versions."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import partial

import msgspec

from headwater.errors import DeclarationError
from headwater.pipeline import Plan, make_plan
from headwater.signature import Signature
from headwater_server.config.schema import Deployment
from headwater_server.config.sections import Traffic
from headwater_server.control.route_kinds import GraphKind, TrafficRoute, VersionsKind
from headwater_server.control.routing import CacheShare, DeploymentRoute, State
from headwater_server.errors import Conflict

__all__ = ["Composite", "GraphState", "Served", "VersionsState"]

logger = logging.getLogger("headwater")


class Served:
    """A deployment. It is LOADING at first, for the given reason."""

    def __init__(self, name: str, config: Deployment, reason: str) -> None:
        self.name = name
        self.config = config
        self.state = State.LOADING
        self.reason = reason
        """The reason for its state, in words for operators."""
        self.failure = ""
        """See `DeploymentRoute.failure`."""
        self.since_s = time.time()
        """When it entered its state, in seconds of the Unix epoch."""
        self.signature: Signature | None = None
        self.is_set_aside = False
        """Whether a command unloads or unloaded it, perhaps to recreate it; until it is READY or FAILED."""

    def route(self, workers: int) -> DeploymentRoute:
        """The route that each of ``workers`` gateway workers gets, with the worker's share of limited resources."""
        cache = self.config.cache
        return DeploymentRoute(
            name=self.name,
            state=self.state,
            reason=self.reason,
            failure=self.failure,
            since_s=self.since_s,
            is_set_aside=self.is_set_aside,
            signature=self.signature,
            max_queue_size=-(-self.config.batching.max_queue_size // workers),
            timeout_s=self.config.timeout_s,
            cache=CacheShare(cache.max_bytes // workers, cache.ttl_s or 0, cache.per_key) if cache else None,
        )

    def enter(self, state: State, reason: str) -> None:
        """Enter a state. A change of the state is logged; a change of the reason alone is not."""
        if state is not self.state:
            logger.info("%s: %s -> %s: %s", self.name, self.state.value, state.value, reason)
            self.since_s = time.time()
        self.state, self.reason = state, reason
        self.is_set_aside &= state not in (State.READY, State.FAILED)

    def note_unloaded(self, leftovers: Collection[str]) -> None:
        """Enter the state after an unload: UNAVAILABLE, or FAILED if anything of the replicas remains."""
        self.failure = ""
        if leftovers:
            self.enter(State.FAILED, f"unloaded, with leftovers: {'; '.join(leftovers)}")
            self.failure = "it was unloaded, but something of it remains"
        else:
            self.enter(State.UNAVAILABLE, f"it is unloaded: load it with POST /v2/repository/models/{self.name}/load")


class Composite(Served, ABC):
    """A pipeline whose steps are deployments, or a deployment with versions."""

    parts = ""
    """The word for its deployments in messages: "steps" or "versions"."""

    def __init__(self, name: str, config: Deployment) -> None:
        super().__init__(name, config, f"waiting for its {self.parts}")
        self.is_loaded = True
        """Whether its state follows from its parts' states. If not, an operator's command has unloaded it, or is
        loading or unloading it."""

    @property
    @abstractmethod
    def deployments(self) -> Mapping[str, str]:
        """The names of its deployments, by step or version."""

    def hold(self, state: State, reason: str) -> None:
        """Enter a state until `release`, whatever the parts' states are."""
        self.is_loaded = False
        self.enter(state, reason)

    def release(self) -> None:
        """Follow the parts' states again, from the next `update`."""
        self.is_loaded = True
        self.is_set_aside = False

    def enter(self, state: State, reason: str, failure: str = "") -> None:
        """Enter a state, with ``failure`` for clients. In READY a changed reason is logged too, since it names the
        parts that are not ready."""
        if state is self.state is State.READY and reason != self.reason:
            logger.warning("%s: still READY: %s", self.name, reason)
        if state is State.FAILED is not self.state:
            logger.error("%s: FAILED; fix it, then load it or restart the server: %s", self.name, reason)
        super().enter(state, reason)
        self.failure = failure

    def adopt(self, config: Deployment) -> Callable[[], None]:
        """Change the configuration; the parts may change with it. Returns a function that undoes the change."""
        undo = partial(setattr, self, "config", self.config)
        self.config = config
        return undo

    @abstractmethod
    def update(self, deployments: Mapping[str, DeploymentRoute]) -> None:
        """Update the state from the routes of all deployments with replicas, by name. While not `is_loaded`, nothing
        changes."""


class VersionsState(Composite):
    """A deployment with versions. Its state is the state of its default version."""

    parts = "versions"

    def __init__(self, name: str, config: Deployment) -> None:
        super().__init__(name, config)
        self.before: Traffic | None = None
        """The traffic before its last change; None: the traffic has not changed yet."""
        self.rolled_back = ""
        """Which rollback the last change of the traffic was, and why; empty if it was no rollback."""

    @property
    def deployments(self) -> Mapping[str, str]:
        """See `Composite.deployments`."""
        return {version: f"{self.name}.{version}" for version in self.config.versions}

    def adopt(self, config: Deployment) -> Callable[[], None]:
        """See `Composite.adopt`. If the traffic changes, the previous traffic is kept for a rollback."""
        before, history = self.config.shared_traffic, (self.before, self.rolled_back)
        undo_config = super().adopt(config)
        if before != config.shared_traffic:
            self.before, self.rolled_back = before, ""

        def undo() -> None:
            undo_config()
            self.before, self.rolled_back = history

        return undo

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
            raise Conflict(f"model `{self.name}`: its traffic has not changed, so there is no change to roll back")
        if self.rolled_back and not is_undo:
            back = ", ".join(f"{100 * share:g} % to {version}" for version, share in self.before.shares.items())
            raise Conflict(
                f"model `{self.name}`: the last change of its traffic was a rollback: {self.rolled_back}; "
                f"`headwater rollback {self.name} --undo` takes it back and gives {back}"
            )
        if is_undo and not self.rolled_back:
            raise Conflict(
                f"model `{self.name}`: expected a rollback as the last change of its traffic, since --undo reverts a "
                "rollback; the last change was not a rollback: revert it without --undo"
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
        """See `Composite.update`. In READY the reason names the versions that are not READY. A reason begins with the
        rollback, if the last change of the traffic was a rollback."""
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
        kind = VersionsKind(shared, self.config.version(first).kind.takes_text)
        return msgspec.structs.replace(super().route(workers), kind=kind)


class GraphState(Composite):
    """A pipeline. Its state follows from the states of its steps."""

    parts = "steps"

    def __init__(self, name: str, config: Deployment) -> None:
        super().__init__(name, config)
        spec = config.pipeline_spec
        assert spec is not None
        self.plan: Plan | None = None
        """None until all steps have had a signature, and while the signatures don't fit together."""
        self._spec = spec
        self._is_open = False
        self._has_served = False
        self._mismatch = ""
        """Why no plan can be made from the steps' signatures."""
        self._signatures: dict[str, Signature] = {}
        """The steps' signatures from which the plan was made."""
        self._deployments = {step.name: step.deployment or f"{name}.{step.name}" for step in self._spec.steps}

    @property
    def deployments(self) -> Mapping[str, str]:
        """See `Composite.deployments`."""
        return self._deployments

    def hold(self, state: State, reason: str) -> None:
        """See `Composite.hold`."""
        self._is_open = False
        super().hold(state, reason)

    def update(self, deployments: Mapping[str, DeploymentRoute]) -> None:
        """See `Composite.update`.

        The pipeline is LOADING until each step has been ready once; FAILED if such a first start of a step has FAILED.
        Then it is READY while it can answer at least a single head: the head and all steps that it needs are READY. The
        reason names steps that are not READY; requests that depend on such a step get its error. Otherwise it is
        UNAVAILABLE; or FAILED, if so many steps have FAILED that no head can be answered without them. If the steps'
        signatures don't fit together, it has FAILED, but after it has served it is UNAVAILABLE.
        """
        if not self.is_loaded:
            return
        steps = {step: deployments[name] for step, name in self.deployments.items()}
        signatures = {step: route.signature for step, route in steps.items() if route.signature is not None}
        self._is_open = False
        missing = [step for step in steps if step not in signatures]
        failed = [step for step in missing if steps[step].state is State.FAILED]
        if missing:
            step = (failed or missing)[0]
            route, state = steps[step], State.FAILED if failed else State.LOADING
            self.enter(state, f"step `{step}`: {route.reason}", f"step `{step}`: {route.cause}")
            return
        if signatures != self._signatures:
            self._signatures, self.plan, self.signature = signatures, None, None
            size = self.config.batching.max_batch_size
            try:
                self.plan = make_plan(self._spec, signatures, name=self.name, max_batch_size=size)
                if self.config.cache is not None:
                    self.plan.signature.check_cacheable()
                self.signature = self.plan.signature
            except DeclarationError as error:
                self.plan, self._mismatch = None, str(error)
        if self.plan is None:
            # If the pipeline has served before, another step may be about to restart with a signature that fits.
            self.enter(State.UNAVAILABLE if self._has_served else State.FAILED, self._mismatch)
            return
        self._has_served = True
        away = [step for step, route in steps.items() if route.state is not State.READY]
        lost = [step for step in away if steps[step].state is State.FAILED]
        reason = "; ".join(f"step `{step}` is {steps[step].state.value}: {steps[step].reason}" for step in away)
        cause = "; ".join(f"step `{step}` is {steps[step].state.value}: {steps[step].cause}" for step in away)
        self._is_open = self._answers_without(away)
        if self._is_open:
            self.enter(State.READY, reason or "all steps ready", cause)
        else:
            self.enter(State.UNAVAILABLE if self._answers_without(lost) else State.FAILED, reason, cause)

    def _answers_without(self, steps: Collection[str]) -> bool:
        """Whether some head can be answered without these steps."""
        assert self.plan is not None
        return any(self.plan.needed([head]).isdisjoint(steps) for head in self._spec.heads)

    def route(self, workers: int) -> DeploymentRoute:
        """The route that each of ``workers`` gateway workers gets."""
        return msgspec.structs.replace(super().route(workers), kind=GraphKind(self.plan, self._is_open))
