"""The text of a scrape: read back by the Prometheus client's own parsers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families

from headwater_server.telemetry.catalogue import CATALOGUE, Phase
from headwater_server.telemetry.exposition import ReplicaTarget, ReplicaText, ask_replicas, exposition
from headwater_server.telemetry.ledger import Totals, merged
from headwater_server.telemetry.model_counts import ModelSeries, ModelTotals
from headwater_server.telemetry.recorder import Recorder
from headwater_server.telemetry.store import Store

DOCS = Path(__file__).parents[3] / "docs"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
TRITON = """\
# HELP nv_inference_count Number of inferences performed (does not include cached requests)
# TYPE nv_inference_count counter
nv_inference_count{model="m",version="1"} 15
# HELP nv_inference_pending_request_count Instantaneous number of pending requests awaiting execution per-model.
# TYPE nv_inference_pending_request_count gauge
nv_inference_pending_request_count{model="m",version="1"} 2
# TYPE other gauge
other 1
"""


VLLM = """\
# TYPE python_info gauge
python_info{implementation="CPython"} 1.0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="chat"} 3.0
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="chat"} 1.7e+09
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="chat"} 4.0
vllm:iteration_tokens_total_count{engine="0",model_name="chat"} 4.0
vllm:iteration_tokens_total_sum{engine="0",model_name="chat"} 12.0
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="chat"} 5.0
vllm:request_queue_time_seconds_bucket{engine="0",le="+Inf",model_name="chat"} 6.0
vllm:request_queue_time_seconds_count{engine="0",model_name="chat"} 6.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="chat"} 1.5
# TYPE http_requests_total counter
http_requests_total{handler="/v1/completions"} 6.0
"""


def everything() -> Totals:
    """Something of every series that is counted in slots."""
    recorder = Recorder(Store())
    requests = recorder.requests("m", "infer")
    for outcome in ("ok", "failed", None):
        requests.accept()
        if outcome is not None:
            requests.end(outcome, 2_000_000)
    recorder.http_requests("/v2/models/{model}/infer", 200).add(2)
    recorder.http_requests("unmatched", 499).add()
    meter = recorder.deployment("m")
    meter.note_request(3, 1_000_000, 400_000, 5_000_000, 2_000_000)
    meter.serialise.observe(100_000)
    meter.note_call(3, 8, 5_000_000)
    meter.note_head("topic", None, 12.0)
    language_model = recorder.language_model("lm")
    language_model.inter_token.observe_times(20_000_000, 3)
    recorder.count("headwater_deployment_state_transitions", 'a "quoted"\nname', "LOADING", "READY")
    return Totals(merged([recorder.store.snapshot().records]), {"supervisor": os.getpid()})


def parsed(
    totals: Totals,
    replicas: list[ReplicaText] | None = None,
    *,
    accept: str = "",
    models: ModelTotals | None = None,
) -> dict[str, Metric]:
    body, media_type = exposition(totals, replicas or [], accept, models or ModelTotals())
    text = body.decode()
    if accept:
        assert media_type.startswith("application/openmetrics-text; version=1.0.0")
        assert text.endswith("# EOF\n")
        return {family.name: family for family in open_metrics_families(text)}  # type: ignore[no-untyped-call]
    assert media_type.startswith("text/plain; version=")
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Metric], family: str, name: str = "", **labels: str) -> float:
    (found,) = [
        sample.value
        for sample in families[family].samples
        if sample.name == (name or family) and labels.items() <= sample.labels.items()
    ]
    return float(found)


@pytest.fixture(params=["", OPEN_METRICS], ids=["text", "openmetrics"])
def families(request: pytest.FixtureRequest) -> dict[str, Metric]:
    return parsed(everything(), [ReplicaText("m", "m-1", TRITON)], accept=request.param)


def test_what_was_counted_is_said_in_base_units(families: dict[str, Metric]) -> None:
    requests = "headwater_requests"
    assert value(families, requests, f"{requests}_total", route="infer", outcome="ok") == 1
    assert value(families, requests, f"{requests}_total", route="infer", outcome="lost") == 0
    assert value(families, "headwater_requests_accepted", "headwater_requests_accepted_total", deployment="m") == 3
    assert value(families, "headwater_requests_in_flight", deployment="m", route="infer") == 1
    assert value(families, "headwater_compute_seconds", "headwater_compute_seconds_total", deployment="m") == 0.005
    assert value(families, "headwater_batch_capacity_rows", "headwater_batch_capacity_rows_total", deployment="m") == 8
    http = "headwater_http_requests"
    assert value(families, http, f"{http}_total", route="/v2/models/{model}/infer", status="2xx") == 2
    assert value(families, http, f"{http}_total", route="unmatched", status="aborted") == 1
    took = {
        phase: value(families, "headwater_request_phase_seconds", "headwater_request_phase_seconds_sum", phase=phase)
        for phase in get_args(Phase)
    }
    assert took == pytest.approx(
        {"queue": 0.0006, "batch_wait": 0.0004, "transport": 0.002, "compute": 0.005, "serialise": 0.0001}
    )


def test_histograms_are_cumulative(families: dict[str, Metric]) -> None:
    name = "headwater_inter_token_seconds"
    buckets = [
        (float(sample.labels["le"]), sample.value)
        for sample in families[name].samples
        if sample.name == f"{name}_bucket"
    ]
    assert buckets == [(bound, 0 if bound < 0.02 else 3) for bound, _ in buckets]
    assert [bound for bound, _ in buckets] == sorted(bound for bound, _ in buckets)
    assert buckets[0][0] == 0.00025
    assert buckets[-1][0] == math.inf
    assert value(families, name, f"{name}_count") == 3
    assert value(families, name, f"{name}_sum") == pytest.approx(0.06)


def test_labels_are_escaped(families: dict[str, Metric]) -> None:
    name = "headwater_deployment_state_transitions"
    assert value(families, name, f"{name}_total", deployment='a "quoted"\nname') == 1


def test_a_process_has_its_own_series(families: dict[str, Metric]) -> None:
    assert value(families, "process_resident_memory_bytes", process="supervisor") > 5_000_000
    assert value(families, "process_cpu_seconds", "process_cpu_seconds_total", process="supervisor") > 0


def test_tritons_own_series_keep_their_names_and_get_two_labels(families: dict[str, Metric]) -> None:
    labels = {"model": "m", "version": "1", "deployment": "m", "replica": "m-1"}
    assert value(families, "nv_inference_count", **labels) == 15
    assert value(families, "nv_inference_pending_request_count", **labels) == 2
    assert families["nv_inference_pending_request_count"].type == "gauge"
    assert "other" not in families


def test_vllms_own_series_do_too() -> None:
    for accept in ("", OPEN_METRICS):
        found = parsed(everything(), [ReplicaText("chat", "chat-1", VLLM)], accept=accept)
        labels = {"engine": "0", "deployment": "chat", "replica": "chat-1"}
        assert value(found, "vllm:num_preemptions", "vllm:num_preemptions_total", **labels) == 3
        queued = "vllm:request_queue_time_seconds"
        assert value(found, queued, f"{queued}_bucket", le="+Inf", **labels) == 6
        assert value(found, "vllm:iteration_tokens_total", "vllm:iteration_tokens_total_sum", **labels) == 12
        assert not [name for name in found if name.startswith(("http_", "python_")) or name.endswith("_created")]


def test_what_is_no_metrics_text_spoils_nothing_else() -> None:
    texts = [ReplicaText("m", "m-1", TRITON), ReplicaText("m", "m-2", TRITON[:130] + "\n}{ 7")]
    found = parsed(everything(), texts)
    assert value(found, "nv_inference_count", replica="m-1") == 15


def test_every_series_is_there_even_if_nothing_was_counted() -> None:
    nothing = parsed(Totals({}, {}))
    assert set(nothing) == set(CATALOGUE)
    for name, family in nothing.items():
        assert family.type == CATALOGUE[name].kind
        assert family.documentation == CATALOGUE[name].help


# What ships with it


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name, kind and labels as the tables of docs/metrics.md have them."""
    rows = re.findall(
        r"^\| `((?:headwater|process)_[a-z_]+)` \| (\w+) \| ([^|]*)\|", (DOCS / "metrics.md").read_text(), re.M
    )
    return {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_the_documented_table_is_what_is_exposed() -> None:
    exposed = {
        series.name + ("_total" if series.kind == "counter" else ""): (series.kind, series.labels)
        for series in CATALOGUE.values()
    }
    assert documented() == exposed


def expressions(item: Any) -> Iterator[str]:
    """Every query of a dashboard."""
    if isinstance(item, dict):
        for key, inner in item.items():
            if key in ("expr", "query", "definition") and isinstance(inner, str):
                yield inner
            else:
                yield from expressions(inner)
    elif isinstance(item, list):
        for inner in item:
            yield from expressions(inner)


def test_every_series_of_the_dashboard_exists_with_the_labels_that_it_is_asked_for() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    names = set()
    for series in CATALOGUE.values():
        suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}[series.kind]
        names |= {series.name + suffix for suffix in suffixes}
    names |= {"nv_inference_count", "nv_inference_exec_count", "nv_inference_pending_request_count"}
    asked = list(expressions(dashboard))
    assert len(asked) >= 15
    used = {name for query in asked for name in re.findall(r"\b(?:headwater|process|nv)_\w+", query)}
    assert used
    assert used <= names
    labels = {label for series in CATALOGUE.values() for label in series.labels} | {
        "le",
        "model",
        "version",
        "instance",
    }
    for query in asked:
        for group in re.findall(r"\bby \(([^)]*)\)", query) + re.findall(r"\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)\s*(?:=~|!~|=|!=|,|$)", re.sub(r'"[^"]*"', "", group))) <= labels, query


# The replicas' Tritons


@contextlib.asynccontextmanager
async def tritons(
    **behaviours: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[Path]:
    """Folders with a metrics socket each, that behaves so."""
    with tempfile.TemporaryDirectory() as folder:
        servers = []
        for name, behave in behaviours.items():
            (Path(folder) / name).mkdir()
            servers.append(await asyncio.start_unix_server(behave, Path(folder) / name / "m"))
        try:
            yield Path(folder)
        finally:
            for server in servers:
                server.close()


def answering(
    text: bytes, status: bytes = b"200 OK"
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(text), text))
        writer.close()

    return behave


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def cut_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nnv_")
    writer.close()


async def gibberish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\xff\xfe\r\n\r\n")
    writer.close()


async def test_who_does_not_answer_is_left_out_and_holds_nobody_up() -> None:
    behaviours = {
        "well": answering(TRITON.encode()),
        "silent": silent,
        "short": cut_off,
        "gibberish": gibberish,
        "refusing": answering(b"no", b"401 Unauthorized"),
        "large": answering(b"x" * 2_000_000),
    }
    async with tritons(**behaviours) as folder:
        names = [*behaviours, "gone"]
        targets = [ReplicaTarget(name, f"{name}-1", folder / name / "m", ("nv_",)) for name in names]
        answers = await ask_replicas(targets, timeout_s=0.5)
    assert [answer[:2] for answer in answers] == [target[:2] for target in targets]
    assert {answer.deployment: answer.text for answer in answers if answer.text is not None} == {"well": TRITON}


def custom(name: str, kind: str, *labels: tuple[str, str], deployment: str = "m", bounds: Any = ()) -> ModelSeries:
    return ModelSeries(name, kind, deployment, labels, bounds)  # type: ignore[arg-type]


@pytest.mark.parametrize("accept", ["", OPEN_METRICS])
def test_custom_metrics_have_a_prefix_and_the_deployment(accept: str) -> None:
    models = ModelTotals(
        records={
            custom("rows", "counter", ("sign", 'a "b"\n\\c')): [3],
            custom("rows", "counter", deployment="n"): [4],
            custom("size", "gauge", ("replica", "m-1")): [-0.5],
            custom("values", "histogram", bounds=(1.0, 2.5)): [1, 2, 3, 7.25],
        },
        helps={"rows": "All\nrows.", "size": "Size.", "values": "Values."},
    )
    families = parsed(everything(), accept=accept, models=models)
    name = "headwater_model_rows_total"
    assert value(families, "headwater_model_rows", name, deployment="m", sign='a "b"\n\\c') == 3
    assert value(families, "headwater_model_rows", name, deployment="n") == 4
    assert families["headwater_model_rows"].documentation == "All\nrows."
    assert value(families, "headwater_model_size", deployment="m", replica="m-1") == -0.5
    buckets = {
        sample.labels.get("le", sample.name): sample.value for sample in families["headwater_model_values"].samples
    }
    assert buckets == {
        "1.0": 1, "2.5": 3, "+Inf": 6, "headwater_model_values_count": 6, "headwater_model_values_sum": 7.25,
    }  # fmt: skip


def test_contradicting_custom_metrics_are_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    models = ModelTotals(
        records={
            custom("unlike", "counter"): [3],
            custom("unlike", "gauge", ("replica", "n-1"), deployment="n"): [4],
            custom("unlike_buckets", "histogram", bounds=(1.0,)): [1, 2, 3],
            custom("unlike_buckets", "histogram", bounds=(2.0,)): [1, 2, 3],
        },
        helps={"unlike": "A.", "unlike_buckets": "B."},
    )
    for _ in range(2):
        families = parsed(everything(), accept=OPEN_METRICS, models=models)
    assert [sample.value for sample in families["headwater_model_unlike"].samples] == [3]
    assert {sample.labels.get("le") for sample in families["headwater_model_unlike_buckets"].samples} == {
        "1.0", "+Inf", None,
    }  # fmt: skip
    assert sorted(re.findall(r"metrics: '(\w+)' of (\w)", caplog.text)) == [("unlike", "n"), ("unlike_buckets", "m")]


def test_nobody_to_ask_is_no_wait() -> None:
    assert asyncio.run(ask_replicas([])) == []


@pytest.mark.slow
def test_a_worker_that_is_never_scraped_imports_no_client() -> None:
    code = (
        "import sys, headwater_server.gateway.worker\n"
        "sys.exit('prometheus_client' in sys.modules or 'httpx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
