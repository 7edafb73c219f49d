"""Models that huggingface_hub has downloaded, found in its cache by their names at the hub.

Source of the layout: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["HubModel", "hub_model", "model_name"]

_NAMED: Final = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w-][\w.-]*))?", re.ASCII)


class HubModel(NamedTuple):
    """A model as the Hugging Face hub names it."""

    name: str
    """``organization/name``."""
    revision: str
    """A branch, tag or commit."""

    @property
    def folder(self) -> Path:
        """The cache's folder for the model, which may not exist."""
        home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
        cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or Path(home) / "hub"
        return Path(os.path.expandvars(cache)).expanduser().absolute() / f"models--{self.name.replace('/', '--')}"

    @property
    def snapshot(self) -> Path | None:
        """The folder of the model's files; None if the cache has no file of this revision."""
        reference = self.folder / "refs" / self.revision
        commit = reference.read_text().strip() if reference.is_file() else self.revision
        snapshot = self.folder / "snapshots" / commit
        return snapshot if snapshot.is_dir() else None


def hub_model(path: str) -> HubModel | None:
    """The model that ``organization/name`` or ``organization/name@revision`` names; None for other paths."""
    match = _NAMED.fullmatch(path)
    return match and HubModel(match["name"], match["revision"] or "main")


def model_name(folder: Path) -> str:
    """The name of a folder's model: of the folder, or for a folder of the cache, whose name is a commit, the hub's."""
    repository = folder.parent.parent.name
    is_cached = folder.parent.name == "snapshots" and repository.startswith("models--")
    return repository.removeprefix("models--").replace("--", "/") if is_cached else folder.name
