"""Loads and unloads LoRA adapters in running vLLM replicas."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Mapping, Sequence

from headwater.errors import LoadError
from headwater_server.config.schema import Deployment
from headwater_server.errors import CallableFailed
from headwater_server.process.adapter_folders import find_adapters
from headwater_server.supervisor.handle import ReplicaHandle

__all__ = ["changed_adapters", "fit"]


def changed_adapters(before: Deployment, wanted: Deployment) -> tuple[dict[str, str], list[str]] | None:
    """The adapters to load (folders by name) and the names of adapters to unload. None if no adapter is added or
    removed, or if another field of the deployment changes, or the folder of an adapter that stays."""
    is_more = before.with_adapters({}) != wanted.with_adapters({})
    if is_more or any(wanted.adapters.get(name, folder) != folder for name, folder in before.adapters.items()):
        return None
    added = {name: folder for name, folder in wanted.adapters.items() if name not in before.adapters}
    removed = [name for name in before.adapters if name not in wanted.adapters]
    return (added, removed) if added or removed else None


async def fit(replica: ReplicaHandle, adapters: Mapping[str, str], search: Sequence[str], timeout_s: float) -> None:
    """Load the adapters that a ready replica lacks, and unload its adapters that are not wanted or have another folder.

    Args:
        replica: a replica of vLLM; its `adapters` are updated after each load and unload.
        adapters: folders of the wanted adapters, by name.
        search: the folders to search; see `find_adapters`.
        timeout_s: seconds that a load or unload may take.

    Raises:
        CallableFailed: an adapter's folder can't be used, or vLLM refused or did not answer. Earlier loads and unloads
            remain.
    """
    for name in [name for name, folder in replica.adapters.items() if adapters.get(name) != folder]:
        await _ask(replica, f"unload adapter `{name}`", "/v1/unload_lora_adapter", timeout_s, lora_name=name)
        replica.adapters = {adapter: folder for adapter, folder in replica.adapters.items() if adapter != name}
    missing = {name: folder for name, folder in adapters.items() if name not in replica.adapters}
    try:
        new_adapters = await asyncio.to_thread(find_adapters, missing, search) if missing else {}
    except LoadError as error:
        raise CallableFailed(str(error)) from error
    for name, adapter in new_adapters.items():
        fields = {"lora_name": name, "lora_path": str(adapter.folder)}
        await _ask(replica, f"load adapter `{name}`", "/v1/load_lora_adapter", timeout_s, **fields)
        replica.adapters = {**replica.adapters, name: adapters[name]}


async def _ask(replica: ReplicaHandle, action: str, url: str, timeout_s: float, **fields: str) -> None:
    try:
        status, answer = await replica.ask_vllm(url, json.dumps(fields), timeout_s)
    except (OSError, http.client.HTTPException) as error:
        raise CallableFailed(f"replica {replica.id} did not {action}: {error or type(error).__name__}") from error
    if status != 200:
        try:
            text = str(json.loads(answer)["error"]["message"])
        except (ValueError, LookupError, TypeError):
            text = answer.decode(errors="replace")
        raise CallableFailed(f"replica {replica.id} did not {action}: {text[:500]}")
