"""Traces: a tree of OpenTelemetry spans per request, for HTTP, and for the model's queue, replica and compute time, the
steps of a fused pipeline, or the tokens of a language model.

With tracing off, OpenTelemetry's SDK is not imported, and tracing costs a request only the check of a variable. With
tracing on, `headwater_server.gateway.worker` calls `use`, `headwater_server.gateway.http.entry.RequestRecords` begins a
request's `Trace`, and the code that serves the request adds spans afterwards, from times that are measured anyway.

Names and attributes follow OpenTelemetry's semantic conventions for HTTP. Attributes that the conventions don't define
begin with ``headwater.``. From a client, a span has only the path, the method, the request id and the trace context;
from an error, only its class name.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headwater_server.errors import HeadwaterError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

    from headwater_server.config.sections import TracingSection

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
_PROBES: Final = ("/v2/health/", "/health", "/metrics")
_CARRIED: Final = (b"traceparent", b"tracestate")


class Tracing:
    """Makes traces.

    Args:
        processor: receives ended spans.

    OpenTelemetry's environment variables OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG decide which requests are
    traced. By default a request without ``traceparent`` is traced, and for a request with this header the sender
    decides.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        import os

        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        import headwater_server

        attributes: dict[str, str | int] = {"service.version": headwater_server.__version__, "process.pid": os.getpid()}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            attributes["service.name"] = "headwater"
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("headwater", headwater_server.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, scope: Mapping[str, Any], request_id: str) -> Trace | None:
        """Begin a request's trace. If the request is sampled, this task and its child tasks add spans to it.

        Returns:
            The trace; None for paths that begin with an element of `_PROBES`: their requests come every few seconds.
        """
        _trace.set(None)
        if scope["path"].startswith(_PROBES):
            return None
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _CARRIED}
        context = self._propagator.extract(carrier, Context())
        # All spans of a request use the same clock, even if the system's clock is changed in the meantime.
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
        """Export the gathered spans; wait for that at most `FLUSH_TIMEOUT_S`."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(FLUSH_TIMEOUT_S)


class Trace:
    """The trace of a request.

    Args:
        tracer: makes the request's spans.
        span: the HTTP span.
        offset_ns: the difference between Unix time and `time.perf_counter_ns`.
    """

    def __init__(self, tracer: Any, span: Span, offset_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._offset_ns = offset_ns

    @property
    def header(self) -> bytes:
        """The value of the answer's header ``traceresponse`` (W3C Trace Context, level 2)."""
        context = self._span.get_span_context()
        return b"00-%032x-%016x-%02x" % (context.trace_id, context.span_id, int(context.trace_flags))

    @property
    def log_fields(self) -> dict[str, str]:
        """The fields that the trace adds to the access log: ``trace_id`` and ``span_id``."""
        context = self._span.get_span_context()
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

    def add(
        self, name: str, began_ns: int, ended_ns: int, parent: Span | None = None, error: str = "", **fields: str | int
    ) -> Span:
        """Add a span that has ended.

        Args:
            name: the span's name.
            began_ns, ended_ns: the span's begin and end, by `time.perf_counter_ns`.
            parent: the span's parent; default: the HTTP span.
            error: the error's name, if the span failed; empty: it succeeded.
            fields: attributes, without the prefix ``headwater.``.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.status import StatusCode

        context = set_span_in_context(parent or self._span, Context())
        attributes = {f"headwater.{name}": value for name, value in fields.items()}
        span: Span = self._tracer.start_span(
            name, context, attributes=attributes, start_time=began_ns + self._offset_ns
        )
        if error:
            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR)
        span.end(max(began_ns, ended_ns) + self._offset_ns)
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
class _StepTimes:
    """The times of a step in a call. The step of a stream has several results, which extend these times."""

    started_ns: int
    ended_ns: int = 0
    compute_us: int = 0


class _DeploymentSpans:
    """The spans of a deployment's work for a request. The work begins when the object is created."""

    def __init__(self, trace: Trace, deployment: str) -> None:
        self._trace = trace
        self._deployment = deployment
        self._began_ns = time.perf_counter_ns()


class ModelTrace(_DeploymentSpans):
    """The spans of a model's work for a request."""

    def __init__(self, trace: Trace, deployment: str) -> None:
        super().__init__(trace, deployment)
        self._called_ns = 0
        self._replica = ""
        self._steps: dict[str, _StepTimes] = {}

    def call(self, replica: str) -> None:
        """Note that a call to this replica begins. Only the request's last call is traced."""
        self._called_ns, self._replica = time.perf_counter_ns(), replica
        self._steps.clear()

    def step(self, name: str, compute_us: int) -> None:
        """Note that a step of a pipeline has just reported its compute time for the whole batch."""
        now_ns = time.perf_counter_ns()
        step = self._steps.get(name)
        if step is None:
            step = self._steps[name] = _StepTimes(max(self._called_ns, now_ns - compute_us * 1000))
        step.ended_ns = now_ns
        step.compute_us += compute_us

    def end(self, rows: int, compute_ns: int, error: str) -> None:
        """Add the spans of the work: the model has just answered, or failed.

        Args:
            rows: the request's rows.
            compute_ns: the time in the callable for the whole batch; 0: unknown.
            error: the error's name; empty: the model answered.
        """
        name, began_ns, called_ns, ended_ns = self._deployment, self._began_ns, self._called_ns, time.perf_counter_ns()
        add = self._trace.add
        whole = add(f"infer {name}", began_ns, ended_ns, error=error, deployment=name, rows=rows)
        add("queue", began_ns, called_ns or ended_ns, whole)
        if not called_ns:
            return
        call = add("replica", called_ns, ended_ns, whole, error, replica=self._replica)
        for step_name, step in self._steps.items():
            add(f"step {step_name}", step.started_ns, step.ended_ns, call, compute_us=step.compute_us)
        if compute_ns and not self._steps:
            # Only the duration is known: the ways to the callable and back are assumed to take equally long.
            started_ns = called_ns + max(0, ended_ns - called_ns - compute_ns) // 2
            add("compute", started_ns, started_ns + compute_ns, call)


class GenerationTrace(_DeploymentSpans):
    """The spans of a language model's work for a request."""

    _first_ns = 0

    def first_token(self) -> None:
        """Note that the first token has just arrived."""
        self._first_ns = time.perf_counter_ns()

    def end(self, sequences: int, tokens: int, error: str) -> None:
        """Add the spans of the work: the request has just ended.

        Args:
            sequences: the number of the request's sequences.
            tokens: the number of generated tokens of all sequences.
            error: the error's name; empty: the request was answered.
        """
        add, name, ended_ns = self._trace.add, self._deployment, time.perf_counter_ns()
        whole = add(
            f"generate {name}", self._began_ns, ended_ns, None, error,
            deployment=name, sequences=sequences, generated_tokens=tokens,
        )  # fmt: skip
        add("first token", self._began_ns, self._first_ns or ended_ns, whole)
        if self._first_ns:
            add("further tokens", self._first_ns, ended_ns, whole)


_trace: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("headwater_trace", default=None)
_tracing: Tracing | None = None


def use(tracing: Tracing | None) -> None:
    """Set this process's tracing; None switches tracing off."""
    global _tracing
    _tracing = tracing


def current() -> Tracing | None:
    """This process's tracing; None: tracing is off."""
    return _tracing


def add_model(deployment: str) -> ModelTrace | None:
    """Begin the spans of a model's work for this task's request. Returns None if the request isn't traced."""
    trace = None if _tracing is None else _trace.get()
    return None if trace is None else ModelTrace(trace, deployment)


def add_generation(deployment: str) -> GenerationTrace | None:
    """Begin the spans of a language model's work for this task's request. Returns None if the request isn't traced."""
    trace = None if _tracing is None else _trace.get()
    return None if trace is None else GenerationTrace(trace, deployment)


def exporting(section: TracingSection) -> Tracing:
    """Create a `Tracing` that exports spans over OTLP/HTTP to the configured collector."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(section.traces_url, timeout=EXPORT_TIMEOUT_S)
    return Tracing(BatchSpanProcessor(exporter))
