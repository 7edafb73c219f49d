"""Plans from given sizes: computes which configurations fit into memory, without running the model."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from headwater_server.cli.option_values import named, read_size
from headwater_server.cli.plan.memory_model import MemoryModel, ReplicaTerms
from headwater_server.cli.plan.point import Point
from headwater_server.cli.plan.profiles import Budget, recommend
from headwater_server.cli.report.columns import columns
from headwater_server.errors import CommandError
from headwater_server.process.machine import size_text

__all__ = ["known_sizes_text", "largest_batches", "model_of_sizes", "read_sizes"]

NAMES: Final = ("weights", "process", "row", "instance")
"""Names of the sizes in ``--from-sizes``: the weights of a copy of the model; a replica without weights (such as
libraries and a GPU's context); the memory that each row of a batch adds; the memory that each further instance adds
besides its rows."""
MOST_ROWS: Final = 1024
"""The largest batch that is considered."""
MOST_REPLICAS: Final = 64
"""The largest number of replicas that is considered."""
SEVERAL: Final = 4
"""Number of cores to assume, since the machine's cores are unknown; bounds the replicas of a profile with several."""


def read_sizes(text: str) -> dict[str, int]:
    """Parse the value of ``--from-sizes``. Returns bytes by name.

    Raises:
        CommandError: a size is wrong, or weights are missing.
    """
    try:
        sizes = named(text, NAMES, read_size)
    except ArgumentTypeError as error:
        raise CommandError(f"--from-sizes: {error}") from None
    if "weights" not in sizes:
        raise CommandError("--from-sizes: expected weights=SIZE among the sizes, got no weights")
    return sizes


def model_of_sizes(sizes: Mapping[str, int]) -> MemoryModel:
    """The model of memory with these terms, in bytes. All terms count as the machine's memory, even if they are a
    GPU's."""
    terms = ReplicaTerms(sizes["weights"] + sizes.get("process", 0), sizes.get("instance", 0), sizes.get("row", 0))
    return MemoryModel(server=0, files=0, host=terms)


def largest_batches(model: MemoryModel, budget: Budget, instances: Sequence[int]) -> Iterator[Point]:
    """For each number of replicas up to `MOST_REPLICAS` and each of ``instances``, the largest batch that fits: a power
    of two, at most `MOST_ROWS`. Combinations with which no batch fits are left out."""
    for replicas in range(1, MOST_REPLICAS + 1):
        fitted = False
        for each in instances:
            rows = MOST_ROWS
            while rows and budget.excess(model.at(Point(rows, each, replicas))):
                rows //= 2
            if rows:
                fitted = True
                yield Point(rows, each, replicas)
        if not fitted:
            return


def known_sizes_text(
    sizes: Mapping[str, int], memory: int, headroom: float, instances: Sequence[int]
) -> tuple[str, bool]:
    """A text about the sizes that fit into ``memory`` bytes, of which the fraction ``headroom`` stays free; and whether
    any size fits."""
    model = model_of_sizes(sizes)
    budget = Budget(round(memory * (1 - headroom)))
    lines = [
        f"{size_text(memory)} of memory, {headroom:.0%} kept free: {size_text(budget.host)} may be taken.",
        "Computed from the sizes given; nothing was run.",
        "",
    ]

    def cells(size: Point) -> tuple[str, ...]:
        return str(size.replicas), str(size.instances), str(size.rows), size_text(model.at(size).host)

    points = list(largest_batches(model, budget, instances))
    if not points:
        smallest_size = size_text(model.at(Point(1)).host)
        return "\n".join([*lines, f"Nothing fits: one replica with batches of one row takes {smallest_size}."]), False
    lines += [columns([("REPLICAS", "INSTANCES", "LARGEST BATCH", "MEMORY"), *map(cells, points)]), ""]
    # Nothing is measured, so the rate is assumed to grow with the batch size of a single call.
    rates = {point: float(point.rows) for point in points if point.calls == 1} or {Point(1): 1.0}
    largest = Point(MOST_ROWS, max(instances), MOST_REPLICAS)
    rows = [
        (profile.name, *("-" * 4 if profile.point is None else cells(profile.point)), profile.note)
        for profile in recommend(model, rates, budget, largest=largest, cores=SEVERAL)
    ]
    lines.append(columns([("PROFILE", "REPLICAS", "INSTANCES", "BATCH", "MEMORY", "NOTE"), *rows]))
    return "\n".join(lines), True
