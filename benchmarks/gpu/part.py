"""One part, in this process: ``python -m benchmarks.gpu.part NAME FILE LIMIT_S DEVICE [tiny]``.

Its steps go to the file as they end, and those that the file has already are not run again.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.gpu.record import Recorder

__all__ = ["PARTS"]

PARTS: Final[Mapping[str, tuple[str, str]]] = {
    "a": ("demo", "check, the tests marked gpu, and the demo against the CPU"),
    "b": ("memory", "device memory: what a replica takes, and what is back after its end"),
    "c": ("images", "a vision model and a text model: the bare forward, Headwater, PyTriton"),
    "e": ("tokens", "a language model: bare decode, engine, clients"),
    "d": ("fused", "one trunk and two heads, fused"),
    "f": ("sharing", "two replicas on one device, and headwater plan"),
}
"""Module and title by name, the most valuable first."""


def main() -> None:
    """Run the part."""
    name, path, limit_s, device, *tiny = sys.argv[1:]
    recorder = Recorder(Path(path), float(limit_s))
    from benchmarks.gpu.target import Target  # with torch, which takes seconds

    if device == "cpu":
        import torch

        torch.set_num_threads(1)  # as servers have: threads that wait for each other do so in a loop
    else:
        import pynvml

        pynvml.nvmlInit()  # and so it stays: where nothing else uses the GPU, each opening may take a second
    module = importlib.import_module(f"benchmarks.gpu.{PARTS[name][0]}")
    module.measure(recorder, Target(device, bool(tiny)))
    recorder.end()


if __name__ == "__main__":
    main()
