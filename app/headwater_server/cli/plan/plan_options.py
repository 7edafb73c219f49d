"""The options of ``headwater plan``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from headwater_server.cli.option_values import (
    add_python_option,
    add_report_options,
    add_set_option,
    listed,
    number,
    read_size,
    whole,
)
from headwater_server.cli.plan.option_defaults import DEFAULTS

__all__ = ["add_plan_command"]

MOST_SECONDS: Final = 3600
PART: Final = number(lambda value: 0 <= value < 1, "a part such as 0.2, from 0 to below 1")
SECONDS: Final = number(lambda value: 0 < value <= MOST_SECONDS, f"seconds above 0, at most {MOST_SECONDS}")


def add_plan_command(commands: Any) -> None:
    """Add the command ``plan`` to a parser's commands."""
    plan = commands.add_parser(
        "plan",
        help="measure a deployment at several sizes, and recommend configurations",
        description="Run a deployment at several sizes, fit models of its memory and speed, say what fits, and write "
        "three configurations, each of which is run. Exit status: 0; 1 if nothing fits, something could not be run, or "
        "the plan was interrupted; 2 for invalid options; 3 if the figures did not hold when they were measured "
        "again. How it works: docs/plan.md.",
    )
    plan.add_argument("what", nargs="?", metavar="CONFIG | MODULE:CLASS | KIND:PATH", help="as for `headwater serve`")
    plan.add_argument("--deployment", metavar="NAME", help="the deployment; default: the only deployment")
    for name, maximum, about in (
        ("batch_sizes", 65_536, "maximum rows in a call"),
        ("sequences", 4096, "for a language model, instead of batch sizes: concurrent sequences"),
        ("instances", 64, "threads per replica that compute at once"),
        ("replicas", 64, "replicas"),
    ):
        option, shown = f"--{name.replace('_', '-')}", ",".join(map(str, DEFAULTS[name]))
        about = f"{about}; default: {shown}"
        plan.add_argument(option, type=listed(whole(1, maximum)), metavar="N[,N]", help=about)
    plan.add_argument(
        "--memory", type=read_size, metavar="SIZE",
        help="memory of the deployment's device, such as 16GiB; default: all memory of the device",
    )  # fmt: skip
    plan.add_argument(
        "--headroom", type=PART, default=0.2, metavar="PART", help="fraction of the memory to keep free; default: 0.2"
    )  # fmt: skip
    plan.add_argument("--seconds", type=SECONDS, metavar="S", help="load at each size; default: 4")
    plan.add_argument(
        "--input", type=Path, metavar="FILE.json",
        help="a request's body with one row, or a list of them; default: made from the model's metadata",
    )  # fmt: skip
    plan.add_argument(
        "--tokens", type=whole(1, 1_000_000), metavar="N",
        help="tokens per answer of a language model; default: 64",
    )  # fmt: skip
    plan.add_argument(
        "--out", type=Path, metavar="FOLDER",
        help="folder for the three files; default: the folder of CONFIG, or the current folder",
    )  # fmt: skip
    add_report_options(plan, "a report with curves")
    plan.add_argument(
        "--rounds", type=whole(1, 100), metavar="N",
        help="how often to run each recommended configuration, alternating with the others; default: 3",
    )  # fmt: skip
    plan.add_argument(
        "--no-verify", action="store_true",
        help="don't run sizes that were not measured, nor the recommended configurations",
    )  # fmt: skip
    plan.add_argument("--dry-run", action="store_true", help="print the sizes that would be measured, and exit")
    plan.add_argument(
        "--from-sizes", metavar="weights=SIZE[,process=SIZE][,row=SIZE][,instance=SIZE]",
        help="compute what fits from these sizes without running anything; needs --memory, and no CONFIG",
    )  # fmt: skip
    add_python_option(plan)
    add_set_option(plan)
    plan.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    # Imported late: the imports of the command are slow, and other commands don't need them.
    from headwater_server.cli.plan.plan_command import run

    return run(options)
