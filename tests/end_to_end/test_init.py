"""Folders of ``headwater init`` behind the server: they answer as their README asks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from headwater_server.cli.init import write_template
from tests.running import Running, serve


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pipeline's folder and a stream's."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("pipeline", "stream")}
    for kind, folder in folders.items():
        write_template(kind, folder)
    return folders


@pytest.fixture(scope="module")
def running(folders: dict[str, Path]) -> Iterator[Running]:
    """Both on one server, to start it once."""
    deployments: dict[str, Any] = {}
    for folder in folders.values():
        deployments.update(yaml.safe_load((folder / "serve.yaml").read_text())["deployments"])
    deployments["averages"]["environment"] = {"PYTHONPATH": str(folders["stream"])}
    with serve({"deployments": deployments}, cwd=folders["pipeline"]) as running:
        yield running


def asked(running: Running, folder: Path) -> str:
    """The answer to the request in a README."""
    (found,) = re.findall(r"curl -sN? localhost:8000(\S+) .*?-d '(.*?)'", (folder / "README.md").read_text(), re.DOTALL)
    response = running.client.post(running.url + found[0], json=json.loads(found[1]))
    assert response.status_code == 200, response.text
    return response.text


def test_a_pipeline_answers(running: Running, folders: dict[str, Path]) -> None:
    answer = json.loads(asked(running, folders["pipeline"]))
    assert answer["median"] in (2.5, [2.5])
    assert "spread" not in answer


def test_a_stream_answers_in_pieces(running: Running, folders: dict[str, Path]) -> None:
    text = asked(running, folders["stream"])
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    assert [event["mean"] for event in events if not event.get("final")] == [1, 2, 4]
