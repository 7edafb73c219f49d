"""``python -m tests.hostile [--only TEXT]``: sends each hostile request at two sizes
and prints what it did to others.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.hostile.table import HOSTILE, TOGETHER
from tests.hostile.watch import MEMORY_BYTES, measure, send_all, serve_target


def main() -> None:
    """Run it; the exit status is 1 if any request harmed others."""
    parser = argparse.ArgumentParser(description="Send hostile requests beside another client's stream.")
    parser.add_argument("--only", default="", help="a part of the names of requests to send; default: all")
    parser.add_argument("--attempts", type=int, default=1, help="see tests/hostile/watch.py; default: %(default)s")
    options = parser.parse_args()
    if not any(options.only in hostile.name for hostile in HOSTILE):
        parser.error(f"--only: no request's name has {options.only!r} in it")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="hw-") as name, serve_target(Path(name)) as target:
        for hostile in HOSTILE:
            for size in hostile.sizes if options.only in hostile.name else ():
                harm = measure(target, hostile, size, attempts=options.attempts)
                seen = f"longest gap {harm.gap_s:.2f} s, health {harm.health_s:.2f} s"
                growth = f"memory {harm.grown_bytes / 1e6:+.0f} MB"
                print(f"{hostile}, {size:,}: {harm.status} after {harm.took_s:.2f} s; {seen}, {growth}", flush=True)
                print(f"  {harm.said[:200]}", flush=True)
                for fault in harm.faults:
                    print(f"  FAILED: {fault}", flush=True)
                failed += bool(harm.faults)
        for together in TOGETHER:
            if options.only in together.name:
                before = target.memory_bytes()
                statuses = send_all(target, together.request(), together.count, missing=together.missing)
                grown = target.grown_bytes(before)
                print(f"{together.count} times {together}: {statuses}; memory {grown / 1e6:+.0f} MB", flush=True)
                failed += not (statuses <= together.statuses and grown <= MEMORY_BYTES)
    print(f"{failed} requests harmed others" if failed else "no request harmed others")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
