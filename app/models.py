"""The models that a gateway worker serves: the routing table come alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from app.dispatch import Dispatcher
from app.errors import BadRequest, NotFound
from app.request_codec import RequestDecoder
from app.response_codec import ResponseEncoder
from app.routing import DeploymentRoute, ReplicaRoute, RoutingTable
from app.triton_client import ReplicaClient
from inference.signature import Signature

__all__ = ["Models", "ServedModel"]

VERSION = "1"
"""Every model has this one version."""


class ServedModel:
    """One deployment: its dispatcher, and the codecs made for its signature."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self._signature: Signature | None = None
        self._codecs: tuple[RequestDecoder, ResponseEncoder] | None = None

    @property
    def route(self) -> DeploymentRoute:
        """Its state."""
        return self.dispatcher.route

    def codecs(self) -> tuple[RequestDecoder, ResponseEncoder]:
        """The codecs, if requests can be taken now.

        Raises:
            Unavailable: they can't.
        """
        signature = self.dispatcher.check_ready()
        if self._codecs is None or signature is not self._signature:
            self._signature = signature
            self._codecs = RequestDecoder(signature), ResponseEncoder(signature)
        return self._codecs


class Models:
    """All deployments, by name.

    Args:
        connect: makes clients of replicas; tests and other engines put their own here.
    """

    def __init__(self, connect: Callable[[str, ReplicaRoute], ReplicaClient] | None = None) -> None:
        self._connect = connect
        self._models: dict[str, ServedModel] = {}
        self.is_draining = False

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def update(self, table: RoutingTable) -> None:
        """Take in a new routing table."""
        self.is_draining = table.draining
        names = set()
        for route in table.deployments:
            names.add(route.name)
            model = self._models.get(route.name)
            if model is None:
                self._models[route.name] = ServedModel(Dispatcher(route, self._connect))
            else:
                model.dispatcher.update(route)
            self._models[route.name].dispatcher.is_draining = table.draining
        for name in [name for name in self._models if name not in names]:
            self._models.pop(name).dispatcher.close()

    def get(self, name: str, version: str | None = None) -> ServedModel:
        """The deployment of that name.

        Raises:
            NotFound: there is none, or not of that version.
        """
        model = self._models.get(name)
        if model is None:
            known = ", ".join(f"`{other}`" for other in self._models) or "none"
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
            able = ", ".join(
                f"`{other.route.name}`" for other in self if other.route.signature and other.route.signature.embedding
            )
            raise BadRequest(f"model: `{name}` gives no embeddings; models that do: {able or 'none'}", field="model")
        return model

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return sum(model.dispatcher.in_flight for model in self)

    def close(self) -> None:
        """End all calls."""
        for model in self:
            model.dispatcher.close()


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:97] + "...")
