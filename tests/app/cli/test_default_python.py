"""Which Python runs the models that name none, and what is said of the choice."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from headwater_server.cli.check import check
from headwater_server.cli.default_python import default_python
from headwater_server.cli.script_config import load_with_scripts
from headwater_server.config.overlay import lay_over
from headwater_server.config.reader import read_config
from headwater_server.config.schema import Config
from headwater_server.config.sections import OWN_PYTHON
from headwater_server.errors import ConfigError

SCALE = {"model": "headwater.zoo.scale:Scale"}


def config_with(**fields: Any) -> Config:
    return read_config({"deployments": {"scale": SCALE}, **fields}, source="test", environment={}, flags={})


def environment_in(folder: Path, *, has_headwater: bool = False) -> Path:
    """The folder of an environment."""
    for name in ("python", *(["headwater"] if has_headwater else [])):
        path = folder / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return folder


def test_the_order(tmp_path: Path) -> None:
    """Each is taken away in turn, and the next is chosen."""
    active, conda, beside = (environment_in(tmp_path / name) for name in ("active", "conda", ".venv"))
    environ = {"VIRTUAL_ENV": str(active), "CONDA_PREFIX": str(conda)}
    config = config_with(python="/of/file")
    chosen = default_python(config, "/of/option", tmp_path, environ)
    assert chosen == (Path("/of/file"), "`python` of the configuration, which comes before --python")
    assert default_python(config, None, tmp_path, environ).why == "`python` of the configuration"
    config = config_with()
    assert default_python(config, "~/p", tmp_path, environ) == (Path("~/p").expanduser(), "--python")
    found = default_python(config, None, tmp_path, environ)
    assert found == (active / "bin" / "python", "the active environment (VIRTUAL_ENV)")
    del environ["VIRTUAL_ENV"]
    found = default_python(config, None, tmp_path, environ)
    assert found == (conda / "bin" / "python", "the active environment (CONDA_PREFIX)")
    del environ["CONDA_PREFIX"]
    found = default_python(config, None, tmp_path, environ)
    assert found == (beside / "bin" / "python", "the environment .venv in the folder of the configuration")
    (beside / "bin" / "python").unlink()
    found = default_python(config, None, tmp_path, environ)
    assert found == (OWN_PYTHON, "no `python` is set, and no environment is active")
    assert str(found).startswith(f"models run under Headwater's own Python, {sys.executable}: ")


def test_an_environment_in_which_headwater_is_installed_is_not_the_users(tmp_path: Path) -> None:
    environment_in(tmp_path / ".venv", has_headwater=True)
    assert default_python(config_with(), None, tmp_path, {}).path == OWN_PYTHON


def test_our_own_environment_may_be_the_active_one() -> None:
    found = default_python(config_with(), None, Path("/"), {"VIRTUAL_ENV": sys.prefix})
    assert found == (OWN_PYTHON, "the active environment (VIRTUAL_ENV)")


def test_on_a_cluster_the_environment_of_one_node_says_nothing_of_others(tmp_path: Path) -> None:
    config = config_with(cluster={"engine": "ray"})
    environ = {"VIRTUAL_ENV": str(environment_in(tmp_path))}
    assert default_python(config, None, tmp_path, environ).path == OWN_PYTHON
    assert default_python(config, "/shared/python", tmp_path, environ).path == Path("/shared/python")


def test_deployments_that_name_none_get_it_also_their_versions_and_steps(tmp_path: Path) -> None:
    config = config_with(
        python="/of/file",
        deployments={
            "plain": SCALE,
            "named": {**SCALE, "python": "/of/deployment"},
            "ours": {**SCALE, "python": "own"},
            "shared": {"versions": {"a": SCALE, "b": {**SCALE, "python": "own"}}},
            "joined": {
                "pipeline": {
                    "placement": "graph",
                    "trunk": SCALE,
                    "heads": {"two": {**SCALE, "python": "/of/step"}},
                }
            },
            "theirs": {"model": f"vllm:{tmp_path}", "python": "/of/vllm"},
        },
    )
    assert {name: str(one.interpreter) for name, one in config.all_deployments().items()} == {
        "plain": "/of/file", "named": "/of/deployment", "ours": "None", "shared.a": "/of/file", "shared.b": "None",
        "joined.trunk": "/of/file", "joined.two": "/of/step", "theirs": "/of/vllm",
    }  # fmt: skip


def test_a_vllm_needs_a_python_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="python: expected the interpreter of an environment that has vLLM"):
        config_with(python="/of/file", deployments={"theirs": {"model": f"vllm:{tmp_path}"}})


def test_what_an_operator_loads_gets_it_too() -> None:
    config = config_with(python="/of/file")
    loaded = lay_over(config, config, "new", SCALE)
    assert loaded.deployments["new"].interpreter == Path("/of/file")
    assert loaded.deployments["scale"].interpreter == Path("/of/file")
    own = lay_over(config, config, "scale", {"python": "own"})
    assert own.deployments["scale"].interpreter is None


def test_what_a_command_reads_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"deployments": {"scale": SCALE}}))
    environment_in(tmp_path / ".venv")
    config = load_with_scripts(str(path), flags={}).config
    assert config.deployments["scale"].interpreter == tmp_path / ".venv" / "bin" / "python"
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "other"))
    config = load_with_scripts(str(path), flags={}).config
    assert config.deployments["scale"].interpreter == tmp_path / "other" / "bin" / "python"
    assert load_with_scripts(str(path), flags={}, python="own").config.deployments["scale"].interpreter is None


def test_check_tells_it_and_what_is_wrong_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert check("headwater.zoo.scale:Scale", as_json=False, flags={"server.port": 0}) == 1
    said = capsys.readouterr().out
    python = os.path.join(tmp_path, "bin", "python")
    assert f"\nmodels run under {python}: the active environment (VIRTUAL_ENV)\n" in said
    assert f"the model's Python, {python}: there is no such file" in said
    assert check("headwater.zoo.scale:Scale", as_json=False, flags={"server.port": 0}, python="own") == 0
    assert f"\nmodels run under Headwater's own Python, {sys.executable}: --python\n" in capsys.readouterr().out
