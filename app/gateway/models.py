"""The models that a gateway worker serves: the routing table come alive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from app.codecs.generate import GenerateDecoder, GenerateEncoder
from app.codecs.infer_request import RequestDecoder
from app.codecs.infer_response import ResponseEncoder
from app.control.messages import Drain, Drained
from app.control.routing import DeploymentRoute, RoutingTable
from app.dispatch.admission import QueueBudget
from app.dispatch.dispatcher import ModelDispatcher
from app.dispatch.graph import GraphDispatcher
from app.dispatch.pool import Connect, connect
from app.dispatch.protocol import Dispatcher, drain
from app.errors import RETRY_AFTER_LOST_S, BadRequest, NotFound, Unavailable
from app.lm.dispatcher import LmDispatcher
from app.telemetry.recorder import recorder
from inference.signature import Signature

__all__ = ["Models", "ServedModel"]

VERSION = "1"
"""Every model has this one version."""


class ServedModel:
    """One deployment: its dispatcher, and the codecs made for its signature.

    Args:
        dispatcher: the deployment's.
        language_model: the same, if it is one.
    """

    def __init__(self, dispatcher: Dispatcher, language_model: LmDispatcher | None = None) -> None:
        self.dispatcher = dispatcher
        self.language_model = language_model
        self._signature: Signature | None = None
        self._codecs: tuple[RequestDecoder, ResponseEncoder] | None = None
        self.meter = recorder().deployment(dispatcher.route.name)
        self._generate: tuple[Signature, GenerateDecoder, GenerateEncoder] | None = None

    @property
    def route(self) -> DeploymentRoute:
        """Its state."""
        return self.dispatcher.route

    def codecs(self) -> tuple[RequestDecoder, ResponseEncoder]:
        """The codecs, if requests can be taken now.

        Raises:
            Unavailable: they can't.
            BadRequest: the model answers by streams only, or with text.
        """
        signature = self.dispatcher.check_ready()
        if self._codecs is None or signature is not self._signature:
            self.dispatcher.check_whole()
            self._signature = signature
            self._codecs = RequestDecoder(signature), ResponseEncoder(signature)
        return self._codecs

    def generate_codecs(self) -> tuple[GenerateDecoder, GenerateEncoder]:
        """The codecs of the generate extension, if requests can be taken now.

        Raises:
            Unavailable: they can't.
        """
        signature = self.dispatcher.check_ready()
        if self._generate is None or signature is not self._generate[0]:
            self._generate = signature, GenerateDecoder(signature), GenerateEncoder(signature)
        return self._generate[1:]


class Models:
    """All deployments, by name.

    Args:
        connect: makes clients of replicas; tests and other engines put their own here.
        room: what may wait of all deployments together; those of language models have bounds of their own.
    """

    def __init__(self, connect: Connect = connect, room: QueueBudget | None = None) -> None:
        self._connect = connect
        self._room = room or QueueBudget()
        self._models: dict[str, ServedModel] = {}
        self.on_quarantined: Callable[[str, bytes], None] = lambda model, mark: None
        """Called with model and fingerprint of a request that took two replicas down."""
        self.cancel_elsewhere: Callable[[str], Awaitable[int]] = _nowhere
        """Cancels in the other workers what has this id, and counts it."""
        self.is_draining = False
        self.streams = 0
        """Answers that are being written piece by piece; a part of them is in flight, too."""

    def __iter__(self) -> Iterator[ServedModel]:
        """Those that stand in the configuration under their own name, in its order."""
        return (model for model in self._models.values() if model.route.part_of is None)

    def with_steps(self) -> Iterator[ServedModel]:
        """Those, and the deployments that are steps of a pipeline."""
        return iter(self._models.values())

    def update(self, table: RoutingTable) -> None:
        """Take in a new routing table."""
        self.is_draining = table.draining
        names = set()
        for route in table.deployments:
            names.add(route.name)
            model = self._models.get(route.name)
            if model is not None and _kind(model.route) != _kind(route):
                # Loaded anew as something else; it was drained before.
                model.dispatcher.close()
                model = None
            if model is None:
                self._models[route.name] = self._served(route)
            else:
                model.dispatcher.update(route)
            self._models[route.name].dispatcher.is_draining = table.draining
        for name in [name for name in self._models if name not in names]:
            self._models.pop(name).dispatcher.close()

    def _served(self, route: DeploymentRoute) -> ServedModel:
        if route.is_language_model:
            language_model = LmDispatcher(route, self._connect)
            return ServedModel(language_model, language_model)
        if route.is_graph:
            return ServedModel(GraphDispatcher(route, self._dispatcher))
        return ServedModel(
            ModelDispatcher(route, self._connect, lambda mark: self.on_quarantined(route.name, mark), self._room)
        )

    def quarantine(self, name: str, mark: bytes) -> None:
        """Refuse what has this fingerprint: another worker saw it take two replicas of that model down."""
        dispatcher = self._dispatcher(name)
        if dispatcher is not None:
            dispatcher.quarantine(mark)

    def _dispatcher(self, name: str) -> Dispatcher | None:
        model = self._models.get(name)
        return None if model is None else model.dispatcher

    def get(self, name: str, version: str | None = None) -> ServedModel:
        """The deployment of that name.

        Raises:
            NotFound: there is none, or not of that version.
        """
        model = self._models.get(name)
        if model is None:
            known = ", ".join(f"`{other.route.name}`" for other in self) or "none"
            raise NotFound(f"model {_quoted(name)}: unknown; this server has {known}", field="model")
        if version is not None and version != VERSION:
            raise NotFound(f"model `{name}`, version: expected {VERSION!r}, got {_quoted(version)}", field="version")
        return model

    def embedding(self, name: str) -> ServedModel:
        """The deployment of that name, which must serve embeddings.

        Raises:
            NotFound: there is none.
            BadRequest: it has no embeddings.
            Unavailable: it can't take requests now.
        """
        model = self.get(name)
        if model.dispatcher.check_ready().embedding is None:
            eligible = ", ".join(
                f"`{other.route.name}`" for other in self if other.route.signature and other.route.signature.embedding
            )
            raise BadRequest(
                f"model: `{name}` gives no embeddings; models that do: {eligible or 'none'}", field="model"
            )
        return model

    def language_model(self, name: str, version: str | None = None) -> LmDispatcher:
        """The deployment of that name, which must be a language model.

        Raises:
            NotFound: there is none, or not of that version.
            BadRequest: it is something else.
        """
        dispatcher = self.get(name, version).language_model
        if dispatcher is None:
            eligible = ", ".join(f"`{other.route.name}`" for other in self if other.route.is_language_model)
            raise BadRequest(
                f"model: `{name}` is no language model; models that are: {eligible or 'none'}", field="model"
            )
        return dispatcher

    async def drain(self, order: Drain) -> Drained:
        """Wait until nothing of a deployment is in flight here, and end what takes longer than it may."""
        model = self._models.get(order.model)
        if model is None:
            return Drained()
        what = "it is being unloaded" if order.replicas is None else "the replica that had the request was replaced"
        error = Unavailable(
            f"model `{order.model}`: {what}, and the request was not done within the drain_timeout_s that was left "
            f"({order.timeout_s:g} s)",
            retry_after_s=RETRY_AFTER_LOST_S,
        )
        return await drain(model.dispatcher, order.replicas, order.timeout_s, error)

    async def cancel_request(self, request_id: str) -> int:
        """Cancel what runs or waits under a request's id, whichever worker has it.

        Returns:
            How many sequences of language models and streams that were.
        """
        here = self.cancel_streams(request_id)
        # Replicas know whose sequences they have, other workers whose streams.
        sequences = (model.dispatcher.cancel_sequences(request_id) for model in self.with_steps())
        return here + sum(await asyncio.gather(self.cancel_elsewhere(request_id), *sequences))

    def cancel_streams(self, request_id: str) -> int:
        """Cancel this worker's streams of models and pipelines by their request's id. Returns how many these were."""
        return sum(model.dispatcher.cancel(request_id) for model in self.with_steps())

    @property
    def in_flight(self) -> int:
        """Requests that replicas are asked."""
        return sum(model.dispatcher.in_flight for model in self.with_steps())

    @property
    def is_idle(self) -> bool:
        """Whether no answer is under way."""
        return not self.streams and not self.in_flight

    def close(self) -> None:
        """End all calls."""
        for model in self.with_steps():
            model.dispatcher.close()


async def _nowhere(request_id: str) -> int:
    return 0


def _kind(route: DeploymentRoute) -> tuple[bool, bool]:
    """What decides which dispatcher a deployment needs."""
    return route.is_language_model, route.is_graph


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:97] + "...")
