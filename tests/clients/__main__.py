"""``python -m tests.clients [NAME ...]``: run each client's cases against one server.

A client's cases are ``NAME_cases.py``, which its own environment's interpreter runs; they print a line of JSON each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

import inference.zoo
from benchmarks.environments import Environments
from tests.running import serve

__all__: list[str] = []

FOLDER: Final = Path(__file__).parent
CLIENTS: Final = Environments(
    ".venv-clients",
    FOLDER,
    {
        "openai": "openai",
        "langchain": "langchain-openai",
        "litellm": "litellm",
        "llamaindex": "llama-index-llms-openai-like",
        "instructor": "instructor",
        "aiperf": "aiperf",
        "guidellm": "guidellm",
        "kserve": "kserve",
    },
)
CONFIG: Final = {
    "deployments": {
        "tiny-lm": {"model": "lm:inference.zoo:weights/tiny_lm"},
        "text": {"model": "inference.zoo.text:Text", "threads": 1},
        "scale": {"model": "inference.zoo.scale:Scale"},
    }
}
TIMEOUT_S: Final = 600


class Result(NamedTuple):
    """What became of a client's cases."""

    passed: list[str]
    failed: dict[str, str]
    """Why, by case."""


def run(name: str, url: str) -> Result:
    """Run a client's cases."""
    environment = {
        **os.environ,
        "HEADWATER_URL": url,
        "HEADWATER_TOKENIZER": str(Path(inference.zoo.__file__).parent / "weights" / "tiny_lm"),
        "NO_PROXY": "127.0.0.1",
    }
    command = [str(CLIENTS.python_of(name)), str(FOLDER / f"{name}_cases.py")]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Result([], {"all": f"did not end within {TIMEOUT_S} s"})
    results = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"case":')]
    failed = {one["case"]: one["error"] for one in results if one["error"]}
    if ended.returncode or not results:
        failed = failed or {"all": ended.stderr[-3000:]}
    return Result([one["case"] for one in results if not one["error"]], failed)


def main() -> None:
    """Run the clients named, or all."""
    names = sys.argv[1:] or list(CLIENTS.packages)
    CLIENTS.make_missing(names)
    made = [name for name in names if CLIENTS.is_made(name)]
    is_good = len(made) == len(names)
    with serve(CONFIG) as running:
        for name in made:
            result = run(name, running.url)
            count = len(result.passed) + len(result.failed)
            print(f"{CLIENTS.packages[name]} {CLIENTS.version_of(name)}: {len(result.passed)} of {count}", flush=True)
            for case, why in result.failed.items():
                print(f"  {case}: {why}")
            is_good = is_good and not result.failed
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
