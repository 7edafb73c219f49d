"""Reads the documentation's pages, so that tests run what these show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

__all__ = ["PAGES", "Block", "Command", "blocks", "section"]

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
"""Every page by its name."""

_PARTS = re.compile(r"^(?:#+ (?P<heading>[^\n]*)|```(?P<kind>\w*)\n(?P<text>.*?)^```)$", re.MULTILINE | re.DOTALL)
_PROMPT = re.compile(r"^(\w*)\$ ", re.MULTILINE)
_FILE = re.compile(r"# (\S+\.(?:py|yaml))\n")


class Command(NamedTuple):
    """One command of a console."""

    host: str
    """Where it is typed, as its prompt says; empty: here."""
    line: str
    """As it is typed, over several lines if the page has it so."""
    printed: str
    """What the page shows that it prints; empty: nothing is shown."""


class Block(NamedTuple):
    """One block of code."""

    page: str
    line: int
    heading: str
    """The heading that it stands below."""
    kind: str
    """Its language; empty: none."""
    text: str

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The name of the file that it is, as its first line says; empty: it is no file."""
        found = _FILE.match(self.text)
        return "" if found is None else found[1]

    @property
    def commands(self) -> list[Command]:
        """Those of a console."""
        _, *parts = _PROMPT.split(self.text)
        found = []
        for host, text in zip(parts[::2], parts[1::2], strict=True):
            line, *more = text.rstrip().splitlines()
            while more and not _is_whole(line):
                line = f"{line}\n{more.pop(0)}"
            found.append(Command(host, line.rstrip(), "\n".join(more)))
        return found


def _is_whole(line: str) -> bool:
    """Whether a shell doesn't wait for another line."""
    try:
        shlex.split(line, comments=True)
    except ValueError:  # a quotation, or a backslash at the end, is open
        return False
    return not line.endswith("\\")


def blocks(page: str) -> list[Block]:
    """A page's blocks, in order."""
    text = PAGES[page].read_text()
    found: list[Block] = []
    heading = ""
    for part in _PARTS.finditer(text):
        if part["text"] is None:
            heading = part["heading"]
        else:
            line = text.count("\n", 0, part.start()) + 1
            found.append(Block(page, line, heading, part["kind"], part["text"]))
    return found


def section(page: str, heading: str) -> list[Block]:
    """The blocks right below a heading, in order."""
    return [block for block in blocks(page) if block.heading == heading]
