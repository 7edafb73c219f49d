"""A progress bar on standard error, if that is a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator

__all__ = ["Progress"]

STEP_S = 0.5


class Progress:
    """Runs that take known times, one after the other.

    Args:
        total_s: of all together.
    """

    def __init__(self, total_s: float) -> None:
        self._total_s = total_s
        self._done_s = 0.0

    @contextlib.asynccontextmanager
    async def shown(self) -> AsyncIterator[Progress]:
        """Show it while the block runs."""
        if not sys.stderr.isatty():
            yield self
            return
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        # No thread of its own: it would take the generator's time in steps of five milliseconds.
        with Bar(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as self._bar:
            self._task = self._bar.add_task("", total=self._total_s)
            yield self

    @contextlib.asynccontextmanager
    async def run(self, what: str, seconds: float) -> AsyncIterator[None]:
        """One of the runs, while the block does it."""
        bar = getattr(self, "_bar", None)
        if bar is None:
            yield
            return
        began_s = time.perf_counter()

        async def move() -> None:
            while True:
                passed_s = min(time.perf_counter() - began_s, seconds)
                bar.update(self._task, description=what, completed=self._done_s + passed_s, refresh=True)
                await asyncio.sleep(STEP_S)

        moving = asyncio.ensure_future(move())
        try:
            yield
        finally:
            moving.cancel()
            self._done_s += seconds
