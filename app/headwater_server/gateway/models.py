"""The models that a gateway worker serves, kept up to date with the routing table."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from starlette.types import Scope

from headwater.signature import Signature
from headwater.wire.open_requests import OpenRequests
from headwater_server.codecs.generate_body import GenerateDecoder, GenerateEncoder
from headwater_server.codecs.infer_request import RequestDecoder
from headwater_server.codecs.infer_response import ResponseEncoder
from headwater_server.control.messages import Drain, Drained, ReplicaLoss
from headwater_server.control.routing import DeploymentRoute, RoutingTable, unavailable
from headwater_server.dispatch.admission import QueueBudget
from headwater_server.dispatch.deployment_protocol import Dispatcher, Fail, TensorDispatcher, drain
from headwater_server.dispatch.pool import Connect
from headwater_server.dispatch.pool import connect as dispatch_connect
from headwater_server.dispatch.shadow import Shadow
from headwater_server.dispatch.versions import VersionsDispatcher
from headwater_server.errors import RETRY_AFTER_LOST_S, BadRequest, NotFound, Unavailable
from headwater_server.gateway.kind_dispatchers import Parts, make_dispatcher
from headwater_server.lm.language_model import LmDispatcher
from headwater_server.security.peer_tls import PeerTls
from headwater_server.telemetry.recorder import recorder
from headwater_server.triton.repository_dispatcher import TritonDispatcher
from headwater_server.vllm.vllm_model import VllmDispatcher

__all__ = ["Models", "ServedModel"]

_LACKS: Final = {
    "embedding": "does not serve embeddings",
    "reranking": "does not rank documents",
    "classification": "does not score labels",
    "transcription": "does not transcribe audio",
}
VERSION = "1"
"""The version of a model without versions."""


class ServedModel:
    """A deployment: its dispatcher, and the codecs for its signature. An adapter of a deployment, or a model of a
    repository, is a `ServedModel`, too, with its own name and the deployment's dispatcher. A version of a deployment
    has the deployment's name."""

    def __init__(self, dispatcher: Dispatcher, adapter: str = "") -> None:
        self.dispatcher = dispatcher
        route = dispatcher.route
        self.name = adapter or (route.part_of if route.version and route.part_of else route.name)
        self.meter = recorder().deployment(dispatcher.route.name)
        self._whole: tuple[Signature, tuple[RequestDecoder, ResponseEncoder]] | None = None
        self._checked: tuple[RequestDecoder, ResponseEncoder] | None = None
        """The codecs of the signature for which `Dispatcher.check_whole` has passed."""
        self._generate: tuple[Signature, tuple[GenerateDecoder, GenerateEncoder]] | None = None

    @property
    def route(self) -> DeploymentRoute:
        """The deployment's entry in the routing table."""
        return self.dispatcher.route

    @property
    def version(self) -> str:
        """The deployment's version; the default version if it has several, `VERSION` if it has no versions."""
        route = self.route
        return route.version or (VERSION if route.traffic is None else route.traffic.default)

    def codecs(self) -> tuple[RequestDecoder, ResponseEncoder]:
        """The codecs of the infer endpoint.

        Raises:
            Unavailable: the deployment accepts no requests now.
            BadRequest: the model answers only with streams, or with text: see `Dispatcher.check_whole`.
        """
        codecs = self.tensor_codecs()
        if self._checked is not codecs:
            self.dispatcher.check_whole()
            self._checked = codecs
        return codecs

    def tensor_codecs(self) -> tuple[RequestDecoder, ResponseEncoder]:
        """The codecs of tensors, of a model that streams, too.

        Raises:
            Unavailable: the deployment accepts no requests now.
        """
        signature = self.dispatcher.check_ready()
        if self._whole is None or signature is not self._whole[0]:
            public_signature = self._public_signature(signature)
            self._whole = signature, (RequestDecoder(public_signature), ResponseEncoder(public_signature, self.version))
        return self._whole[1]

    def generate_codecs(self) -> tuple[GenerateDecoder, GenerateEncoder]:
        """The codecs of the generate extension.

        Raises:
            Unavailable: the deployment accepts no requests now.
        """
        signature = self.dispatcher.check_ready()
        if self._generate is None or signature is not self._generate[0]:
            public_signature = self._public_signature(signature)
            self._generate = (
                signature,
                (GenerateDecoder(public_signature), GenerateEncoder(public_signature, self.version)),
            )
        return self._generate[1]

    def _public_signature(self, signature: Signature) -> Signature:
        """The signature as clients see it, with the name that they know. The replicas of a version have a signature
        with another name."""
        public = signature.public
        return msgspec.structs.replace(public, name=self.name) if self.route.version else public

    @property
    def versions(self) -> list[str]:
        """All versions of the model; a single version if this is a version itself."""
        traffic = self.route.traffic
        return [self.version] if traffic is None else list(traffic.shares)


class Models:
    """All deployments, by name.

    Args:
        connect: makes the clients of replicas other than vLLM's; tests pass a fake.
        budget: limits the requests that wait in all deployments of tensors together, in this worker.
        tls: the cluster's TLS, for replicas on other machines; None: there is no cluster with TLS.
        folder, open_requests: see `Parts`.
    """

    def __init__(
        self,
        connect: Connect | None = None,
        budget: QueueBudget | None = None,
        tls: PeerTls | None = None,
        folder: Path | None = None,
        open_requests: OpenRequests | None = None,
    ) -> None:
        self._parts = Parts(
            connect or functools.partial(dispatch_connect, tls=tls), budget or QueueBudget(), tls, self._dispatcher,
            lambda model, fingerprint: self.on_quarantined(model, fingerprint), lambda loss: self.on_lost(loss),
            folder, open_requests or OpenRequests(),
        )  # fmt: skip
        self._models: dict[str, ServedModel] = {}
        self._adapters: dict[str, ServedModel] = {}
        self.on_quarantined: Callable[[str, bytes], None] = lambda model, fingerprint: None
        """Called with the model and the fingerprint of a request that took two replicas down."""
        self.on_lost: Callable[[ReplicaLoss], None] = lambda loss: None
        """Called with the report of each replica that this worker lost, and again once a request with an API key has
        taken two replicas down."""
        self.cancel_elsewhere: Callable[[str], Awaitable[int]] = _nowhere
        """Cancels the sequences and streams with this id in the other workers. Returns their number."""
        self.is_draining = False
        """Whether the server is stopping: then new requests are refused."""
        self.is_leaving = False
        """Whether the server is stopping or about to stop: then it isn't ready."""
        self.streams = 0
        """Answers that are being written piece by piece. Some of their requests are also in flight."""

    def __iter__(self) -> Iterator[ServedModel]:
        """The deployments, without adapters, versions, and steps of pipelines."""
        return (model for model in self._models.values() if model.route.part_of is None)

    def with_steps(self) -> Iterator[ServedModel]:
        """All deployments, including the steps of pipelines and versions."""
        return iter(self._models.values())

    def by_version(self) -> Iterator[ServedModel]:
        """All deployments as Triton lists them: in place of a deployment with versions only its versions."""
        return (model for model in self._models.values() if model.route.traffic is None)

    def share(self, model: ServedModel) -> float | None:
        """The fraction of the deployment's requests that a version answers; None: the model is not a version."""
        if not model.route.version:
            return None
        traffic = self.get(model.name).route.traffic
        return 0.0 if traffic is None else traffic.shares.get(model.version, 0.0)  # it may be about to go

    def is_shadow(self, model: ServedModel) -> bool:
        """Whether the model is a version that gets copies of requests that another version answers."""
        return self._copies_for(model) is not None

    def versions_of(self, model: ServedModel) -> list[ServedModel]:
        """A deployment's versions; for a deployment without versions, or a version, a list with the model itself."""
        return [model] if model.route.traffic is None else [self.get(model.name, version) for version in model.versions]

    def update(self, table: RoutingTable) -> None:
        """Apply a new routing table: create, update and close dispatchers, and set adapters and shadows."""
        self.is_draining = table.draining
        self.is_leaving = table.leaving or table.draining
        for route in table.deployments:
            model = self._models.get(route.name)
            if model is not None and type(model.route.kind) is type(route.kind):
                model.dispatcher.update(route)
            else:
                if model is not None:  # reloaded as another kind of model; it was drained before
                    model.dispatcher.close()
                model = self._models[route.name] = ServedModel(make_dispatcher(route, self._parts))
            model.dispatcher.is_draining = table.draining
        for name in self._models.keys() - {route.name for route in table.deployments}:
            self._models.pop(name).dispatcher.close()
        self._adapters = {
            name: ServedModel(model.dispatcher, name)
            for model in self._models.values()
            for name in _names_within(model.route)
        }
        for model in self._models.values():
            dispatcher = model.dispatcher
            if isinstance(dispatcher, TensorDispatcher) and model.route.version:
                versions = self._versions(model)
                dispatcher.shadow = None if versions is None else versions.shadow_of(model.route.version)
            elif isinstance(dispatcher, VersionsDispatcher) and dispatcher.shadow and table.draining:
                dispatcher.shadow.cancel()

    def _versions(self, model: ServedModel) -> VersionsDispatcher | None:
        """The dispatcher of the deployment that a version belongs to; None: the model is not a version."""
        dispatcher = self._dispatcher(model.route.part_of or "")
        return dispatcher if isinstance(dispatcher, VersionsDispatcher) else None

    def _copies_for(self, model: ServedModel) -> Shadow | None:
        """The sender of request copies to a version; None: the version gets no copies."""
        versions = self._versions(model)
        is_one = versions is not None and versions.traffic.shadow == model.route.version
        return versions.shadow if versions is not None and is_one else None

    def quarantine(self, name: str, fingerprint: bytes) -> None:
        """Refuse requests with this fingerprint: in another worker such a request took two replicas of this model
        down."""
        dispatcher = self._dispatcher(name)
        if dispatcher is not None:
            dispatcher.quarantine(fingerprint)

    def _dispatcher(self, name: str) -> Dispatcher | None:
        model = self._models.get(name)
        return None if model is None else model.dispatcher

    def get(self, name: str, version: str | None = None) -> ServedModel:
        """Find a deployment, or an adapter.

        Args:
            name: the name.
            version: the version; None: the deployment itself, even if it has versions.
        Raises:
            NotFound: no deployment has this name and version.
        """
        model = self._models.get(name) or self._adapters.get(name)
        if model is None:
            for repository in self.repositories():
                if repository.signature is None:  # the names of its models are not known yet
                    raise unavailable(repository.route)
            names = self._names(lambda route: True)
            raise NotFound(f"model {_quoted(name)}: unknown; this server has {names}", field="model")
        if version is None or model.route.kind.relays_models:
            return model
        if version not in model.versions:
            versions = " or ".join(map(repr, model.versions))
            raise NotFound(f"model `{name}`, version: expected {versions}, got {_quoted(version)}", field="version")
        return model if model.route.traffic is None else self._models[f"{name}.{version}"]

    def choose(self, scope: Scope, name: str, version: str | None = None) -> ServedModel:
        """Find the deployment that answers a request. If it has versions, this is the named version, or a version
        chosen by `VersionsDispatcher.chosen`; or the deployment itself, if it accepts no requests now.

        Args:
            scope: the request's ASGI scope. If a version answers, its ``state`` then has the version.
            name: the deployment's name, or an adapter's.
            version: the version that the request names; None: the request names no version.

        Raises:
            NotFound: no deployment has this name and version.
        """
        model = self.get(name, version)
        route = model.dispatcher.route
        # The traffic is checked first: the check of the dispatcher's class takes longer than everything else here.
        if route.kind.traffic is not None and isinstance(model.dispatcher, VersionsDispatcher):
            sticky = model.dispatcher.traffic.sticky.lower().encode()
            sticky_value = (
                next((value for header, value in scope["headers"] if header == sticky), None) if sticky else None
            )
            key = scope["state"]["request_id"] if sticky_value is None else sticky_value.decode("latin-1")
            try:
                model = self._models[f"{name}.{model.dispatcher.chosen(key)}"]
            except Unavailable:  # raised again, and counted, where the request is answered
                return model
            route = model.dispatcher.route
        if route.version:
            scope["state"]["version"] = model.version
        return model

    def check_mapped(self, model: ServedModel, mapping: str) -> None:
        """Check that a deployment answers requests of a route that maps to its tensors.

        Args:
            model: the deployment.
            mapping: such as ``embedding``, see `headwater.mapping.MAPPINGS`.

        Raises:
            BadRequest: the deployment does not have this mapping.
            Unavailable: the deployment accepts no requests now.
        """
        if getattr(model.dispatcher.check_ready(), mapping) is None:
            names = self._names(lambda route: getattr(route.signature, mapping, None) is not None)
            fix = model.route.kind.embedding_hint if mapping == "embedding" else ""
            raise BadRequest(f"model: `{model.name}` {_LACKS[mapping]}; models that do: {names}{fix}", field="model")

    def only(self, mappings: Sequence[str]) -> str:
        """The name of the only deployment that has at least one of these mappings.

        Raises:
            BadRequest: several deployments have one, or none has.
            Unavailable: none has one so far, and a deployment has not loaded yet.
        """

        def is_mapped(route: DeploymentRoute) -> bool:
            return any(getattr(route.signature, mapping, None) is not None for mapping in mappings)

        names = [model.name for model in self if is_mapped(model.route)]
        starting = (model.route for model in self if model.route.signature is None and not model.route.is_set_aside)
        if not names and (route := next(starting, None)) is not None:
            raise unavailable(route)
        if not names:
            expected = " or ".join(f"`{mapping}`" for mapping in mappings)
            raise BadRequest(f"model: no model of this server can answer here: none declares {expected}", field="model")
        if len(names) != 1:
            message = "model: expected a name in the body, or ?model=NAME, got neither; models that can be meant: "
            raise BadRequest(message + self._names(is_mapped), field="model")
        return names[0]

    def mapping_of(self, name: str, mappings: Sequence[str]) -> str:
        """Which of these mappings a deployment has; the first if it has none of them or several. Raises `NotFound`."""
        signature = self.get(name).route.signature
        return next((mapping for mapping in mappings if getattr(signature, mapping, None) is not None), mappings[0])

    def language_model(self, model: ServedModel) -> LmDispatcher:
        """A deployment's dispatcher, if it is a language model.

        Raises:
            BadRequest: the deployment is not a language model, or vLLM computes it.
            Unavailable: no version of the deployment accepts requests now.
        """
        name, dispatcher = model.name, model.dispatcher
        if isinstance(dispatcher, VersionsDispatcher):
            dispatcher.check_ready()
        if isinstance(dispatcher, VllmDispatcher):
            raise BadRequest(f"model: `{name}` is computed by vLLM: its tokenizer is not offered", field="model")
        if not isinstance(dispatcher, LmDispatcher):
            names = self._names(lambda route: route.takes_text)
            raise BadRequest(f"model: `{name}` is not a language model; language models: {names}", field="model")
        return dispatcher

    def vllm(self, name: str) -> VllmDispatcher | None:
        """The dispatcher of a model that vLLM computes; None if there is no such model, or if another engine computes
        the model."""
        model = self._models.get(name) or self._adapters.get(name)
        dispatcher = model.dispatcher if model is not None else None
        return dispatcher if isinstance(dispatcher, VllmDispatcher) else None

    def repositories(self) -> Iterator[TritonDispatcher]:
        """The dispatchers of all model repositories."""
        for model in self._models.values():
            if isinstance(model.dispatcher, TritonDispatcher):
                yield model.dispatcher

    def repository(self, name: str) -> TritonDispatcher | None:
        """The dispatcher of the repository that has a model; None if no repository has it."""
        model = self._adapters.get(name)
        dispatcher = model.dispatcher if model is not None and name not in self._models else None
        return dispatcher if isinstance(dispatcher, TritonDispatcher) else None

    def _names(self, is_one: Callable[[DeploymentRoute], bool]) -> str:
        names = (name for model in self if is_one(model.route) for name in (model.name, *_names_within(model.route)))
        return ", ".join(f"`{name}`" for name in names) or "none"

    async def drain(self, order: Drain) -> Drained:
        """Wait until a deployment has nothing in flight in this worker, or no request of the kind that the order names;
        at the timeout, end the remaining requests. Zeros if the deployment is unknown here."""
        model = self._models.get(order.model)
        if model is None:
            return Drained()
        reason = "it is being unloaded" if order.replicas is None else "the replica that had the request was replaced"
        if order.adapters:
            reason = "the adapter is being unloaded"
        error = Unavailable(
            f"model `{order.model}`: {reason}, and the request was not done within the drain_timeout_s that was left "
            f"({order.timeout_s:g} s)",
            retry_after_s=RETRY_AFTER_LOST_S,
        )
        dispatcher = model.dispatcher
        if (copies := self._copies_for(model)) is not None:
            copies.cancel()

        def under_way() -> list[Fail]:
            if order.adapters and isinstance(dispatcher, VllmDispatcher):
                return dispatcher.under_way_for(order.adapters)
            return dispatcher.under_way(order.replicas)

        return await drain(under_way, order.timeout_s, error)

    async def cancel_request(self, request_id: str) -> int:
        """Cancel the sequences and streams that have a request's id (`headwater_server.security.key_check.owned_id`),
        in all workers. Returns their number."""
        return await self.cancel_here(request_id) + await self.cancel_elsewhere(request_id)

    async def cancel_here(self, request_id: str) -> int:
        """Cancel the sequences and streams that have a request's id, in this worker. Returns their number."""
        return sum(model.dispatcher.cancel(request_id) for model in self.with_steps())

    @property
    def in_flight(self) -> int:
        """The number of requests in flight in this worker; a pipeline's request and its steps' requests all count."""
        return sum(model.dispatcher.in_flight for model in self.with_steps())

    @property
    def is_idle(self) -> bool:
        """Whether no request is in flight, and no answer is being written."""
        return not self.streams and not self.in_flight

    def close(self) -> None:
        """Close all dispatchers, which ends their calls."""
        for model in self.with_steps():
            model.dispatcher.close()


def _names_within(route: DeploymentRoute) -> Iterable[str]:
    """The names that a deployment serves besides its own: of adapters, or of a repository's models."""
    triton = None if route.signature is None else route.signature.triton
    return route.adapters if triton is None else triton.models


async def _nowhere(request_id: str) -> int:
    return 0


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:97] + "...")
