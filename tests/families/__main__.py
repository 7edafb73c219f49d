"""``python -m tests.families``: measures architectures, and writes the table and the page (`make families`)."""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path

import msgspec
import transformers

from headwater_server.cli.families import PAGE, TABLE, page_text, read_table
from tests.families.measuring import Family, kinds, measure_in_worker

JOBS = 2


def main() -> None:
    """Measure the architectures that the command line names, or else all."""
    with multiprocessing.get_context("spawn").Pool(JOBS, maxtasksperchild=20) as pool:
        results = pool.map(measure_in_worker, sys.argv[1:] or kinds(), chunksize=1)
    if faults := [result for result in results if isinstance(result, str)]:
        sys.exit("\n".join(faults))
    rows = {family.model_type: msgspec.structs.asdict(family) for family in read_table().families if sys.argv[1:]}
    rows |= {result.model_type: result._asdict() for result in results if isinstance(result, Family)}
    lines = ",\n".join(json.dumps(rows[kind]) for kind in sorted(rows))
    TABLE.write_text(f'{{"transformers": "{transformers.__version__}", "families": [\n{lines}\n]}}\n')
    (Path(__file__).parents[2] / PAGE).write_text(page_text(read_table()))


if __name__ == "__main__":
    main()
