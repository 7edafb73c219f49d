"""Messages between supervisor and replica: the specification down, status lines up; and what a fork takes.

A replica has two sides: its host loads and runs the model under the Python of the deployment, and its binder, under
Headwater's own, has PyTriton bind the model to an embedded Triton, which the binder becomes. The host asks over a
`headwater.wire.link`, first with a `BindRequest`, then with a `WarmUpRequest`. The binder answers the second with any
number of ``progress`` and a ``done``, or either of them with a ``failed``.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from headwater.errors import LoadError, ModelError, is_permanent, shortage_of, text_for_clients
from headwater.pipeline import PipelineSpec
from headwater.reference import is_language_model
from headwater.signature import Signature

__all__ = [
    "COMMAND", "GO", "HOST", "OWN_SIDE", "READY", "STATUS", "BindRequest", "ForkRequest", "ReplicaSpec",
    "ReplicaStatus", "WarmUpRequest", "failure_of",
]  # fmt: skip


class ReplicaSpec(msgspec.Struct, frozen=True):
    """A replica's specification."""

    name: str
    """The deployment's name."""
    model: str
    """As the configuration has it; empty for a pipeline."""
    token: str
    """The embedded Triton's access token."""
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
    environment: dict[str, str | None] = {}
    """What the host's environment has otherwise than the supervisor's; None: it lacks this."""

    @property
    def is_language_model(self) -> bool:
        """Whether it serves a language model, which takes control messages in place of the signature's inputs."""
        return self.pipeline is None and is_language_model(self.model)


class ReplicaStatus(msgspec.Struct, omit_defaults=True):
    """One line on the status pipe, from the replica or its guardian; and what a binder answers its host."""

    event: Literal["progress", "ready", "limited", "failed", "unloaded", "ending", "ended", "done"]
    """``done`` comes from a binder only."""
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
    """In ``ready``: the ``device``, and the versions of ``python`` and the packages that models use, or of ``vllm``;
    and what the binder tells in ``done``: versions on Headwater's own side, with names that begin with `OWN_SIDE`."""
    imported: list[str] = []
    """In ``ready`` and ``failed``: the files of the modules that it imported from the user's folders."""
    exit_status: int = 0
    """In ``ended``: the exit status, as in `subprocess.Popen.returncode`."""
    leftovers: list[str] = []
    """In ``ended``: what the sweep could not remove."""
    batch_limit: int = 0
    """In ``limited``: the most rows, or sequences, that fit in its device's memory at once; 0: no limit is known."""


def failure_of(error: Exception) -> ReplicaStatus:
    """The status that reports an error which keeps a replica from serving."""
    if (shortage := shortage_of(error)) is not None:
        return ReplicaStatus("failed", str(shortage), cause=text_for_clients(str(shortage)), is_shortage=True)
    if not isinstance(error, ModelError):
        text = f"{type(error).__name__}: {error}"
        return ReplicaStatus("failed", text, cause=_cause(error), is_permanent=is_permanent(error))
    text = str(error)
    if isinstance(error, LoadError):
        cause = error.problem.reason if error.__cause__ is None else _cause(error.__cause__)
    else:
        cause = text
    return ReplicaStatus("failed", text, cause=text_for_clients(cause), is_permanent=is_permanent(error))


def _cause(error: BaseException) -> str:
    """An error for clients: its class and message."""
    text = str(error)
    return text_for_clients(f"{type(error).__name__}: {text}" if text else type(error).__name__)


class BindRequest(msgspec.Struct, frozen=True):
    """Bind a model, and start its Triton."""

    signature: Signature
    """Without the example; a language model's lacks its limits, too."""


class WarmUpRequest(msgspec.Struct, frozen=True):
    """Wait until Triton serves the model, and call it."""

    signature: Signature
    sizes: list[int]
    """The numbers of rows that it is called with; those of sequences follow from a language model's limits."""


READY: Final = b"ready"
"""What `headwater.replica.preloaded` says once it can fork."""
GO: Final = b"go\n"
"""What a forked guardian waits for on its command pipe: the supervisor knows it and has set its priority."""
STATUS: Final = "{status}"
OWN_SIDE: Final = "headwater-"
"""Begins the names of a replica's facts that are of Headwater's own Python, not of the model's."""
COMMAND: Final = "{command}"
HOST: Final = "{host}"


class ForkRequest(msgspec.Struct, frozen=True):
    """A replica to fork. With it come three pipes: for its status, from the supervisor, and for what it prints."""

    name: str
    directory: str
    user_paths: tuple[str, ...]
    variables: dict[str, str]
    """Those of the host's environment that the preloaded process hasn't."""
    python: str
    """Headwater's own Python, in which guardian and binder run."""
    binder: str
    """The binder's module."""
    changes: dict[str, str | None]
    """What the environment of guardian and binder has otherwise than the preloaded process's; None: it lacks this."""
    guardian: list[str]
    """The guardian's command line, with `STATUS`, `COMMAND` and `HOST` for two descriptors and the replica's process
    id."""
