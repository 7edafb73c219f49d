"""The custom metrics of a replica's models (``pb_utils.MetricFamily``), and the replica's page of metrics.

Triton's own custom metrics end its process, or a stub, at about every second use of that interface. So the hosts of the
models declare and count here, in the replica's host, by lines of JSON over a unix socket; families are common to all
models, as Triton's are. The page has Triton's series, and then these.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import socketserver
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final, Literal

from headwater_server.process.socket_http import ask_socket

__all__ = ["CALLS_SOCKET", "PAGE_SOCKET", "MetricRegistry", "serve_metrics"]

CALLS_SOCKET: Final = "calls"
"""The name of the socket, in the replica's folder, at which the models' hosts declare and count."""
PAGE_SOCKET: Final = "metrics"
"""The name of the socket, in the replica's folder, that has the page."""
MAX_SERIES: Final = 10_000
MAX_LINE_BYTES: Final = 64 * 1024
PAGE_TIMEOUT_S: Final = 1.0
_NAME: Final = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]{0,199}\Z", re.ASCII)
_LABEL: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}\Z", re.ASCII)
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
Kind = Literal["COUNTER", "GAUGE", "HISTOGRAM"]


class MetricFault(Exception):
    """A call is refused; the message is the model's exception."""


@dataclass(eq=False)
class _MetricSeries:
    labels: tuple[tuple[str, str], ...]
    bounds: tuple[float, ...] = ()
    buckets: list[int] = field(default_factory=list)
    value: float = 0.0
    """The value; of a histogram the sum."""
    users: int = 0
    """The number of ``Metric`` objects."""


@dataclass(eq=False)
class _MetricFamily:
    name: str
    help: str
    type: Kind
    series: dict[tuple[tuple[str, str], ...], _MetricSeries] = field(default_factory=dict)
    users: int = 0
    """The number of ``MetricFamily`` objects."""


class MetricRegistry:
    """All families. Methods may be called in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, _MetricFamily] = {}

    def declare(self, name: str, help: str, kind: Kind) -> _MetricFamily:
        """Add a family, or find it.

        Raises:
            MetricFault: the name is invalid, or taken by a family of another kind.
        """
        with self._lock:
            family = self._families.get(name)
            if family is None:
                if not _NAME.match(name):
                    raise MetricFault("Invalid metric name")
                family = self._families[name] = _MetricFamily(name, help, kind)
            elif family.type != kind:
                raise MetricFault("Family name already exists with different type")
            family.users += 1
            return family

    def add(self, family: _MetricFamily, labels: Mapping[str, str], bounds: Iterable[float] | None) -> _MetricSeries:
        """Add a series to a family, or find it.

        Raises:
            MetricFault: a label or the buckets are invalid, or there are too many series.
        """
        if family.type == "HISTOGRAM" and bounds is None:
            raise MetricFault("Failed to create metric. Missing required buckets.")
        limits = tuple(map(float, bounds or ()))
        if any(not math.isfinite(limit) for limit in limits) or list(limits) != sorted({*limits}):
            raise MetricFault(f"buckets: expected numbers in ascending order, got {list(limits)}")
        if wrong := [name for name in labels if not _LABEL.match(name)]:
            raise MetricFault(f"labels: expected names of letters, digits and '_', got {wrong[0]!r}")
        key = tuple(sorted((name, str(value)) for name, value in labels.items()))
        with self._lock:
            series = family.series.get(key)
            if series is None:
                if sum(len(one.series) for one in self._families.values()) >= MAX_SERIES:
                    raise MetricFault(f"expected at most {MAX_SERIES} series of all models, got more")
                series = family.series[key] = _MetricSeries(key, limits, [0] * (len(limits) + 1))
            series.users += 1
            return series

    def change(self, family: _MetricFamily, series: _MetricSeries, method: str, value: float = 0.0) -> float:
        """Carry out ``increment``, ``set``, ``observe`` or ``value``. Returns the value.

        Raises:
            MetricFault: the family's kind doesn't allow it.
        """
        allowed = {"COUNTER": ("increment", "value"), "HISTOGRAM": ("observe",), "GAUGE": ("increment", "set", "value")}
        if method not in allowed[family.type]:
            name = {"value": "Value"}.get(method, method.capitalize())
            raise MetricFault(f"TRITONSERVER_METRIC_KIND_{family.type} does not support {name}")
        if family.type == "COUNTER" and not value >= 0:
            why = "can only be incremented monotonically by non-negative values."
            raise MetricFault(f"TRITONSERVER_METRIC_KIND_COUNTER {why}")
        with self._lock:
            if method == "set":
                series.value = value
            elif method != "value":
                series.value += value
            if method == "observe":
                series.buckets[bisect_left(series.bounds, value)] += 1
            return series.value

    def leave(self, family: _MetricFamily, series: _MetricSeries | None) -> None:
        """A model's object is gone; a family, or a series, without objects leaves the page."""
        with self._lock:
            one: _MetricFamily | _MetricSeries = family if series is None else series
            one.users -= 1
            if one.users:
                return
            if series is None:
                self._families.pop(family.name, None)
            else:
                family.series.pop(series.labels, None)

    def text(self) -> str:
        """All series in Prometheus' text format."""
        with self._lock:
            families = [family for family in self._families.values() if family.series]
            return "".join(f"{line}\n" for family in families for line in _lines(family))


def _lines(family: _MetricFamily) -> Iterator[str]:
    help = family.help.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {family.name} {help}"
    yield f"# TYPE {family.name} {family.type.lower()}"
    for series in family.series.values():
        if family.type != "HISTOGRAM":
            yield f"{family.name}{_labels(series.labels)} {series.value!r}"
            continue
        count = 0
        for bound, number in zip([*(f"{limit:.12g}" for limit in series.bounds), "+Inf"], series.buckets, strict=True):
            count += number
            yield f"{family.name}_bucket{_labels((*series.labels, ('le', bound)))} {count}"
        yield f"{family.name}_count{_labels(series.labels)} {count}"
        yield f"{family.name}_sum{_labels(series.labels)} {series.value!r}"


def _labels(labels: Iterable[tuple[str, str]]) -> str:
    text = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels)
    return f"{{{text}}}" if text else ""


class _SocketServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    registry: MetricRegistry
    page: Callable[[], bytes]


class _CallsHandler(socketserver.StreamRequestHandler):
    """A connection of a model's host: a line for each call, and a line for each answer."""

    server: _SocketServer

    def handle(self) -> None:
        """Serve the connection until it closes; what a host has counted stays."""
        registry = self.server.registry
        objects: dict[int, tuple[_MetricFamily, _MetricSeries | None]] = {}
        while line := self.rfile.readline(MAX_LINE_BYTES):
            try:
                answer: dict[str, Any] = {"value": _carry_out(registry, objects, *json.loads(line))}
            except MetricFault as error:
                answer = {"error": str(error)}
            except (ValueError, TypeError, LookupError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            with contextlib.suppress(OSError):
                self.wfile.write(json.dumps(answer).encode() + b"\n")


def _carry_out(
    registry: MetricRegistry,
    objects: dict[int, tuple[_MetricFamily, _MetricSeries | None]],
    function: str,
    *arguments: Any,
) -> float | int | None:
    if function == "metric_family":
        objects[len(objects)] = registry.declare(*arguments), None
        return len(objects) - 1
    family, series = objects[arguments[0]]
    if function == "metric":
        objects[len(objects)] = family, registry.add(family, *arguments[1:])
        return len(objects) - 1
    if function == "metric_forget":
        registry.leave(family, series)
        return None
    if series is None:
        raise TypeError("expected a metric, got a family")
    return registry.change(family, series, *arguments[1:])


class _PageHandler(BaseHTTPRequestHandler):
    server: _SocketServer

    def do_GET(self) -> None:
        """Answer with the page, whatever the path is."""
        body = self.server.page()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def serve_metrics(directory: Path, triton: Path) -> None:
    """Serve both sockets, in threads.

    Args:
        directory: the replica's folder.
        triton: the socket that has Triton's metrics.

    Raises:
        OSError: a socket can't be made.
    """
    registry = MetricRegistry()

    def page() -> bytes:
        body = b""
        with contextlib.suppress(OSError, http.client.HTTPException):  # Triton is not ready, or busy
            _, body = ask_socket(triton, "GET", "/metrics", None, PAGE_TIMEOUT_S)
        return body + registry.text().encode()

    for name, handler in ((CALLS_SOCKET, _CallsHandler), (PAGE_SOCKET, _PageHandler)):
        server = _SocketServer(str(directory / name), handler)
        server.registry = registry
        server.page = page
        threading.Thread(target=server.serve_forever, name=name, daemon=True).start()
