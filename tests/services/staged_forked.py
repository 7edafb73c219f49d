"""As `tests/services/staged.py`, in a replica that is forked: its imports, torch among them, are made before."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tests.services.staged import Staged
else:
    Staged = importlib.import_module("staged").Staged


class Forked(Staged):
    """Gives back x."""

    def load(self, device: str) -> None:
        """See that the replica was forked."""
        assert "headwater.replica.preloaded" in sys.orig_argv, "it was not forked"
        torch.set_num_threads(1)
