"""``headwater plan``: runs the command, from its options to the report and the exit status."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from headwater_server.cli.kind_commands import COMMANDS
from headwater_server.cli.option_values import check_writable, config_flags, write_file
from headwater_server.cli.plan.known_sizes import known_sizes_text, read_sizes
from headwater_server.cli.plan.measuring import weigh_deployment
from headwater_server.cli.plan.memory_model import check_fitting
from headwater_server.cli.plan.option_defaults import DEFAULTS, NOT_HELD
from headwater_server.cli.plan.planning import Plan
from headwater_server.cli.plan.point import grid, takes_instances
from headwater_server.cli.plan.profiles import PROFILES, Budget
from headwater_server.cli.plan.report import plan_json, plan_page, plan_text
from headwater_server.cli.plan.subject import Subject, choose_deployment, make_subject
from headwater_server.cli.report.plots import check_plots
from headwater_server.cli.script_config import load_with_scripts
from headwater_server.cli.surroundings import require_folders
from headwater_server.config.schema import Deployment
from headwater_server.errors import CommandError
from headwater_server.process.gpu import gpu_capacities, gpu_name
from headwater_server.process.machine import cpu_count, host_capacity

__all__ = ["exit_status", "run", "smallest_gpu"]

SIZE_S: Final = 10.0
"""Approximate time to measure a size, without the duration of the load, if imports are quick."""
CHECKS: Final = 2
"""Maximum number of sizes, besides the profiles, that are predicted first and run afterwards."""


def run(options: argparse.Namespace) -> int:
    """Make a plan, and report it. Returns the exit status; see `exit_status`.

    Raises:
        ConfigError: the configuration is wrong.
        CommandError: an option is wrong, a file can't be written, or the plan was stopped before it measured anything.
        InterpreterError: the Python of a deployment that vLLM computes has no usable vLLM.
    """
    if options.from_sizes is not None:
        return _from_sizes(options)
    if options.no_verify:
        _refuse(options, ("rounds",), "can't be used with --no-verify, which runs no recommended configuration")
    if options.what is None:
        raise CommandError("CONFIG: required, but missing; name a YAML file or a model")
    require_folders()
    if not options.dry_run:
        check_fitting()
    if options.html is not None:
        check_plots()
    config, user_paths, _, python = load_with_scripts(options.what, flags=config_flags(options), python=options.python)
    _progress(str(python))
    name = choose_deployment(config, options.deployment)
    kind = config.deployments[name].kind
    if kind in COMMANDS:
        return COMMANDS[kind].plan(options, config, name, _progress)
    if kind.takes_text:
        _refuse(options, ("batch_sizes",), f"expected --sequences, since {name} is a language model")
    else:
        _refuse(options, ("sequences", "tokens"), f"expected a language model, got {name}")
    options = _with_defaults(options)
    subject = make_subject(
        options.what, config, name, user_paths, cores=cpu_count(), seconds=options.seconds,
        tokens=options.tokens, input=options.input,
    )  # fmt: skip
    rows = options.sequences if subject.takes_text else options.batch_sizes
    points = grid(rows, options.instances if takes_instances(subject.deployment) else (1,), options.replicas)
    rounds = 0 if options.no_verify else options.rounds
    runs = len(points) + (CHECKS + len(PROFILES) * rounds if rounds else 0)
    minutes = runs * (SIZE_S + subject.seconds) / 60
    listed = ", ".join(map(str, points))
    _progress(f"{len(points)} sizes (batch × instances × replicas), about {minutes:.0f} min or more: {listed}")
    if options.dry_run:
        return 0
    files = _files(options)
    check_writable("--json", options.json)
    check_writable("--html", options.html)
    check_writable("--out", files.with_name(f"{files.name}-balanced.yaml"))
    capacity = host_capacity()
    budget = _budget(options, subject, capacity)
    _progress(f"loading {name} to measure its weights")
    # On SIGTERM, as on Ctrl-C, the reports are written and the running server is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        weights = weigh_deployment(name, subject.deployment, user_paths)
    except KeyboardInterrupt:
        raise CommandError("stopped by hand before anything was measured") from None
    plan = Plan(subject, budget, capacity, weights, files, _progress)
    try:
        plan.run(points, checks=not options.no_verify, rounds=rounds)
    finally:
        write_file("--json", options.json, json.dumps(plan_json(plan), indent=2) + "\n")
        if options.html is not None:
            write_file("--html", options.html, plan_page(plan))
    print(plan_text(plan))
    return exit_status(plan)


def _from_sizes(options: argparse.Namespace) -> int:
    if options.what is not None:
        raise CommandError(f"--from-sizes: expected no CONFIG, since no model is run, got {options.what}")
    if options.memory is None:
        raise CommandError("--from-sizes: requires --memory")
    others = vars(options).keys() - {"from_sizes", "memory", "headroom", "instances", "run"}
    _refuse(options, sorted(others), "can't be used with --from-sizes, which runs no model and only prints sizes")
    options = _with_defaults(options)
    sizes = read_sizes(options.from_sizes)
    text, fits = known_sizes_text(sizes, options.memory, options.headroom, options.instances)
    print(text)
    return 0 if fits else 1


def _refuse(options: argparse.Namespace, names: Iterable[str], reason: str) -> None:
    """Raise CommandError if one of these options, by their names in the namespace, is given."""
    for name in names:
        if getattr(options, name) not in (None, False, []):
            option = "set" if name == "fields" else name.replace("_", "-")
            raise CommandError(f"--{option}: {reason}")


def _with_defaults(options: argparse.Namespace) -> argparse.Namespace:
    given = {name: value for name, value in vars(options).items() if value is not None}
    return argparse.Namespace(**{**vars(options), **DEFAULTS, **given})


def _files(options: argparse.Namespace) -> Path:
    """The common beginning of the paths of the written files."""
    source = Path(options.what)
    is_file = source.is_file()
    folder = options.out if options.out is not None else (source.parent if is_file else Path())
    stem = source.stem if is_file else options.what.rpartition(":")[2].rpartition("/")[2].lower()
    return Path(folder, f"{stem}-{options.deployment}" if options.deployment else stem)


def _budget(options: argparse.Namespace, subject: Subject, capacity: int | None) -> Budget:
    """The memory that may be taken. ``--memory`` is the memory of the device on which the model computes.

    Raises:
        CommandError: the size of the memory is unknown.
    """
    part = 1 - options.headroom
    device = subject.deployment.placements[0]
    gpus = gpu_capacities()
    if device.startswith("cuda") or (device == "auto" and gpus):
        whole = options.memory or smallest_gpu(subject.deployment, gpus)
        if whole is None or capacity is None:
            raise CommandError("--memory: required, since NVML doesn't report the size of the GPU's memory")
        return Budget(round(capacity * part), round(whole * part))
    whole = options.memory or capacity
    if whole is None:
        raise CommandError("--memory: required, since the system doesn't report the size of its memory")
    return Budget(round(whole * part))


def smallest_gpu(deployment: Deployment, gpus: Mapping[str, int]) -> int | None:
    """The memory in bytes of the smallest GPU that replicas may be placed on, as each GPU gets its share of the
    replicas; None if NVML doesn't report one of these GPUs.

    Args:
        deployment: its ``device`` is ``auto``, or names at least a single GPU.
        gpus: the GPUs' memory by name, as `gpu_capacities` returns it.
    """
    visible = deployment.environment.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    devices = ["cuda:0" if device == "auto" else device for device in deployment.placements if device != "cpu"]
    sizes = [gpus.get(gpu_name(device, visible) or "", 0) for device in devices]
    return min(sizes) or None


def exit_status(plan: Plan) -> int:
    """Return 0; 1 if nothing fits, a size could not be run, or the plan is not complete; or `NOT_HELD` if figures
    differ too much. If it is not 0, print the reasons to standard error."""
    failures, doubts = [], []
    if plan.ended:
        failures.append(f"the plan is not complete: {plan.ended}")
    if excess := plan.smallest_excess():
        failures.append(f"nothing fits: the smallest size, one replica with batches of one row, {excess}")
    for trial in [*plan.checks, *(profile.trial for profile in plan.profiles if profile.trial is not None)]:
        if trial.error and not plan.ended:
            failures.append(f"{trial.point} could not be run: {trial.error}")
        if trial.measured is not None and trial.measured.is_unsteady:
            doubts.append(
                f"{trial.point}: its rounds differ by {trial.measured.spread:.0%}: the machine was busy with something "
                "else, and the figures are not reliable"
            )
        doubts += [
            f"{trial.point}: {comparison.what}: the prediction differs from the measurement by {comparison.error:+.1%}"
            for comparison in trial.comparisons
            if comparison.is_off
        ]
    for line in dict.fromkeys((*failures, *doubts)):  # two profiles may have the same size
        print(f"headwater: {line}", file=sys.stderr)
    return 1 if failures else NOT_HELD if doubts else 0


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
