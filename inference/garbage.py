"""Python's garbage collector in a process that has started and now serves."""

from __future__ import annotations

import gc

__all__ = ["settle"]


def settle(allocations: int | None = None) -> None:
    """What is there now stays for good: collections need not look at it any more.

    A process of ours has some hundred thousand objects from imports alone.

    Args:
        allocations: so many more objects than were freed start a collection; None: as many as before. Where cycles may
            hold large tensors it should stay.
    """
    gc.collect()
    gc.freeze()
    if allocations is not None:
        gc.set_threshold(allocations, *gc.get_threshold()[1:])
