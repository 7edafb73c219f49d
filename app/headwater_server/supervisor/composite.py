"""A served name without replicas of its own, whose state follows from deployments that have some."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping

from headwater_server.config.schema import Deployment
from headwater_server.control.routing import DeploymentRoute, State
from headwater_server.supervisor.served import Served

__all__ = ["Composite"]

logger = logging.getLogger("headwater")


class Composite(Served, ABC):
    """A pipeline whose steps are deployments, or a deployment with versions."""

    parts = ""
    """What it consists of, in words."""

    def __init__(self, name: str, config: Deployment) -> None:
        super().__init__(name, config, f"waiting for its {self.parts}")
        self.is_loaded = True
        """Whether its state follows from its parts' states; otherwise an operator's command holds or unloaded it."""

    @property
    @abstractmethod
    def deployments(self) -> Mapping[str, str]:
        """The names of the deployments that it consists of, by part."""

    def hold(self, state: State, reason: str) -> None:
        """Enter a state until `release`, whatever the parts' states are."""
        self.is_loaded = False
        self.enter(state, reason)

    def release(self) -> None:
        """Follow the parts' states again, from the next `update`."""
        self.is_loaded = True
        self.is_set_aside = False

    def enter(self, state: State, reason: str, failure: str = "") -> None:
        """Enter a state; in READY a changed reason is logged, too, since it says which parts are away."""
        if state is self.state is State.READY and reason != self.reason:
            logger.warning("%s: still READY: %s", self.name, reason)
        if state is State.FAILED is not self.state:
            logger.error("%s: FAILED; fix it, then load it or restart the server: %s", self.name, reason)
        super().enter(state, reason)
        self.failure = failure

    def adopt(self, config: Deployment) -> None:
        """Change the configuration; its parts may be others."""
        self.config = config

    @abstractmethod
    def update(self, deployments: Mapping[str, DeploymentRoute]) -> None:
        """Take in the state of all deployments."""
