"""The files for `ray up`: what Ray's own schema takes, and whether what their commands name is there."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from headwater_server import __version__
from headwater_server.config.reader import read_config
from tests.deploy.charts import DEPLOY

FOLDER = DEPLOY / "ray"
FILES = ("cluster.yaml", "aws.yaml")
CONFIG: Any = yaml.safe_load((FOLDER / "headwater.yaml").read_text())


def cluster(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def prepared(content: Any) -> None:
    """What `ray up` does with a file before it starts anything."""
    util = pytest.importorskip("ray.autoscaler._private.util", reason="needs Ray")
    util.validate_config(util.prepare_config(content))


@pytest.mark.parametrize("name", FILES)
def test_ray_takes_a_file(name: str) -> None:
    prepared(cluster(name))


@pytest.mark.parametrize("name", FILES)
def test_unknown_fields_are_noticed(name: str) -> None:
    with pytest.raises(Exception, match="setup_command"):
        prepared({**cluster(name), "setup_command": []})


@pytest.mark.parametrize("name", FILES)
def test_ray_and_headwater_have_a_token(name: str) -> None:
    found = cluster(name)
    assert found["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    starts = [line for kind in ("head", "worker") for line in found[f"{kind}_start_ray_commands"]]
    chosen = [line for line in starts if re.search(r"ray start|headwater serve", line)]
    assert len(chosen) == 3
    assert all("RAY_AUTH_MODE=token" in line for line in chosen)


@pytest.mark.parametrize("name", FILES)
def test_what_the_commands_use_is_copied(name: str) -> None:
    found = cluster(name)
    mounts = found["file_mounts"]
    wheels = [f"{name}-{__version__}-py3-none-any.whl" for name in ("headwater", "headwater_server")]
    assert [mounts[f"~/{wheel}"] for wheel in wheels] == wheels
    files = f'"$HOME/{wheels[0]}" "$HOME/{wheels[1]}[cluster,demo]"'
    install = f"/opt/headwater/bin/pip install -c ~/requirements.lock {files}"
    assert install in found["setup_commands"]
    assert "~/requirements.lock" in mounts
    assert (FOLDER / mounts["~/headwater.yaml"]).is_file()
    assert found["head_start_ray_commands"][-1].endswith("/opt/headwater/bin/headwater serve $HOME/headwater.yaml")
    assert any(CONFIG["cluster"]["tls"] in line and "~/cluster-tls/*" in line for line in found["setup_commands"])


@pytest.mark.parametrize("name", FILES)
def test_no_replica_is_placed_on_the_head(name: str) -> None:
    (start,) = (line for line in cluster(name)["head_start_ray_commands"] if "ray start" in line)
    assert "--head" in start
    assert "--num-cpus=0" in start


def test_headwater_takes_the_configuration() -> None:
    assert set(read_config(CONFIG, source="headwater.yaml", environment={}, flags={}).deployments) == {"scale", "text"}
