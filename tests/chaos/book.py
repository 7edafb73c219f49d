"""The clients' book beside the server's: every request must be in both, and end once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from headwater_server.telemetry.catalogue import OUTCOMES
from tests.chaos.client import Result
from tests.running import Running

__all__ = ["IDLE", "Scrape", "compare"]

IDLE: Final = (
    "headwater_requests_in_flight",
    "headwater_queue_rows",
    "headwater_active_sequences",
    "headwater_waiting_sequences",
    "headwater_cache_used_tokens",
)
"""Gauges that are 0 when nothing is under way."""


class Scrape:
    """One answer of ``/metrics``."""

    def __init__(self, running: Running) -> None:
        response = running.get("/metrics")
        response.raise_for_status()
        self._samples = [
            sample for family in text_string_to_metric_families(response.text) for sample in family.samples
        ]

    def of(self, name: str, **labels: str) -> int:
        """The sum over all series of that name with these labels."""
        wanted = labels.items()
        return int(sum(one.value for one in self._samples if one.name == name and wanted <= one.labels.items()))

    def busy(self) -> dict[str, int]:
        """Those of `IDLE` that aren't 0."""
        return {name: value for name in IDLE if (value := self.of(name))}

    def outcomes(self) -> Counter[str]:
        """Of all requests."""
        found: Counter[str] = Counter()
        for one in self._samples:
            if one.name == "headwater_requests_total":
                found[one.labels["outcome"]] += int(one.value)
        return +found

    def routes(self) -> set[tuple[str, str]]:
        """Deployments and routes that were asked."""
        name = "headwater_requests_accepted_total"
        return {(one.labels["deployment"], one.labels["route"]) for one in self._samples if one.name == name}


def compare(results: Sequence[Result], scrape: Scrape, before: Scrape, *, workers_hit: bool) -> list[str]:
    """What doesn't agree, between two scrapes at which nothing was in flight.

    For each deployment and route: accepted = the sum over all outcomes; what was answered is there, with the outcome
    that the client saw; and there is no more than that, but for requests of which the client can't know: it left, or
    its connection ended. A worker that is killed takes with it what it had not booked yet: `lost`, though its client
    may have read the end.
    """
    faults = []
    by_route: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        by_route[result.ask.deployment, result.ask.route].append(result)
    for deployment, route in sorted(scrape.routes() | set(by_route)):
        where = {"deployment": deployment, "route": route}
        accepted, *counts = (
            scrape.of(name, **where, **more) - before.of(name, **where, **more)
            for name, more in (
                ("headwater_requests_accepted_total", {}),
                *(("headwater_requests_total", {"outcome": outcome}) for outcome in OUTCOMES),
            )
        )
        ended: dict[str, int] = dict(zip(OUTCOMES, counts, strict=True))
        faults += [
            f"{deployment}, {route}: {fault}" for fault in _disagreements(by_route[deployment, route], accepted, ended)
        ]
    if not workers_hit and scrape.of("headwater_requests_total", outcome="lost"):
        faults.append("requests are booked as lost, though no gateway worker was hit")
    return faults


def _disagreements(results: Iterable[Result], accepted: int, ended: Mapping[str, int]) -> list[str]:
    seen: Counter[str] = Counter()
    unknown = 0
    """Of these the client doesn't know the outcome; they may not even have been accepted."""
    unnamed = 0
    """These were answered, with what outcome isn't known."""
    for result in results:
        if result.how != "answered" or not result.is_counted:
            unknown += 1
        elif not result.outcome:
            unnamed += 1
        else:
            seen[result.outcome] += 1
    faults = []
    if accepted != sum(ended.values()):
        faults.append(f"accepted {accepted}, ended {sum(ended.values())}: {dict(ended)}")
    known = sum(seen.values()) + unnamed
    if not known <= accepted <= known + unknown:
        faults.append(
            f"accepted {accepted}, but the clients had {known} answers and {unknown} of which they can't know"
        )
    for outcome, count in ended.items():
        most = seen[outcome] + unnamed + unknown
        if outcome != "lost" and not seen[outcome] - ended["lost"] <= count <= most:
            faults.append(f"{outcome}: {count}, but the clients saw {seen[outcome]}, and {most} at most")
    return faults
