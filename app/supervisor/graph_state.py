"""A pipeline whose steps are deployments of their own, as the supervisor sees it: its plan, and its state by theirs."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import NamedTuple

from app.config.schema import Deployment
from app.control.routing import LAST_LINES, DeploymentRoute, State
from inference.errors import DeclarationError
from inference.pipeline import Plan, make_plan
from inference.signature import Signature

__all__ = ["GraphState", "StepState"]


class StepState(NamedTuple):
    """What is known of a step's deployment."""

    state: State
    reason: str
    signature: Signature | None
    failure: str = ""
    """What clients are told instead of the reason, if a start has failed and none succeeded since."""

    @property
    def cause(self) -> str:
        """The reason, in the words for clients."""
        return self.failure or self.reason.partition(LAST_LINES)[0]


class GraphState:
    """One pipeline.

    Args:
        name: the deployment's.
        config: its configuration.
    """

    def __init__(self, name: str, config: Deployment) -> None:
        assert config.pipeline is not None
        self.name = name
        self.config = config
        self.state = State.LOADING
        self.reason = "waiting for its steps"
        self.failure = ""
        """The same in the words for clients, if these are others."""
        self.since_s = time.time()
        """When it came into its state, in seconds of the Unix epoch."""
        self.is_set_aside = False
        """Whether an operator unloaded it, and it isn't loaded again."""
        self.plan: Plan | None = None
        self._spec = config.pipeline.spec()
        self.is_loaded = True
        """Whether an operator wants it."""
        self._held: tuple[State, str] | None = None
        self._is_open = False
        self._has_served = False
        self._mismatch = ""
        """Why there is no plan, of signatures that are known."""
        self._signatures: dict[str, Signature] = {}
        """Of the steps, those that the plan was made of."""
        self.deployments = {step.name: step.deployment or f"{name}.{step.name}" for step in self._spec.steps}
        """By step."""

    @property
    def signature(self) -> Signature | None:
        """Of the whole, once known."""
        return self.plan.signature if self.plan is not None else None

    @property
    def is_decided(self) -> bool:
        """Whether its first start has succeeded or failed."""
        return self.state is not State.LOADING

    @property
    def is_held(self) -> bool:
        """Whether an operator's command, and not its steps, makes its state."""
        return self._held is not None

    def hold(self, state: State, reason: str) -> None:
        """Be in a state, whatever its steps are in: an operator's command is under way, or has set it aside."""
        self._held = state, reason

    def release(self) -> None:
        """Be in the state that its steps make, from the next update on."""
        self._held = None

    def update(self, deployments: Mapping[str, StepState]) -> None:
        """Take in the state of all deployments.

        It is READY as long as it can answer anything: one head, and all steps before it, are ready. While a step is
        away the reason says so; requests that want what follows from it have its error. It has FAILED if its steps
        don't fit together, or so many of them have failed that no head can ever be answered.
        """
        if self._held is not None:
            self._is_open = False
            self._set(*self._held)
            return
        steps = {step: deployments[name] for step, name in self.deployments.items()}
        known = {step: one.signature for step, one in steps.items() if one.signature is not None}
        self._is_open = False
        failed = [step for step, one in steps.items() if one.state is State.FAILED and step not in known]
        if failed:
            one = steps[failed[0]]
            self._set(State.FAILED, f"step `{failed[0]}`: {one.reason}", f"step `{failed[0]}`: {one.cause}")
            return
        loading = [step for step in steps if step not in known]
        if loading:
            one = steps[loading[0]]
            self._set(State.LOADING, f"step `{loading[0]}`: {one.reason}", f"step `{loading[0]}`: {one.cause}")
            return
        if known != self._signatures:
            self._signatures, self.plan = known, None
            size = self.config.batching.max_batch_size
            try:
                self.plan = make_plan(self._spec, known, name=self.name, max_batch_size=size)
            except DeclarationError as error:
                self._mismatch = str(error)
        if self.plan is None:
            # After it has served, another step may be about to restart with what fits.
            self._set(State.UNAVAILABLE if self._has_served else State.FAILED, self._mismatch)
            return
        self._has_served = True
        away = [step for step, one in steps.items() if one.state is not State.READY]
        lost = [step for step in away if steps[step].state is State.FAILED]
        told = "; ".join(f"step `{step}` is {steps[step].state.value}: {steps[step].reason}" for step in away)
        cause = "; ".join(f"step `{step}` is {steps[step].state.value}: {steps[step].cause}" for step in away)
        self._is_open = self._answers_without(away)
        if self._is_open:
            self._set(State.READY, told or "all steps ready", cause)
        else:
            self._set(State.UNAVAILABLE if self._answers_without(lost) else State.FAILED, told, cause)

    def _answers_without(self, steps: Collection[str]) -> bool:
        """Whether some head can be answered if these steps can't be run."""
        assert self.plan is not None
        return any(self.plan.needed([head]).isdisjoint(steps) for head in self._spec.heads)

    def _set(self, state: State, reason: str, failure: str = "") -> None:
        if state is not self.state:
            self.since_s = time.time()
        self.state, self.reason, self.failure = state, reason, failure

    def route(self, workers: int) -> DeploymentRoute:
        """What gateway workers are told."""
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
            is_graph=True,
            plan=self.plan,
            is_open=self._is_open,
        )
