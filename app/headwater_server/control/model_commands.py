"""The last load or unload of each model of a repository that clients asked for, in files that gateway workers write and
the replicas' hosts read: a replica that starts later repeats them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import msgspec

from headwater_server.errors import Conflict

__all__ = ["ModelCommand", "ModelCommands"]

FOLDER: Final = "commands"
"""The folder of all deployments' commands, in the server's folder."""
COMMAND: Final = "command"


class ModelCommand(msgspec.Struct, frozen=True):
    """A load or unload that all replicas have carried out."""

    model: str
    path: str
    """The path of the request to Triton."""
    body: str
    """The body of the request, JSON."""
    replicas: tuple[str, ...]
    """The names of the folders of the replicas that had it from the client."""
    given_ns: int
    """When it was carried out, by `time.monotonic_ns`."""

    @property
    def action(self) -> str:
        """``load`` or ``unload``."""
        return self.path.rpartition("/")[2]


class ModelCommands:
    """The commands on the models of a deployment. Each model has a folder with a file, which is replaced atomically.

    Args:
        server: the server's folder.
        deployment: the deployment's name.
    """

    def __init__(self, server: Path, deployment: str) -> None:
        self._folder = server / FOLDER / deployment

    @contextlib.contextmanager
    def alone(self, model: str) -> Iterator[None]:
        """A context in which no other command on a model runs, in any worker.

        Raises:
            Conflict: another command on it is under way.
        """
        (self._folder / model).mkdir(parents=True, exist_ok=True)
        handle = os.open(self._folder / model, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"model `{model}`: another load or unload is under way; send this command again after its end"
                raise Conflict(message) from None
            yield
        finally:
            os.close(handle)

    def keep(self, model: str, path: str, body: bytes, replicas: Collection[str]) -> None:
        """Keep a command that replicas have carried out, in place of the model's last command, unless `forget` was
        called meanwhile. Must be called in `alone`. Arguments as for `ModelCommand`."""
        command = ModelCommand(model, path, body.decode(), tuple(replicas), time.monotonic_ns())
        new = self._folder / model / "new"
        with contextlib.suppress(FileNotFoundError):
            new.write_bytes(msgspec.json.encode(command))
            new.replace(new.with_name(COMMAND))

    def read(self) -> list[ModelCommand]:
        """The last command on each model, in the order in which they were given."""
        commands = []
        with contextlib.suppress(FileNotFoundError):  # the folder is being removed
            for path in self._folder.glob(f"*/{COMMAND}"):
                commands.append(msgspec.json.decode(path.read_bytes(), type=ModelCommand))
        return sorted(commands, key=lambda command: command.given_ns)

    def forget(self) -> None:
        """Forget all commands."""
        shutil.rmtree(self._folder, ignore_errors=True)
