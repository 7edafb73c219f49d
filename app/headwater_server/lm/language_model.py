"""A language model in a gateway worker: its replicas, its requests in flight, its tokenizer and chat template."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from headwater.signature import LanguageModelSpec
from headwater.wire.lm import Load
from headwater_server.control.messages import ReplicaLoss
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, check_key, unavailable
from headwater_server.dispatch.deployment_protocol import Fail
from headwater_server.dispatch.pool import Connect, Replica, ReplicaPool, connect
from headwater_server.errors import RETRY_AFTER_LOST_S, HeadwaterError, ReplicaLost, Unavailable
from headwater_server.lm.engine_channel import NOTHING, Channel
from headwater_server.lm.request import RequestRun
from headwater_server.lm.sequence import Generation, SequenceSpec
from headwater_server.lm.text_dispatcher import TextDispatcher
from headwater_server.telemetry.tracing import add_generation
from headwater_server.transport.replica_protocol import FrameReplicaClient

if TYPE_CHECKING:
    from headwater_server.lm.text.language import LanguageText

__all__ = ["LmDispatcher"]

logger = logging.getLogger("headwater.lm")

AVOID_S: Final = 1.0
"""Seconds after the end of a replica's channel with `Unavailable`, in which the replica gets requests only if there is
no other candidate: it may refuse every request."""

LoadText = Callable[[LanguageModelSpec], "LanguageText"]


@dataclass(slots=True, eq=False)
class EngineReplica(Replica):
    """A replica and the channel to its engine."""

    client: FrameReplicaClient
    channel: Channel | None = None
    """The channel. None before the first request, and after the channel's end until the next request."""
    avoided_until_s: float = 0.0
    """Loop time until which the replica gets requests only if there is no other candidate: see `AVOID_S`."""

    @property
    def sequences(self) -> int:
        """Number of this worker's sequences on the replica plus, from the engine's last report, of other workers; 0
        without a channel."""
        return self.channel.sequences + self.channel.others if self.channel is not None else 0

    def close(self, reason: str) -> None:
        """End the connection. Requests in flight fail with `ReplicaLost`, except requests that the replica never
        received: they are restarted, if there is another replica."""
        if self.channel is not None:
            self.channel.close(ReplicaLost(reason, retry_after_s=RETRY_AFTER_LOST_S))
        self.client.close()


class LmDispatcher(TextDispatcher):
    """Submits a language model's requests to the engines of its replicas.

    Args:
        route: the deployment.
        connect: creates a replica's client.
        load_text: loads a model's tokenizer and chat template; called in a thread. None: from the model's folder.
        on_lost: called with the report of each replica that is lost.
    """

    def __init__(
        self,
        route: DeploymentRoute,
        connect: Connect = connect,
        load_text: LoadText | None = None,
        on_lost: Callable[[ReplicaLoss], None] = lambda loss: None,
    ) -> None:
        super().__init__(route)
        self._connect = connect
        self._load_text = load_text or _load_text
        self._pool = ReplicaPool(route.name, self._open, on_lost=on_lost, keys_of=_keys_of)
        self._runs: set[RequestRun] = set()
        self._text_source: tuple[str, str | None, str | None, int] | None = None
        """The folder and tool parser of the last load of tokenizer and chat template, and the deployment's generation
        at that time; None before the first load."""
        self._text: asyncio.Task[LanguageText | Unavailable] | None = None
        """The last load, which may still run; None before the first."""
        self.update(route)

    @property
    def in_flight(self) -> int:
        """The number of requests that are not closed yet."""
        return len(self._runs)

    @property
    def _channels(self) -> list[Channel]:
        return [replica.channel for replica in self._pool.connected.values() if replica.channel is not None]

    @property
    def _running(self) -> int:
        return sum(channel.sequences for channel in self._channels)

    def _loads(self) -> list[Load]:
        return [channel.load for channel in self._channels]

    def update(self, route: DeploymentRoute) -> None:
        super().update(route)
        self._pool.update(route)
        if route.signature is not None and route.signature.language_model is not None:
            self._prepare_text(route.signature.language_model, route.generation)

    def close(self) -> None:
        super().close()
        self._pool.close()

    def under_way(self, replicas: Collection[str] | None) -> list[Fail]:
        if replicas is None:
            return [run.fail for run in self._runs if run.is_running]
        held = [replica.channel for replica in self._pool.held(replicas)]
        return [owner.fail for channel in held if channel is not None for owner in channel.owners]

    async def text(self) -> LanguageText:
        """The model's tokenizer and chat template. Waits while they are being loaded.

        Raises:
            Unavailable: the model's folder is not known yet, or tokenizer and chat template can't be loaded.
        """
        while (task := self._text) is not None:
            outcome = task.result() if task.done() else await asyncio.shield(task)
            if task is not self._text:  # the folder has changed or the deployment was reloaded meanwhile
                continue
            if isinstance(outcome, Unavailable):
                raise outcome.again()
            return outcome
        raise unavailable(self.route)

    @property
    def loaded_text(self) -> LanguageText | None:
        """The model's tokenizer and chat template; None while they are being loaded, or if they can't be loaded."""
        outcome = self._text.result() if self._text is not None and self._text.done() else None
        return None if isinstance(outcome, Unavailable) else outcome

    def open(
        self,
        request_id: str,
        specs: Sequence[SequenceSpec],
        *,
        timeout_s: float | None = None,
        cache_scope: str = "",
    ) -> Generation:
        """Have a request's sequences generated, all on the same replica. The caller must close the returned
        `Generation`.

        Args:
            request_id: the request's id from the client, for `cancel`.
            specs: the sequences.
            timeout_s: maximum duration of the whole request in seconds; None: no maximum. The maximum time without a
                token is the deployment's `timeout_s`.
            cache_scope: the name of the request's API key; empty without a key. Only requests with the same scope share
                cached prefixes.

        Raises:
            Unavailable: no replica can be reached, or new requests are refused, because the server is stopping or the
                deployment is being unloaded.
            RateLimited: the API key's requests ended too many replicas.
        """
        self.check_ready()
        check_key(self.route, cache_scope)
        start = partial(self._start, self.route.generation)
        run = RequestRun(
            request_id,
            specs,
            self.meter,
            start=start,
            on_left=self._runs.discard,
            idle_s=self.route.timeout_s,
            limit_s=timeout_s,
            trace=add_generation(self.route.name),
            cache_scope=cache_scope,
        )
        self._runs.add(run)
        try:
            start(run)
        except BaseException:
            run.abandon()
            raise
        return run

    def cancel(self, request_id: str) -> int:
        return sum([run.cancel() for run in self._runs if run.request_id == request_id])

    # Replicas

    def _open(self, route: ReplicaRoute) -> EngineReplica:
        client = cast(FrameReplicaClient, self._connect(self.route.name, route))
        client.open(NOTHING, streams=True)
        return EngineReplica(route, client)

    def _start(self, generation: int, run: RequestRun) -> None:
        """Submit a request to the candidate with the fewest sequences. A replica within `AVOID_S` is used only if there
        is no other candidate. With many replicas, the pool offers only some of them as candidates.

        Args:
            generation: the deployment's generation when the request was opened: the request's tokens are valid only for
                replicas of this generation.
            run: the request.

        Raises:
            Unavailable: the deployment was reloaded since, or no replica can be reached.
        """
        if generation != self.route.generation:
            raise Unavailable(f"model `{self.route.name}` was reloaded", retry_after_s=RETRY_AFTER_LOST_S)
        candidates = self._pool.candidates()
        if not candidates:
            raise self._no_replica()
        now_s = self._loop.time()
        replica = min(candidates, key=lambda candidate: (now_s < candidate.avoided_until_s, candidate.sequences))
        if replica.channel is None:
            on_end = partial(self._on_channel_end, replica)
            replica.channel = Channel(self.route.name, replica.client, self.meter, on_end)
        run.submit(replica.channel)

    def _on_channel_end(self, replica: EngineReplica, error: HeadwaterError) -> None:
        channel, replica.channel = replica.channel, None
        if channel is not None and channel.has_answered:
            replica.losses = 0
        if isinstance(error, Unavailable):
            replica.avoided_until_s = self._loop.time() + AVOID_S
        if isinstance(error, ReplicaLost):
            self._pool.lose(replica, _keys_of_channel(channel))

    # Text

    def _prepare_text(self, spec: LanguageModelSpec, generation: int) -> None:
        """Start to load tokenizer and chat template, unless the last load, which may still run, was of the same folder,
        formats and generation. Load again after a failure."""
        task = self._text
        has_failed = task is not None and task.done() and isinstance(task.result(), Unavailable)
        source = (spec.folder, spec.tool_parser, spec.reasoning, generation)
        if source != self._text_source or has_failed:
            self._text_source = source
            self._text = self._loop.create_task(self._loaded(spec))

    async def _loaded(self, spec: LanguageModelSpec) -> LanguageText | Unavailable:
        try:
            return await asyncio.to_thread(self._load_text, spec)
        except Exception as error:
            logger.exception("model %s: no tokenizer or chat template from %s", self.route.name, spec.folder)
            reason = f"its tokenizer or chat template can't be loaded: {str(error) or type(error).__name__}"
            return Unavailable(f"model `{self.route.name}`: {reason}", retry_after_s=RETRY_AFTER_LOST_S)


def _keys_of(replica: EngineReplica) -> set[str]:
    return _keys_of_channel(replica.channel)


def _keys_of_channel(channel: Channel | None) -> set[str]:
    """The names of the API keys with sequences in flight on the channel; "" for requests without a key."""
    return set() if channel is None else {run.cache_scope for run in channel.owners}


def _load_text(spec: LanguageModelSpec) -> LanguageText:
    from headwater_server.lm.text.language import LanguageText  # imports tokenizers, which takes memory

    text = LanguageText(Path(spec.folder), spec.tool_parser, spec.sampling, spec.reasoning)
    tools = "unknown" if text.tool_format is None else text.tool_format.name
    reasoning = "none" if text.reasoning_format is None else text.reasoning_format.name
    logger.info("%s: tool calls in the format %s, reasoning in the format %s", spec.folder, tools, reasoning)
    return text
