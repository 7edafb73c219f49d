"""Gives all traffic to the default version once another version answers worse.

While a version other than the default has a share of the requests, it is compared with the default over the last
`WINDOW_S` seconds, by the rule in ``traffic.rollback``:

- the fraction of requests that failed through no fault of the client. The default's fraction counts as at least
  1/``min_requests``, so that a single failure makes no difference;
- the 99th percentile of the time that answered requests took. Times are known only by their histogram bucket, and
  bucket bounds are 9 % apart, so the lower bound of the version's bucket is compared with the upper bound of the
  default's bucket: the version really is slower by that factor. In addition, the number of slow requests must be too
  large to be chance, given how many requests both percentiles come from.

Nothing is decided before both versions have had ``min_requests`` within these seconds.
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
from headwater_server.supervisor.child_processes import ChildProcesses
from headwater_server.supervisor.deployments import Deployments
from headwater_server.supervisor.states import VersionsState
from headwater_server.telemetry.catalogue import ALL_SERIES, VERSION_TIMES
from headwater_server.telemetry.recorder import recorder

__all__ = ["Canaries", "Comparison"]

logger = logging.getLogger("headwater")

TICK_S: Final = 0.5
WINDOW_S: Final = 60.0
CHANCE: Final = 1e-6
"""A version counts as slower only if the probability of so many slow requests, computed for a version exactly as slow
as the rule allows, is below this."""
_BOUNDS_MS: Final = [bound / 1e6 for bound in ALL_SERIES[VERSION_TIMES].bounds]
_NONE: Final = Tally("", 0, 0, [0] * (len(_BOUNDS_MS) + 1))


class Comparison:
    """Compares the versions of a deployment with its default, as long as its traffic settings stay the same."""

    def __init__(self, traffic: Traffic, rule: RollbackRule) -> None:
        self.traffic = traffic
        self._rule = rule
        self._samples: deque[tuple[float, Mapping[str, Tally]]] = deque()

    def verdict(self, now_s: float, tallies: Mapping[str, Tally]) -> tuple[str, str] | None:
        """The first version that is worse than the default, and the reason; None if no version is worse.

        Args:
            now_s: seconds on any steady clock.
            tallies: the counts so far, by version.
        """
        self._samples.append((now_s, dict(tallies)))
        while self._samples[0][0] < now_s - WINDOW_S:
            self._samples.popleft()
        default = self._recent(self.traffic.default)
        for version, share in self.traffic.shares.items():
            if share and version != self.traffic.default:
                reason = self._fault(self._recent(version), default)
                if reason:
                    return version, reason
        return None

    def _recent(self, version: str) -> Tally:
        """A version's counts within the window."""
        before, after = (tallies.get(version, _NONE) for tallies in (self._samples[0][1], self._samples[-1][1]))
        return after.since(before)

    def _fault(self, version: Tally, default: Tally) -> str:
        """Why a version is worse than the default; empty if it is not worse."""
        rule = self._rule
        if min(version.ended, default.ended) < rule.min_requests:
            return ""
        failed, usual = (tally.failed / tally.ended for tally in (version, default))
        if failed > rule.errors * max(usual, 1 / rule.min_requests):
            return f"{100 * failed:.3g} % of its requests failed, {100 * usual:.3g} % of the default's"
        if min(version.answered, default.answered) < rule.min_requests:
            return ""
        slow, fast = _p99_bucket(version.times), _p99_bucket(default.times)
        if fast == len(_BOUNDS_MS):
            return ""
        # Index of the first bucket that is slower by the allowed factor. Bounds are rounded to nanoseconds, hence the
        # tolerance.
        first = bisect_left(_BOUNDS_MS, rule.p99 * _BOUNDS_MS[fast] * (1 - 1e-6)) + 1
        if slow >= first and _chance(sum(version.times[first:]), version.answered, default.answered) < CHANCE:
            text = "its p99 is over {:.3g} ms, that of the default at most {:.3g} ms"
            return text.format(_BOUNDS_MS[slow - 1], _BOUNDS_MS[fast])
        return ""


def _chance(slow: int, answered: int, default_answered: int) -> float:
    """An upper bound on the probability that ``slow`` of a version's requests are slow by chance.

    A request of the default is slow above the default's 99th percentile, a request of the version above that percentile
    times the allowed factor. If the version were only as slow as the rule allows, a slow request of either would be the
    default's with the same probability as any request is. The number of slow requests of the default then has a
    binomial distribution, and this is Chernoff's bound on the probability that it is so small.
    """
    usual = default_answered // 100
    expected = default_answered / (default_answered + answered)
    share = usual / (slow + usual) if slow else 1.0
    if share >= expected:
        return 1.0
    divergence = (1 - share) * math.log((1 - share) / (1 - expected))
    if share:
        divergence += share * math.log(share / expected)
    return math.exp(-(slow + usual) * divergence)


def _p99_bucket(times: list[int]) -> int:
    """The index of the bucket that contains the 99th percentile."""
    rank = sum(times) - sum(times) // 100
    for index, count in enumerate(times):
        rank -= count
        if rank <= 0:
            return index
    return len(times) - 1


class Canaries:
    """Compares the versions of all deployments that have a rollback rule, and rolls back.

    Args:
        deployments: the server's deployments.
        tallies: the counts over all gateway workers, by `Tally.name`.
        is_busy: whether a command is running on a deployment; its versions are not compared then.
        children: says when the server stops, and has a rollback published.
    """

    def __init__(
        self,
        deployments: Deployments,
        tallies: Callable[[], Mapping[str, Tally]],
        is_busy: Callable[[str], bool],
        children: ChildProcesses,
    ) -> None:
        self._deployments = deployments
        self._tallies = tallies
        self._is_busy = is_busy
        self._children = children
        self._comparisons: dict[str, Comparison] = {}

    async def run(self) -> None:
        """Compare at every tick until the server stops."""
        while not self._children.is_stopping:
            await self._children.wait_for_stop(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Compare the versions of each deployment once."""
        watched = {
            name: composite
            for name, composite in self._deployments.composites.items()
            if isinstance(composite, VersionsState)
            and composite.is_watched
            and composite.is_loaded
            and not self._is_busy(name)
        }
        self._comparisons = {name: comparison for name, comparison in self._comparisons.items() if name in watched}
        for name, composite in watched.items():
            traffic = composite.config.shared_traffic
            comparison = self._comparisons.get(name)
            if comparison is None or comparison.traffic != traffic:
                assert traffic.rollback is not None
                comparison = self._comparisons[name] = Comparison(traffic, traffic.rollback)
            counted = self._tallies()
            tallies = {version: counted.get(part, _NONE) for version, part in composite.deployments.items()}
            verdict = comparison.verdict(time.monotonic(), tallies)
            if verdict is not None:
                version, reason = verdict
                logger.error("%s: rolled back by itself: version `%s`: %s", name, version, reason)
                recorder().count("headwater_rollbacks", name, version)
                had = f"it had {100 * traffic.shares[version]:g} %"
                self._deployments.adopt(name, composite.default_alone())
                composite.rolled_back = f"version `{version}` lost its share by itself: {reason} ({had})"
                self._children.on_change()
