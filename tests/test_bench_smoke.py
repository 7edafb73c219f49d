"""`make bench-smoke`: which benchmarks take part, and what their flag does."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import pytest

from benchmarks.smoke import BENCHMARKS, parse_with_smoke

FOLDER = Path(__file__).parents[1] / "benchmarks"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=5)
    return parser


@pytest.mark.parametrize(
    ("given", "rounds", "seconds", "smoke"),
    [
        ([], 40, 5, False),
        (["--smoke"], 1, 0.5, True),
        (["--rounds", "7", "--smoke"], 7, 0.5, True),
        (["--seconds", "3"], 40, 3, False),
    ],
)
def test_the_flag_changes_what_is_not_given(
    monkeypatch: pytest.MonkeyPatch, given: list[str], rounds: int, seconds: float, smoke: bool
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *given])
    options = parse_with_smoke(parser(), rounds=1, seconds=0.5)
    assert (options.rounds, options.seconds, options.smoke) == (rounds, seconds, smoke)


def test_an_option_that_there_is_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark"])
    with pytest.raises(ValueError, match=r"got round$"):
        parse_with_smoke(parser(), round=1)


def test_every_benchmark_with_the_flag_takes_part() -> None:
    has_flag = re.compile(r'parse_with_smoke\(|add_argument\("--smoke"')
    found = {
        path.parent.name if path.name == "__main__.py" else path.stem
        for path in (*FOLDER.glob("*.py"), *FOLDER.glob("*/__main__.py"))
        if has_flag.search(path.read_text()) and path.stem != "smoke"
    }
    assert found == set(BENCHMARKS)
