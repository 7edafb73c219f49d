"""An environment for each peer: ``python -m benchmarks.peers.environments [NAME ...]`` makes those that are missing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from benchmarks.environments import Environments

__all__ = ["PEER_ENVIRONMENTS"]

PEER_ENVIRONMENTS: Final = Environments(
    ".venv-peers",
    Path(__file__).parent,
    {
        "pytriton": "nvidia-pytriton",
        "mosec": "mosec",
        "litserve": "litserve",
        "fastapi": "fastapi",
        "ray": "ray",
        "bentoml": "bentoml",
    },
)

if __name__ == "__main__":
    PEER_ENVIRONMENTS.make_missing(sys.argv[1:])
