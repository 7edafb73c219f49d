"""canitoolcall, a public suite of outputs of models with the answers that parsers should read in them. It runs
`tests.clients.canitoolcall_adapter` with the project's own interpreter; the server that runs beside it isn't asked."""

from __future__ import annotations

import os
from collections import Counter
from functools import lru_cache
from pathlib import Path

from canitoolcall.chunking import DEFAULT_STRATEGIES, ChunkStrategy
from canitoolcall.results import CheckResult, RunResults, Status
from canitoolcall.runner import RunConfig
from canitoolcall.runner import run as replayed
from cases import run

ADAPTER = "tests.clients.canitoolcall_adapter:HeadwaterAdapter"
LEAST_PASSES = 460
CHARACTERS = ChunkStrategy("char", 0)
"""One character a piece."""


@lru_cache(maxsize=1)
def results() -> RunResults:
    """The results of all fixtures, replayed whole, and streamed in each way."""
    path = {"PYTHONPATH": os.environ["HEADWATER_PYTHONPATH"]}
    strategies = (*DEFAULT_STRATEGIES, CHARACTERS)
    return replayed(RunConfig(ADAPTER, strategies=strategies, python=Path(os.environ["HEADWATER_PYTHON"]), env=path))


def broken(check: str) -> list[tuple[str, CheckResult]]:
    """The rows of a check that didn't pass, also with one character a piece."""
    return [
        (case.fixture_id, row)
        for case in results().cases
        for row in case.checks
        if row.check == check and row.status is not Status.PASS
    ]


def fixtures_pass() -> None:
    statuses = Counter(case.status for case in results().cases)
    assert statuses[Status.PASS] >= LEAST_PASSES, statuses
    others = [case.fixture_id for case in results().cases if case.status is not Status.PASS]
    assert others == ["gemma4/vllm-text-before-call"], others  # two other fixtures of its family contradict it


def streams_equal_whole_answers() -> None:
    assert not broken("stream_equals_nonstream")


def splits_do_not_matter() -> None:
    assert not broken("split_invariance")


def no_mark_leaks() -> None:
    assert not broken("no_leakage")


run(fixtures_pass, streams_equal_whole_answers, splits_do_not_matter, no_mark_leaks)
