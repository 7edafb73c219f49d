"""``headwater bench``: its options, its progress bar, and the run from the first question to the report."""

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

from app.cli.bench.bodies import Wishes
from app.cli.bench.closed_loop import STOPPED
from app.cli.bench.generator import Generator, generator
from app.cli.bench.job import PATHS, Load
from app.cli.bench.outcomes import OF_REQUESTS, OF_RUNS, read_limits
from app.cli.bench.plan import Plan, check_answers, points_of
from app.cli.bench.results import Results
from app.cli.bench.table import page_html, table_text
from app.cli.client import ServerClient, api_key
from app.cli.options import add_report_options, check_writable, listed, number, whole, write_file
from app.cli.report.plots import check_plots
from app.errors import CommandError

__all__ = ["add_bench_command", "bench"]

MOST_CONNECTIONS = 20_000
MOST_PROCESSES = 64
STEP_S = 0.5
"""Interval of the progress bar."""
POSITIVE = number(lambda value: value > 0, "a number above 0")
NOT_NEGATIVE = number(lambda value: value >= 0, "a number 0 or more")


def add_bench_command(commands: Any) -> None:
    """Add the command to a parser's commands."""
    bench = commands.add_parser(
        "bench",
        help="put load on a running server, and measure",
        description="Put load on a running server, and measure. Exit status: 0; 1 if requests failed, the run ended "
        "early or nothing could be measured; 2 for invalid options. docs/bench.md explains the figures.",
    )
    bench.add_argument("url", metavar="URL", help="the server, such as http://127.0.0.1:8000")
    bench.add_argument("--model", metavar="NAME", help="the model; default: the server's only model")
    bench.add_argument(
        "--mode", choices=tuple(PATHS), default="infer",
        help="infer: whole answers; stream: /v2/.../generate_stream; chat, completions: OpenAI's streams; "
        "default: %(default)s",
    )  # fmt: skip
    loop = bench.add_mutually_exclusive_group()
    loop.add_argument(
        "--connections", type=listed(whole(1, MOST_CONNECTIONS)), metavar="N[,N]",
        help="closed loop: connections, each of which waits for its answer; default: 1,16",
    )  # fmt: skip
    loop.add_argument(
        "--rate", type=listed(POSITIVE), metavar="R[,R]",
        help="open loop: requests/s, sent on schedule whether or not the server keeps up",
    )  # fmt: skip
    bench.add_argument(
        "--arrivals", choices=("poisson", "constant"), default="poisson",
        help="schedule for --rate: at random or at equal intervals; default: %(default)s",
    )  # fmt: skip
    bench.add_argument(
        "--max-connections", type=whole(1, MOST_CONNECTIONS), default=1024, metavar="N",
        help="connections for --rate, at most; default: %(default)s",
    )  # fmt: skip
    bench.add_argument("--seconds", type=POSITIVE, default=5.0, metavar="S", help="duration of each run; default: 5")
    bench.add_argument(
        "--warmup", type=NOT_NEGATIVE, default=1.0, metavar="S",
        help="load before each run that doesn't count; default: 1",
    )  # fmt: skip
    bench.add_argument("--repeats", type=whole(1, 1000), default=3, metavar="N", help="runs of each load; default: 3")
    bench.add_argument(
        "--timeout", type=POSITIVE, default=30.0, metavar="S",
        help="time after which an incomplete answer counts as failed; default: 30",
    )  # fmt: skip
    bench.add_argument(
        "--processes", type=whole(1, MOST_PROCESSES), default=1, metavar="N",
        help="generator processes that share the load; default: 1",
    )  # fmt: skip
    bench.add_argument(
        "--input", type=Path, metavar="FILE.json",
        help="a request's body, or a list of bodies sent in turn; default: made from the model's metadata",
    )  # fmt: skip
    bench.add_argument("--rows", type=whole(1, 100_000), default=1, metavar="N", help="rows per request; default: 1")
    bench.add_argument(
        "--shape", type=_shape, action="append", default=[], metavar="INPUT=D[,D]",
        help="row shape of an input with varying dimensions; default: 16 for each of these; may be repeated",
    )  # fmt: skip
    bench.add_argument("--binary", action="store_true", help="send and receive tensors as bytes, not JSON")
    bench.add_argument(
        "--seed", type=whole(0, 2**31), default=0, metavar="N", help="seed of inputs and schedule; default: 0"
    )
    bench.add_argument(
        "--heads", type=_heads, action="append", metavar="A[,B]",
        help="a pipeline's heads to ask for, or all; may be repeated, for one measurement each",
    )  # fmt: skip
    bench.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT",
        help="prompt for text streams; may be repeated, sent in turn; default: a few sentences",
    )  # fmt: skip
    bench.add_argument(
        "--max-tokens", type=whole(1, 1_000_000), default=64, metavar="N", help="tokens per answer; default: 64"
    )
    bench.add_argument(
        "--ignore-eos", action="store_true", help="generate --max-tokens in any case; not every server supports this"
    )
    bench.add_argument(
        "--slo", type=read_limits, default={}, metavar="LIMIT=MS[,LIMIT=MS]",
        help=f"limits: {', '.join(OF_REQUESTS)} for each request, which goodput counts; {', '.join(OF_RUNS)} for a "
        "whole run",
    )  # fmt: skip
    bench.add_argument(
        "--api-key-file", type=Path, metavar="FILE",
        help="file with the API key; default: the environment variable HEADWATER_KEY",
    )  # fmt: skip
    add_report_options(bench, "a page with plots")
    bench.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> int:
    _check_together(options)
    loads = (
        [Load(rate_per_s=rate) for rate in options.rate]
        if options.rate
        else [Load(connections) for connections in options.connections or (1, 16)]
    )
    return bench(Plan(
        options.url.rstrip("/"), options.model, options.mode, loads, options.arrivals, options.max_connections,
        options.seconds, options.warmup, options.repeats, options.timeout, options.processes, options.input,
        options.heads or (None,),
        Wishes(options.rows, dict(options.shape), options.binary, options.seed, options.prompt, options.max_tokens,
               options.ignore_eos),
        options.slo, _key(options.api_key_file), options.json, options.html,
    ))  # fmt: skip


def _check_together(options: argparse.Namespace) -> None:
    """Check for options that contradict each other.

    Raises:
        CommandError: two options do.
    """
    if options.input is not None:
        for name, value in (
            ("--heads", options.heads), ("--binary", options.binary), ("--shape", options.shape),
            ("--prompt", options.prompt), ("--ignore-eos", options.ignore_eos),
        ):  # fmt: skip
            if value:
                raise CommandError(f"{name}: can't be used with --input, which has the whole request")
    if options.mode in ("chat", "completions") and options.heads:
        raise CommandError(f"--heads: expected --mode infer or stream, got {options.mode}")
    if options.mode != "infer" and options.binary:
        raise CommandError(f"--binary: expected --mode infer, got {options.mode}")
    if options.mode == "infer":
        for name in ("ttft_ms", "itl_ms", "tpot_ms"):
            if name in options.slo:
                raise CommandError(f"--slo: {name}: expected a mode that streams, got --mode infer")
    if options.rate and options.processes > options.max_connections:
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


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, dims = text.rpartition("=")
    try:
        shape = tuple(int(dim) for dim in dims.split(",") if dim)
    except ValueError:
        shape = (-1,)
    if not name or any(dim < 0 for dim in shape):
        raise argparse.ArgumentTypeError(f"expected an input and a row's dimensions, such as x=3,224,224, got {text!r}")
    return name, shape


def _heads(text: str) -> tuple[str, ...] | None:
    if text == "all":
        return None
    heads = tuple(text.split(","))
    if not all(heads):
        raise argparse.ArgumentTypeError(f"expected heads separated by commas, or all, got {text!r}")
    return heads


def bench(plan: Plan) -> int:
    """Measure, print the table, write the files.

    Returns:
        The exit status: 0, or 1 if a figure is unreliable.

    Raises:
        CommandError: nothing could be measured.
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
    results = Results(plan, model, about, points, started, [[] for _ in points])
    with generator(plan.processes) as load:
        uvloop.run(_measure(results, load))
    report = results.report()
    print(table_text(points, report))
    write_file("--json", plan.json, json.dumps(report, indent=1) + "\n")
    if plan.html is not None:
        write_file("--html", plan.html, page_html(results, report))
    return 0 if report["valid"] else 1


async def _measure(results: Results, load: Generator) -> None:
    """Run every load once, then all of them again, so that disturbances on the machine affect all alike."""
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
                    results.runs[place].append(outcomes)
                if outcomes.ended or load.stop.is_set():
                    results.ended = outcomes.ended or STOPPED
                    return
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextlib.asynccontextmanager
async def _progress(total_s: float) -> AsyncIterator[Callable[[str, float], None]]:
    """Show a bar on standard error, if that is a terminal, while the block runs.

    Gives a function to call at the start of each run, with the run's name and the seconds of those before it.
    """
    if not sys.stderr.isatty():
        yield lambda what, done_s: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    # No refresh thread: it would take the generator's time in steps of five milliseconds.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=total_s)

        async def advance() -> None:
            while True:
                await asyncio.sleep(STEP_S)
                bar.update(task, advance=STEP_S, refresh=True)

        advancing = asyncio.ensure_future(advance())
        try:
            yield lambda what, done_s: bar.update(task, description=what, completed=done_s, refresh=True)
        finally:
            advancing.cancel()
