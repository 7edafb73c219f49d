"""Does what a plan says: asks the server what it is, puts load on it, and tells what came of it."""

from __future__ import annotations

import asyncio
import json
import signal
from datetime import datetime, timezone

import uvloop

from app.bench.closed_loop import STOPPED
from app.bench.load import Generator, generator
from app.bench.plan import Plan
from app.bench.preparing import check_answers, points_of
from app.bench.progress import Progress
from app.bench.results import Results
from app.bench.table import table_text
from app.reports.options import check_writable, write_file
from app.reports.plots import check_plots
from app.server_client import ServerClient

__all__ = ["bench"]


def bench(plan: Plan) -> int:
    """Measure, print the table, write the files.

    Returns:
        The exit status: 0, or 1 if a figure is not to be relied on.

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
    results = Results(plan, model, about, points, started)
    with generator(plan.processes) as load:
        uvloop.run(_measure(results, load))
    told = results.told()
    print(table_text(told))
    write_file("--json", plan.json, json.dumps(told, indent=1) + "\n")
    if plan.html is not None:
        from app.bench.page import page_html

        write_file("--html", plan.html, page_html(results))
    return 0 if told["valid"] else 1


async def _measure(results: Results, load: Generator) -> None:
    """Every load once, then all of them again: what else the machine does harms all alike."""
    plan = results.plan
    loop = asyncio.get_running_loop()
    await check_answers(results.points)
    total_s = plan.run_s * plan.repeats * len(results.points)
    loop.add_signal_handler(signal.SIGINT, load.stop)
    try:
        async with Progress(total_s).shown() as progress:
            for repeat in range(plan.repeats):
                for point, runs in zip(results.points, results.runs, strict=True):
                    what = f"{point}, repeat {repeat + 1} of {plan.repeats}"
                    async with progress.run(what, plan.run_s):
                        outcomes = await load.run(plan.job(point, repeat))
                    if outcomes.requests:
                        runs.append(outcomes)
                    if outcomes.ended:
                        results.ended = outcomes.ended
                        return
                    if load.is_stopped:
                        results.ended = STOPPED
                        return
    finally:
        loop.remove_signal_handler(signal.SIGINT)
