"""Custom metrics of a model, which appear in the server's ``/metrics``: `Model.metrics`, or `headwater.metrics` for a
function. All models of a replica share them, such as the steps of a fused pipeline."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import threading
from bisect import bisect_left
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from headwater.errors import DeclarationError
from headwater.metrics_file import SIZE_SLOTS, CountsFile, Declaration, Kind

__all__ = ["Counter", "Gauge", "Histogram", "Metrics", "metrics"]

logger = logging.getLogger(__name__)

MAX_SERIES: Final = 1000
MAX_LABELS: Final = 10
MAX_BUCKETS: Final = 50
MAX_CHARS: Final = 100
"""Limit of the characters of a name, and of a label's value; longer values are cut."""
DEFAULT_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,99}\Z", re.ASCII)
_SUFFIXES: Final = ("_total", "_sum", "_count", "_bucket", "_created", "_info")
"""Ends of names that ``/metrics`` adds, or that Prometheus' formats reserve."""
_RESERVED_LABELS: Final = ("deployment", "le", "quantile", "replica", "value")


class _Metric:
    """A declared metric: finds the slots of its series."""

    def __init__(self, metrics: Metrics, declaration: Declaration) -> None:
        self.declaration = declaration
        self._metrics = metrics
        self._labels = declaration.labels
        self._names = frozenset(declaration.labels)
        self._series: dict[tuple[str, ...], int] = {}
        if not self._labels:  # so that it is in /metrics before it is first updated
            self._add(())

    def _slot(self, labels: dict[str, Any]) -> int | None:
        """The slot of a series' first number; None: the series is dropped.

        Raises:
            ValueError: the labels aren't the declared labels.
        """
        if labels.keys() != self._names:
            expected, got = (", ".join(map(repr, names)) or "no labels" for names in (self._labels, labels))
            raise ValueError(f"metric {self.declaration.name!r}, labels: expected {expected}, got {got}")
        values = tuple([str(labels[name]) for name in self._labels])
        slot = self._series.get(values)
        return self._add(values) if slot is None else slot

    def _add(self, values: tuple[str, ...]) -> int | None:
        """Add a series, unless it exists under the value that its labels are cut to."""
        values = tuple(value.encode("utf-8", "replace").decode()[:MAX_CHARS] for value in values)
        with self._metrics.lock:
            slot = self._series.get(values)
            if slot is None:
                slot = self._metrics.add_series(self.declaration, values)
                if slot is not None:
                    self._series[values] = slot
        return slot


class Counter(_Metric):
    """A count that only goes up."""

    def inc(self, value: float = 1, **labels: object) -> None:
        """Add to the count of the series with these labels.

        Raises:
            ValueError: the value is negative or not finite, or the labels aren't the declared labels.
        """
        if not 0 <= value < math.inf:
            raise ValueError(f"metric {self.declaration.name!r}: expected a number of at least 0, got {value!r}")
        slot = self._slot(labels)
        if slot is not None:
            metrics = self._metrics
            with metrics.lock:
                metrics.numbers[slot] += value


class Gauge(_Metric):
    """A current value, which each replica has for itself."""

    def set(self, value: float, **labels: object) -> None:
        """Set the value of the series with these labels.

        Raises:
            ValueError: the labels aren't the declared labels.
        """
        slot = self._slot(labels)
        if slot is not None:
            self._metrics.numbers[slot] = value


class Histogram(_Metric):
    """The distribution of values over buckets."""

    def observe(self, value: float, **labels: object) -> None:
        """Count a value in the series with these labels.

        Raises:
            ValueError: the value is not finite, or the labels aren't the declared labels.
        """
        if not -math.inf < value < math.inf:
            raise ValueError(f"metric {self.declaration.name!r}: expected a finite number, got {value!r}")
        slot = self._slot(labels)
        if slot is not None:
            metrics, bounds = self._metrics, self.declaration.bounds
            bucket = slot + bisect_left(bounds, value)
            with metrics.lock:
                metrics.numbers[bucket] += 1
                metrics.numbers[slot + len(bounds) + 1] += value


_MetricKind = TypeVar("_MetricKind", bound=_Metric)


class Metrics:
    """Declares metrics. A name may be declared again, in the same way; all get the same metric. Until `open` the
    counts are in private memory.

    Args:
        max_series: the most series; further series are dropped.
    """

    def __init__(self, max_series: int = MAX_SERIES) -> None:
        self.lock = threading.RLock()
        """Held while a number changes, or a series is added."""
        self.numbers: memoryview[float] = memoryview(b"").cast("d")
        """The numbers to change; empty until a metric is declared."""
        self._declared: dict[str, _Metric] = {}
        self._left = max_series
        self._file: CountsFile | None = None
        self._target: tuple[Path | None, str] = (None, "")
        self._is_muted = False
        self._has_warned = False

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        """A count that only goes up, such as of texts; ``/metrics`` adds ``_total`` to the name.

        Args:
            name: letters, digits and ``_``; in ``/metrics`` after ``headwater_model_``.
            help: a description for people.
            labels: the names of the labels that each update sets.

        Raises:
            DeclarationError: an argument is invalid, or the name is declared differently.
        """
        return self._declare(Counter, "counter", name, help, labels)

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        """A current value, such as a size. In ``/metrics`` each replica has one, with the label ``replica``. For
        arguments and errors see `counter`."""
        return self._declare(Gauge, "gauge", name, help, labels)

    def histogram(
        self, name: str, help: str, labels: Sequence[str] = (), *, buckets: Sequence[float] = DEFAULT_BUCKETS
    ) -> Histogram:
        """A distribution of values, such as lengths. ``buckets`` are the inclusive upper bounds of the buckets, in
        ascending order; for other arguments and errors see `counter`."""
        return self._declare(Histogram, "histogram", name, help, labels, buckets)

    def open(self, path: Path | None, deployment: str) -> None:
        """Count in a file that is created when a metric is declared; to be called before. None: in private memory."""
        self._target = (path, deployment)

    @contextlib.contextmanager
    def muted(self) -> Generator[None, None, None]:
        """A context in which updates have no effect, for a warm-up."""
        with self.lock:
            self._is_muted = True
            if self._file is not None:
                self.numbers = _scratch()
        try:
            yield
        finally:
            with self.lock:
                self._is_muted = False
                if self._file is not None:
                    self.numbers = self._file.numbers

    def detach(self) -> None:
        """In a forked process: stop counting. Only the process that opened the file writes to it."""
        self.lock = threading.RLock()  # another thread may have held it
        if self._file is not None:
            self._file, self.numbers = CountsFile(None), _scratch()
            self._left, self._has_warned = 0, True

    def add_series(self, declaration: Declaration, values: tuple[str, ...]) -> int | None:
        """Append a series, while `lock` is held. Returns the slot of its first number; None: there is no space."""
        assert self._file is not None
        slot = self._file.append([declaration.name, *values], declaration.numbers) if self._left > 0 else None
        self._left -= 1
        if slot is None and not self._has_warned:
            self._has_warned = True
            text = "metric %r, labels %r: expected at most %d series; further series of all metrics are dropped"
            logger.warning(text, declaration.name, values, MAX_SERIES)
        return slot

    def _declare(
        self, kind: type[_MetricKind], word: Kind, name: str, help: str, labels: Sequence[str],
        buckets: Sequence[float] = (),
    ) -> _MetricKind:  # fmt: skip
        _check(word, name, help, labels, buckets)
        declaration = Declaration(name, word, help, tuple(sorted(labels)), tuple(map(float, buckets)))
        with self.lock:
            if self._file is None:
                self._file = self._opened()
                self.numbers = _scratch() if self._is_muted else self._file.numbers
            metric = self._declared.get(name)
            if metric is None:
                if self._file.append(declaration, 0) is None:
                    raise DeclarationError(f"metric {name!r}: no space for more metrics; declare fewer")
                metric = self._declared[name] = kind(self, declaration)
        if not isinstance(metric, kind) or metric.declaration != declaration:
            raise DeclarationError(f"metric {name!r}: expected {metric.declaration} again, got {declaration}")
        return metric

    def _opened(self) -> CountsFile:
        path, deployment = self._target
        try:
            return CountsFile(path, deployment)
        except OSError as error:
            logger.error("the custom metrics are not in /metrics: %s: %s", path, error.strerror)
            return CountsFile(None)


def _scratch() -> memoryview[float]:
    """Numbers that nobody reads."""
    return memoryview(bytearray(SIZE_SLOTS * 8)).cast("d")


def _check(kind: Kind, name: Any, help: Any, labels: Any, buckets: Any) -> None:
    """Check a declaration; raises as `Metrics.counter`."""
    word = f"at most {MAX_CHARS} letters, digits and '_', beginning with a letter"
    is_name = isinstance(name, str) and _NAME.match(name)
    are_labels = isinstance(labels, (list, tuple)) and len(labels) == len({*labels}) <= MAX_LABELS
    are_words = are_labels and all(isinstance(label, str) and _NAME.match(label) for label in labels)
    bounds = [*buckets] if kind == "histogram" else [0]
    are_bounds = all(isinstance(bound, (int, float)) and math.isfinite(bound) for bound in bounds)
    for field, value, is_right, expected in (
        ("name", name, is_name, word),
        ("name", name, is_name and not name.endswith(_SUFFIXES), f"an end other than {', '.join(_SUFFIXES)}"),
        ("help", help, isinstance(help, str) and 0 < len(help) <= 500, "a text of at most 500 characters"),
        ("labels", labels, are_labels, f"a list of at most {MAX_LABELS} names"),
        ("labels", labels, are_words, f"each {word}"),
        ("labels", labels, are_words and {*labels}.isdisjoint(_RESERVED_LABELS), f"no {', '.join(_RESERVED_LABELS)}"),
        ("buckets", buckets, are_bounds and bounds == sorted({*bounds}) and 0 < len(bounds) <= MAX_BUCKETS,
         f"1 to {MAX_BUCKETS} numbers in ascending order"),
    ):  # fmt: skip
        if not is_right:
            raise DeclarationError(f"metric {name!r:.100}, {field}: expected {expected}, got {value!r:.200}")


metrics: Final = Metrics()
"""The metrics of this process."""

os.register_at_fork(after_in_child=metrics.detach)
