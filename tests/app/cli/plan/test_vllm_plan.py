"""Plans for vLLM: options that follow from what one start showed."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headwater_server.cli.main import main
from headwater_server.cli.plan import vllm_plan
from headwater_server.cli.plan.process_memory import ServerMemory
from headwater_server.cli.plan.vllm_plan import GIB, Started, propose
from headwater_server.config.schema import Deployment
from headwater_server.errors import CommandError
from headwater_server.process.vllm_program import VllmInstall

MIB = 1024**2


def deployment(**options: Any) -> Deployment:
    return Deployment.model_validate({"model": "vllm:some/model", "python": "python", "options": options})


@pytest.mark.parametrize(("options", "cache_tokens", "context", "expected"), [
    # 0.8 of the cache holds 256 sequences, the default
    ({}, 200_000, 512, {"max_model_len": 512, "max_num_seqs": 256}),
    # as many as fit at their longest
    ({}, 100_000, 4096, {"max_model_len": 4096, "max_num_seqs": 19}),
    # not more than was set
    ({"max_num_seqs": 8}, 100_000, 4096, {"max_model_len": 4096, "max_num_seqs": 8}),
    # the cache holds less than one context
    ({}, 10_000, 131_072, {"max_model_len": 8000, "max_num_seqs": 1}),
])  # fmt: skip
def test_sequences_fit_into_the_cache_that_vllm_reports(
    options: dict[str, Any], cache_tokens: int, context: int, expected: dict[str, int]
) -> None:
    first = {"gpu_memory_utilization": 0.8}
    found = propose(deployment(**options), first, Started(cache_tokens, context, 0), most_bytes=0, headroom=0.2)
    assert found == {**first, **expected}


@pytest.mark.parametrize(("most_gib", "expected"), [(64, 33), (10, 8)])
def test_the_cache_on_the_cpu_is_as_large_as_the_sequences_need_or_as_memory_allows(
    most_gib: int, expected: int
) -> None:
    # 10,000 tokens a GiB; 64 sequences of 4,096 tokens and a fifth free need 32.8 GiB; the rest takes 2 GiB
    found = propose(
        deployment(max_num_seqs=64), {"kv_cache_gib": 2}, Started(20_000, 4096, 4 * GIB),
        most_bytes=most_gib * GIB, headroom=0.2,
    )  # fmt: skip
    assert found["kv_cache_gib"] == expected
    assert found["max_num_seqs"] == min(64, int(expected * 10_000 * 0.8) // 4096)


def test_too_little_memory_says_how_much_is_needed() -> None:
    with pytest.raises(CommandError, match="2048 MiB besides its cache of at least 1 GiB, and 2560 MiB is available"):
        propose(deployment(), {"kv_cache_gib": 1}, Started(10_000, 512, 3 * GIB), most_bytes=2560 * MIB, headroom=0.2)


def test_without_a_cache_there_is_nothing_to_size() -> None:
    with pytest.raises(CommandError, match="got a cacheless model"):
        propose(deployment(), {"kv_cache_gib": 1}, Started(0, 256, GIB), most_bytes=8 * GIB, headroom=0.2)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each start, none of which takes place."""
    found: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def serve(source: str, fields: dict[str, Any], timeout_s: float) -> Iterator[SimpleNamespace]:
        options = fields["deployments"]["chat"]["options"]
        found.append(options)
        limits = {"cache_tokens": 20_000 * options.get("kv_cache_gib", 1), "context_length": 4096}
        stats = {"model_stats": [{"language_model": {"limits": limits}}]}
        yield SimpleNamespace(pid=0, runtime_dir=Path(), get=lambda path: stats)

    monkeypatch.setattr(vllm_plan, "serve_point", serve)
    monkeypatch.setattr(vllm_plan, "measure_server", lambda pid, runtime_dir: ServerMemory(GIB, (2 * GIB,), GIB))
    return found


def plan(monkeypatch: pytest.MonkeyPatch, *arguments: str, is_cpu: bool = True, **fields: Any) -> int:
    monkeypatch.setattr(vllm_plan, "find_vllm", lambda python, environ: VllmInstall(python, "0.32.0", is_cpu))
    flags = [f"--set=deployments.chat.{name}={json.dumps(value)}" for name, value in fields.items()]
    with pytest.raises(SystemExit) as ended:
        main(["plan", "chat.yaml", *flags, *arguments])
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "chat.yaml").write_text(
        f"deployments: {{chat: {{model: 'vllm:headwater.zoo:weights/tiny_lm', python: {sys.executable}}}}}"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_is_started_with_what_is_proposed(
    starts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert plan(monkeypatch, "--memory", "10GiB", "--json", "plan.json") == 0
    proposed = {"kv_cache_gib": 6, "max_model_len": 4096, "max_num_seqs": 23}
    assert starts == [{"kv_cache_gib": 1}, proposed]
    report = json.loads((folder / "plan.json").read_text())
    assert report["options"] == proposed
    assert report["verified"]["cache_tokens"] == 120_000
    assert "23 sequences of 4096 tokens fill 79% of the cache." in capsys.readouterr().out


def test_replicas_share_the_memory(starts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"replicas": 4, "device": ["cuda:0", "cuda:1"]}
    assert plan(monkeypatch, "--no-verify", is_cpu=False, **fields) == 0
    assert starts == [{"gpu_memory_utilization": 0.4}]


def test_a_dry_run_starts_nothing(starts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(monkeypatch, "--dry-run") == 0
    assert starts == []


@pytest.mark.parametrize("flag", [
    "--out=there", "--input=rows.json", "--memory=10GiB", "--batch-sizes=1", "--sequences=1", "--instances=1",
    "--replicas=1", "--seconds=4", "--tokens=64", "--rounds=3",
])  # fmt: skip
def test_options_that_it_has_no_use_for_are_refused(
    starts: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert plan(monkeypatch, flag, is_cpu=False) == 1
    name = flag.partition("=")[0]
    assert f"{name}: not supported for a deployment that vLLM computes" in capsys.readouterr().err
    assert starts == []
