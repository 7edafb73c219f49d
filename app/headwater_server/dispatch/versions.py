"""A deployment with versions: each request goes to a version, chosen by the versions' shares."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from hashlib import blake2b
from typing import Final

from headwater.signature import Signature
from headwater_server.codecs.tensors import Answer, HeadAnswer, InferRequest
from headwater_server.control.route_kinds import TrafficRoute, VersionsKind
from headwater_server.control.routing import DeploymentRoute, State, unavailable
from headwater_server.dispatch.deployment_protocol import Dispatcher, Fail, TensorDispatcher
from headwater_server.dispatch.shadow import Shadow, Target
from headwater_server.errors import RETRY_AFTER_LOST_S, Unavailable

__all__ = ["VersionsDispatcher", "version_for"]

_DIGEST_BYTES: Final = 8


class VersionsDispatcher(Dispatcher):
    """Chooses the version for a request. The dispatcher of that version computes the request and counts it.

    Args:
        route: the deployment.
        find: finds a deployment's dispatcher by its name; returns None if there is no such deployment.
    """

    def __init__(self, route: DeploymentRoute, find: Callable[[str], Dispatcher | None]) -> None:
        self.route = route
        self._find = find
        self.shadow: Shadow | None = None
        """Sends copies of requests to the version ``traffic.shadow``; None if there is no such version."""
        self._adopt_shadow()

    def update(self, route: DeploymentRoute) -> None:
        """See `Dispatcher.update`."""
        super().update(route)
        self._adopt_shadow()

    def close(self) -> None:
        """See `Dispatcher.close`."""
        super().close()
        if self.shadow is not None:
            self.shadow.cancel()

    def shadow_of(self, version: str) -> Shadow | None:
        """The shadow that receives copies of a version's requests; None for the shadow version itself, and if there is
        no shadow."""
        return None if version == self.traffic.shadow else self.shadow

    def _adopt_shadow(self) -> None:
        name = f"{self.route.name}.{self.traffic.shadow}" if self.traffic.shadow else ""
        if self.shadow is not None and self.shadow.name != name:
            self.shadow.cancel()
            self.shadow = None
        if name and self.shadow is None:
            self.shadow = Shadow(name, lambda: self._target(name))

    def _target(self, name: str) -> Target | None:
        dispatcher = self._find(name)
        return dispatcher if isinstance(dispatcher, TensorDispatcher) else None

    @property
    def traffic(self) -> TrafficRoute:
        """The versions' shares of the requests, and the shadow."""
        assert isinstance(self.route.kind, VersionsKind)
        return self.route.kind.traffic

    @property
    def in_flight(self) -> int:
        """See `Dispatcher.in_flight`."""
        return 0

    def under_way(self, replicas: Collection[str] | None) -> list[Fail]:
        """See `Dispatcher.under_way`."""
        return []

    def check_ready(self, *, is_step: bool = False) -> Signature:
        """See `Dispatcher.check_ready`: requests are accepted while the default version is ready."""
        if self.is_draining:
            raise Unavailable("the server is stopping", retry_after_s=RETRY_AFTER_LOST_S)
        if self.route.signature is None or self.route.state is not State.READY:
            raise unavailable(self.route)
        return self.route.signature

    def chosen(self, key: str) -> str:
        """The version for a request: chosen by the shares, or the default version if the chosen version isn't ready.

        Args:
            key: requests with the same key get the same version while the shares stay the same; see `version_for`.

        Raises:
            Unavailable: no requests are accepted now.
        """
        self.check_ready()
        traffic = self.traffic
        version = version_for(f"{self.route.name}\n{key}", traffic.shares)
        dispatcher = self._find(f"{self.route.name}.{version}")
        if dispatcher is None or dispatcher.route.state is not State.READY or not dispatcher.route.replicas:
            return traffic.default
        return version

    async def infer(self, request: InferRequest, *, is_step: bool = False) -> Answer:
        """See `Dispatcher.infer`; the default version answers, since no version was chosen for the request."""
        return await self._default.infer(request, is_step=is_step)

    def stream(self, request: InferRequest) -> AsyncIterator[HeadAnswer]:
        """See `Dispatcher.stream`; the default version answers, as in `infer`."""
        return self._default.stream(request)

    @property
    def _default(self) -> Dispatcher:
        dispatcher = self._find(f"{self.route.name}.{self.traffic.default}")
        if dispatcher is None:
            raise unavailable(self.route)
        return dispatcher


def version_for(key: str, shares: dict[str, float]) -> str:
    """The version whose part of the interval [0, 1) contains the key's hash.

    The parts are in the order of ``shares``, and as long as the shares. With two versions, a key that is on a version
    stays on it while that version's share grows.
    """
    at = int.from_bytes(blake2b(key.encode(), digest_size=_DIGEST_BYTES).digest(), "big") / 2 ** (8 * _DIGEST_BYTES)
    having = [version for version, share in shares.items() if share]
    for version in having[:-1]:
        at -= shares[version]
        if at < 0:
            return version
    return having[-1]
