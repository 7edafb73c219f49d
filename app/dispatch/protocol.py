"""What a gateway worker asks of a deployment, whichever kind of model it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from typing import Final, Protocol

import msgspec

from app.codecs.tensors import Answer, HeadAnswer, InferRequest
from app.control.load import Moment
from app.control.messages import Drained
from app.control.routing import DeploymentRoute, State, unavailable
from app.errors import RETRY_AFTER_LOST_S, BadRequest, HeadwaterError, Unavailable
from app.telemetry.instruments import Gauge
from inference.signature import Signature

__all__ = ["Dispatcher", "Fail", "drain"]

POLL_S: Final = 0.02

Fail = Callable[[HeadwaterError], None]
"""Ends one request with an error."""


class Dispatcher(Protocol):
    """One deployment in a gateway worker: a model, a pipeline or a language model.

    What stands here is what most do; where a kind of model differs, its dispatcher says so.
    """

    route: DeploymentRoute
    """Its state."""
    is_draining: bool = False
    """Whether new requests are refused; those under way are still answered."""

    @property
    def signature(self) -> Signature | None:
        """The model's signature, once known."""
        return self.route.signature

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        ...

    def update(self, route: DeploymentRoute) -> None:
        """Take in a new state of the deployment: other replicas, another signature."""
        if route.signature is not None and route.signature == self.route.signature:
            # The same object, so that what was made for it stays good.
            route = msgspec.structs.replace(route, signature=self.route.signature)
        self.route = route

    def close(self) -> None:
        """End all calls; their requests are answered with `ReplicaLost`."""
        self.route = msgspec.structs.replace(self.route, replicas=(), retiring=())

    def under_way(self, replicas: Collection[str] | None) -> list[Fail]:
        """Of each request that isn't answered yet, what ends it.

        Args:
            replicas: ids; only what these have. None: everything, what waits in a queue included.
        """
        ...

    def moment(self) -> Moment:
        """What its replicas have to do now, for this worker."""
        return Moment()

    def gauges(self) -> dict[Gauge, int]:
        """What metrics say of it now."""
        return {}

    def check_ready(self, *, is_step: bool = False) -> Signature:
        """The signature, if requests can be taken now.

        Args:
            is_step: whether for a step of a pipeline's request, which is answered although the server is stopping.

        Raises:
            Unavailable: they can't.
        """
        if self.is_draining and not is_step:
            raise Unavailable("the server is stopping", retry_after_s=RETRY_AFTER_LOST_S)
        route = self.route
        if route.signature is None or not route.replicas:
            raise unavailable(route)
        # A step's pipeline is drained first, and still needs it.
        if route.state is State.DRAINING and not (is_step and route.part_of is not None):
            raise unavailable(route)
        return route.signature

    def check_whole(self) -> None:
        """See whether the model answers a request with one result.

        Raises:
            Unavailable: it can't take requests now.
            BadRequest: it answers with any number of them, or with text.
        """
        if self.check_ready().streams:
            name = self.route.name
            raise BadRequest(f"model `{name}` streams its results: POST to /v2/models/{name}/generate_stream")

    async def infer(self, request: InferRequest, *, is_step: bool = False) -> Answer:
        """Answer a request whole.

        Args:
            request: what is asked.
            is_step: whether it is a step of a pipeline's request, which is answered although the server is stopping.

        Raises:
            Unavailable: no replica is ready, or the one that had the request ended.
            QueueFull: the queue is full.
            DeadlineExceeded: it took too long; rows not yet sent are never computed.
            BadRequest: the callable said that the rows are wrong, or the model takes no tensors.
            CallableFailed: the callable raised, or broke its declaration.
        """
        ...

    def stream(self, request: InferRequest) -> AsyncIterator[HeadAnswer]:
        """Answer a request piece by piece, each as soon as it is ready.

        Raises:
            HeadwaterError: as `infer`; after the first piece too.
        """
        ...

    def cancel(self, request_id: str) -> int:
        """Cancel what runs or waits in this worker under a request's id. Returns how many streams that were."""
        return 0

    async def cancel_sequences(self, request_id: str) -> int:
        """Cancel a language model's request, whichever worker has it. Returns how many sequences it had."""
        return 0

    def quarantine(self, mark: bytes) -> None:
        """Refuse what has this fingerprint: another worker saw it take two replicas of a model down."""
        return


async def drain(
    dispatcher: Dispatcher, replicas: Collection[str] | None, timeout_s: float, error: HeadwaterError
) -> Drained:
    """Wait until what is in flight is answered; after ``timeout_s`` end the rest with this error."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    before = len(dispatcher.under_way(replicas))
    while (left := dispatcher.under_way(replicas)) and loop.time() < deadline_s:  # noqa: ASYNC110 - only at an unload
        await asyncio.sleep(POLL_S)
    for fail in left:
        fail(error.again())
    return Drained(max(0, before - len(left)), len(left))
