"""Takes traffic away from versions that answer worse than the default version.

While a version other than the default has a share of the requests, both are compared over the last `WINDOW_S`, as the
rule in ``traffic.rollback`` says:

- the part of the requests that failed, by no fault of their clients. A part below one in ``min_requests`` counts as
  that: a single failure is no difference;
- the 99th percentile of the time that answered requests took. Times are known by the bucket of a histogram, whose
  bounds are 9 % apart, so the lower bounds of the version's buckets are compared with the upper bound of that of the
  default's percentile: the version really is that much slower. And so many requests must have been that slow that it is
  no chance, given how many requests both percentiles are from.

Unless both versions have had ``min_requests``, nothing is decided.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from headwater_server.config.sections import RollbackRule, Traffic
from headwater_server.control.load import Tally
from headwater_server.supervisor.composite import Composite
from headwater_server.supervisor.host import Host
from headwater_server.supervisor.versions_state import VersionsState
from headwater_server.telemetry.catalogue import ALL_SERIES, VERSION_TIMES
from headwater_server.telemetry.recorder import recorder

__all__ = ["Canaries", "Comparison"]

logger = logging.getLogger("headwater")

TICK_S: Final = 0.5
WINDOW_S: Final = 60.0
CHANCE: Final = 1e-6
"""How probable so many slow requests must be at most, were the version just as slow as the rule allows."""
_BOUNDS_MS: Final = [bound / 1e6 for bound in ALL_SERIES[VERSION_TIMES].bounds]
_NONE: Final = Tally("", 0, 0, [0] * (len(_BOUNDS_MS) + 1))


class Comparison:
    """Compares the versions of one deployment with its default, as long as its traffic stays the same."""

    def __init__(self, traffic: Traffic, rule: RollbackRule) -> None:
        self.traffic = traffic
        self._rule = rule
        self._seen: deque[tuple[float, Mapping[str, Tally]]] = deque()

    def verdict(self, now_s: float, tallies: Mapping[str, Tally]) -> tuple[str, str] | None:
        """The version that is to lose its share, and why; None: there is none.

        Args:
            now_s: on any steady clock.
            tallies: what each version has counted so far.
        """
        self._seen.append((now_s, dict(tallies)))
        while self._seen[0][0] < now_s - WINDOW_S:
            self._seen.popleft()
        default = self._recent(self.traffic.default)
        for version, share in self.traffic.shares.items():
            if share and version != self.traffic.default:
                reason = self._fault(self._recent(version), default)
                if reason:
                    return version, reason
        return None

    def _recent(self, version: str) -> Tally:
        """What a version has counted within the window."""
        before, after = (seen.get(version, _NONE) for seen in (self._seen[0][1], self._seen[-1][1]))
        return after.since(before)

    def _fault(self, version: Tally, default: Tally) -> str:
        """What is worse about a version; empty: nothing."""
        rule = self._rule
        if min(version.ended, default.ended) < rule.min_requests:
            return ""
        failed, usual = (one.failed / one.ended for one in (version, default))
        if failed > rule.errors * max(usual, 1 / rule.min_requests):
            return f"{100 * failed:.3g} % of its requests failed, {100 * usual:.3g} % of the default's"
        if min(version.answered, default.answered) < rule.min_requests:
            return ""
        slow, fast = _p99_bucket(version.times), _p99_bucket(default.times)
        if fast == len(_BOUNDS_MS):
            return ""
        # Of the buckets that are so much slower; bounds are rounded to nanoseconds.
        first = bisect_left(_BOUNDS_MS, rule.p99 * _BOUNDS_MS[fast] * (1 - 1e-6)) + 1
        if slow >= first and _chance(sum(version.times[first:]), version.answered, default.answered) < CHANCE:
            text = "its p99 is over {:.3g} ms, that of the default at most {:.3g} ms"
            return text.format(_BOUNDS_MS[slow - 1], _BOUNDS_MS[fast])
        return ""


def _chance(slow: int, answered: int, default_answered: int) -> float:
    """An upper bound on the probability that so many of a version's requests are slow by chance.

    Slow is what one in a hundred of the default's requests is, times the factor. Were the version no slower than that,
    each slow request of both together would be the default's as probably as any request is. That so few of them are has
    a binomial distribution's probability, for which this is Chernoff's bound.
    """
    usual = default_answered // 100
    expected = default_answered / (default_answered + answered)
    found = usual / (slow + usual) if slow else 1.0
    if found >= expected:
        return 1.0
    divergence = (1 - found) * math.log((1 - found) / (1 - expected))
    if found:
        divergence += found * math.log(found / expected)
    return math.exp(-(slow + usual) * divergence)


def _p99_bucket(times: list[int]) -> int:
    """The index of the bucket that has the 99th percentile."""
    left = sum(times) - sum(times) // 100
    for index, count in enumerate(times):
        left -= count
        if left <= 0:
            return index
    return len(times) - 1


class Canaries:
    """Compares the versions of all deployments whose traffic has a rule, and rolls back.

    Args:
        composites: names without replicas of their own; they may change.
        tallies: what each deployment has counted, over all gateway workers.
        is_busy: whether a command is under way with a deployment, which is then left alone.
        roll_back: takes the deployment, the version that is to lose its share, and why.
        host: says when the server stops.
        clock: in seconds; tests replace it.
    """

    def __init__(
        self,
        composites: Mapping[str, Composite],
        tallies: Callable[[], Mapping[str, Tally]],
        is_busy: Callable[[str], bool],
        roll_back: Callable[[VersionsState, str, str], None],
        host: Host,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._composites = composites
        self._tallies = tallies
        self._is_busy = is_busy
        self._roll_back = roll_back
        self._host = host
        self._clock = clock
        self._comparisons: dict[str, Comparison] = {}

    async def run(self) -> None:
        """Compare at every tick until the server stops."""
        while not self._host.is_stopping:
            await self._host.wait_for_stop(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Compare the versions of each deployment once."""
        watched = {
            name: one
            for name, one in self._composites.items()
            if isinstance(one, VersionsState) and one.is_watched and one.is_loaded and not self._is_busy(name)
        }
        self._comparisons = {name: one for name, one in self._comparisons.items() if name in watched}
        for name, one in watched.items():
            traffic = one.config.shared_traffic
            comparison = self._comparisons.get(name)
            if comparison is None or comparison.traffic != traffic:
                assert traffic.rollback is not None
                comparison = self._comparisons[name] = Comparison(traffic, traffic.rollback)
            counted = self._tallies()
            tallies = {version: counted.get(part, _NONE) for version, part in one.deployments.items()}
            verdict = comparison.verdict(self._clock(), tallies)
            if verdict is not None:
                version, reason = verdict
                logger.error("%s: rolled back by itself: version `%s`: %s", name, version, reason)
                recorder().count("headwater_rollbacks", name, version)
                self._roll_back(one, version, reason)
