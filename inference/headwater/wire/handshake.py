"""Messages between supervisor and replica: the specification down, status lines up; and what a fork takes."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from headwater.pipeline import PipelineSpec

__all__ = ["COMMAND", "GO", "HOST", "READY", "STATUS", "ForkRequest", "ReplicaSpec", "ReplicaStatus"]


class ReplicaSpec(msgspec.Struct, frozen=True):
    """A replica's specification."""

    name: str
    """The deployment's name."""
    model: str
    """As the configuration has it; empty for a pipeline."""
    token: str
    """The embedded Triton's access token."""
    status_fd: int
    user_paths: tuple[str, ...]
    """Folders of the user's modules; see `headwater.user_folders`."""
    working_dir: str
    """The working folder of the user's code."""
    options: dict[str, Any] = {}
    adapters: dict[str, str] = {}
    """Folders of LoRA adapters for vLLM, by served name, as the configuration has them."""
    pipeline: PipelineSpec | None = None
    """The steps of a fused pipeline."""
    max_batch_size: int = 1
    instances: int = 1
    """Threads that call the model concurrently."""
    device: str = "auto"
    threads: int | None = None
    warmup_batch_sizes: tuple[int, ...] | None = None
    load_timeout_s: float = 600
    max_compute_s: float | None = None
    """The longest that a call of the user's code may take, once the replica serves."""
    is_cached: bool = False
    """Whether gateways keep its answers."""


class ReplicaStatus(msgspec.Struct, omit_defaults=True):
    """One line on the status pipe, from the replica or its guardian."""

    event: Literal["progress", "ready", "limited", "failed", "unloaded", "ending", "ended"]
    text: str = ""
    """In ``progress`` the stage; in ``failed`` and ``ending`` the reason; in ``limited`` what changed."""
    cause: str = ""
    """In ``failed``: the reason for clients: the error's class and message, with paths cut to their last part."""
    is_permanent: bool = False
    """In ``failed``: whether another start would fail in the same way."""
    is_shortage: bool = False
    """In ``failed``: whether the machine lacked something: processes, space, descriptors."""
    signature: dict[str, Any] | None = None
    """In ``ready``: an `headwater.signature.Signature`."""
    facts: dict[str, str] = {}
    """In ``ready``: the device, and the versions of the relevant packages."""
    imported: list[str] = []
    """In ``ready`` and ``failed``: the files of the modules that it imported from the user's folders."""
    exit_status: int = 0
    """In ``ended``: the exit status, as in `subprocess.Popen.returncode`."""
    leftovers: list[str] = []
    """In ``ended``: what the sweep could not remove."""
    batch_limit: int = 0
    """In ``limited``: the most rows, or sequences, that fit in its device's memory at once; 0: no limit is known."""


READY: Final = b"ready"
"""What `headwater.replica.preloaded` says once it can fork."""
GO: Final = b"go\n"
"""What a forked guardian waits for on its command pipe: the supervisor knows it and has set its priority."""
STATUS: Final = "{status}"
COMMAND: Final = "{command}"
HOST: Final = "{host}"


class ForkRequest(msgspec.Struct, frozen=True):
    """A replica to fork. With it come three pipes: for its status, from the supervisor, and for what it prints."""

    name: str
    directory: str
    user_paths: tuple[str, ...]
    variables: dict[str, str]
    """Those of its environment that the preloaded process hasn't."""
    guardian: list[str]
    """The guardian's command line, with `STATUS`, `COMMAND` and `HOST` for two descriptors and the replica's process
    id."""
