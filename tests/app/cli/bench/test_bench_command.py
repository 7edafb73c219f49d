"""The command as a user types it, against a small server."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shutil
import signal
import ssl
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.environment import install_command
from headwater_server.cli.main import main
from tests.load_target import Answer, Asked, LoadTarget, events, load_target, model
from tests.running import wait_for

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[4]
QUICK = ("--seconds", "0.3", "--warmup", "0", "--repeats", "2", "--connections", "1,4")
ONCE = ("--seconds", "0.3", "--warmup", "0", "--repeats", "1", "--connections", "1")
PIPELINE = model("pipeline", heads=[{"name": "a"}, {"name": "b"}])
LANGUAGE_MODEL = {**model("lm"), "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [-1, 1]}]}


def answer(asked: Asked) -> Answer:
    if asked.path.endswith("completions"):
        text = {"choices": [{"delta": {"content": "a"}, "text": "a"}]}
        return Answer(
            pieces=events(text, text, {"choices": [], "usage": {"completion_tokens": 4}}, "[DONE]", gap_s=0.01)
        )
    if asked.path.endswith("generate_stream"):
        ends = {"final": True, "completion_tokens": 4}
        return Answer(pieces=events({"text_output": "a"}, {"text_output": "b"}, ends, gap_s=0.01))
    return Answer(delay_s=0.01)


@pytest.fixture(scope="module")
def target() -> Iterator[LoadTarget]:
    with load_target(answer, model(), PIPELINE, LANGUAGE_MODEL) as running:
        yield running


def run(*arguments: object) -> int:
    """Runs the command; gives its exit status."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def measured(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.read_text())
    return told


def test_it_prints_a_table_and_writes_all_as_json(
    target: LoadTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    assert run(target.url, "--model", "m", *QUICK, "--slo", "latency_ms=5000,p50_ms=5000", "--json", path) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert re.search(r"^LOAD +REQUESTS/S +GOODPUT/S +P50 ms +P90 ms +P99 ms +P99.9 ms +ERRORS$", out, re.MULTILINE)
    assert re.search(r"^4 connections .* 0$", out, re.MULTILINE)
    assert "p50_ms 5000: 1 connection met; 4 connections met" in out
    told = measured(path)
    assert told["schema"] == "headwater-bench/1"
    assert told["valid"] is True
    assert told["ended_early"] is None
    assert told["server"] == {"url": target.url, "name": "headwater", "version": "1.2.3"}
    assert (told["run"]["model"], told["run"]["mode"], told["run"]["limits_ms"]["latency_ms"]) == ("m", "infer", 5000)
    assert [point["load"]["connections"] for point in told["points"]] == [1, 4]
    for point in told["points"]:
        assert (point["valid"], point["errors"], point["limits_met"], len(point["repeats"])) == (True, [], True, 2)
        spread = point["summary"]["requests_per_s"]
        assert spread["min"] <= spread["median"] <= spread["max"]
        assert point["summary"]["goodput_per_s"] == spread
        assert point["summary"]["ttft_ms_p50"] is None
        for repeat in point["repeats"]:
            assert repeat["requests"] == repeat["latency_ms"]["count"] > 0
            assert repeat["latency_ms"]["min"] >= 10


def test_errors_are_told_beside_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "bench.json", tmp_path / "bench.html"

    def fail(asked: Asked) -> Answer:
        return Answer(b'{"error": "no <luck>"}', 500, 0.01) if asked.number % 2 else Answer(delay_s=0.01)

    with load_target(fail) as target:
        assert run(target.url, *QUICK, "--json", path, "--html", page) == 1
    out = capsys.readouterr().out
    assert re.search(r"^! 1 connection .*%\)$", out, re.MULTILINE)
    assert re.search(r"^! 4 connections: [\d,]+ of [\d,]+ requests failed .* status 500: no <luck>", out, re.MULTILINE)
    told = measured(path)
    assert told["valid"] is False
    for point in told["points"]:
        assert point["valid"] is False
        assert "requests failed" in point["warnings"][0]
        (error,) = point["errors"]
        assert (error["kind"], error["status"], error["reason"]) == ("status", 500, "no <luck>")
        assert error["count"] == sum(repeat["failures"] for repeat in point["repeats"])
    html = page.read_text()
    assert html.count("requests failed") == 2
    assert html.count('class="flagged"') == 2
    assert "no &lt;luck&gt;" in html
    assert "<luck>" not in html


@pytest.mark.parametrize("mode", ["stream", "chat", "completions"])
def test_streams_have_token_figures(
    target: LoadTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    path = tmp_path / "bench.json"
    limits = ("--slo", "ttft_ms=5000,itl_ms=5000,tpot_ms=5000")
    assert run(target.url, "--mode", mode, "--model", "lm", *ONCE, *limits, "--json", path) == 0
    assert "TTFT P50 ms" in capsys.readouterr().out
    (point,) = measured(path)["points"]
    (repeat,) = point["repeats"]
    assert repeat["tokens"] == 4 * repeat["answers"]
    assert repeat["itl_ms"]["count"] == repeat["ttft_ms"]["count"] == repeat["answers"]
    # One gap for four tokens.
    assert repeat["tpot_ms"]["max"] == pytest.approx(repeat["itl_ms"]["max"] / 3)
    assert repeat["goodput_per_s"] == repeat["requests_per_s"] == pytest.approx(repeat["tokens_per_s"] / 4)


def formed(asked: Asked) -> Answer:
    """JSON of four tokens, every third time cut, to who asks for a form; eight tokens to who doesn't."""
    body = json.loads(asked.body)
    reason = "length" if asked.number % 3 == 0 else "stop"
    delta: dict[str, Any] = {"content": "Once" if "response_format" not in body else '{"a": 1}'}
    if "tools" in body:
        delta = {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}
    tokens = 4 if body.keys() & {"response_format", "tools"} else 8
    ends = {"choices": [{"delta": {}, "finish_reason": reason}], "usage": {"completion_tokens": tokens}}
    return Answer(pieces=events({"choices": [{"delta": delta}]}, ends, "[DONE]", gap_s=0.01))


@pytest.mark.parametrize(
    ("option", "content"), [("schema", {"type": "object"}), ("tools", [{"function": {"name": "f"}}])]
)
def test_constrained_answers_are_counted_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, content: Any
) -> None:
    asks, path, page = tmp_path / "form.json", tmp_path / "bench.json", tmp_path / "bench.html"
    asks.write_text(json.dumps(content))
    with load_target(formed, LANGUAGE_MODEL) as target:
        report = ("--unconstrained", "--json", path, "--html", page)
        assert run(target.url, "--mode", "chat", *QUICK, f"--{option}", asks, *report) == 0
    out = capsys.readouterr().out
    assert re.search(r"^LOAD +CONSTRAINT +FINISHED +PARSED +TOKENS/S RATIO$", out, re.MULTILINE)
    assert re.search(rf"^4 connections +{option} +[\d,]+ of [\d,]+ \(\d+.\d%\) +[\d,]+ of [\d,]+ \(100.0%\)", out, re.M)
    assert re.search(r"^4 connections +none +[\d,]+ of .* – +–$", out, re.MULTILINE)
    points = measured(path)["points"]
    assert [(point["load"]["connections"], point["constraint"]) for point in points] == [
        (1, option), (1, "none"), (4, option), (4, "none"),
    ]  # fmt: skip
    for constrained, free in (points[:2], points[2:]):
        assert free["tokens_per_s_ratio"] is None
        pairs = list(zip(constrained["repeats"], free["repeats"], strict=True))
        ratios = [repeat["tokens_per_s"] / other["tokens_per_s"] for repeat, other in pairs]
        assert constrained["tokens_per_s_ratio"]["median"] == pytest.approx(statistics.median(ratios))
        for repeat, other in pairs:
            assert repeat["tokens"] == 4 * repeat["answers"]
            assert repeat["parsed"] == repeat["finished"]
            assert (other["tokens"], other["parsed"]) == (8 * other["answers"], None)
        for repeats in zip(*pairs, strict=True):
            assert 0 < sum(one["finished"] for one in repeats) < sum(one["answers"] for one in repeats)
    html = page.read_text()
    assert "TOKENS/S RATIO" in html
    assert f"{option}" in html


def test_a_page_of_streams_has_a_plot_of_each_figure(target: LoadTarget, tmp_path: Path) -> None:
    page = tmp_path / "bench.html"
    assert run(target.url, "--mode", "chat", "--model", "lm", *ONCE, "--html", page) == 0
    html = page.read_text()
    for title in ("Throughput", "Latency", "Time to first token", "Inter-token latency", "Time per output token"):
        assert f'aria-label="{title}' in html


def test_each_selection_of_heads_is_measured(target: LoadTarget, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    heads = ("--heads", "a", "--heads", "a,b", "--heads", "all")
    assert run(target.url, "--model", "pipeline", *ONCE, *heads, "--json", path) == 0
    assert [point["heads"] for point in measured(path)["points"]] == [["a"], ["a", "b"], None]


def test_an_open_loop_says_what_it_asked_and_what_it_got(
    target: LoadTarget, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bench.json"
    asked = ("--rate", "500", "--max-connections", "1", "--seconds", "0.5", "--warmup", "0", "--repeats", "1")
    assert run(target.url, "--model", "m", *asked, "--json", path) == 0
    out = capsys.readouterr().out
    assert "of 500 requests/s: latency grows" in out  # one connection, 10 ms each: 100/s at most
    assert "had to wait for one of 1 connections" in out
    (point,) = measured(path)["points"]
    assert point["load"] == {"kind": "open", "connections": None, "rate_per_s": 500}
    (repeat,) = point["repeats"]
    assert repeat["sent_late"]["waited_for_connection"] > 100
    assert repeat["sent_late"]["lateness_ms"]["max"] > 500
    assert repeat["latency_ms"]["max"] > 500


def test_several_processes_share_the_load(target: LoadTarget, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    asked = ("--connections", "3", "--seconds", "0.5", "--warmup", "0.1", "--repeats", "1", "--processes", "2")
    assert run(target.url, "--model", "m", *asked, "--json", path) == 0
    (point,) = measured(path)["points"]
    assert point["repeats"][0]["answers"] > 10


def test_a_file_says_what_to_ask(tmp_path: Path) -> None:
    path = tmp_path / "input.json"
    path.write_text('[{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [7]}]}]')
    got = set()

    def note(asked: Asked) -> Answer:
        got.add(asked.body)
        return Answer(delay_s=0.01)

    with load_target(note) as target:
        assert run(target.url, *ONCE, "--input", path) == 0
    assert got == {b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,1],"data":[7]}]}'}


def test_a_key_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got = set()

    def note(asked: Asked) -> Answer:
        got.add(asked.headers.get("authorization"))
        return Answer(delay_s=0.01)

    path = tmp_path / "key"
    path.write_text("from-file\n")
    monkeypatch.setenv("HEADWATER_KEY", "from-environment")
    with load_target(note) as target:
        assert run(target.url, *ONCE) == 0
        assert run(target.url, *ONCE, "--api-key-file", path) == 0
    assert got == {"Bearer from-environment", "Bearer from-file"}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_it_speaks_https(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj",
         "/CN=somewhere.else", "-days", "1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with load_target(answer, tls=context) as target:
        assert target.url.startswith("https://")
        assert run(target.url, *ONCE) == 0


def test_a_wrong_key_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    target = LoadTarget(lambda asked: Answer(b'{"error": "?"}', 401))
    target.start()
    try:
        assert run(target.url, *ONCE) == 1
    finally:
        target.close()
    told = capsys.readouterr().err
    assert "--api-key-file" in told
    assert "HEADWATER_KEY" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "--model: expected the name of a model, got no name; the server has m, pipeline, lm"),
        (("--model", "nope"), "--model: expected one of the server's models, m, pipeline, lm, got 'nope'"),
        (("--model", "nope", "--mode", "chat"), "--model: expected one of the server's models"),
        (("--model", "pipeline", "--heads", "c"), "--heads: expected one of the heads a, b, got 'c'"),
        (("--model", "m", "--heads", "c"), "--heads: expected no --heads: m has no heads"),
        (("--model", "m", "--shape", "y=1"), "--shape: expected one of the inputs x"),
        (("--model", "m", "--input", "nowhere.json"), "--input: nowhere.json: can't be read"),
        (("--model", "m", "--input", "a.json", "--binary"), "--binary: can't be used with --input"),
        (("--model", "m", "--input", "a.json", "--rows", "1"), "--rows: can't be used with --input"),
        (("--model", "m", "--input", "a.json", "--max-tokens", "64"), "--max-tokens: can't be used with --input"),
        (("--model", "m", "--mode", "chat", "--heads", "a"), "--heads: expected --mode infer or stream, got chat"),
        (("--model", "m", "--mode", "chat", "--shape", "x=1"), "--shape: expected --mode infer or stream, got chat"),
        (("--model", "m", "--mode", "stream", "--rows", "1"), "--rows: expected --mode infer, got stream"),
        (("--model", "m", "--prompt", "a"), "--prompt: expected --mode stream or chat or completions, got infer"),
        (("--model", "m", "--max-tokens", "64"), "--max-tokens: expected --mode stream or chat or completions"),
        (("--model", "m", "--ignore-eos"), "--ignore-eos: expected --mode stream or chat or completions"),
        (("--model", "m", "--mode", "stream", "--prompt", "a"), "--prompt: expected a model with the input text_input"),
        (("--model", "m", "--mode", "stream", "--max-tokens", "64"), "--max-tokens: expected a model with the input"),
        (("--model", "m", "--mode", "stream", "--ignore-eos"), "--ignore-eos: expected a model with the input"),
        (("--model", "lm", "--mode", "stream", "--shape", "x=1"), "--shape: expected a model that takes tensors"),
        (("--model", "m", "--arrivals", "poisson"), "--arrivals: requires --rate"),
        (("--model", "m", "--max-connections", "4"), "--max-connections: requires --rate"),
        (("--model", "m", "--schema", "a.json"), "--schema: expected --mode chat, got infer"),
        (("--model", "lm", "--mode", "chat", "--schema", "nowhere.json"), "--schema: nowhere.json: can't be read"),
        (("--model", "m", "--input", "a.json", "--tools", "b"), "--tools: can't be used with --input"),
        (("--model", "m", "--tool-choice", "auto"), "--tool-choice: requires --tools"),
        (("--model", "m", "--unconstrained"), "--unconstrained: requires --schema or --tools"),
        (("--model", "m", "--slo", "ttft_ms=1"), "--slo: ttft_ms: expected a mode that streams"),
        (("--model", "m", "--json", "/dev/null/a.json"), "--json: /dev/null/a.json: can't be written"),
        (("--model", "m", "--api-key-file", "nowhere"), "--api-key-file: nowhere: can't be read"),
    ],
)
def test_what_contradicts_the_server_is_told(
    target: LoadTarget, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    assert run(target.url, *arguments) == 1
    out, err = capsys.readouterr()
    assert told in err
    assert out == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--connections", "0"), "--connections: expected a whole number from 1 to 20,000, got '0'"),
        (("--connections", "1,x"), "got 'x'"),
        (("--rate", "-5"), "--rate: expected a number above 0, got '-5'"),
        (("--rate", "5", "--connections", "1"), "not allowed with argument"),
        (("--seconds", "0"), "--seconds: expected a number above 0"),
        (("--seconds", "inf"), "--seconds: expected a number above 0"),
        (("--warmup", "-1"), "--warmup: expected a number 0 or more"),
        (("--repeats", "0"), "--repeats: expected a whole number"),
        (("--slo", "foo=1"), "--slo: expected one of latency_ms, ttft_ms"),
        (("--shape", "x=a"), "--shape: expected an input and a row's dimensions"),
        (("--heads", "a,,b"), "--heads: expected heads separated by commas"),
        (("--schema", "a", "--tools", "b"), "not allowed with argument"),
        (("--mode", "other"), "--mode: invalid choice"),
    ],
)
def test_nonsense_is_told(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str) -> None:
    assert run("http://127.0.0.1:1", *arguments) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "ftp://x", "http://", "http://a:b"])
def test_a_server_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert run(url, "--model", "m") == 1
    assert "headwater: URL: " in capsys.readouterr().err


def test_a_request_that_the_server_refuses_is_told_before_any_load(capsys: pytest.CaptureFixture[str]) -> None:
    with load_target(lambda asked: Answer(b'{"error": "inputs[0]: expected more"}', 400)) as target:
        assert run(target.url) == 1
        assert target.asked["POST /v2/models/m/infer"] == 1
    assert "status 400: inputs[0]: expected more; send a valid request with --input" in capsys.readouterr().err


def test_without_matplotlib_a_page_is_refused_before_the_run(
    target: LoadTarget, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    before = dict(target.asked)
    assert run(target.url, "--model", "m", "--html", tmp_path / "a.html") == 1
    assert install_command("reports", "matplotlib") in capsys.readouterr().err
    assert target.asked == before


@contextlib.contextmanager
def begun(target: LoadTarget, path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, in the middle of its first run."""
    command = [
        sys.executable,
        "-m",
        "headwater_server",
        "bench",
        target.url,
        "--connections",
        "2",
        "--seconds",
        "60",
        "--warmup",
        "0",
    ]
    with subprocess.Popen(
        [*command, "--json", str(path)], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            wait_for(lambda: target.asked.get("POST /v2/models/m/infer", 0) > 50)
            yield process
        finally:
            process.kill()


def test_a_server_that_goes_away_leaves_partial_results(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    with load_target(lambda asked: Answer(delay_s=0.01)) as target, begun(target, path) as process:
        target.stop()
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "")
    assert "! ended early: no connection could be made for 2 s" in out
    told = measured(path)
    assert told["valid"] is False
    assert told["ended_early"].startswith("no connection could be made")
    assert told["points"][0]["repeats"][0]["answers"] >= 40


def test_ctrl_c_leaves_partial_results(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    with load_target(lambda asked: Answer(delay_s=0.01)) as target, begun(target, path) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "")
    assert "! ended early: stopped by hand" in out
    told = measured(path)
    assert told["points"][0]["errors"] == []
    assert told["points"][0]["repeats"][0]["answers"] >= 40
