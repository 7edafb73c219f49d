"""The supervisor's view of a graph, a pipeline with deployments as steps: its plan and its state."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from headwater.errors import DeclarationError
from headwater.pipeline import Plan, make_plan
from headwater.signature import Signature
from headwater_server.config.schema import Deployment
from headwater_server.control.route_kinds import GraphKind
from headwater_server.control.routing import DeploymentRoute, State
from headwater_server.supervisor.composite import Composite

__all__ = ["GraphState"]


class GraphState(Composite):
    """A pipeline. Its state follows from the states of its steps."""

    parts = "steps"

    def __init__(self, name: str, config: Deployment) -> None:
        super().__init__(name, config)
        assert config.pipeline is not None
        self.plan: Plan | None = None
        """None until all steps have had a signature, and while the signatures don't fit together."""
        self._spec = config.pipeline.spec()
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
