"""Virtual environments for software that is none of ours, each out of nothing but its pins."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

__all__ = ["Environments"]

ROOT: Final = Path(__file__).parents[1]
STAMP: Final = "pins.sha256"


class Environments:
    """Environments that are made in one folder, where they are missing or their pins have changed.

    Args:
        folder: its name, in the repository's root.
        pins: has a file ``requirements-NAME.txt`` for each.
        packages: by environment, the package that it is there for.
        interpreters: by environment, the command of the Python that it needs, if this process's is too old.
    """

    def __init__(
        self, folder: str, pins: Path, packages: Mapping[str, str], interpreters: Mapping[str, str] = {}
    ) -> None:
        self._folder = ROOT / folder
        self._pins_folder = pins
        self.packages = packages
        self._interpreters = interpreters

    def python_of(self, name: str) -> Path:
        """An environment's interpreter."""
        return self._folder / name / "bin" / "python"

    def is_made(self, name: str) -> bool:
        """Whether an environment is there and is what its pins say."""
        stamp = self._folder / name / STAMP
        return stamp.is_file() and stamp.read_text() == self._digest(name)

    def version_of(self, name: str) -> str:
        """What its pins say of the package that an environment is there for."""
        for line in self._pins(name).read_text().splitlines():
            package, _, version = line.partition("==")
            if package.partition("[")[0] == self.packages[name]:
                return version.partition(" ")[0]
        raise ValueError(f"{self._pins(name).name}: expected a pin of {self.packages[name]}, got none")

    def make_missing(self, names: Sequence[str]) -> None:
        """Make those of these environments that are missing. One that can't be made is left out, with the reason; its
        log lies beside it."""
        for name in names or self.packages:
            if name not in self.packages:
                raise SystemExit(f"expected names among {', '.join(self.packages)}, got {name}")
            if self.is_made(name):
                continue
            into = f"{self._folder.name}/{name}"
            print(f"Installing {self._pins(name).name} into {into} (a minute or two) ...", flush=True)
            if why := self._make(name):
                print(f"left out: {name}: {why}", file=sys.stderr)

    def _make(self, name: str) -> str:
        """Make an environment anew; why that failed, or nothing."""
        interpreter = self._interpreters.get(name, sys.executable)
        if shutil.which(interpreter) is None:
            return f"it needs {interpreter}, which is not on PATH"
        shutil.rmtree(self._folder / name, ignore_errors=True)
        self._folder.mkdir(exist_ok=True)
        log = self._folder / f"{name}.log"
        python = str(self.python_of(name))
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        with log.open("w") as output:
            for command in (
                [interpreter, "-m", "venv", str(self._folder / name)],
                # What is imported is compiled then; compiling all of torch now takes longer than installing it.
                [*pip, "install", "--no-compile", "-r", str(self._pins(name))],
                [*pip, "check"],
            ):
                if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode:
                    return f"{' '.join(command)} failed; see {log}"
        (self._folder / name / STAMP).write_text(self._digest(name))
        return ""

    def _pins(self, name: str) -> Path:
        return self._pins_folder / f"requirements-{name}.txt"

    def _digest(self, name: str) -> str:
        return hashlib.sha256(self._pins(name).read_bytes() + sys.version.encode()).hexdigest()
