"""The state of what goes by a name, be it a set of replicas or a pipeline of others."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from app.config.schema import Deployment
from app.control.routing import State

__all__ = ["Served"]

logger = logging.getLogger("headwater")


class Served:
    """One of them.

    Args:
        name: the deployment's.
        config: its configuration.
        reason: why it is still LOADING.
    """

    def __init__(self, name: str, config: Deployment, reason: str) -> None:
        self.name = name
        self.config = config
        self.state = State.LOADING
        self.reason = reason
        self.since_s = time.time()
        """When it came into its state, in seconds of the Unix epoch."""
        self.is_set_aside = False
        """Whether an operator unloaded it, and it isn't loaded again."""

    def enter(self, state: State, reason: str) -> None:
        """Come into a state; each change is logged once."""
        if state is not self.state:
            logger.info("%s: %s -> %s: %s", self.name, self.state.value, state.value, reason)
            self.since_s = time.time()
        self.state, self.reason = state, reason
        self.is_set_aside &= state not in (State.READY, State.FAILED)

    def note_unloaded(self, leftovers: Collection[str]) -> None:
        """What it had has ended; or, if anything remains, it has FAILED."""
        if leftovers:
            self.enter(State.FAILED, f"unloaded, but this remains: {'; '.join(leftovers)}")
        else:
            self.enter(State.UNAVAILABLE, f"it is unloaded: load it with POST /v2/repository/models/{self.name}/load")
