"""From a plan to requests that the server answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

from app.bench.asking import ask
from app.bench.bodies import infer_bodies, read_bodies, stream_bodies
from app.bench.connection import Dialler
from app.bench.faults import AskFailed
from app.bench.plan import Plan, Point
from app.bench.target import Body, Target
from app.errors import CommandError
from app.server_client import Metadata, ServerClient

__all__ = ["check_answers", "points_of"]

REFUSALS: Final = (400, 401, 403, 404, 405, 413, 415, 422)
"""An answer of these is about the request, and the next one would be the same."""


def points_of(plan: Plan, server: ServerClient, model: str) -> list[Point]:
    """What is to be measured, with the requests.

    Raises:
        CommandError: the plan and the model contradict each other.
    """
    metadata = None
    if plan.kind in ("infer", "generate"):
        metadata = server.metadata(model)
    elif (known := server.models()) and model not in known:
        raise CommandError(f"--model: expected one of the server's models, {', '.join(known)}, got {model!r}")
    points = []
    for heads in plan.heads:
        target = Target(
            plan.url,
            _path(plan.kind, model),
            _bodies(plan, metadata, model, heads),
            plan.kind,
            plan.key,
            plan.timeout_s,
        )
        points += [Point(load, heads, target) for load in plan.loads]
    return points


async def check_answers(points: Sequence[Point]) -> None:
    """Ask once for each selection, before any load.

    An error that load could meet as well, such as a 500, is left to the load to count.

    Raises:
        CommandError: the server refuses the request as such, or is not there.
    """
    for target in dict.fromkeys(point.target for point in points):
        dialler = Dialler(target)
        now = time.perf_counter()
        watch = asyncio.get_running_loop().call_later(target.timeout_s + 0.1, dialler.expire)
        try:
            connection = await dialler.dial()
            sample = await ask(connection, target.requests()[0], target.kind, now, now + target.timeout_s)
        except AskFailed as failed:
            raise CommandError(f"URL: {target.url}: {failed.fault}; is the server running there?") from None
        finally:
            watch.cancel()
            dialler.close()
        fault = sample.fault
        if fault is not None and (fault.status in REFUSALS or fault.kind == "bad answer"):
            raise CommandError(
                f"{target.path}: the server refuses the request: {fault}. Give one that it takes with --input FILE.json"
            )


def _path(kind: str, model: str) -> str:
    if kind == "chat":
        return "/v1/chat/completions"
    if kind == "completions":
        return "/v1/completions"
    route = "infer" if kind == "infer" else "generate_stream"
    return f"/v2/models/{quote(model, safe='')}/{route}"


def _bodies(plan: Plan, metadata: Metadata | None, model: str, heads: tuple[str, ...] | None) -> tuple[Body, ...]:
    if heads is not None and metadata is not None:
        known = [head.name for head in metadata.heads]
        for head in heads:
            if head not in known:
                told = f"one of the heads {', '.join(known)}" if known else f"no --heads, since {model} has none"
                raise CommandError(f"--heads: expected {told}, got {head!r}")
    if plan.input is not None:
        return read_bodies(plan.input, plan.kind, model)
    if plan.kind == "infer":
        assert metadata is not None
        return infer_bodies(metadata, heads, plan.wishes)
    return stream_bodies(plan.kind, metadata, model, heads, plan.wishes)
