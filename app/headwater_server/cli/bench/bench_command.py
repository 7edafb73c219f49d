"""``headwater bench``: runs the command, from its options to the report, with a progress bar."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import uvloop

from headwater_server.cli.bench.closed_loop import STOPPED
from headwater_server.cli.bench.generator import Generator, generator
from headwater_server.cli.bench.job import Load
from headwater_server.cli.bench.plan import LoadPlan, check_answers, points_of
from headwater_server.cli.bench.request_bodies import Wishes, read_schema, read_tools
from headwater_server.cli.bench.results import Results
from headwater_server.cli.bench.table import page_html, table_text
from headwater_server.cli.option_values import check_writable, write_file
from headwater_server.cli.report.plots import check_plots
from headwater_server.cli.server_client import ServerClient, api_key
from headwater_server.errors import CommandError

__all__ = ["bench", "run"]

MAX_CONNECTIONS = 1024
"""Connections of an open loop, at most, by default."""
STEP_S = 0.5
"""Interval at which the progress bar is updated, in seconds."""


def run(options: argparse.Namespace) -> int:
    """Run a bench with these options. Returns the exit status.

    Raises:
        CommandError: an option is wrong, or nothing could be measured.
    """
    _check_together(options)
    loads = (
        [Load(rate_per_s=rate) for rate in options.rate]
        if options.rate
        else [Load(connections) for connections in options.connections or (1, 16)]
    )
    chat_fields: dict[str, Any] = {}
    constraints: list[str | None] = [None]
    if options.schema is not None:
        chat_fields, constraints = read_schema(options.schema), ["schema"]
    elif options.tools is not None:
        chat_fields, constraints = read_tools(options.tools, options.tool_choice or "required"), ["tools"]
    if options.unconstrained:
        constraints.append("none")
    return bench(LoadPlan(
        options.url.rstrip("/"), options.model, options.mode, loads, options.arrivals or "poisson",
        options.max_connections or MAX_CONNECTIONS, options.seconds, options.warmup, options.repeats, options.timeout,
        options.processes, options.input, options.heads or (None,), constraints,
        Wishes(options.rows or 1, dict(options.shape), options.binary, options.seed, options.prompt, options.max_tokens,
               options.ignore_eos, chat_fields),
        options.slo, _key(options.api_key_file), options.json, options.html,
    ))  # fmt: skip


def _check_together(options: argparse.Namespace) -> None:
    """Check that the options don't contradict each other, and that none would be ignored.

    Raises:
        CommandError: two options contradict each other, or one is of no use with another.
    """
    if options.input is not None:
        for name, value in (
            ("--heads", options.heads), ("--binary", options.binary), ("--rows", options.rows),
            ("--shape", options.shape), ("--prompt", options.prompt), ("--max-tokens", options.max_tokens),
            ("--ignore-eos", options.ignore_eos), ("--schema", options.schema), ("--tools", options.tools),
        ):  # fmt: skip
            if value:
                raise CommandError(f"{name}: can't be used with --input, which has the whole request")
    for name, value in (("--schema", options.schema), ("--tools", options.tools)):
        if value is not None and options.mode != "chat":
            raise CommandError(f"{name}: expected --mode chat, got {options.mode}")
    if options.tool_choice is not None and options.tools is None:
        raise CommandError("--tool-choice: requires --tools")
    if options.unconstrained and options.schema is None and options.tools is None:
        raise CommandError("--unconstrained: requires --schema or --tools")
    tensors, texts = ("infer", "stream"), ("stream", "chat", "completions")
    for name, value, modes in (
        ("--heads", options.heads, tensors), ("--shape", options.shape, tensors),
        ("--binary", options.binary, ("infer",)), ("--rows", options.rows, ("infer",)),
        ("--prompt", options.prompt, texts), ("--max-tokens", options.max_tokens, texts),
        ("--ignore-eos", options.ignore_eos, texts),
    ):  # fmt: skip
        if value and options.mode not in modes:
            raise CommandError(f"{name}: expected --mode {' or '.join(modes)}, got {options.mode}")
    for name, value in (("--arrivals", options.arrivals), ("--max-connections", options.max_connections)):
        if value is not None and not options.rate:
            raise CommandError(f"{name}: requires --rate")
    if options.mode == "infer":
        for name in ("ttft_ms", "itl_ms", "tpot_ms"):
            if name in options.slo:
                raise CommandError(f"--slo: {name}: expected a mode that streams, got --mode infer")
    if options.rate and options.processes > (options.max_connections or MAX_CONNECTIONS):
        raise CommandError("--processes: expected at most as many as --max-connections")


def _key(path: Path | None) -> str:
    if path is None:
        return api_key()
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--api-key-file: {path}: can't be read: {getattr(error, 'strerror', error)}") from error
    if not key or not (key.isascii() and key.isprintable()):
        raise CommandError(f"--api-key-file: {path}: expected one line of visible ASCII characters")
    return key


def bench(plan: LoadPlan) -> int:
    """Measure, print the tables, and write the files.

    Returns:
        The exit status: 0, or 1 if requests failed, a run had no answer, or the bench ended early.

    Raises:
        CommandError: nothing could be measured, or a file can't be written.
    """
    if plan.html is not None:
        check_plots()
    check_writable("--json", plan.json)
    check_writable("--html", plan.html)
    server = ServerClient(plan.url, key=plan.key, option="URL")
    about = server.about()
    model = plan.model or server.only_model()
    points = points_of(plan, server, model)
    started = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
    results = Results(plan, model, about, points, started, [{} for _ in points])
    with generator(plan.processes) as load:
        uvloop.run(_measure(results, load))
    report = results.report()
    print(table_text(points, report))
    write_file("--json", plan.json, json.dumps(report, indent=1) + "\n")
    if plan.html is not None:
        write_file("--html", plan.html, page_html(results, report))
    return 0 if report["valid"] else 1


async def _measure(results: Results, load: Generator) -> None:
    """Run every load once, then every load again, and so on, so that disturbances on the machine affect all loads
    alike."""
    plan = results.plan
    loop = asyncio.get_running_loop()
    await check_answers(results.points)
    order = [(repeat, place) for repeat in range(plan.repeats) for place in range(len(results.points))]
    loop.add_signal_handler(signal.SIGINT, load.stop.set)
    try:
        async with _progress(plan.run_s * len(order)) as show:
            for done, (repeat, place) in enumerate(order):
                point = results.points[place]
                show(f"{point}, repeat {repeat + 1} of {plan.repeats}", plan.run_s * done)
                outcomes = await load.run(plan.job(point, repeat))
                if outcomes.requests:
                    results.runs[place][repeat] = outcomes
                if outcomes.ended or load.stop.is_set():
                    results.ended = outcomes.ended or STOPPED
                    return
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextlib.asynccontextmanager
async def _progress(total_s: float) -> AsyncIterator[Callable[[str, float], None]]:
    """Show a progress bar while the ``with`` block runs, if standard error is a terminal.

    Yields a function to call at the start of each run, with the run's name and the total seconds of the runs before it.
    """
    if not sys.stderr.isatty():
        yield lambda run_name, done_s: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    # No refresh thread: it would interrupt the generator for up to 5 ms at a time.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=total_s)

        async def advance() -> None:
            while True:
                await asyncio.sleep(STEP_S)
                bar.update(task, advance=STEP_S, refresh=True)

        advancing = asyncio.ensure_future(advance())
        try:
            yield lambda run_name, done_s: bar.update(task, description=run_name, completed=done_s, refresh=True)
        finally:
            advancing.cancel()
