"""A little of the chaos run, which `tests.chaos` does at length: bad clients, poison, processes that end or stop."""

from __future__ import annotations

import signal

from tests.chaos.faults import WORKER, Fault
from tests.chaos.run import chaos_config, run_chaos
from tests.running import leftovers, segments_of, serve

SEED = 1
FAULTS = (
    Fault(1.0, signal.SIGSTOP, "host", "plain", 0),
    Fault(1.5, signal.SIGKILL, WORKER, "", 0),
    Fault(1.5, signal.SIGKILL, "stub", "tiny", 0),
    Fault(1.0, signal.SIGSTOP, "tritonserver", "fused", 0),
)
LEAST_S = 6.0
"""So that requests meet the last of these, too."""


def test_nothing_hangs_is_wrong_lost_or_left() -> None:
    """Every request ends in time and with the right answer, the books agree, and all is as it was in the end."""
    with serve(chaos_config(small=True)) as running:
        findings = run_chaos(
            running, requests=300, clients=6, seed=SEED, faults=iter(FAULTS), on_fault=print, least_s=LEAST_S
        )
        print("\n".join(findings.lines()))
        assert findings.faults == []
        assert findings.harm.done == [str(fault) for fault in FAULTS]
        segments = segments_of(running.folder) | findings.harm.segments
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []
