"""Options of commands that write a report."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_report_options"]


def add_report_options(command: argparse.ArgumentParser, page: str) -> None:
    """Add ``--json`` and ``--html``.

    Args:
        command: whose.
        page: what the page is, for the help.
    """
    command.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    command.add_argument("--html", type=Path, metavar="FILE", help=f"write {page}; needs headwater[reports]")
