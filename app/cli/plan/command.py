"""``headwater plan``: the run from the options to the report and the exit status."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from app.cli.options import check_writable, write_file
from app.cli.plan.json import plan_json
from app.cli.plan.known_sizes import paper_text, read_sizes
from app.cli.plan.measuring import weigh_deployment
from app.cli.plan.page import plan_page
from app.cli.plan.planning import Plan, Planner
from app.cli.plan.point import Point, grid, takes_instances
from app.cli.plan.profiles import PROFILES, Budget
from app.cli.plan.subject import Subject, choose_deployment, make_subject
from app.cli.plan.text import is_off, is_unsteady, plan_text, smallest_need
from app.cli.report.plots import check_plots
from app.config.schema import Config
from app.errors import CommandError
from app.process.gpu import gpu_capacities, gpu_name
from app.process.machine import host_capacity

__all__ = ["exit_status", "run"]

Read = Callable[[argparse.Namespace], tuple[Config, tuple[str, ...]]]

SIZE_S: Final = 10.0
"""About how long a size takes besides its load, where imports are quick."""
NOT_HELD: Final = 3
"""Exit status: everything was run, but figures differ too much from round to round or from what was predicted."""
CHECKS: Final = 2
"""Sizes that are predicted first and run after, at most."""


def run(options: argparse.Namespace, read: Read) -> int:
    """Make a plan, and tell it. Returns the exit status.

    Args:
        options: of the command line.
        read: gives the configuration, and folders that come first on ``sys.path``.

    Raises:
        ConfigError: the configuration is wrong.
        CommandError: an option is.
    """
    if options.from_sizes is not None:
        return _on_paper(options)
    if options.what is None:
        raise CommandError("CONFIG: expected a YAML file or a model, got none")
    if options.html is not None:
        check_plots()
    cores = len(os.sched_getaffinity(0))
    config, user_paths = read(options)
    name = choose_deployment(config, options.deployment)
    subject = make_subject(
        options.what, config, name, user_paths, cores=cores, seconds=options.seconds, tokens=options.tokens,
        input=options.input,
    )  # fmt: skip
    points = _points(options, subject)
    rounds = 0 if options.no_verify else options.rounds
    _announce(points, subject, rounds)
    if options.dry_run:
        return 0
    out, stem = _where(options)
    check_writable("--json", options.json)
    check_writable("--html", options.html)
    check_writable("--out", out / f"{stem}-balanced.yaml")
    capacity = host_capacity()
    budget = _budget(options, subject, capacity)
    _say(f"loading {name} to weigh it")
    # As Ctrl-C: what there is should be written, and the server that runs be stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        weights = weigh_deployment(name, subject.deployment, user_paths)
    except KeyboardInterrupt:
        raise CommandError("stopped by hand before anything was measured") from None
    plan = Plan(subject, budget, capacity, weights)
    try:
        Planner(plan, config, out, stem, _say).run(points, checks=not options.no_verify, rounds=rounds)
    finally:
        _write(plan, options)
    print(plan_text(plan))
    return exit_status(plan)


def _on_paper(options: argparse.Namespace) -> int:
    if options.what is not None:
        raise CommandError(f"--from-sizes: expected no CONFIG beside it, since nothing is run, got {options.what}")
    if options.memory is None:
        raise CommandError("--from-sizes: expected --memory beside it, got none")
    text, fits = paper_text(read_sizes(options.from_sizes), options.memory, options.headroom, options.instances)
    print(text)
    return 0 if fits else 1


def _points(options: argparse.Namespace, subject: Subject) -> list[Point]:
    rows = options.sequences if subject.is_language_model else options.batch_sizes
    instances = options.instances if takes_instances(subject.deployment) else (1,)
    return grid(rows, instances, options.replicas)


def _announce(points: list[Point], subject: Subject, rounds: int) -> None:
    listed = ", ".join(map(str, points))
    runs = len(points) + (CHECKS + len(PROFILES) * rounds if rounds else 0)
    about = runs * (SIZE_S + subject.seconds)
    _say(f"{len(points)} sizes (batch × instances × replicas), about {about / 60:.0f} min or more: {listed}")


def _where(options: argparse.Namespace) -> tuple[Path, str]:
    """The folder of the files that are written, and what their names begin with."""
    what = Path(options.what)
    is_file = what.is_file()
    folder = options.out if options.out is not None else (what.parent if is_file else Path())
    stem = what.stem if is_file else options.what.rpartition(":")[2].rpartition("/")[2].lower()
    return folder, f"{stem}-{options.deployment}" if options.deployment else stem


def _budget(options: argparse.Namespace, subject: Subject, capacity: int | None) -> Budget:
    """What may be taken. ``--memory`` is of the device that it computes on.

    Raises:
        CommandError: nobody knows how much there is.
    """
    part = 1 - options.headroom
    device = subject.deployment.placements[0]
    gpus = gpu_capacities()
    if device.startswith("cuda") or (device == "auto" and gpus):
        name = gpu_name("cuda:0" if device == "auto" else device, os.environ.get("CUDA_VISIBLE_DEVICES"))
        whole = options.memory or gpus.get(name or "")
        if whole is None or capacity is None:
            raise CommandError("--memory: expected the size of the GPU's memory, which NVML doesn't tell, got none")
        return Budget(round(capacity * part), round(whole * part))
    whole = options.memory or capacity
    if whole is None:
        raise CommandError("--memory: expected the size of the memory, which the system doesn't tell, got none")
    return Budget(round(whole * part))


def _write(plan: Plan, options: argparse.Namespace) -> None:
    """The reports, whatever there is of the plan.

    Raises:
        CommandError: one can't be written.
    """
    write_file("--json", options.json, json.dumps(plan_json(plan), indent=2) + "\n")
    if options.html is not None:
        write_file("--html", options.html, plan_page(plan))


def exit_status(plan: Plan) -> int:
    """0, 1 or `NOT_HELD`; says on standard error why it is not 0."""
    failures, doubts = [], []
    if plan.ended:
        failures.append(f"the plan is not complete: {plan.ended}")
    if plan.predictor is not None and (excess := smallest_need(plan)):
        failures.append(f"nothing fits: the smallest size, one replica with batches of one row, {excess}")
    trials = [*plan.trials, *(one.trial for one in plan.recommendations if one.trial is not None)]
    for trial in trials:
        if trial.error and not plan.ended:
            failures.append(f"{trial.point} could not be run: {trial.error}")
        if (measured := trial.measured) is not None and is_unsteady(measured):
            doubts.append(
                f"{trial.point}: its rounds differ by {measured.spread:.0%}: the machine was busy with something else, "
                "and its figures are not to be relied on"
            )
        doubts += [
            f"{trial.point}: {one.what}: predicted {one.error:+.1%} of what was measured"
            for one in trial.comparisons
            if is_off(one)
        ]
    for line in dict.fromkeys((*failures, *doubts)):  # two profiles may have one size
        print(f"headwater: {line}", file=sys.stderr)
    return 1 if failures else NOT_HELD if doubts else 0


def _say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)
