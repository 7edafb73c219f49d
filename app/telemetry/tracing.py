"""Traces: one tree of OpenTelemetry spans a request, from HTTP through queue, replica, trunk and heads.

Off, nothing here imports OpenTelemetry's SDK, and a request costs one look at a variable. On, `app.gateway.worker`
calls `use`; `app.gateway.http.entry.RequestRecords` begins a request's `Trace`, and what serves the request adds spans
to it, afterwards and from times that are measured anyway.

Names and attributes follow OpenTelemetry's semantic conventions for HTTP; others begin with ``headwater.``. No span
holds what a client sent or a callable said.
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
        processor: what takes the spans that have ended.
        sample: which part of the requests is traced that come without a ``traceparent``; with one, its sender decides.
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
        """A request's head is here: begin its trace, which this task and those that it starts add to.

        Returns:
            None of those that only look after the server: they come every few seconds, and tell nothing.
        """
        _trace.set(None)
        if scope["path"].startswith(_PROBES):
            return None
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind

        carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _CARRIED}
        context = self._propagator.extract(carrier, Context())
        # One clock for all of a request's spans, whatever becomes of the machine's meanwhile.
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
        """Send off what has gathered, if that doesn't take long."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(FLUSH_TIMEOUT_S)


class Trace:
    """One request's.

    Args:
        tracer: makes its spans.
        span: of HTTP.
        offset_ns: what makes a Unix time of `time.perf_counter_ns`.
    """

    def __init__(self, tracer: Any, span: Span, offset_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._offset_ns = offset_ns

    @property
    def header(self) -> bytes:
        """For the answer's ``traceresponse`` (W3C Trace Context, level 2)."""
        context = self._span.get_span_context()
        return b"00-%032x-%016x-%02x" % (context.trace_id, context.span_id, int(context.trace_flags))

    @property
    def log_fields(self) -> dict[str, str]:
        """For the access log."""
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
        """Add a span of what is over.

        Args:
            name: its name.
            started_ns: by `time.perf_counter_ns`.
            ended_ns: likewise.
            attributes: what is known of it.
            parent: default: HTTP's.
            error: the error's name, if it failed.
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
        """The request is over, with this status; 499: its client went away."""
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
    """What a step of a call has done by now; a stream's goes on."""

    started_ns: int
    ended_ns: int = 0
    compute_us: int = 0


class ModelTrace:
    """What one model does for a request.

    Args:
        trace: the request's.
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
        """A call of it begins; the last one counts."""
        self._called_ns, self._replica = time.perf_counter_ns(), replica
        self._steps.clear()

    def step(self, name: str, compute_us: int) -> None:
        """A step of a pipeline has just said what it took, for the whole batch."""
        now_ns = time.perf_counter_ns()
        step = self._steps.get(name)
        if step is None:
            step = self._steps[name] = _Step(max(self._called_ns, now_ns - compute_us * 1000))
        step.ended_ns = now_ns
        step.compute_us += compute_us

    def end(self, rows: int, compute_ns: int, error: str) -> None:
        """It has answered, or failed, just now.

        Args:
            rows: the request had.
            compute_ns: what the callable took for the whole batch; 0: not known.
            error: the error's name, if it failed.
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
            # It says how long, not when: the way there is taken to be as long as the way back.
            started_ns = self._called_ns + max(0, ended_ns - self._called_ns - compute_ns) // 2
            add("compute", started_ns, started_ns + compute_ns, {}, parent=call)


class GenerationTrace:
    """What a language model does for a request.

    Args:
        trace: the request's.
        model: the deployment.
    """

    def __init__(self, trace: Trace, model: str) -> None:
        self._trace = trace
        self._model = model
        self._began_ns = time.perf_counter_ns()
        self._first_ns = 0

    def first_token(self) -> None:
        """It is here."""
        self._first_ns = time.perf_counter_ns()

    def end(self, sequences: int, tokens: int, error: str) -> None:
        """Nobody waits for more.

        Args:
            sequences: that were asked for.
            tokens: that came, of all sequences.
            error: the error's name, if it failed.
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
    """Trace with this from now on."""
    global _tracing
    _tracing = tracing


def current() -> Tracing | None:
    """What traces in this process; None: nothing does."""
    return _tracing


def current_trace() -> Trace | None:
    """The trace of the request that this task works for; None if it isn't traced."""
    return None if _tracing is None else _trace.get()


def add_model(model: str) -> ModelTrace | None:
    """To note in what a model does for the request that this task works for; None if it isn't traced."""
    trace = current_trace()
    return None if trace is None else ModelTrace(trace, model)


def add_generation(model: str) -> GenerationTrace | None:
    """As `add_model`, of a language model."""
    trace = current_trace()
    return None if trace is None else GenerationTrace(trace, model)


def exporting(section: TracingSection) -> Tracing:
    """A `Tracing` that sends spans where the configuration says, over OTLP/HTTP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(section.traces_url, timeout=EXPORT_TIMEOUT_S)
    return Tracing(BatchSpanProcessor(exporter), section.sample)
