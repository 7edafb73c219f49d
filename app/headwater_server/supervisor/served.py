"""The state of a served deployment: a set of replicas, a pipeline of other deployments, or a deployment with
versions."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from headwater.signature import Signature
from headwater_server.config.schema import Deployment
from headwater_server.control.routing import CacheShare, DeploymentRoute, State

__all__ = ["Served"]

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
        """Whether an operator unloaded it; until it is READY or FAILED."""

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
            self.enter(State.FAILED, f"unloaded, but this remains: {'; '.join(leftovers)}")
            self.failure = "it was unloaded, but something of it remains"
        else:
            self.enter(State.UNAVAILABLE, f"it is unloaded: load it with POST /v2/repository/models/{self.name}/load")
