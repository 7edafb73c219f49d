"""Messages between supervisor and replica: the specification goes to the replica, status lines come back. Also the
request to fork a replica, and the messages between a replica's host and its binder.

A replica has two sides. Its host loads and runs the model under the deployment's Python. Its binder, under Headwater's
Python, has PyTriton bind the model to an embedded Triton, and then becomes that Triton. The host sends requests over a
`headwater.wire.link`: first a `BindRequest`, then a `WarmUpRequest`. The binder answers the `WarmUpRequest` with any
number of ``progress`` and ``warning`` statuses and a ``done``. It answers either request with ``failed`` if an error
occurs.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from headwater.errors import LoadError, ModelError, is_permanent, shortage_of, text_for_clients
from headwater.pipeline import PipelineSpec
from headwater.reference import is_language_model
from headwater.signature import Signature

__all__ = [
    "COMMAND", "GO", "HOST", "OWN_SIDE", "READY", "STATUS", "BindRequest", "BinderProgram", "ForkRequest",
    "ReplicaSpec", "ReplicaStatus", "WarmUpRequest", "failure_of",
]  # fmt: skip


class ReplicaSpec(msgspec.Struct, frozen=True):
    """A replica's specification."""

    name: str
    """The deployment's name."""
    model: str
    """The configuration's ``model``; empty for a pipeline."""
    token: str
    """The embedded Triton's access token."""
    user_paths: tuple[str, ...]
    """Folders of the user's modules; see `headwater.user_folders`."""
    working_dir: str
    """The working folder of the user's code."""
    options: dict[str, Any] = {}
    adapters: dict[str, str] = {}
    """Folders of LoRA adapters for vLLM, by served name, as written in the configuration."""
    pipeline: PipelineSpec | None = None
    """The steps of a fused pipeline."""
    max_batch_size: int = 1
    instances: int = 1
    """Threads that call the model concurrently."""
    device: str = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""
    threads: int | None = None
    """Number of torch's compute threads; None: torch's default."""
    warmup_batch_sizes: tuple[int, ...] | None = None
    """Numbers of rows of the warm-up's calls; None: powers of two and the maximum; empty: no warm-up."""
    load_timeout_s: float = 600
    """Seconds within which the replica must be ready."""
    max_compute_s: float | None = None
    """Time limit of a call of the user's code, in seconds, once the replica serves; None: no limit."""
    is_cached: bool = False
    """Whether gateway workers cache the replica's answers."""
    counts: str = ""
    """The file of the model's custom metrics (`headwater.metrics_file`); empty: metrics are off."""
    environment: dict[str, str | None] = {}
    """Variables in which the host's environment differs from the supervisor's; None: the variable is unset."""

    @property
    def is_language_model(self) -> bool:
        """Whether the replica serves a language model, which takes control messages in place of the signature's
        inputs."""
        return self.pipeline is None and is_language_model(self.model)


class ReplicaStatus(msgspec.Struct, omit_defaults=True):
    """A line on the status pipe, from the host or the guardian; also a binder's answer to its host."""

    event: Literal["progress", "warning", "ready", "limited", "failed", "unloaded", "ending", "ended", "done"]
    """The kind of status. Only a binder sends ``done``."""
    text: str = ""
    """In ``progress`` the stage; in ``warning`` the warning; in ``failed``, ``ending`` and ``ended`` the reason; in
    ``limited`` a text about the change."""
    cause: str = ""
    """In ``failed``: the reason as shown to clients: the error's class and message, with paths cut to their last
    part."""
    is_permanent: bool = False
    """In ``failed``: whether another start would fail in the same way."""
    is_shortage: bool = False
    """In ``failed``: whether the machine ran out of a resource: processes, disk space or memory, descriptors."""
    signature: dict[str, Any] | None = None
    """In ``ready``: a `headwater.signature.Signature`."""
    facts: dict[str, str] = {}
    """In ``ready``: the ``device``, and the versions of ``python`` and of the packages that models use, or of ``vllm``.
    In a binder's ``done``, and then also in ``ready``: versions of the binder's Python and packages, with names that
    begin with `OWN_SIDE`."""
    imported: list[str] = []
    """In the host's ``ready`` and ``failed``: the files of the modules that it imported from the user's folders."""
    exit_status: int = 0
    """In ``ended``: the host's exit status, as in `subprocess.Popen.returncode`; 0 also if the host didn't start."""
    leftovers: list[str] = []
    """In ``ended``: the files and folders that the sweep could not remove."""
    batch_limit: int = 0
    """In ``limited``: the smallest limit of the rows, or sequences, that fit in the device's memory at once; 0: no
    limit is known."""


def failure_of(error: Exception) -> ReplicaStatus:
    """The ``failed`` status for an error that keeps a replica from serving."""
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
    """An error's class and message, as shown to clients."""
    text = str(error)
    return text_for_clients(f"{type(error).__name__}: {text}" if text else type(error).__name__)


class BindRequest(msgspec.Struct, frozen=True):
    """Asks the binder to bind a model and start its Triton."""

    directory: str
    """The replica's folder."""
    signature: Signature
    """The model's signature without the example and, for a language model, without its limits."""


class WarmUpRequest(msgspec.Struct, frozen=True):
    """Asks the binder to wait until Triton serves the model, and then to call the model."""

    signature: Signature
    """The model's complete signature."""
    sizes: list[int]
    """Numbers of rows of the calls. For a language model the numbers of sequences follow from its limits instead."""
    skips_slow: bool = False
    """Whether calls that would take long are left out, and all larger calls."""


READY: Final = b"ready"
"""Sent by `headwater.replica.preloaded` when it is ready to fork, and to a waiting guardian by its host."""
GO: Final = b"go\n"
"""Sent on a forked guardian's command pipe when the supervisor has set the guardian's priority. The guardian waits for
it."""
STATUS: Final = "{status}"
OWN_SIDE: Final = "headwater-"
"""Prefix of the names of a replica's facts about Headwater's Python, as opposed to the model's Python."""
COMMAND: Final = "{command}"
HOST: Final = "{host}"


class BinderProgram(msgspec.Struct, frozen=True):
    """Has the preloaded process fork a guardian, a host and a binder, which then wait for a `ForkRequest`, unless such
    processes wait already. It is sent without descriptors, and is not answered."""

    python: str
    """Path of Headwater's Python."""
    module: str
    """The binder's module."""
    changes: dict[str, str | None]
    """Variables in which the environment of guardian and binder differs from the preloaded process's environment;
    None: the variable is unset."""


class ForkRequest(msgspec.Struct, frozen=True):
    """Asks the preloaded process to start a replica in the processes that wait. Three descriptors of pipes are sent
    with the request: to write status lines, to read the supervisor's commands, and to write the printed output."""

    name: str
    directory: str
    user_paths: tuple[str, ...]
    variables: dict[str, str]
    """Environment variables that the host gets in addition to those of the preloaded process."""
    guardian: list[str]
    """The guardian's command line. `STATUS` and `COMMAND` stand for the descriptors of two pipes, `HOST` for the
    process id of the replica's host."""
