"""The report as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.fanout_report import Spread
from benchmarks.gpu.part import PARTS
from benchmarks.gpu.record import Figure, Goal, Part, Report, Step
from headwater_server.process.machine import size_text

__all__ = ["markdown"]


def markdown(report: Report) -> str:
    """All of it: what failed and what missed its goal first, then every part."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# Headwater on {report.machine.get('gpu', {}).get('name', 'a CPU')}"
    yield ""
    if report.is_tiny:
        yield (
            "Tiny sizes: this shows that everything runs, and no figure means anything. Memory is the replicas' share "
            "of the machine's (PSS), and the device-side assert is an exception that says so."
        )
        yield ""
    yield from _machine(report.machine)
    yield ""
    yield "| part | | status | took | checks | goals |"
    yield "| --- | --- | --- | ---: | ---: | ---: |"
    for name, (_, title) in PARTS.items():
        part = report.parts.get(name)
        yield f"| {name} | {title} | not run | | | |" if part is None else _part_row(name, title, part)
    yield from _bad(report)
    for name, (_, title) in PARTS.items():
        if (part := report.parts.get(name)) is not None:
            yield from _part(name, title, part)


def _machine(machine: Mapping[str, Any]) -> Iterator[str]:
    gpu = machine.get("gpu")
    if gpu is not None:
        told = [f"{size_text(gpu['memory_bytes'])} of memory", f"capability {gpu['capability']}"]
        if "bytes_per_s" in gpu:
            told.append(f"{gpu['bytes_per_s'] / 1e12:.2f} TB/s by its clock and bus")
        if "driver" in gpu:
            told.append(f"driver {gpu['driver']}")
        yield f"- {gpu['name']}: {', '.join(told)}"
    memory = machine.get("memory_bytes")
    yield f"- {machine['cores']} cores{'' if memory is None else f', {size_text(memory)}'}, {machine['system']}"
    packages = [f"{name} {version}" for name, version in machine["packages"].items()]
    yield f"- Python {machine['python']}, CUDA {machine['cuda'] or 'none'}, {', '.join(packages)}"
    yield f"- commit {machine['commit']}"


def _part_row(name: str, title: str, part: Part) -> str:
    checks = [check.ok for step in part.steps.values() for check in step.checks]
    goals = [goal.is_met for step in part.steps.values() for goal in step.goals]
    counts = f"{sum(checks)} of {len(checks)} | {sum(goals)} of {len(goals)}"
    return f"| {name} | {title} | {part.status} | {part.took_s:.0f} s | {counts} |"


def _bad(report: Report) -> Iterator[str]:
    """Whatever failed, or missed its goal, the latter with its profile; with tiny sizes goals mean nothing."""
    found: list[str] = []
    for name, part in report.parts.items():
        if part.error:
            found += [f"- **{name}** failed between its steps:", *_block(part.error)]
        if part.left:
            found.append(f"- **{name}**, no time was left for: {', '.join(part.left)}")
        for title, step in part.steps.items():
            if step.error:
                found += [f"- **{name}, {title}** failed:", *_block(step.error)]
            found += [
                f"- **{name}, {title}**: {check.text}: {check.detail or 'no'}" for check in step.checks if not check.ok
            ]
            missed = [] if report.is_tiny else [goal for goal in step.goals if not goal.is_met]
            found += [f"- **{name}, {title}** missed its goal: {_goal(goal)}" for goal in missed]
            if missed:
                found += _block(step.profile or "no profile was taken")
    if found:
        yield from ("", "## Failed, or missed its goal", "", *found)


def _part(name: str, title: str, part: Part) -> Iterator[str]:
    yield from ("", f"## {name}: {title}")
    for heading, step in part.steps.items():
        took = "" if step.took_s is None else f" ({step.took_s:.1f} s)"
        yield from ("", f"### {heading}{took}", "")
        yield from _step(step)


def _step(step: Step) -> Iterator[str]:
    if step.figures:
        yield "| figure | median | range | unit |"
        yield "| --- | ---: | ---: | --- |"
        yield from map(_figure, step.figures)
        yield ""
    for check in step.checks:
        detail = f" ({check.detail})" if check.detail else ""
        yield f"- {'ok' if check.ok else '**FAILED**'}: {check.text}{detail}"
    for goal in step.goals:
        yield f"- {'met' if goal.is_met else '**MISSED**'}: {_goal(goal)}"
    for note in step.notes:
        yield f"- {note}"
    if step.error:
        yield f"- **FAILED**: {step.error.strip().splitlines()[-1]}"
    if step.profile:
        yield from _block(step.profile)


def _figure(figure: Figure) -> str:
    found = Spread.of(figure.values)
    between = f"{found.least:,.4g} to {found.most:,.4g}" if len(figure.values) > 1 else ""
    return f"| {figure.name} | {found.median:,.4g} | {between} | {figure.unit} |"


def _goal(goal: Goal) -> str:
    found = Spread.of(goal.values)
    bounds = [f"at least {goal.at_least:g}"] if goal.at_least is not None else []
    bounds += [f"at most {goal.at_most:g}"] if goal.at_most is not None else []
    return f"{goal.name}: {found.median:.3f} ({found.least:.3f} to {found.most:.3f}), goal {' and '.join(bounds)}"


def _block(text: str) -> list[str]:
    return ["", "```text", text.rstrip(), "```", ""]
