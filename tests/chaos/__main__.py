"""``python -m tests.chaos [--requests 10000] [--seconds S] [--clients 48] [--seed N]``.

Prints what is done to the server as it is done, then the figures; its exit status is 1 if anything was not as it should
be.
The same seed asks the same and plans the same faults; what these meet is up to the machine.
"""

from __future__ import annotations

import argparse
import sys

from tests.chaos.faults import planned
from tests.chaos.run import chaos_config, run_chaos
from tests.running import leftovers, segments_of, serve

SHOWN_FAULTS = 30


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description="Ask a server whose processes are killed and stopped.")
    parser.add_argument("--requests", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=120, help="that it lasts at least; default: %(default)s")
    parser.add_argument("--clients", type=int, default=48, help="that ask at once; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with serve(chaos_config()) as running:
        findings = run_chaos(
            running,
            requests=options.requests,
            clients=options.clients,
            seed=options.seed,
            faults=planned(options.seed),
            least_s=options.seconds,
            on_fault=lambda fault: print(fault, flush=True),
        )
        segments = segments_of(running.folder) | findings.harm.segments
        status = running.stop()
        faults = findings.faults + ([f"the server ended with status {status}"] if status else [])
        faults += [f"left by the server: {one}" for one in leftovers(running.folder, segments)]
        if faults:
            print(running.log.read_text()[-20_000:])
    print("\n".join(findings.lines()))
    print(f"stopped with status {status}; {len(segments)} shared segments were looked for")
    for fault in faults[:SHOWN_FAULTS]:
        print(f"FAILED: {fault}")
    print("nothing hung, was wrong, lost or left" if not faults else f"{len(faults)} faults")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
