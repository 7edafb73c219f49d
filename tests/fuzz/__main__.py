"""``python -m tests.fuzz [--seconds 60] [--jobs 1] [TARGET ...]``: each target under atheris for so long.

Prints executions, code edges reached and what was found; an input that found something is left in a folder that is
named. The exit status is 1 if anything was found: a target raised, took longer than `UNIT_S` seconds for an input, or
came to more than `RSS_MB` of memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from tests.fuzz.targets import TARGETS, WORDS, seeds_of

UNIT_S: Final = 10
RSS_MB: Final = 1500
MAX_BYTES: Final = 4096
START_S: Final = 120
"""Importing and instrumenting, and the seeds."""
_EDGES: Final = re.compile(r"\bcov: (\d+) ft: (\d+)")
_FIGURES: Final = re.compile(r"^stat::(\w+):\s+(\d+)", re.MULTILINE)


class Outcome(NamedTuple):
    """What came of a target."""

    name: str
    executions: int
    first_edges: int
    """With the seeds alone."""
    edges: int
    peak_rss_mb: int
    found: list[Path]
    status: int
    log: str

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found, and it ran."""
        return self.status == 0 and not self.found and self.executions > 0

    def line(self) -> str:
        """A row of the table."""
        said = "clean" if self.is_clean else f"FOUND: {', '.join(map(str, self.found)) or f'status {self.status}'}"
        return (
            f"{self.name:12} {self.executions:>10} executions {self.first_edges:>6} -> {self.edges:>5} edges "
            f"{self.peak_rss_mb:>5} MB  {said}"
        )


def fuzz(name: str, seconds: int, folder: Path) -> Outcome:
    """Run one target.

    Args:
        name: the target's.
        seconds: for so long.
        folder: for what it finds.
    """
    corpus, found, seeds = folder / f"{name}-corpus", folder / f"{name}-found", folder / f"{name}-seeds"
    for made in (corpus, found, seeds):
        made.mkdir()
    for seed in seeds_of(name):
        (seeds / seed.name).write_bytes(seed.read_bytes())
    words = folder / f"{name}-words"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in WORDS))
    command = [
        *(sys.executable, "-m", "tests.fuzz.driver", name, str(corpus), str(seeds)),
        *(f"-max_total_time={seconds}", f"-timeout={UNIT_S}", f"-rss_limit_mb={RSS_MB}", f"-max_len={MAX_BYTES}"),
        *(f"-dict={words}", f"-artifact_prefix={found}/", "-print_final_stats=1"),
    ]
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        limit_s = seconds + START_S + UNIT_S
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=limit_s).returncode
    text = log.read_text("utf-8", "replace")
    edges = [int(match[1]) for match in _EDGES.finditer(text)] or [0]
    figures = {match[1]: int(match[2]) for match in _FIGURES.finditer(text)}
    return Outcome(
        name,
        figures.get("number_of_executed_units", 0),
        edges[0],
        edges[-1],
        figures.get("peak_rss_mb", 0),
        sorted(found.iterdir()),
        status,
        text,
    )


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace('"', '\\"')


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description="Give what reads others' bytes bytes that reach new code.")
    parser.add_argument("--seconds", type=int, default=60, help="for each target; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="targets at once; default: %(default)s")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; default: all")
    options = parser.parse_args()
    if unknown := [name for name in options.targets if name not in TARGETS]:
        parser.error(f"expected targets of {', '.join(TARGETS)}, got {', '.join(unknown)}")
    if importlib.util.find_spec("atheris") is None:
        parser.error(
            "atheris is not installed: pip install -e '.[fuzz]' (wheels for Python 3.11 to 3.12 on x86-64 only)"
        )
    folder = Path(tempfile.mkdtemp(prefix="headwater-fuzz-"))
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = []
        for outcome in pool.map(lambda name: fuzz(name, options.seconds, folder), options.targets or list(TARGETS)):
            outcomes.append(outcome)
            print(outcome.line(), flush=True)
            if not outcome.is_clean:
                print(outcome.log[-6000:], flush=True)
    executions = sum(outcome.executions for outcome in outcomes)
    bad = [outcome.name for outcome in outcomes if not outcome.is_clean]
    print(f"{len(outcomes)} targets, {executions} executions, {len(bad)} with findings: {', '.join(bad) or 'none'}")
    print(f"inputs and logs are in {folder}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
