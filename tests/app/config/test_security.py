"""The configuration of keys, origins and HTTPS, and what is found wrong with it before a server starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.errors import Problem
from headwater_server.config.reader import read_config
from headwater_server.config.schema import Config
from headwater_server.errors import ConfigError
from headwater_server.supervisor.preflight import security_problems


def config(**sections: Any) -> Config:
    content = {"deployments": {"a": {"model": "some:Model"}}, **sections}
    return read_config(content, source="file", environment={}, flags={})


def test_paths_start_where_headwater_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    read = config(security={"keys_file": "keys.json"}, server={"tls": {"certificate": "~/c.pem", "key": "/k.pem"}})
    assert read.security.keys_file == tmp_path / "keys.json"
    assert read.server.tls is not None
    assert (read.server.tls.certificate, read.server.tls.key) == (Path("/home/somebody/c.pem"), Path("/k.pem"))
    assert read.server.model_dump(mode="json")["tls"]["key"] == "/k.pem"


@pytest.mark.parametrize("origin", ["https://app.example", "http://localhost:3000", "http://[::1]:3000", "*"])
def test_origins_are_taken(origin: str) -> None:
    assert config(security={"cors_origins": [origin]}).security.cors_origins == (origin,)


@pytest.mark.parametrize(
    "origin",
    ["app.example", "https://app.example/", "https://App.example", "ftp://app.example", "", "null", "https://*"],
)
def test_what_no_browser_sends_as_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"security\.cors_origins.*expected an origin"):
        config(security={"cors_origins": [origin]})


def test_nothing_is_wrong_with_nothing() -> None:
    assert security_problems(config()) == []


def test_a_problem_has_the_parts_of_its_error_however_it_is_worded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known_keys(path: object) -> None:
        raise ConfigError("x: reworded; twice", field="keys: file", fix="do a; then b")

    monkeypatch.setattr("headwater_server.supervisor.preflight.known_keys", known_keys)
    (problem,) = security_problems(config())
    assert problem == Problem("keys: file", "x: reworded; twice", "do a; then b")


def test_what_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    wrong = config(
        security={"keys_file": str(tmp_path / "keys.json")},
        server={"tls": {"certificate": str(tmp_path / "c"), "key": str(tmp_path / "k")}},
    )
    keys, tls = security_problems(wrong)
    assert keys.title == "security.keys_file"
    assert "No such file" in keys.reason
    assert "headwater keys add" in keys.fix
    assert tls.title == "server.tls.certificate"
