"""The common base of the dispatchers of all language models, for any engine that computes the tokens."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterable
from typing import NoReturn

from headwater.wire.lm import Load
from headwater_server.codecs.tensors import InferRequest
from headwater_server.control.load import Moment
from headwater_server.control.routing import DeploymentRoute, unavailable
from headwater_server.dispatch.deployment_protocol import Dispatcher
from headwater_server.errors import RETRY_AFTER_LOST_S, BadRequest, Unavailable
from headwater_server.telemetry.instruments import Gauge
from headwater_server.telemetry.recorder import recorder

__all__ = ["TextDispatcher"]


class TextDispatcher(Dispatcher):
    """A dispatcher that accepts text, and refuses tensors.

    Args:
        route: the deployment.
    """

    def __init__(self, route: DeploymentRoute) -> None:
        self.route = route
        self.meter = recorder().language_model(route.name)
        self._loop = asyncio.get_running_loop()
        self._waiting_since_s: float | None = None
        """Loop time of the call of `moment` since which every call has found waiting sequences; `None` if the last call
        found no waiting sequence."""

    @property
    @abstractmethod
    def _running(self) -> int:
        """Number of this worker's sequences or requests at the engines, running or waiting."""

    @abstractmethod
    def _loads(self) -> Iterable[Load]:
        """The last known load of each connected engine, over all workers."""

    @property
    def load(self) -> Load:
        """The last known loads of the engines, over all workers, summed; an engine without a known load counts as
        idle."""
        loads = list(self._loads())
        return Load(
            sum(load.active for load in loads),
            sum(load.waiting for load in loads),
            sum(load.cache_used for load in loads),
        )

    def moment(self) -> Moment:
        now_s = self._loop.time()
        waiting = self.load.waiting
        if not waiting:
            self._waiting_since_s = None
        elif self._waiting_since_s is None:
            self._waiting_since_s = now_s
        running = self._running
        wait_s = 0.0 if self._waiting_since_s is None else now_s - self._waiting_since_s
        return Moment(running, running, min(waiting, running), wait_s if running else 0.0)

    def gauges(self) -> dict[Gauge, int]:
        meter, load = self.meter, self.load
        now = {meter.active: load.active, meter.waiting: load.waiting, meter.cache_used: load.cache_used}
        if self.signature is not None and (limits := self.signature.limits) is not None:
            now[meter.cache_limit] = limits.cache_tokens * len(self.route.replicas)
        return now

    def check_whole(self) -> None:
        self.check_ready()
        raise self._refusal()

    async def infer(self, request: InferRequest, *, is_step: bool = False) -> NoReturn:
        raise self._refusal()

    def stream(self, request: InferRequest) -> NoReturn:
        raise self._refusal()

    def _no_replica(self) -> Unavailable:
        """The error for a request that no replica can take: the deployment's state, or that its replica ended if the
        routing table still lists a replica."""
        if not self.route.replicas:
            return unavailable(self.route)
        return Unavailable(f"model `{self.route.name}`: its replica ended", retry_after_s=RETRY_AFTER_LOST_S)

    def _refusal(self) -> BadRequest:
        name = self.route.name
        return BadRequest(
            f"model `{name}` is a language model and takes no tensors: POST to /v2/models/{name}/generate, "
            f"/v2/models/{name}/generate_stream or /v1/chat/completions"
        )
