"""The interface of a deployment in a gateway worker, for every kind of model."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Iterator
from itertools import chain
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from headwater.signature import Signature
from headwater_server.codecs.tensors import Answer, HeadAnswer, InferRequest
from headwater_server.control.load import Moment
from headwater_server.control.messages import Drained
from headwater_server.control.routing import DeploymentRoute, State, unavailable
from headwater_server.dispatch.answer_cache import AnswerCache, Waiter
from headwater_server.dispatch.collector import Collector, no_rows, no_rows_by_head
from headwater_server.dispatch.sequence_states import SequenceStates
from headwater_server.dispatch.shadow import Shadow
from headwater_server.errors import RETRY_AFTER_LOST_S, BadRequest, HeadwaterError, Unavailable
from headwater_server.telemetry.instruments import Gauge
from headwater_server.telemetry.recorder import recorder

__all__ = ["Dispatcher", "Fail", "TensorDispatcher", "drain"]

POLL_S: Final = 0.02
"""Seconds between the checks of `drain`."""

Fail = Callable[[HeadwaterError], None]
"""Ends one request with an error."""


class Dispatcher(Protocol):
    """One deployment in a gateway worker: a model, a pipeline or a language model."""

    route: DeploymentRoute
    """The deployment's state."""
    is_draining: bool = False
    """Whether the server is stopping: new requests are refused, requests in flight are still answered."""

    @property
    def signature(self) -> Signature | None:
        """The model's signature; None until a replica has been ready (of a graph: until a plan was made)."""
        return self.route.signature

    @property
    def in_flight(self) -> int:
        """The number of requests in flight."""
        ...

    def update(self, route: DeploymentRoute) -> None:
        """Adopt a new state of the deployment, such as other replicas or another signature."""
        if route.signature is not None and route.signature == self.route.signature:
            # Keep the same object: batch keys contain its identity.
            route = msgspec.structs.replace(route, signature=self.route.signature)
        self.route = route

    def close(self) -> None:
        """End all calls to replicas; requests that replicas have, or that wait for a replica, fail with `Unavailable`
        or its subclass `ReplicaLost`."""
        self.route = msgspec.structs.replace(self.route, replicas=(), retiring=())

    def under_way(self, replicas: Collection[str] | None) -> list[Fail]:
        """For each request that isn't answered yet, the function that ends it.

        Args:
            replicas: only requests that replicas with these ids have; None for all requests, including queued requests.
                A deployment without replicas ignores it.
        """
        ...

    def moment(self) -> Moment:
        """The replicas' present load from this worker; zeros for a deployment without replicas."""
        return Moment()

    def gauges(self) -> dict[Gauge, int]:
        """The present values of the deployment's gauges."""
        return {}

    def check_ready(self, *, is_step: bool = False) -> Signature:
        """Check that requests are accepted now. Returns the signature.

        Args:
            is_step: whether the request is a step of a pipeline's request, which is answered even while the server is
                stopping.

        Raises:
            Unavailable: no requests are accepted now.
        """
        if self.is_draining and not is_step:
            raise Unavailable("the server is stopping", retry_after_s=RETRY_AFTER_LOST_S)
        route = self.route
        if route.signature is None or not route.replicas:
            raise unavailable(route)
        # A pipeline is drained before its steps, and its requests still need the steps.
        if route.state is State.DRAINING and not (is_step and route.part_of is not None):
            raise unavailable(route)
        return route.signature

    def check_whole(self) -> None:
        """Check that the model answers a request with a single result of tensors.

        Raises:
            Unavailable: no requests are accepted now.
            BadRequest: the model answers with a stream of results, or with text.
        """
        if self.check_ready().streams:
            name = self.route.name
            raise BadRequest(f"model `{name}` streams its results: POST to /v2/models/{name}/generate_stream")

    async def infer(self, request: InferRequest, *, is_step: bool = False) -> Answer:
        """Answer a request whole.

        Args:
            request: the request.
            is_step: see `check_ready`.

        Raises:
            Unavailable: no requests are accepted now, the replica that had the request ended, or an unload ended the
                request.
            RateLimited: the API key's requests ended too many replicas.
            Quarantined: the same request took two replicas down.
            QueueFull: the queue is full.
            SharedMemoryFull: /dev/shm has no capacity for the request's tensors.
            DeadlineExceeded: the deadline passed; rows not yet sent are never computed.
            BadRequest: the callable reported that the rows are wrong, the request has more rows than may ever wait, or
                the model takes no tensors.
            BodyTooLarge: the request has more bytes than may ever wait.
            CallableFailed: the callable raised, or broke its declaration; `OutOfMemory` if the device's memory is too
                small.
        """
        ...

    def stream(self, request: InferRequest) -> AsyncIterator[HeadAnswer]:
        """Answer a request piece by piece, each as soon as it is ready.

        Raises:
            HeadwaterError: the same errors as `infer`, also after the first piece; `Cancelled` if a client cancelled
                the request by its id.
        """
        ...

    def cancel(self, request_id: str) -> int:
        """Cancel the streams, or a language model's sequences, that this worker has under a request's id. Returns their
        number; requests to vLLM count once, since their sequences are not followed."""
        return 0

    def quarantine(self, fingerprint: bytes) -> None:
        """Refuse requests with this fingerprint: in another worker such a request took two replicas down."""
        return


class Run(Protocol):
    """A request in flight."""

    request: InferRequest
    collector: Collector


R = TypeVar("R", bound=Run)


class TensorDispatcher(Dispatcher, Generic[R]):
    """Takes requests for a model or a pipeline, and answers them whole or piece by piece."""

    def __init__(self, route: DeploymentRoute) -> None:
        self.route = route
        self._requests: set[R] = set()
        """Requests queued or being computed. Requests that wait for an identical request are in `_waiting`."""
        self._waiting: set[Waiter] = set()
        self._cache: AnswerCache | None = None
        self._states: SequenceStates | None = None
        """The states of the model's sequences; None: the model has no states."""
        self.shadow: Shadow | None = None
        """Receives copies of the requests that this dispatcher computes; None: no copies are sent."""
        self._adopt_cache()

    @abstractmethod
    def _start(self, request: InferRequest, signature: Signature, *, is_stream: bool) -> R:
        """Admit a request, start it and add it to ``_requests``."""

    @abstractmethod
    def _end(self, run: R) -> None:
        """Remove a request that was answered, failed, or lost its client, and stop computing it."""

    @property
    def in_flight(self) -> int:
        """See `Dispatcher.in_flight`."""
        return len(self._requests) + len(self._waiting)

    @property
    def is_crowded(self) -> bool:
        """Whether more rows wait than the next call takes."""
        return False

    def _is_queued(self, request: InferRequest) -> bool:
        """Whether a request in flight may still wait in a queue, where a more urgent request would overtake it."""
        return True

    def update(self, route: DeploymentRoute) -> None:
        """See `Dispatcher.update`."""
        super().update(route)
        self._adopt_cache()

    def gauges(self) -> dict[Gauge, int]:
        """See `Dispatcher.gauges`."""
        if self._cache is None:
            return {}
        return {recorder().cache(self.route.name).size_bytes: self._cache.kept.size_bytes}

    @property
    def version(self) -> Hashable:
        """Identifies the model that computes the answers; changes when a load or reload replaces the replicas."""
        return self.route.generation, self.route.signature

    def _adopt_cache(self) -> None:
        """Create, resize or remove the cache of answers to match the route; clear it if an operator unloaded the
        deployment."""
        share = self.route.cache
        if share is None:
            self._cache = None
        elif self._cache is None:
            meter = recorder().cache(self.route.name)
            self._cache = AnswerCache(share, meter, self._waiting, lambda: self.version, self._is_queued)
        else:
            self._cache.kept.limit(share)
        if self._cache is not None and self.route.is_set_aside:
            self._cache.clear()

    def under_way(self, replicas: Collection[str] | None) -> list[Fail]:
        """See `Dispatcher.under_way`."""
        return [run.collector.fail for run in self._all() if not run.collector.is_done]

    def cancel(self, request_id: str) -> int:
        """See `Dispatcher.cancel`."""
        return sum([run.collector.cancel() for run in self._all() if run.request.cancel_id == request_id])

    def _all(self) -> Iterator[Run]:
        return chain(self._requests, self._waiting)

    async def infer(self, request: InferRequest, *, is_step: bool = False) -> Answer:
        """See `Dispatcher.infer`."""
        signature = self.check_ready(is_step=is_step)
        if self._states is not None:
            return await self._states.answer(request, self.route.timeout_s, self.compute, self.check_ready)
        if request.rows == 0:
            return Answer(no_rows(signature, request))
        began_s = time.monotonic()
        if self._cache is None:
            answer = await self._compute(request, signature)
        else:
            answer = await self._cache.answer(
                request, self.route.timeout_s, lambda: self._compute(request, self.check_ready(is_step=is_step))
            )
        if self.shadow is not None and answer.cache in ("", "miss"):
            self.shadow.offer(request, answer, signature, time.monotonic() - began_s, is_crowded=self.is_crowded)
        if answer.cache not in ("", "miss"):
            meter = recorder().deployment(self.route.name)
            meter.rows.add(request.rows)
            for head in request.heads:
                meter.note_head(head, None, (time.monotonic() - began_s) * 1000)
        return answer

    async def compute(self, request: InferRequest) -> Answer:
        """Answer a request whole like `infer`, but never from the cache and without a copy for a shadow."""
        return await self._compute(request, self.check_ready())

    async def _compute(self, request: InferRequest, signature: Signature) -> Answer:
        run = self._start(request, signature, is_stream=False)
        try:
            return await run.collector.whole()
        finally:
            self._end(run)

    async def stream(self, request: InferRequest) -> AsyncIterator[HeadAnswer]:
        """See `Dispatcher.stream`."""
        signature = self.check_ready()
        if self._states is not None:
            yield HeadAnswer("", (await self.infer(request)).outputs)
            return
        if self.shadow is not None:
            self.shadow.drop("stream")
        if request.rows == 0:
            for piece in no_rows_by_head(signature, request):
                yield piece
            return
        run = self._start(request, signature, is_stream=True)
        try:
            while (answer := await run.collector.next_piece()) is not None:
                yield answer
                del answer  # frees its memory: the next piece may take long
        finally:
            self._end(run)


async def drain(under_way: Callable[[], list[Fail]], timeout_s: float, error: HeadwaterError) -> Drained:
    """Wait until requests in flight are answered; after ``timeout_s`` fail the remaining requests with ``error``.
    Returns how many requests ended in time, and how many were failed."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    before = len(under_way())
    while (remaining := under_way()) and loop.time() < deadline_s:  # noqa: ASYNC110 - only at an unload
        await asyncio.sleep(POLL_S)
    for fail in remaining:
        fail(error.again())
    return Drained(max(0, before - len(remaining)), len(remaining))
