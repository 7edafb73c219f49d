"""Custom metrics of models: counts of live replicas in a file for each, counts of ended replicas in a common file.

The folder is the one of `headwater_server.telemetry.ledger`. It contains

- ``replica-ID`` for each replica whose model has declared a metric (`headwater.metrics_file`);
- ``ended-replicas``: the counts of ended replicas, and the latest replicas' ids. This file is replaced as a whole
  before a replica's file is removed. A reader counts everything exactly once if it reads the replicas' files first,
  then this file, and ignores the files of replicas that this file names.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from headwater.metrics_file import Kind, decode_counts, used_bytes

__all__ = ["ModelCounts", "ModelSeries", "ModelTotals", "read_model_totals"]

logger = logging.getLogger("headwater.metrics")
_PREFIX: Final = "replica-"
_ENDED: Final = "ended-replicas"
_IDS_LIMIT: Final = 1000
"""The most ids in ``ended-replicas``. The latest id is the last."""


class ModelSeries(NamedTuple):
    """A series of a custom metric."""

    name: str
    type: Kind
    deployment: str
    labels: tuple[tuple[str, str], ...]
    """Names and values of the labels besides the deployment. A gauge also has ``replica``."""
    bounds: tuple[float, ...]
    """A histogram's inclusive upper bounds."""


class ModelTotals(msgspec.Struct):
    """The counts of several replicas together."""

    ids: list[str] = []
    """The ids of the replicas; in ``ended-replicas`` the latest of them."""
    records: dict[ModelSeries, list[float]] = {}
    """A number; of a histogram the number of values in each bucket, not added up, and their sum."""
    helps: dict[str, str] = {}
    """Descriptions by name."""

    def include(self, other: ModelTotals) -> None:
        """Add the counts of other replicas."""
        self.ids += other.ids
        self.helps |= other.helps
        for series, numbers in other.records.items():
            before = self.records.get(series, [0.0] * len(numbers))
            self.records[series] = [old + new for old, new in zip(before, numbers, strict=True)]


class ModelCounts:
    """Keeps the files, for the process that starts replicas.

    Args:
        folder: the folder; None: metrics are off.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._ended = ModelTotals()

    def path(self, id: str) -> Path | None:
        """The path of a new replica's file, which the replica creates; None: metrics are off."""
        return None if self._folder is None else self._folder / f"{_PREFIX}{id}"

    def take(self, id: str, counts: bytes) -> None:
        """Keep the counts of a replica on another machine: the used part of its file."""
        path = self.path(id)
        if path is None or id in self._ended.ids:
            return
        try:
            temporary = path.with_name(f".{id}.new")  # the dot keeps it from readers, also of an id such as `replica-1`
            temporary.write_bytes(counts)
            temporary.replace(path)
        except OSError as error:
            logger.error("metrics: can't keep the counts of replica %s: %s", id, error)

    def end(self, id: str) -> None:
        """Move the counts of an ended replica to ``ended-replicas``. Its gauges are no longer valid."""
        path = self.path(id)
        if path is None or not path.exists():
            return
        try:
            totals = _read(path)
            totals.records = {series: n for series, n in totals.records.items() if series.type != "gauge"}
            ended = ModelTotals()
            ended.include(self._ended)
            ended.include(totals)
            del ended.ids[:-_IDS_LIMIT]
            self._replace(ended)
            path.unlink()
        except OSError as error:  # its file stays, and is still read
            logger.error("metrics: can't move the counts of the ended replica %s: %s", id, error)

    def restore(self) -> None:
        """Write ``ended-replicas`` again, after the folder was removed.

        Raises:
            OSError: the file can't be written.
        """
        if self._folder is not None:
            self._replace(self._ended)

    def _replace(self, ended: ModelTotals) -> None:
        assert self._folder is not None
        temporary = self._folder / f"{_ENDED}.new"
        temporary.touch(mode=0o600)
        temporary.write_bytes(msgspec.msgpack.encode(ended))
        temporary.replace(self._folder / _ENDED)
        self._ended = ended


def read_model_totals(folder: Path) -> ModelTotals:
    """Read all files of a server. The module's docstring says why everything is counted exactly once."""
    replicas: list[ModelTotals] = []
    for path in sorted(folder.glob(f"{_PREFIX}*")):
        with contextlib.suppress(FileNotFoundError):  # its counts were moved in the meantime
            replicas.append(_read(path))
    totals = ModelTotals()
    with contextlib.suppress(FileNotFoundError):
        totals = msgspec.msgpack.decode((folder / _ENDED).read_bytes(), type=ModelTotals)
    ended = set(totals.ids)
    for replica in replicas:
        if ended.isdisjoint(replica.ids):
            totals.include(replica)
    return totals


def _read(path: Path) -> ModelTotals:
    id = path.name.removeprefix(_PREFIX)
    counts = decode_counts(used_bytes(path))
    totals = ModelTotals([id])
    for declared, values, numbers in counts.series:
        labels = (*zip(declared.labels, values, strict=True), *((("replica", id),) if declared.kind == "gauge" else ()))
        series = ModelSeries(declared.name, declared.kind, counts.deployment, labels, declared.bounds)
        totals.records[series] = numbers
        totals.helps[declared.name] = declared.help
    return totals
