"""Has a gateway worker collect all garbage on SIGUSR1.

With this folder on PYTHONPATH, Python runs this as it starts.
"""

from __future__ import annotations

import gc
import signal
import sys
import time


def _collect(number: int, frame: object) -> None:
    began_s = time.perf_counter()
    gc.collect()
    print(f"collected in {(time.perf_counter() - began_s) * 1e3:.2f} ms", file=sys.stderr, flush=True)


if "headwater_server.gateway.worker" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, _collect)
