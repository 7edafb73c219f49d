"""A virtual environment for each peer, out of nothing but its pins.

``python -m benchmarks.peers.environments [NAME ...]`` makes those that are missing, or whose pins have changed, in
``.venv-peers/NAME``. One that can't be made is left out, with the reason; its log lies beside it.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["PACKAGES", "is_made", "python_of", "version_of"]

PACKAGES = {
    "pytriton": "nvidia-pytriton",
    "mosec": "mosec",
    "litserve": "litserve",
    "fastapi": "fastapi",
    "ray": "ray",
    "bentoml": "bentoml",
}
"""By environment: what it is there for."""
FOLDER = Path(__file__).parents[2] / ".venv-peers"
STAMP = "pins.sha256"


def python_of(name: str) -> Path:
    """An environment's interpreter."""
    return FOLDER / name / "bin" / "python"


def is_made(name: str) -> bool:
    """Whether an environment is there and is what its pins say."""
    stamp = FOLDER / name / STAMP
    return stamp.is_file() and stamp.read_text() == _digest(name)


def version_of(name: str) -> str:
    """What its pins say of the package that an environment is there for."""
    for line in _pins(name).read_text().splitlines():
        package, _, version = line.partition("==")
        if package.partition("[")[0] == PACKAGES[name]:
            return version.partition(" ")[0]
    raise ValueError(f"{_pins(name).name}: expected a pin of {PACKAGES[name]}, got none")


def make(name: str) -> str:
    """Make an environment anew; why that failed, or nothing."""
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    FOLDER.mkdir(exist_ok=True)
    log = FOLDER / f"{name}.log"
    python = str(python_of(name))
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    with log.open("w") as output:
        for command in (
            [sys.executable, "-m", "venv", str(FOLDER / name)],
            # What is imported is compiled then; compiling all of torch now takes longer than installing it.
            [*pip, "install", "--no-compile", "-r", str(_pins(name))],
            [*pip, "check"],
        ):
            if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode:
                return f"{' '.join(command)} failed; see {log}"
    (FOLDER / name / STAMP).write_text(_digest(name))
    return ""


def main() -> None:
    """Make what is asked for."""
    for name in sys.argv[1:] or PACKAGES:
        if name not in PACKAGES:
            raise SystemExit(f"expected names among {', '.join(PACKAGES)}, got {name}")
        if is_made(name):
            continue
        print(f"Installing {_pins(name).name} into {FOLDER.name}/{name} (a minute or two) ...", flush=True)
        if why := make(name):
            print(f"left out: {name}: {why}", file=sys.stderr)


def _pins(name: str) -> Path:
    return Path(__file__).parent / f"requirements-{name}.txt"


def _digest(name: str) -> str:
    return hashlib.sha256(_pins(name).read_bytes() + sys.version.encode()).hexdigest()


if __name__ == "__main__":
    main()
