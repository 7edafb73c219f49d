"""The last load or unload of each model of a repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater_server.control.model_commands import ModelCommands
from headwater_server.errors import Conflict


@pytest.fixture
def commands(tmp_path: Path) -> ModelCommands:
    return ModelCommands(tmp_path, "models")


def keep(commands: ModelCommands, model: str, action: str, body: bytes = b"{}") -> None:
    with commands.alone(model):
        commands.keep(model, f"/v2/repository/models/{model}/{action}", body, ["r1"])


def test_the_last_command_of_each_model_is_read_in_the_order_in_which_they_were_given(commands: ModelCommands) -> None:
    assert commands.read() == []
    keep(commands, "b", "load")
    keep(commands, "a", "load", b'{"parameters":{"config":"{}"}}')
    keep(commands, "b", "unload")
    first, second = commands.read()
    assert (first.model, first.action, first.body) == ("a", "load", '{"parameters":{"config":"{}"}}')
    assert (second.model, second.action, second.replicas) == ("b", "unload", ("r1",))
    assert second.path == "/v2/repository/models/b/unload"


def test_deployments_have_separate_commands(tmp_path: Path, commands: ModelCommands) -> None:
    keep(commands, "m", "load")
    assert ModelCommands(tmp_path, "others").read() == []


def test_a_model_has_one_command_at_a_time(tmp_path: Path, commands: ModelCommands) -> None:
    with commands.alone("m"):
        with pytest.raises(Conflict, match="model `m`: another load or unload is under way; send this command again"):
            keep(ModelCommands(tmp_path, "models"), "m", "load")
        keep(commands, "n", "load")
    keep(commands, "m", "load")


def test_the_longest_name_of_a_folder_can_be_kept(commands: ModelCommands) -> None:
    keep(commands, "m" * 255, "load")
    assert [command.model for command in commands.read()] == ["m" * 255]


def test_commands_are_forgotten(commands: ModelCommands) -> None:
    keep(commands, "m", "load")
    with commands.alone("m"):
        commands.forget()
        commands.keep("m", "/load", b"{}", [])  # the deployment was unloaded meanwhile
    assert commands.read() == []
    commands.forget()
