"""Plans on paper: what fits where the sizes are known and nothing can be run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from pydantic import TypeAdapter, ValidationError

from app.cli.options import named
from app.cli.plan.memory_model import MemoryModel, ReplicaTerms
from app.cli.plan.point import Point
from app.cli.plan.profiles import Budget, recommend
from app.cli.report.columns import columns
from app.config.sections import MemorySize
from app.errors import CommandError
from app.process.machine import size_text

__all__ = ["largest_batches", "paper_model", "paper_text", "read_size", "read_sizes"]

NAMES: Final = {
    "weights": "of one copy of the model",
    "process": "that a replica takes before it has any weights: libraries, a GPU's context",
    "row": "that a row of a batch adds while it is computed",
    "instance": "that another instance adds besides its rows",
}
_size: Final[TypeAdapter[int]] = TypeAdapter(MemorySize)
MOST_ROWS: Final = 1024
MOST_REPLICAS: Final = 64
SEVERAL: Final = 4
"""Replicas that are taken for several where the machine is unknown."""


def read_sizes(text: str) -> dict[str, int]:
    """Bytes by name, of what stands behind ``--from-sizes``.

    Raises:
        CommandError: the message says what was expected.
    """
    try:
        sizes = named(text, NAMES, read_size)
    except ValueError as error:
        raise CommandError(f"--from-sizes: {error}") from None
    if "weights" not in sizes:
        raise CommandError("--from-sizes: expected weights=SIZE among them, got none")
    return sizes


def read_size(text: str) -> int:
    """``4GiB`` as bytes.

    Raises:
        ValueError: the message says what was expected.
    """
    try:
        return _size.validate_python(text.strip())
    except ValidationError:
        raise ValueError(f"expected a size such as 4GiB or 512MiB, got {text!r}") from None


def paper_model(sizes: Mapping[str, int]) -> MemoryModel:
    """The model of memory with these terms, all of one kind of memory."""
    terms = ReplicaTerms(sizes["weights"] + sizes.get("process", 0), sizes.get("instance", 0), sizes.get("row", 0))
    return MemoryModel(server=0, files=0, host=terms)


def largest_batches(model: MemoryModel, budget: Budget, instances: Sequence[int]) -> Iterator[tuple[Point, int]]:
    """For each number of replicas and instances of which a batch of one row fits, the largest batch that does.

    Batches are powers of two. Gives the size with it, and bytes that it takes.
    """
    for replicas in range(1, MOST_REPLICAS + 1):
        fitted = False
        for each in instances:
            rows = MOST_ROWS
            while rows and budget.excess(model.at(Point(rows, each, replicas))):
                rows //= 2
            if rows:
                fitted = True
                point = Point(rows, each, replicas)
                yield point, model.at(point).host
        if not fitted:
            return


def paper_text(sizes: Mapping[str, int], memory: int, headroom: float, instances: Sequence[int]) -> tuple[str, bool]:
    """What fits, for people, and whether anything does."""
    model = paper_model(sizes)
    budget = Budget(round(memory * (1 - headroom)))
    lines = [
        f"{size_text(memory)} of memory, {headroom:.0%} kept free: {size_text(budget.host)} may be taken.",
        "Computed from the sizes given; nothing was run.",
        "",
    ]
    found = list(largest_batches(model, budget, instances))
    if not found:
        least = model.at(Point(1)).host
        lines.append(f"Nothing fits: one replica with batches of one row takes {size_text(least)}.")
        return "\n".join(lines), False
    head = ("REPLICAS", "INSTANCES", "LARGEST BATCH", "MEMORY")
    table = [(str(point.replicas), str(point.instances), str(point.rows), size_text(need)) for point, need in found]
    lines += [columns([head, *table]), ""]
    profiles = []
    # Nothing is measured: the larger a batch of one call is, the more it gives.
    rates = {point: float(point.rows) for point, _ in found if point.calls == 1} or {Point(1): 1.0}
    most = Point(MOST_ROWS, max(instances), MOST_REPLICAS)
    for one in recommend(model, rates, budget, most=most, cores=SEVERAL):
        if one.point is None:
            profiles.append((one.name, "-", "-", "-", "-", one.note))
        else:
            size = one.point
            need = size_text(model.at(size).host)
            profiles.append((one.name, str(size.replicas), str(size.instances), str(size.rows), need, one.note))
    lines.append(columns([("PROFILE", "REPLICAS", "INSTANCES", "BATCH", "MEMORY", "NOTE"), *profiles]))
    return "\n".join(lines), True
