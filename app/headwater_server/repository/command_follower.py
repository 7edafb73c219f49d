"""Repeats in a replica's Triton the loads and unloads that clients asked for while the replica wasn't there."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from typing import Final

from headwater_server.control.model_commands import ModelCommand, ModelCommands

__all__ = ["CommandFollower"]

LOOK_S: Final = 1.0
"""Time between two looks for new commands."""


class CommandFollower:
    """Repeats each command once.

    Args:
        commands: the deployment's commands.
        replica: the name of the replica's folder.
        ask: sends a POST request with a path and a body to Triton; returns the answer's status and body.
        warn: called with the reason why a command can't be repeated.
    """

    def __init__(
        self,
        commands: ModelCommands,
        replica: str,
        ask: Callable[[str, str], tuple[int, bytes]],
        warn: Callable[[str], None],
    ) -> None:
        self._commands = commands
        self._replica = replica
        self._ask = ask
        self._warn = warn
        self._seen: dict[str, int] = {}
        """When the last command was given that was looked at, by model."""

    def follow(self) -> None:
        """Repeat the commands that were given since the last call and that this replica didn't get."""
        for command in self._commands.read():
            if command.given_ns != self._seen.get(command.model):
                self._seen[command.model] = command.given_ns
                if self._replica not in command.replicas:
                    self._repeat(command)

    def run(self, stop: threading.Event) -> None:
        """Look each second, until an event is set."""
        while not stop.wait(LOOK_S):
            self.follow()

    def _repeat(self, command: ModelCommand) -> None:
        try:
            status, body = self._ask(command.path, command.body)
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
        else:
            if status == http.client.OK:
                return
            reason = body.decode(errors="replace")
        action = command.action
        self._warn(f"model {command.model}: a client's {action} can't be repeated: {reason}; send {action} again")
