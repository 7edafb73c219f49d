"""The load of a plan, and the command of ``headwater bench`` that makes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headwater_server.cli.bench import bench_command
from headwater_server.cli.bench.plan import LoadPlan, points_of
from headwater_server.cli.main import main
from headwater_server.cli.plan.point import Point
from headwater_server.cli.plan.profiles import served_at
from headwater_server.cli.plan.subject import WARMUP_S, Subject, make_subject
from headwater_server.cli.server_client import Metadata, ServerClient, Tensor
from headwater_server.config.reader import read_config
from headwater_server.errors import CommandError

URL = "http://127.0.0.1:8000"
METADATA = Metadata("one", [Tensor("x", "FP32", [-1, 4]), Tensor("text", "BYTES", [-1, 1])])
UNARY = {"deployments": {"one": {"model": "my.models:Scale", "timeout_s": 7}}}


def subject(content: dict[str, Any], **options: Any) -> Subject:
    config = read_config(content, source="test", environment={}, flags={})
    given = {"cores": 2, "seconds": 2.5, "tokens": 9, "input": None, **options}
    return make_subject("models.yaml", config, "one", (), **given)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What ``headwater bench`` makes of arguments."""
    found: list[LoadPlan] = []

    def bench(plan: LoadPlan) -> int:
        found.append(plan)
        return 0

    monkeypatch.setattr(bench_command, "bench", bench)
    monkeypatch.setattr(ServerClient, "metadata", lambda self, model: METADATA)
    monkeypatch.setattr(ServerClient, "models", lambda self: ["one"])

    def read(arguments: list[str]) -> LoadPlan:
        with pytest.raises(SystemExit) as ended:
            main(["bench", *arguments])
        assert ended.value.code == 0
        return found[-1]

    return read


def language_model(folder: Path) -> dict[str, Any]:
    config = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "max_position_embeddings": 100}
    (folder / "config.json").write_text(json.dumps(config))
    return {"deployments": {"one": {"model": f"lm:{folder}"}}}


@pytest.mark.parametrize("kind", ["unary", "language model", "of a file", "language model, of a file"])
def test_the_command_sends_the_same_requests_as_the_plan(read: Any, tmp_path: Path, kind: str) -> None:
    content = language_model(tmp_path) if "language model" in kind else UNARY
    options: dict[str, Any] = {}
    if "of a file" in kind:
        file = tmp_path / "rows with a space.json"
        file.write_text('[{"prompt": "a", "max_tokens": 3}, {"prompt": "b"}]')
        options["input"] = file
    planned = subject(content, **options)
    point = Point(4, 1, 2)
    told = read(planned.bench_arguments(URL, point))
    (found,) = points_of(told, ServerClient(URL), "one")
    assert found.target == planned.target(URL)
    assert found.load.connections == planned.connections(point)
    assert (told.seconds, told.warmup_s) == (2.5, WARMUP_S)


@pytest.mark.parametrize(
    ("server", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"host": "0.0.0.0", "port": 9000}, "http://127.0.0.1:9000"),
        ({"host": "::1"}, "http://[::1]:8000"),
    ],
)
def test_where_a_profile_is_asked(server: dict[str, Any], url: str) -> None:
    config = read_config({**UNARY, "server": server}, source="test", environment={}, flags={})
    assert served_at(config) == url


@pytest.mark.parametrize("content", [None, "{"])
def test_a_config_json_that_can_not_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CommandError, match=f"^lm:{tmp_path}: config.json can't be read: "):
        subject({"deployments": {"one": {"model": f"lm:{tmp_path}"}}})
