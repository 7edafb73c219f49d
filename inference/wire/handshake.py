"""What a supervisor and a replica say to each other: the spec on the way down, status lines on the way up."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from inference.pipeline import PipelineSpec

__all__ = ["ReplicaSpec", "ReplicaStatus"]


class ReplicaSpec(msgspec.Struct, frozen=True):
    """What the supervisor tells a replica."""

    name: str
    """The deployment."""
    model: str
    """``module:Class``, ``onnx:PATH`` or ``lm:PATH``; empty for a pipeline."""
    token: str
    """The embedded Triton's access token."""
    status_fd: int
    user_paths: tuple[str, ...]
    """Put first on ``sys.path``."""
    working_dir: str
    """Where relative paths in the user's code start."""
    options: dict[str, Any] = {}
    pipeline: PipelineSpec | None = None
    """Steps that are computed together."""
    max_batch_size: int = 1
    instances: int = 1
    """Threads that compute at once."""
    device: str = "auto"
    threads: int | None = None
    warmup_batch_sizes: tuple[int, ...] | None = None
    load_timeout_s: float = 600
    max_compute_s: float | None = None
    """That a call of the user's code may take, once the replica serves."""


class ReplicaStatus(msgspec.Struct, omit_defaults=True):
    """One line on the status pipe, from the replica or its guardian."""

    event: Literal["progress", "ready", "failed", "unloaded", "ending", "ended"]
    text: str = ""
    """Of ``progress``: the stage. Of ``failed`` and ``ending``: why."""
    cause: str = ""
    """Of ``failed``: why, in the words for clients: the error's class and message, without the folders of paths."""
    is_permanent: bool = False
    """Of ``failed``: whether another start would fail in the same way."""
    signature: dict[str, Any] | None = None
    """Of ``ready``: an `inference.signature.Signature`."""
    facts: dict[str, str] = {}
    """Of ``ready``: device, and versions of what matters."""
    exit_status: int = 0
    """Of ``ended``: as `subprocess.Popen.returncode` has it."""
    leftovers: list[str] = []
    """Of ``ended``: what the sweep could not remove."""
