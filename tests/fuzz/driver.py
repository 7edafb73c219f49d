"""``python -m tests.fuzz.driver TARGET ARG...``: one target under atheris, in a process that libFuzzer ends.

The arguments are libFuzzer's.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["headwater_server", "headwater"], enable_loader_override=False):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Run it."""
    name = sys.argv[1]

    def target(data: bytes) -> None:
        TARGETS[name](data)

    atheris.Setup([f"{sys.argv[0]}:{name}", *sys.argv[2:]], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
