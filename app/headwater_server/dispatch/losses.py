"""Retries rows whose replica was lost, each part alone, and quarantines requests that end replicas."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from headwater.signature import CONTEXT
from headwater_server.codecs.tensors import InferRequest
from headwater_server.control.messages import ReplicaLoss
from headwater_server.dispatch.pending import Part
from headwater_server.dispatch.pool import LOST_RETRY_S, ReplicaCalls, ReplicaPool
from headwater_server.errors import RETRY_AFTER_LOST_S, Quarantined, QueueFull, ReplicaLost
from headwater_server.telemetry.recorder import DeploymentMeter

__all__ = ["LIMIT", "Losses", "Quarantine", "Retries", "fingerprint", "keys_of"]

logger = logging.getLogger("headwater.dispatch")

LIMIT: Final = 1024
"""The most suspects, and the most refused requests, that are remembered."""

FINGERPRINT_BYTES: Final = 16

RETRY_AFTER_TWICE_S: Final = 60


def fingerprint(request: InferRequest) -> bytes:
    """Hash of a request's inputs, parameters and heads, which determine the model's answer. Equal requests of several
    clients have equal hashes."""
    row_parameters = {**request.row_parameters, CONTEXT: ""}
    parameters = (sorted(request.batch_parameters.items()), sorted(row_parameters.items()))
    digest = hashlib.blake2b(msgspec.json.encode((parameters, request.heads)), digest_size=FINGERPRINT_BYTES)
    for name, tensor in sorted(request.inputs.items()):
        # The length of each tensor keeps different tensors apart that have the same concatenated bytes.
        digest.update(msgspec.json.encode((name, tensor.datatype, tensor.shape, len(tensor.data))))
        digest.update(tensor.data)
    return digest.digest()


def keys_of(replica: ReplicaCalls, unsent: list[Part] | None = None) -> set[str]:
    """Names of the API keys that sent the requests of a replica's calls in flight, without the batch ``unsent``, which
    never reached it; "" for a request without a key."""
    return {part.pending.request.owner for batch in replica.batches.values() if batch is not unsent for part in batch}


class Quarantine:
    """The suspects and the refused requests of one deployment in this worker, by fingerprint. Callers pass the present
    time.

    A request is a suspect once a replica was lost while it had the request, perhaps together with other requests; a
    suspect should be computed alone. The request is refused once another replica was lost while computing the request
    alone, or once another worker refuses it.

    Args:
        for_s: seconds for which suspects and refused requests are remembered; 0 disables both.
    """

    def __init__(self, for_s: float) -> None:
        self.for_s = for_s
        self._suspected: dict[bytes, float] = {}
        """The time at which each fingerprint expires; the earliest first."""
        self._refused: dict[bytes, float] = {}

    def __len__(self) -> int:
        """The number of fingerprints; while it is 0, no request needs hashing."""
        return len(self._suspected) + len(self._refused)

    def suspect(self, fingerprint: bytes, now_s: float) -> None:
        """Note that a replica was lost with the request."""
        self._add(self._suspected, fingerprint, now_s)

    def refuse(self, fingerprint: bytes, now_s: float) -> None:
        """Refuse the request from now on: two replicas were lost with it."""
        self.clear(fingerprint)
        self._add(self._refused, fingerprint, now_s)

    def clear(self, fingerprint: bytes) -> None:
        """Drop the suspicion: the request was answered, so another request ended the replica."""
        self._suspected.pop(fingerprint, None)

    def lift(self) -> None:
        """Forget all fingerprints, because the model was reloaded."""
        self._suspected.clear()
        self._refused.clear()

    def is_suspected(self, fingerprint: bytes, now_s: float) -> bool:
        """Whether the request should be computed alone."""
        _drop_expired(self._suspected, now_s)
        return fingerprint in self._suspected

    def refused_s(self, fingerprint: bytes, now_s: float) -> float:
        """Seconds for which the request is still refused; 0 if it isn't refused."""
        _drop_expired(self._refused, now_s)
        return self._refused.get(fingerprint, now_s) - now_s

    def _add(self, table: dict[bytes, float], fingerprint: bytes, now_s: float) -> None:
        if not self.for_s:
            return
        _drop_expired(table, now_s)
        table.pop(fingerprint, None)
        table[fingerprint] = now_s + self.for_s
        if len(table) > LIMIT:
            del table[next(iter(table))]


def _drop_expired(table: dict[bytes, float], now_s: float) -> None:
    while table and table[first := next(iter(table))] <= now_s:
        del table[first]


class Retries:
    """The parts of one deployment that wait to be retried.

    One replica at a time is set aside for retries. It computes one call at a time: retries and batches of other
    requests take turns there, so that neither kind waits until the other has ended.
    """

    def __init__(self) -> None:
        self._waiting: deque[Part] = deque()
        self.aside: ReplicaCalls | None = None
        """The replica that is set aside; None if no replica is."""
        self._is_alone = False
        """Whether that replica computes a retry now."""
        self._is_others_turn = False
        """Whether that replica gets a batch of other requests before the next retry, if such requests wait."""

    def __bool__(self) -> bool:
        """Whether a part waits, or a replica is set aside."""
        return bool(self._waiting) or self.aside is not None

    @property
    def rows(self) -> int:
        """Rows that wait, without the rows of requests that have ended."""
        return sum(part.rows for part in self._waiting if not part.pending.collector.is_done)

    def push(self, part: Part) -> None:
        """Add a part, which is in no queue."""
        part.is_retry = True
        self._waiting.append(part)

    def push_back(self, parts: list[Part]) -> None:
        """Put back parts that `next` returned and that never reached a replica; `next` returns them first."""
        for part in reversed(parts):
            part.is_retry = True
            self._waiting.appendleft(part)

    def remove(self, part: Part) -> None:
        """Remove a waiting part."""
        self._waiting.remove(part)
        part.is_retry = False

    def drain(self) -> list[Part]:
        """Remove and return all parts."""
        return [self._pop() for _ in range(len(self._waiting))]

    def _pop(self) -> Part:
        part = self._waiting.popleft()
        part.is_retry = False
        return part

    def next(
        self, find_replica: Callable[[], ReplicaCalls | None], *, has_others: bool
    ) -> tuple[ReplicaCalls, Part] | None:  # fmt: skip
        """Take the part to be computed now. Sets a replica aside if necessary, and releases it once no part waits or is
        computed.

        Returns the replica that is set aside, and the part; None if no part waits, no replica is eligible, the replica
        has a call, or it is the turn of other requests.

        Args:
            find_replica: finds the least loaded eligible replica, without calls if possible.
            has_others: whether rows of other requests wait; their batches then take turns with retries.
        """
        while self._waiting and self._waiting[0].pending.collector.is_done:
            self._pop()
        if self.aside is not None and not self.aside.is_eligible:
            self._release()
        if not self._waiting:
            if not self._is_alone:
                self._release()
            return None
        if self.aside is None or (self.aside.calls and not self._is_alone):
            best = find_replica()
            # Change the replica only for an idle replica: another busy replica may take long.
            if best is not None and (self.aside is None or not best.calls):
                self._release()
                self.aside = best
        if self.aside is None or self.aside.calls or (self._is_others_turn and has_others):
            return None
        self._is_alone = True
        return self.aside, self._pop()

    def admits(self, replica: ReplicaCalls) -> bool:
        """Whether a replica may have a batch of other requests now."""
        return replica is not self.aside or (self._is_others_turn and not replica.calls)

    def note_batch(self) -> None:
        """Note that the replica that is set aside gets a batch of other requests."""
        self._is_others_turn = False

    def note_end(self, replica: ReplicaCalls) -> None:
        """Note that a replica's call has ended; the replica's ``calls`` must not include it any more."""
        if replica is not self.aside:
            return
        self._is_others_turn = self._is_alone
        self._is_alone = False
        if not self._waiting:
            self._release()

    def _release(self) -> None:
        self.aside = None
        self._is_alone = False
        self._is_others_turn = False


class Losses:
    """Retries or fails the rows of one deployment's lost replicas.

    When a request took two replicas down, ``on_quarantined`` is called with its fingerprint, and, if it was sent with
    an API key, ``on_lost`` with a report that names the key.
    """

    def __init__(
        self,
        name: str,
        meter: DeploymentMeter,
        pool: ReplicaPool[ReplicaCalls],
        on_quarantined: Callable[[bytes], None],
        on_lost: Callable[[ReplicaLoss], None] = lambda loss: None,
    ) -> None:
        self._name = name
        self._meter = meter
        self._pool = pool
        self._on_quarantined = on_quarantined
        self._on_lost = on_lost
        self._accused: dict[str, list[tuple[Part, str]]] = {}
        """By the id of a part's second lost replica: the part, and the id of its first lost replica."""
        self._loop = asyncio.get_running_loop()
        self.retries = Retries()
        self.quarantine = Quarantine(0)
        self.is_closed = False
        """Whether replicas are lost because the deployment's dispatcher is closed."""

    def lose(self, replica: ReplicaCalls, unsent: list[Part] | None = None) -> None:
        """Give a lost replica no new calls; the batch ``unsent`` never reached it."""
        self._pool.lose(replica, keys_of(replica, unsent))
        self.fail_stranded()

    def fail_stranded(self) -> None:
        """Fail the parts that wait to be retried, if no eligible replica is left."""
        if self.retries and not self._pool.eligible():
            for part in self.retries.drain():
                text = f"model `{self._name}`: no replica is left that could compute the request"
                text = "the replica ended while it had the request" if part.lost_with else text
                part.fail(ReplicaLost(text, retry_after_s=RETRY_AFTER_LOST_S))

    def take(self, part: Part, replica: ReplicaCalls, error: ReplicaLost) -> None:
        """Retry a lost replica's rows on another replica, once and alone, for the heads that have not answered.

        Rows that can't be retried fail with ``error``. Rows that have lost a second replica fail once it is known
        whether their request is to blame (`judge`), within `LOST_RETRY_S`.
        """
        pending = part.pending
        if pending.collector.is_done or part.awaited.isdisjoint(pending.collector.undecided):
            return
        if self.is_closed or pending.signature.streams or pending.request.is_copy:
            part.fail(error)
            return
        part.losses += 1
        if not pending.fingerprint:
            pending.fingerprint = fingerprint(pending.request)
        now_s = self._loop.time()
        id = replica.route.id
        if part.losses > 1:
            self._accused.setdefault(id, []).append((part, part.lost_with))
            if replica.losses > 1:  # it failed before it had the request, so the supervisor will end it anyway
                self._acquit(id)
                return
            self._loop.call_later(LOST_RETRY_S, self._acquit, id)
            self.judge()
            return
        part.lost_with = id
        self.quarantine.suspect(pending.fingerprint, now_s)
        if not self._pool.eligible() or not pending.signature.idempotent:
            part.fail(error)
            return
        self._meter.retries.add()
        self.retries.push(part)

    def judge(self) -> None:
        """Quarantine requests whose second lost replica has left the routing table: that replica has ended."""
        for id in [id for id in self._accused if id not in self._pool.connected]:
            for part, earlier in self._accused.pop(id):
                self._convict(part, id, earlier)

    def _convict(self, part: Part, replica: str, earlier: str) -> None:
        fingerprint, owner = part.pending.fingerprint, part.pending.request.owner
        self.quarantine.refuse(fingerprint, self._loop.time())
        self._meter.quarantined.add()
        self._on_quarantined(fingerprint)
        if owner:
            self._on_lost(ReplicaLoss(self._name, replica, convicted=owner, earlier=earlier))
        logger.warning("model %s: a request took two replicas down: it is not tried again", self._name)
        text = f"model `{self._name}`: the request took two replicas down, and is not tried again"
        part.fail(ReplicaLost(text, retry_after_s=RETRY_AFTER_TWICE_S))

    def _acquit(self, replica: str) -> None:
        """Fail the requests with this second lost replica, without quarantine: the replica failed before, is still in
        the routing table, or the dispatcher closes."""
        for part, _ in self._accused.pop(replica, ()):
            text = f"model `{self._name}`: two replicas could not answer the request"
            part.fail(ReplicaLost(text, retry_after_s=RETRY_AFTER_LOST_S))

    def close(self) -> None:
        """Stop retries, because the deployment's dispatcher is about to close all connections. Requests that have lost
        a second replica fail now."""
        self.is_closed = True
        for replica in list(self._accused):
            self._acquit(replica)

    def examine(self, request: InferRequest, max_rows: int) -> bytes:
        """The fingerprint of a new request if it must be computed alone, because it is a suspect; else empty.

        Raises:
            Quarantined: the same request took two replicas down.
            QueueFull: more than ``max_rows`` rows, including this request's, would wait to be computed alone.
        """
        digest = fingerprint(request)
        now_s = self._loop.time()
        left_s = self.quarantine.refused_s(digest, now_s)
        if left_s:
            raise Quarantined(
                f"model `{self._name}`: the same request took two replicas down, and is refused for another "
                f"{left_s:.0f} s; to lift that, reload the model",
                retry_after_s=int(left_s) + 1,
            )
        if not self.quarantine.is_suspected(digest, now_s):
            return b""
        if self.retries.rows + request.rows > max_rows:
            raise QueueFull(f"model `{self._name}`: too many requests wait to be computed alone", retry_after_s=1)
        return digest
