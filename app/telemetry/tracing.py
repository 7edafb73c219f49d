"""Traces: one tree of OpenTelemetry spans per request, from HTTP through queue, replica, trunk and heads.

With tracing off, OpenTelemetry's SDK is not imported, and a request costs one check of a variable. With tracing on,
`app.gateway.worker` calls `use`, `app.gateway.http.entry.RequestRecords` begins a request's `Trace`, and the code that
serves the request adds spans afterwards, from times that are measured anyway.

Names and attributes follow OpenTelemetry's semantic conventions for HTTP; others begin with ``headwater.``. No span
quotes a client's data or a callable's message.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from app.errors import HeadwaterError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

    from app.config.sections import TracingSection

__all__ = [
    "GenerationTrace",
    "ModelTrace",
    "Trace",
    "Tracing",
    "add_generation",
    "add_model",
    "current",
    "exporting",
    "use",
]

FLUSH_TIMEOUT_S: Final = 2.0
EXPORT_TIMEOUT_S: Final = 5.0
_PROBES: Final = ("/v2/health/", "/metrics")
_CARRIED: Final = (b"traceparent", b"tracestate")


class Tracing:
    """Makes traces.

    Args:
        processor: receives ended spans.
        sample: the fraction of requests without a ``traceparent`` to trace; with one, its sender decides.
    """

    def __init__(self, processor: SpanProcessor, sample: float) -> None:
        import os

        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        import app

        attributes: dict[str, str | int] = {"service.version": app.__version__, "process.pid": os.getpid()}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            attributes["service.name"] = "headwater"
        self._provider = TracerProvider(
            ParentBased(TraceIdRatioBased(sample)), Resource.create(attributes), shutdown_on_exit=False
        )
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("headwater", app.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Mapping[str, Any], request_id: str) -> Trace | None:
        """Begin a request's trace, which this task and its child tasks add to.

        Returns:
            The trace; None for health checks and scrapes, which come every few seconds.
        """
        _trace.set(None)
        if scope["path"].startswith(_PROBES):
            return None
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _CARRIED}
        context = self._propagator.extract(carrier, Context())
        # One clock for all of a request's spans, even if the system's clock is changed in the meantime.
        began_ns = time.perf_counter_ns()
        offset_ns = time.time_ns() - began_ns
        span = self._tracer.start_span(
            scope["method"],
            context,
            SpanKind.SERVER,
            {
                "http.request.method": scope["method"],
                "url.path": scope["path"],
                "url.scheme": scope.get("scheme", "http"),
                "headwater.request_id": request_id,
            },
            start_time=began_ns + offset_ns,
        )
        trace = Trace(self._tracer, span, offset_ns)
        if span.is_recording():
            _trace.set(trace)
        return trace

    def close(self) -> None:
        """Export the gathered spans, within `FLUSH_TIMEOUT_S`."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(FLUSH_TIMEOUT_S)


class Trace:
    """The trace of one request.

    Args:
        tracer: makes its spans.
        span: the HTTP span.
        offset_ns: the difference between Unix time and `time.perf_counter_ns`.
    """

    def __init__(self, tracer: Any, span: Span, offset_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._offset_ns = offset_ns

    @property
    def header(self) -> bytes:
        """The value of the answer's ``traceresponse`` (W3C Trace Context, level 2)."""
        context = self._span.get_span_context()
        return b"00-%032x-%016x-%02x" % (context.trace_id, context.span_id, int(context.trace_flags))

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields for the access log."""
        context = self._span.get_span_context()
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

    def add(
        self,
        name: str,
        started_ns: int,
        ended_ns: int,
        attributes: Mapping[str, str | int],
        *,
        parent: Span | None = None,
        error: str = "",
    ) -> Span:
        """Add a span that has ended.

        Args:
            name: the span's name.
            started_ns: by `time.perf_counter_ns`.
            ended_ns: likewise.
            attributes: the span's attributes.
            parent: default: the HTTP span.
            error: the error's name, if the span failed.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.status import StatusCode

        context = set_span_in_context(parent or self._span, Context())
        span: Span = self._tracer.start_span(
            name, context, attributes=attributes, start_time=started_ns + self._offset_ns
        )
        if error:
            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR)
        span.end(max(started_ns, ended_ns) + self._offset_ns)
        return span

    def end(self, scope: Mapping[str, Any], status: int, error: HeadwaterError | None) -> None:
        """End the trace with the answer's status; 499: the client disconnected."""
        from opentelemetry.trace.status import StatusCode

        span = self._span
        if span.is_recording():
            route = getattr(scope.get("route"), "path", "")
            if route:
                span.update_name(f"{scope['method']} {route}")
                span.set_attribute("http.route", route)
            span.set_attribute("http.response.status_code", status)
            if error is not None or status >= 400:
                span.set_attribute("error.type", type(error).__name__ if error is not None else str(status))
            if status >= 500 or (error is not None and error.status >= 500):
                span.set_status(StatusCode.ERROR)
        span.end(time.perf_counter_ns() + self._offset_ns)


@dataclass(slots=True)
class _Step:
    """The progress of one step of a call; a stream's step continues."""

    started_ns: int
    ended_ns: int = 0
    compute_us: int = 0


class ModelTrace:
    """The spans of one model's work for a request.

    Args:
        trace: the request's trace.
        model: the deployment.
    """

    def __init__(self, trace: Trace, model: str) -> None:
        self._trace = trace
        self._model = model
        self._arrived_ns = time.perf_counter_ns()
        self._called_ns = 0
        self._replica = ""
        self._steps: dict[str, _Step] = {}

    def call(self, replica: str) -> None:
        """A call to this replica begins; only the last call is traced."""
        self._called_ns, self._replica = time.perf_counter_ns(), replica
        self._steps.clear()

    def step(self, name: str, compute_us: int) -> None:
        """A step of a pipeline has just reported its time for the whole batch."""
        now_ns = time.perf_counter_ns()
        step = self._steps.get(name)
        if step is None:
            step = self._steps[name] = _Step(max(self._called_ns, now_ns - compute_us * 1000))
        step.ended_ns = now_ns
        step.compute_us += compute_us

    def end(self, rows: int, compute_ns: int, error: str) -> None:
        """The model has just answered or failed.

        Args:
            rows: the request's rows.
            compute_ns: time in the callable for the whole batch; 0: unknown.
            error: the error's name, if the model failed.
        """
        ended_ns = time.perf_counter_ns()
        add = self._trace.add
        attributes: dict[str, str | int] = {"headwater.deployment": self._model, "headwater.rows": rows}
        whole = add(f"infer {self._model}", self._arrived_ns, ended_ns, attributes, error=error)
        add("queue", self._arrived_ns, self._called_ns or ended_ns, {}, parent=whole)
        if not self._called_ns:
            return
        call = add(
            "replica", self._called_ns, ended_ns, {"headwater.replica": self._replica}, parent=whole, error=error
        )
        for name, step in self._steps.items():
            took = {"headwater.compute_us": step.compute_us}
            add(f"step {name}", step.started_ns, step.ended_ns, took, parent=call)
        if compute_ns and not self._steps:
            # Only the duration is known: both ways are assumed to take equally long.
            started_ns = self._called_ns + max(0, ended_ns - self._called_ns - compute_ns) // 2
            add("compute", started_ns, started_ns + compute_ns, {}, parent=call)


class GenerationTrace:
    """The spans of a language model's work for a request.

    Args:
        trace: the request's trace.
        model: the deployment.
    """

    def __init__(self, trace: Trace, model: str) -> None:
        self._trace = trace
        self._model = model
        self._began_ns = time.perf_counter_ns()
        self._first_ns = 0

    def first_token(self) -> None:
        """The first token has arrived."""
        self._first_ns = time.perf_counter_ns()

    def end(self, sequences: int, tokens: int, error: str) -> None:
        """The request has ended.

        Args:
            sequences: the number of requested sequences.
            tokens: the tokens received, over all sequences.
            error: the error's name, if the request failed.
        """
        ended_ns = time.perf_counter_ns()
        attributes: dict[str, str | int] = {
            "headwater.deployment": self._model, "headwater.sequences": sequences, "headwater.generated_tokens": tokens,
        }  # fmt: skip
        add = self._trace.add
        whole = add(f"generate {self._model}", self._began_ns, ended_ns, attributes, error=error)
        add("first token", self._began_ns, self._first_ns or ended_ns, {}, parent=whole)
        if self._first_ns:
            add("further tokens", self._first_ns, ended_ns, {}, parent=whole)


_trace: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("headwater_trace", default=None)
_tracing: Tracing | None = None


def use(tracing: Tracing | None) -> None:
    """Set this process's tracing; None switches it off."""
    global _tracing
    _tracing = tracing


def current() -> Tracing | None:
    """This process's tracing; None: off."""
    return _tracing


def current_trace() -> Trace | None:
    """The trace of this task's request; None if it isn't traced."""
    return None if _tracing is None else _trace.get()


def add_model(model: str) -> ModelTrace | None:
    """Begin the spans of a model's work for this task's request; None if it isn't traced."""
    trace = current_trace()
    return None if trace is None else ModelTrace(trace, model)


def add_generation(model: str) -> GenerationTrace | None:
    """Begin the spans of a language model's work for this task's request; None if it isn't traced."""
    trace = current_trace()
    return None if trace is None else GenerationTrace(trace, model)


def exporting(section: TracingSection) -> Tracing:
    """A `Tracing` that exports spans over OTLP/HTTP to the configured collector."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(section.traces_url, timeout=EXPORT_TIMEOUT_S)
    return Tracing(BatchSpanProcessor(exporter), section.sample)
