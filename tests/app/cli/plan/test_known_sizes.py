"""What fits where the sizes are known; and the example in the documentation, which says the same."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from headwater_server.cli.main import main
from headwater_server.cli.plan.known_sizes import largest_batches, model_of_sizes, read_sizes
from headwater_server.cli.plan.point import Point
from headwater_server.cli.plan.profiles import Budget
from headwater_server.errors import CommandError

DOCS = Path(__file__).parents[4] / "docs/plan.md"
GIB = 2**30


def test_sizes_are_read() -> None:
    assert read_sizes("weights=4GiB, row=64MB") == {"weights": 4 * GIB, "row": 64_000_000}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("row=1GiB", "expected weights=SIZE among the sizes, got no weights"),
        ("weights=4 potatoes", "weights: expected a size such as 4GiB or 512MiB, got '4 potatoes'"),
        ("weights", "weights: expected a size"),
        ("heads=1", "expected one of weights, process, row, instance, got 'heads'"),
        ("weights=4GiB,row=1MiB,row=2MiB", "--from-sizes: row: expected once, got it twice"),
    ],
)
def test_sizes_that_are_none(text: str, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        read_sizes(text)


def test_the_largest_batches_that_fit() -> None:
    model = model_of_sizes({"weights": 4 * GIB, "row": GIB // 4})
    found = list(largest_batches(model, Budget(round(12.7 * GIB)), [1, 2]))
    assert found == [Point(32, 1, 1), Point(16, 2, 1), Point(8, 1, 2), Point(4, 2, 2)]
    assert {model.at(point).host for point in found} == {12 * GIB}


def test_the_example_in_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, example = DOCS.read_text().partition("$ headwater plan --from-sizes ")
    command, _, output = example.partition("```")[0].partition("\n")
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--from-sizes", *shlex.split(command)])
    assert ended.value.code == 0
    assert capsys.readouterr().out == output


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (
            ["--from-sizes", "weights=20GiB", "--memory", "16GiB"],
            1,
            "Nothing fits: one replica with batches of one row",
        ),
        (["--from-sizes", "weights=4GiB"], 1, "--from-sizes: requires --memory"),
        (["--from-sizes", "weights=4GiB", "--memory", "16GiB", "x:Y"], 1, "expected no CONFIG, since no model is run"),
        *(
            (["--from-sizes", "weights=4GiB", "--memory", "16GiB", *given], 1, f"{given[0]}: can't be used with")
            for given in (
                ["--batch-sizes", "1,8,32"],
                ["--replicas", "1"],
                ["--seconds", "4"],
                ["--json", "p.json"],
                ["--dry-run"],
                ["--no-verify"],
                ["--python", "own"],
                ["--set", "server.port=1"],
            )
        ),
        (["x:Y", "--no-verify", "--rounds", "3"], 1, "--rounds: can't be used with --no-verify"),
        (["x:Y", "--sequences", "1"], 1, "--sequences: expected a language model, got y"),
        (["x:Y", "--tokens", "64"], 1, "--tokens: expected a language model, got y"),
        (["lm:here", "--batch-sizes", "1"], 1, "--batch-sizes: expected --sequences, since here is a language model"),
        ([], 1, "CONFIG: required, but missing; name a YAML file or a model"),
        (["x:Y", "--batch-sizes", "0"], 2, "expected a whole number from 1 to"),
        (["x:Y", "--replicas", "1,,2"], 2, "expected a whole number from 1 to"),
        (["x:Y", "--headroom", "1"], 2, "expected a part such as 0.2"),
        (["x:Y", "--seconds", "nan"], 2, "expected seconds above 0"),
        (["x:Y", "--memory", "much"], 2, "expected a size such as 4GiB"),
        (["nowhere.yaml"], 1, "nowhere.yaml: can't be read"),
        (["x:Y", "--json", "/dev/null/p.json"], 1, "can't be written"),
        (["x:Y", "--input", "nowhere.json"], 1, "--input: nowhere.json: can't be read"),
    ],
)
def test_options_that_make_no_sense(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    told = capsys.readouterr()
    assert ended.value.code == status
    assert message in " ".join((told.out + told.err).split())
