"""A served name without replicas: its state follows from the states of other deployments."""

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

    def adopt(self, config: Deployment) -> None:
        """Change the configuration; the parts may change with it."""
        self.config = config

    @abstractmethod
    def update(self, deployments: Mapping[str, DeploymentRoute]) -> None:
        """Update the state from the routes of all deployments with replicas, by name. While not `is_loaded`, nothing
        changes."""
