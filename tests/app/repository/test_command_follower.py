"""Commands that a replica repeats, because it wasn't there when clients gave them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from headwater_server.control.model_commands import ModelCommands
from headwater_server.repository.command_follower import CommandFollower


class ScriptedReplica:
    """The replica ``r3``, with a Triton that refuses some models."""

    def __init__(self, folder: Path) -> None:
        self.commands = ModelCommands(folder, "models")
        self.asked: list[tuple[str, str]] = []
        self.warnings: list[str] = []
        self.follower = CommandFollower(self.commands, "r3", self.ask, self.warnings.append)

    def ask(self, path: str, body: str) -> tuple[int, bytes]:
        self.asked.append((path, body))
        if path.startswith("/gone/"):
            return 400, b'{"error":"no such file"}'
        if path.startswith("/silent/"):
            raise TimeoutError
        return 200, b""

    def given(self, model: str, action: str, *replicas: str) -> None:
        with self.commands.alone(model):
            self.commands.keep(model, f"/{model}/{action}", b"{}", replicas)


@pytest.fixture
def replica(tmp_path: Path) -> ScriptedReplica:
    return ScriptedReplica(tmp_path)


def test_a_command_that_it_did_not_get_is_repeated_once(replica: ScriptedReplica) -> None:
    replica.given("b", "load", "r1", "r2")
    replica.given("a", "unload", "r1", "r2")
    for _ in range(3):
        replica.follower.follow()
    assert replica.asked == [("/b/load", "{}"), ("/a/unload", "{}")]
    replica.given("b", "unload", "r1")
    replica.follower.follow()
    assert replica.asked[2:] == [("/b/unload", "{}")]


def test_a_command_that_it_got_from_the_client_is_not_repeated(replica: ScriptedReplica) -> None:
    replica.given("b", "load", "r1", "r3")
    replica.follower.follow()
    assert replica.asked == []


@pytest.mark.parametrize(("model", "reason"), [("gone", '{"error":"no such file"}'), ("silent", "TimeoutError")])
def test_a_command_that_fails_is_a_warning_and_not_tried_again(
    replica: ScriptedReplica, model: str, reason: str
) -> None:
    replica.given(model, "load", "r1")
    for _ in range(3):
        replica.follower.follow()
    assert replica.warnings == [f"model {model}: a client's load can't be repeated: {reason}; send load again"]
    assert len(replica.asked) == 1


def test_it_looks_until_it_is_stopped(replica: ScriptedReplica) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=replica.follower.run, args=[stop])
    thread.start()
    replica.given("m", "load")
    while not replica.asked:
        assert thread.is_alive()
        thread.join(0.01)
    stop.set()
    thread.join()
    assert replica.asked == [("/m/load", "{}")]
