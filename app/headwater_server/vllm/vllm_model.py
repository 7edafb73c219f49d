"""A model served by vLLM, in a gateway worker: its replicas and its requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Collection
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import anyio

from headwater.wire.lm import Load
from headwater_server.control.messages import ReplicaLoss
from headwater_server.control.route_kinds import VllmKind
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, check_key
from headwater_server.dispatch.deployment_protocol import Fail
from headwater_server.dispatch.pool import ReplicaPool
from headwater_server.errors import BadRequest, Cancelled, DeadlineExceeded, HeadwaterError
from headwater_server.lm.text_dispatcher import TextDispatcher
from headwater_server.telemetry.tracing import add_generation
from headwater_server.transport.address import ClientTls
from headwater_server.transport.relay_client import RelayClient
from headwater_server.vllm.affinity import PrefixAffinity
from headwater_server.vllm.relay import Relay, VllmReplica
from headwater_server.vllm.requests import VllmRequest

if TYPE_CHECKING:
    from headwater_server.vllm.media_fetch import MediaFetcher

__all__ = ["VllmDispatcher"]

SAMPLE_S: Final = 1.0
"""Approximate number of seconds between two reads of a replica's metrics, for up to `MOST_SAMPLED` replicas; also the
maximum duration of a read."""
MOST_SAMPLED: Final = 50
"""Maximum number of replicas sampled per `SAMPLE_S`. With more replicas all samples are older, and are used for gauges
and scaling only: stale loads of other workers make a worse choice of replica than this worker's requests alone."""
_METRIC: Final = re.compile(
    rb"\nvllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)\{[^}\n]*\} ([0-9.eE+-]+)"
)
"""Starts with the newline before a metric, since `re` tries ``^`` at every position, which takes six times as long."""


class VllmDispatcher(TextDispatcher):
    """Relays requests for one deployment to its replicas.

    Args:
        route: the deployment.
        tls: the cluster's certificates, for replicas on other machines.
        on_lost: called with the report of each replica that is lost.
    """

    def __init__(
        self,
        route: DeploymentRoute,
        tls: ClientTls | None = None,
        on_lost: Callable[[ReplicaLoss], None] = lambda loss: None,
    ) -> None:
        super().__init__(route)
        self._tls = tls
        self._pool = ReplicaPool(route.name, self._open, on_lost=on_lost, keys_of=self._keys_of)
        self._affinity = PrefixAffinity()
        self._relays: set[Relay] = set()
        self._sampled: dict[str, Load] = {}
        """Each connected replica's last sampled load, by the replica's id."""
        self._fetcher: MediaFetcher | None = None
        self.update(route)
        self._sampling = self._loop.create_task(self._sample())

    @property
    def in_flight(self) -> int:
        """The number of requests that are not closed yet."""
        return len(self._relays)

    @property
    def _running(self) -> int:
        return len(self._relays)

    @property
    def _kind(self) -> VllmKind:
        assert isinstance(self.route.kind, VllmKind)
        return self.route.kind

    def _loads(self) -> Collection[Load]:
        return self._sampled.values()

    def update(self, route: DeploymentRoute) -> None:
        super().update(route)
        self._pool.update(route)
        self._sampled = {id: load for id, load in self._sampled.items() if id in self._pool.connected}

    def close(self) -> None:
        super().close()
        self._sampling.cancel()
        self._pool.close()

    def under_way(self, replicas: Collection[str] | None) -> list[Fail]:
        return [
            relay.fail
            for relay in self._relays
            if relay.is_running
            and (replicas is None or (relay.replica is not None and relay.replica.route.id in replicas))
        ]

    def under_way_for(self, adapters: Collection[str]) -> list[Fail]:
        """For each running request for these adapters, the function that ends it."""
        return [relay.fail for relay in self._relays if relay.is_running and relay.model in adapters]

    def cancel(self, request_id: str) -> int:
        """See `Dispatcher.cancel`; each request counts once."""
        relays = [relay for relay in self._relays if relay.request_id == request_id and relay.is_running]
        for relay in relays:
            relay.fail(Cancelled("the request was cancelled"))
        return len(relays)

    def check_generates(self) -> None:
        """Check that the model generates text.

        Raises:
            Unavailable: no requests are accepted now.
            BadRequest: the model returns embeddings.
        """
        if self.check_ready().embedding is not None:
            raise self._refusal()

    def _refusal(self) -> BadRequest:
        if not self.route.gives_embeddings:
            return super()._refusal()
        message = f"model: `{self.route.name}` serves only embeddings: POST to /v1/embeddings, or name a model of text"
        return BadRequest(message, field="model")

    @property
    def fetches_media(self) -> bool:
        """Whether requests may name images and the like by URLs that must be fetched."""
        return bool(self._kind.media_hosts)

    async def fetch_media(self, request: VllmRequest, take: Callable[[int], None]) -> None:
        """Fetch the images and the like that a request names by URLs, within the request's and the deployment's
        ``timeout_s``, and put them into the request. Nothing is fetched a second time.

        Args:
            request: the checked request.
            take: called with a number of bytes before they are held; an error that it raises ends the fetch.

        Raises:
            BadRequest: a URL isn't allowed, or can't be fetched; the message names the field.
            DeadlineExceeded: the time is over.
            HeadwaterError: an error from ``take``.
        """
        if request.media is None or not request.media.links:
            return
        if self._fetcher is None:
            from headwater_server.vllm.media_fetch import MediaFetcher

            self._fetcher = MediaFetcher()
        limit_s = min(self.route.timeout_s, request.timeout_s or self.route.timeout_s)
        try:
            with anyio.fail_after(limit_s):
                await self._fetcher.fetch(request.media, self._kind.media_hosts, take)
            request.media.links.clear()
        except TimeoutError:
            raise DeadlineExceeded(f"the deadline of {limit_s:g} s passed") from None

    def open(self, request: VllmRequest, request_id: str, cache_scope: str = "", began_s: float | None = None) -> Relay:
        """Begin a request: only the returned relay's methods send it. The caller must close the relay.

        Args:
            request: the checked request.
            request_id: the request's id from the client, for `cancel`.
            cache_scope: the name of the request's API key; empty without a key. Only requests with the same scope, for
                the same load of an adapter, share cached prefixes.
            began_s: loop time from which the request's own ``timeout_s`` counts; default: now.

        Raises:
            Unavailable: no requests are accepted now.
            RateLimited: the API key's requests ended too many replicas.
            BadRequest: the request's body is nested too deeply.
        """
        self.check_ready()
        check_key(self.route, cache_scope)
        key = cache_scope
        loads = self._kind.adapters.get(request.model)
        if loads:  # otherwise the cache entries of an earlier adapter with this name would be reused
            cache_scope = f"{cache_scope}\n{loads}"
        relay = Relay(
            request,
            request_id,
            cache_scope,
            key=key,
            choose=self._choose,
            on_lost=self._pool.lose,
            on_left=self._relays.discard,
            idle_s=self.route.timeout_s,
            trace=add_generation(self.route.name),
            began_s=began_s,
        )
        self._relays.add(relay)
        return relay

    # Replicas

    def _open(self, route: ReplicaRoute) -> VllmReplica:
        return VllmReplica(route, RelayClient(route.http_address, route.token, self._tls))

    def _keys_of(self, replica: VllmReplica) -> set[str]:
        return {relay.key for relay in self._relays if relay.replica is replica}

    def _choose(self, request: VllmRequest, tried: VllmReplica | None) -> VllmReplica:
        """The replica for a request: the least busy of the pool's candidates, or a replica that has computed a prefix
        of the prompt. ``tried`` only if there is no other candidate.

        Raises:
            Unavailable: there is no replica.
        """
        candidates = self._pool.candidates()
        candidates = [replica for replica in candidates if replica is not tried] or candidates
        if not candidates:
            raise self._no_replica()
        least_busy = min(candidates, key=attrgetter("load"))
        factor = 0 if request.route in ("embeddings", "tokenize") else self._kind.prefix_affinity
        if not factor or len(self._pool.eligible()) == 1:
            return least_busy

        def load(id: str) -> int | None:
            replica = self._pool.connected.get(id)
            return replica.load if replica is not None and replica.is_eligible and replica is not tried else None

        prompt = request.model.encode() + request.prompt
        return self._pool.connected[self._affinity.choose(prompt, least_busy.route.id, load, factor)]

    async def _sample(self) -> None:
        """Read the replicas' metrics repeatedly, one replica after another, until cancelled."""
        while True:
            ids = list(self._pool.connected)
            pause_s = SAMPLE_S / min(max(1, len(ids)), MOST_SAMPLED)
            for id in ids:
                if (replica := self._pool.connected.get(id)) is not None:
                    await self._read(replica, is_current=len(ids) <= MOST_SAMPLED)
                await asyncio.sleep(pause_s)
            if not ids:
                await asyncio.sleep(pause_s)

    async def _read(self, replica: VllmReplica, *, is_current: bool) -> None:
        # asyncio's `wait_for` would lose its cancellation if the answer fails at the same moment.
        with contextlib.suppress(HeadwaterError), anyio.move_on_after(SAMPLE_S):
            load = self._load(await replica.client.get("/metrics"))
            if self._pool.connected.get(replica.route.id) is replica:
                replica.losses = 0
                self._sampled[replica.route.id] = load
                replica.others = max(0, load.active + load.waiting - replica.requests) if is_current else 0

    def _load(self, text: bytes) -> Load:
        """The load in a replica's metrics. Metrics that are missing count as 0."""
        metrics = {name: float(value) for name, value in _METRIC.findall(text)}
        vllm = self.signature.vllm if self.signature is not None else None
        cache_used = metrics.get(b"kv_cache_usage_perc", 0.0) * (vllm.cache_tokens if vllm is not None else 0)
        running, waiting = (int(metrics.get(name, 0)) for name in (b"num_requests_running", b"num_requests_waiting"))
        return Load(running, waiting, int(cache_used))
