"""Finds a cluster's supervisor for a gateway, in a separate process: Ray ends a process that is connected to Ray some
time after Ray's head is gone, and a gateway must go on.

Run as ``python -m headwater_server.cluster.discovery ADDRESS``, with a `SupervisorSpec`, or nothing, on its standard
input. With a specification it starts the supervisor if there is no supervisor yet. It writes an `Announcement` or a
`Trouble` as a line whenever the result changes, and ends when its standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator
from typing import IO, Final

import msgspec

from headwater_server.cluster.cluster_supervisor import HEAD_TIMEOUT_S, Announcement, SupervisorSpec
from headwater_server.cluster.holder import own_output, read_spec, write_spec
from headwater_server.cluster.ray_client import ActorGone, RayClient
from headwater_server.control.messages import MAX_MESSAGE_BYTES
from headwater_server.errors import StartError

__all__ = ["NAME", "Trouble", "announcements", "look", "main", "stop_cluster"]

logger = logging.getLogger("headwater")

NAME: Final = "supervisor"
"""Name of the supervisor's actor."""
LOOK_EVERY_S: Final = 0.5
ANSWER_TIMEOUT_S: Final = 5.0
RESTART_S: Final = 2.0
STOP_AGAIN_S: Final = 60.0


class Trouble(msgspec.Struct, frozen=True):
    """Why the supervisor can't be found now, or can't serve."""

    error: str


async def announcements(address: str, spec: SupervisorSpec | None) -> AsyncGenerator[Announcement | Trouble, None]:
    """Yield where the supervisor is, and then each change: a new place, or why the supervisor can't be found. The first
    result is an `Announcement`.

    Args:
        address: address of Ray's head, or ``auto``.
        spec: starts a supervisor if the cluster has no supervisor at the beginning; None: only find it.

    Raises:
        StartError: there is no Ray or no supervisor, or it can't serve this configuration. Raised only before the first
            result.
    """
    is_first = True
    while True:
        try:
            process = _search(address)
        except OSError as error:  # such as too many open files
            if is_first:
                raise StartError(f"cluster: the search for the supervisor can't be started: {error}") from error
            await asyncio.sleep(RESTART_S)
            continue
        assert process.stdin is not None
        assert process.stdout is not None
        transport: asyncio.BaseTransport | None = None
        try:
            write_spec(process.stdin, spec.encoded() if spec is not None and is_first else b"")
            reader = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES)
            make = functools.partial(asyncio.StreamReaderProtocol, reader)
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(make, process.stdout)
            while line := await reader.readline():
                said = _decoded(line)
                if is_first and isinstance(said, Trouble):
                    raise StartError(said.error)
                is_first = False
                yield said
        except BrokenPipeError:
            pass
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()
            if transport is not None:
                transport.close()
        if is_first:
            raise StartError("cluster: the search for the supervisor ended without a result; see the lines above")
        await asyncio.sleep(RESTART_S)


def stop_cluster(address: str) -> None:
    """End everything that a cluster serves, and wait until all its replicas and its supervisor have ended.

    Raises:
        StartError: there is no Ray, or nothing is served there.
    """
    ray = RayClient(address)
    try:
        actor = ray.find(NAME)
    except ActorGone:
        raise StartError("cluster: nothing is served there") from None
    asked_s = float("-inf")
    while True:
        try:
            if time.monotonic() - asked_s > STOP_AGAIN_S:  # a supervisor that was restarted doesn't know the order
                ray.ask_order(actor, "stop")
                asked_s = time.monotonic()
            ray.ask(actor, ANSWER_TIMEOUT_S)
        except ActorGone:
            return
        except TimeoutError:
            pass
        time.sleep(LOOK_EVERY_S)


def _decoded(line: bytes) -> Announcement | Trouble:
    try:
        return msgspec.json.decode(line, type=Trouble)
    except msgspec.ValidationError:
        return msgspec.json.decode(line, type=Announcement)


def _search(address: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "headwater_server.cluster.discovery", address]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def main() -> None:
    """Entry point; see the module's docstring."""
    spec = read_spec(sys.stdin.buffer)
    output = own_output()
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        ray = RayClient(sys.argv[1])
        if spec:
            command = [sys.executable, "-m", "headwater_server.cluster.cluster_supervisor"]
            ray.start_supervisor(NAME, command, spec, {"PWD": os.getcwd()})
    except StartError as error:
        _tell(Trouble(str(error)), output)
        return
    before: Announcement | Trouble | None = None
    while True:
        finding = look(ray) or before
        if finding is not None and finding != before:
            before = finding
            _tell(finding, output)
        time.sleep(LOOK_EVERY_S)


def look(ray: RayClient) -> Announcement | Trouble | None:
    """Where the supervisor is, or why it can't be found. None: it is about to start, or can't be reached now."""
    if trouble := ray.head_trouble(HEAD_TIMEOUT_S):
        return Trouble(f"cluster: {trouble}")
    try:
        said = ray.ask(ray.find(NAME), ANSWER_TIMEOUT_S)
    except ActorGone:
        text = "cluster: no server runs there; run `headwater serve CONFIG` on one of its machines first"
        return Trouble(text)
    except TimeoutError:
        return None
    return _decoded(said.encode()) if said else None


def _tell(finding: Announcement | Trouble, output: IO[str]) -> None:
    print(msgspec.json.encode(finding).decode(), file=output, flush=True)


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        continue
    os._exit(0)


if __name__ == "__main__":
    main()
