"""A pipeline whose steps are deployments of their own, as the supervisor sees it: its plan, and its state by theirs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import msgspec

from app.config.schema import Deployment
from app.control.routing import DeploymentRoute, State
from app.supervisor.served import Served
from inference.errors import DeclarationError
from inference.pipeline import Plan, make_plan
from inference.signature import Signature

__all__ = ["GraphState"]

logger = logging.getLogger("headwater")


class GraphState(Served):
    """One pipeline.

    Args:
        name: the deployment's.
        config: its configuration.
    """

    def __init__(self, name: str, config: Deployment) -> None:
        super().__init__(name, config, "waiting for its steps")
        assert config.pipeline is not None
        self.is_loaded = True
        """Whether its steps make its state, and not an operator's command that is under way or has unloaded it."""
        self.plan: Plan | None = None
        self._spec = config.pipeline.spec()
        self._is_open = False
        self._has_served = False
        self._mismatch = ""
        """Why there is no plan, of signatures that are known."""
        self._signatures: dict[str, Signature] = {}
        """Of the steps, those that the plan was made of."""
        self.deployments = {step.name: step.deployment or f"{name}.{step.name}" for step in self._spec.steps}
        """By step."""

    def hold(self, state: State, reason: str) -> None:
        """Be in a state until `release`, whatever its steps are in."""
        self.is_loaded = self._is_open = False
        self.enter(state, reason)

    def release(self) -> None:
        """Be in the state that its steps make, from the next update on."""
        self.is_loaded = True
        self.is_set_aside = False

    def enter(self, state: State, reason: str, failure: str = "") -> None:
        """Come into a state; a READY one says what it lacks, too."""
        if state is self.state is State.READY and reason != self.reason:
            logger.warning("%s: still READY: %s", self.name, reason)
        if state is State.FAILED is not self.state:
            logger.error("%s: FAILED; correct it, and then load it or restart the server: %s", self.name, reason)
        super().enter(state, reason)
        self.failure = failure

    def update(self, deployments: Mapping[str, DeploymentRoute]) -> None:
        """Take in the state of all deployments.

        It is READY as long as it can answer anything: one head, and all steps before it, are ready. While a step is
        away the reason says so; requests that want what follows from it have its error. It has FAILED if its steps
        don't fit together, or so many of them have failed that no head can ever be answered.
        """
        if not self.is_loaded:
            return
        steps = {step: deployments[name] for step, name in self.deployments.items()}
        known = {step: one.signature for step, one in steps.items() if one.signature is not None}
        self._is_open = False
        failed = [step for step, one in steps.items() if one.state is State.FAILED and step not in known]
        if failed:
            one = steps[failed[0]]
            self.enter(State.FAILED, f"step `{failed[0]}`: {one.reason}", f"step `{failed[0]}`: {one.cause}")
            return
        loading = [step for step in steps if step not in known]
        if loading:
            one = steps[loading[0]]
            self.enter(State.LOADING, f"step `{loading[0]}`: {one.reason}", f"step `{loading[0]}`: {one.cause}")
            return
        if known != self._signatures:
            self._signatures, self.plan, self.signature = known, None, None
            size = self.config.batching.max_batch_size
            try:
                self.plan = make_plan(self._spec, known, name=self.name, max_batch_size=size)
                self.signature = self.plan.signature
            except DeclarationError as error:
                self._mismatch = str(error)
        if self.plan is None:
            # After it has served, another step may be about to restart with what fits.
            self.enter(State.UNAVAILABLE if self._has_served else State.FAILED, self._mismatch)
            return
        self._has_served = True
        away = [step for step, one in steps.items() if one.state is not State.READY]
        lost = [step for step in away if steps[step].state is State.FAILED]
        told = "; ".join(f"step `{step}` is {steps[step].state.value}: {steps[step].reason}" for step in away)
        cause = "; ".join(f"step `{step}` is {steps[step].state.value}: {steps[step].cause}" for step in away)
        self._is_open = self._answers_without(away)
        if self._is_open:
            self.enter(State.READY, told or "all steps ready", cause)
        else:
            self.enter(State.UNAVAILABLE if self._answers_without(lost) else State.FAILED, told, cause)

    def _answers_without(self, steps: Collection[str]) -> bool:
        """Whether some head can be answered if these steps can't be run."""
        assert self.plan is not None
        return any(self.plan.needed([head]).isdisjoint(steps) for head in self._spec.heads)

    def route(self, workers: int) -> DeploymentRoute:
        """What each of so many gateway workers is told."""
        return msgspec.structs.replace(super().route(workers), is_graph=True, plan=self.plan, is_open=self._is_open)
