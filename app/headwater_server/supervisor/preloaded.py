"""Processes that have imported the modules that replicas need, and fork replicas; see `headwater.replica.preloaded`."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

import msgspec

from headwater.errors import LoadError
from headwater.reference import find_folder, find_path, kind_and_path
from headwater.wire.handshake import READY, BinderProgram, ForkRequest
from headwater_server.config.deployment_kinds import kind_of
from headwater_server.config.schema import Deployment
from headwater_server.process.interpreter import foreign_environment, stage_package
from headwater_server.process.launcher import BINDER
from headwater_server.supervisor.child_processes import Backoff, ChildProcesses, kill
from headwater_server.supervisor.kind_programs import program_of
from headwater_server.supervisor.replica_process import Fork, changes_between, environment_of

__all__ = ["Preloaded", "Preloads", "heavy_imports"]

logger = logging.getLogger("headwater")

HEAVY: Final = ("torch", "transformers", "tokenizers", "safetensors")
"""Packages that start neither threads nor CUDA when they are imported."""
IMPORT_TIMEOUT_S: Final = 60.0
"""Seconds that the first starts wait for the imports at most; then they don't fork."""
FORK_TIMEOUT_S: Final = 1.0
"""Seconds that the supervisor waits for a fork, which takes some 20 ms. A process that takes longer is replaced."""
PREPARE_AFTER_S: Final = 2.0
"""Seconds from the imports, or from a fork, until processes for the next replica are forked, under another Python."""
END_TIMEOUT_S: Final = 2.0
"""Seconds that the process, and forks that wait for a replica, may take to end before the process is killed."""
REASON_BYTES: Final = 64 * 1024
BINDING: Final = ("headwater_server.binder.warmup", "headwater_server.binder.warmup_lm")
"""Modules that binders import."""
_PAD: Final = " " * 200
"""An argument that makes room: replicas write their command lines into its memory."""


def heavy_imports(deployment: Deployment, search: Sequence[str]) -> list[str]:
    """The slow modules that replicas import, each as ``MODULE`` or ``MODULE:NAME``: modules of `HEAVY`, and for
    language models also modules of Headwater's engine.

    Empty for kinds that aren't preloaded, and for models that don't import torch, or only after they have chosen a
    device: the choice depends on whether torch is imported.

    Args:
        deployment: a deployment with replicas.
        search: folders that come first on the replicas' ``sys.path``.
    """
    if not program_of(deployment.kind).preloads:
        return []
    if deployment.interpreter is not None:
        packages = deployment.interpreter.absolute().parent.parent.glob("lib/python3*/site-packages")
        search = [*search, *map(str, packages)]
    named = [(step.model or "", step.options) for step in deployment.steps.values()]
    named = named or [(deployment.model or "", deployment.options)]
    imports: dict[str, None] = {}
    has_torch = False
    for reference, options in named:
        is_first, modules = _of_model(reference, options, search)
        has_torch = has_torch or is_first
        imports.update(dict.fromkeys(modules))
    return list(imports) if has_torch else []


def _of_model(reference: str, options: Mapping[str, Any], search: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether torch is imported before the device is chosen, and the modules to import."""
    kind, path = kind_and_path(reference)
    if engine := program_of(kind_of(reference)).engine:
        with contextlib.suppress(LoadError):
            return "engine" not in options, [*engine, *_architecture(find_folder(reference, search))]
    elif kind == "hf":
        with contextlib.suppress(LoadError):
            return True, ["torch", "transformers", *_architecture(find_path("", path, search, "folder"))]
    elif kind == "torch":
        return True, ["torch"]
    elif not kind:
        return _of_source(reference.partition(":")[0], search)
    return False, []


def _architecture(folder: Path) -> list[str]:
    """The module of transformers that implements a folder's model, judged by its ``config.json``; empty if unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        name = str(json.loads((folder / "config.json").read_text())["model_type"]).replace("-", "_")
        return [f"transformers.models.{name}.modeling_{name}"]
    return []


def _of_source(module: str, search: Sequence[str]) -> tuple[bool, list[str]]:
    try:
        tree = ast.parse(_source(module, search))
    except (OSError, SyntaxError, ValueError):  # the replica reports the error
        return False, []
    at_once = [name for statement in tree.body for name in _heavy(statement)]
    names = [name for node in ast.walk(tree) for name in _heavy(node)]
    return any(name.partition(":")[0].partition(".")[0] == "torch" for name in at_once), names


def _source(module: str, search: Sequence[str]) -> bytes:
    """The source of a module, found without importing its parent packages."""
    package, *names = module.split(".")
    spec = PathFinder.find_spec(package, list(search)) or importlib.util.find_spec(package)
    for name in names:
        spec = spec and PathFinder.find_spec(name, list(spec.submodule_search_locations or ()))
    if spec is None or spec.origin is None:
        raise FileNotFoundError(module)
    return Path(spec.origin).read_bytes()


def _heavy(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
        names = [f"{node.module}:{alias.name}" for alias in node.names]
    else:
        return
    yield from (name for name in names if name.replace(":", ".").partition(".")[0] in HEAVY)


class Preloaded:
    """A process that forks replicas. It is started again when it ends, unless it could not fork.

    Args:
        children: follows the process.
        interpreter: the Python of the models; None: Headwater's Python.
        environment: the environment of the models.
        modules: the modules to import.
    """

    def __init__(
        self, children: ChildProcesses, interpreter: Path | None, environment: Mapping[str, str], modules: Sequence[str]
    ) -> None:
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once it is first known whether the process can fork; `is_ready` says whether it can."""
        self._children = children
        self._interpreter = interpreter
        self._environment = environment
        self._modules = modules if interpreter is not None else [*BINDING, *modules]
        self._process: subprocess.Popen[bytes] | None = None
        self._stage: Path | None = None
        """A folder with our package `headwater`, for another Python."""
        self._socket: socket.socket | None = None
        """Connected to the process while it can fork; otherwise None."""

    @property
    def is_ready(self) -> bool:
        """Whether the process can fork now."""
        return self._socket is not None

    async def run(self) -> None:
        """Keep the process running until the server stops, or the process reports that it can't fork or ends before it
        can."""
        backoff = Backoff()
        while not self._children.is_stopping:
            began_s = time.monotonic()
            try:
                is_fit = await self._live()
            except OSError as error:
                logger.warning("replicas are started without preloaded imports: %s", error)
                is_fit = True
            finally:
                if not self.decided.done():
                    self.decided.set_result(None)
            if not is_fit:
                return
            await self._children.wait_for_stop(backoff.after(time.monotonic() - began_s))

    async def _live(self) -> bool:
        """Start the process and follow it to its end. Returns whether it could fork."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                command = [self._python(), "-m", "headwater.replica.preloaded", str(self._children.folder)]
                process = self._process = subprocess.Popen(  # noqa: ASYNC220  # starting takes milliseconds
                    [*command, str(theirs.fileno()), *self._modules, _PAD],
                    cwd=self._children.folder,
                    env=self._environment,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            ended = self._children.follow(process, "the process that replicas are forked from")
            stopping = asyncio.ensure_future(self._children.stopping.wait())
            ours.setblocking(False)
            said = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(ours, REASON_BYTES))
            awaited: list[asyncio.Future[Any]] = [stopping, said]
            try:
                await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                text = said.result() if said.done() else b""
                if text == READY:
                    self._socket = ours
                    self._prepare_next()
                    if not self.decided.done():
                        self.decided.set_result(None)
                    awaited[1] = ended
                    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                elif not self._children.is_stopping:
                    reason = text.decode(errors="replace") or "the process that imports has ended"
                    logger.warning("replicas are started without preloaded imports: %s", reason)
                return text == READY
            finally:
                self._socket = None
                for task in (said, stopping):
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, OSError):
                        await task
                if text == READY:
                    ours.close()
                    await asyncio.wait({ended}, timeout=END_TIMEOUT_S)
                if not ended.done():
                    kill(process.pid)
                await ended

    def _python(self) -> str:
        """The interpreter. For another Python, a folder with our package `headwater` is made on the first call and put
        on the path in the process's environment."""
        if self._interpreter is None:
            return sys.executable
        if self._stage is None:
            self._stage = stage_package(Path(tempfile.mkdtemp(dir=self._children.folder), "python"))
            self._environment = foreign_environment(self._environment, self._stage)
        return os.path.abspath(self._interpreter)

    def fork(self, request: ForkRequest, fds: Sequence[int]) -> int:
        """Fork a guardian with its replica. Returns the process id of the guardian, which waits for `GO`.

        Args:
            request: the request.
            fds: see `ForkRequest`.

        Raises:
            OSError: the process can't fork, or not in time. A guardian that is forked too late finds its pipes closed
                and ends.
        """
        assert self._socket is not None
        assert self._process is not None
        try:
            self._socket.settimeout(FORK_TIMEOUT_S)
            self._send_program(self._socket)
            socket.send_fds(self._socket, [msgspec.json.encode(request)], list(fds))
            answer = self._socket.recv(REASON_BYTES).decode(errors="replace")
            if answer.isdigit():
                self._prepare_next()
                return int(answer)
        except OSError:
            self._replace()
            raise
        self._replace()
        raise OSError(answer or "it has ended")

    def _prepare_next(self) -> None:
        """Under another Python, have the processes of the next replica forked in `PREPARE_AFTER_S`."""

        def prepare() -> None:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._send_program(self._socket)

        if self._interpreter is not None:
            asyncio.get_running_loop().call_later(PREPARE_AFTER_S, prepare)

    def _send_program(self, connection: socket.socket) -> None:
        program = BinderProgram(sys.executable, BINDER, changes_between(self._environment, os.environ))
        connection.send(msgspec.json.encode(program))

    def _replace(self) -> None:
        self._socket = None
        assert self._process is not None
        kill(self._process.pid)


class Preloads:
    """The processes that fork replicas: a process for each distinct Python and environment of replicas with heavy
    imports. ``children`` owns the processes."""

    def __init__(self, children: ChildProcesses) -> None:
        self._children = children
        self._all: dict[_Key, Preloaded] = {}

    def start(self, deployments: Iterable[Deployment]) -> None:
        """Start the processes for the deployments that are started with the server."""
        modules_by_key: dict[_Key, list[str]] = {}
        for deployment in deployments:
            if modules := heavy_imports(deployment, self._children.search):
                modules_by_key.setdefault(_key(deployment), []).extend(modules)
        for key, modules in modules_by_key.items():
            preloaded = Preloaded(self._children, key[0], dict(key[1]), list(dict.fromkeys(modules)))
            self._all[key] = preloaded
            self._children.spawn(preloaded.run())

    async def wait(self, deployment: Deployment) -> None:
        """Wait until a replica of the deployment can be forked, or should be started without forking."""
        if (preloaded := self._of(deployment)) is not None:
            await asyncio.wait({preloaded.decided}, timeout=IMPORT_TIMEOUT_S)

    def fork_of(self, deployment: Deployment) -> Fork | None:
        """A function that forks replicas of the deployment; None: they are started without forking."""
        preloaded = self._of(deployment)
        return preloaded.fork if preloaded is not None and preloaded.is_ready else None

    def _of(self, deployment: Deployment) -> Preloaded | None:
        preloaded = self._all.get(_key(deployment))
        return preloaded if preloaded is not None and heavy_imports(deployment, self._children.search) else None


_Key = tuple[Path | None, tuple[tuple[str, str], ...]]


def _key(deployment: Deployment) -> _Key:
    return deployment.interpreter, tuple(sorted(environment_of(deployment).items()))
