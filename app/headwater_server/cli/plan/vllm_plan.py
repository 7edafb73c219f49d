"""``headwater plan`` for a model that vLLM computes: a start shows the size of the cache, from which options are
computed.

vLLM reserves its memory when it starts: a fraction of a GPU's memory or, on the CPU, a cache of a given number of GiB.
So no measurement under load is needed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import yaml

from headwater_server.cli.option_values import check_writable, write_file
from headwater_server.cli.plan.measured_server import serve_point
from headwater_server.cli.plan.measuring import serving_fields
from headwater_server.cli.plan.option_defaults import DEFAULTS, NOT_HELD
from headwater_server.cli.plan.process_memory import measure_server
from headwater_server.config.content import content
from headwater_server.config.schema import Config, Deployment
from headwater_server.errors import CommandError
from headwater_server.process.machine import host_capacity, size_text
from headwater_server.process.vllm_program import find_vllm

__all__ = ["Started", "plan_vllm", "propose"]

GIB: Final = 1024**3
TOLERANCE: Final = 0.1
"""Fraction by which the memory of the second start may exceed the memory that may be taken."""


class Started(NamedTuple):
    """Figures from a start of vLLM. The fields have the same names in the JSON report."""

    cache_tokens: int
    """Capacity of a replica's key/value cache, in tokens."""
    context_length: int
    """Maximum number of tokens of a prompt and its answer together."""
    host_bytes: int
    """Bytes of the machine's memory that the replica takes, the server's libraries and other files included."""

    def text(self) -> str:
        """The figures on one line."""
        return f"a cache of {self.cache_tokens} tokens, {size_text(self.host_bytes)} of the machine's memory"


def plan_vllm(options: argparse.Namespace, config: Config, name: str, progress: Callable[[str], None]) -> int:
    """Start vLLM, propose options, start vLLM with these options, and report. Returns the exit status: 0, or `NOT_HELD`
    if the proposed sequences don't fit into the cache of the second start, or, on the CPU, that start takes too much
    memory.

    ``options.no_verify`` leaves out the second start, and ``options.dry_run`` both.

    Raises:
        CommandError: an option of the command is wrong, vLLM doesn't start, or nothing fits.
        InterpreterError: the deployment's Python has no usable vLLM.
    """
    deployment = config.deployments[name]
    is_cpu = find_vllm(str(deployment.python), {**os.environ, **deployment.environment}).is_cpu
    for option in ("html", "input", "out", *DEFAULTS, *(() if is_cpu else ("memory",))):
        if getattr(options, option) is not None:
            flag = option.replace("_", "-")
            raise CommandError(f"--{flag}: not supported for a deployment that vLLM computes; leave it out")
    check_writable("--json", options.json)
    free = 1 - options.headroom
    max_bytes = int((options.memory or host_capacity() or 0) * free / deployment.replicas.max)
    first = _reserved(deployment, free, is_cpu=is_cpu)
    starts = 1 if options.no_verify else 2
    progress(f"{starts} starts of vLLM, each as long as that of `headwater serve`; the first with {first}")
    if options.dry_run:
        return 0
    started = _start(options.what, config, name, first)
    progress(f"started: {started.text()}")
    proposed = propose(deployment, first, started, most_bytes=max_bytes, headroom=options.headroom)
    again = None if options.no_verify else _start(options.what, config, name, proposed)
    report = {
        "deployment": name,
        "headroom": options.headroom,
        "most_host_bytes": max_bytes if is_cpu else None,
        "started": {"options": first, **started._asdict()},
        "options": proposed,
        "verified": None if again is None else again._asdict(),
    }
    write_file("--json", options.json, json.dumps(report, indent=2) + "\n")
    print(yaml.safe_dump({"deployments": {name: {"options": proposed}}}, sort_keys=False), end="")
    if again is None:
        return 0
    print(f"# Started with these: {again.text()}.")
    needed = proposed["max_num_seqs"] * proposed["max_model_len"]
    print(f"# {proposed['max_num_seqs']} sequences of {proposed['max_model_len']} tokens fill "
          f"{needed / again.cache_tokens:.0%} of the cache.")  # fmt: skip
    holds = needed <= again.cache_tokens and (not is_cpu or again.host_bytes <= max_bytes * (1 + TOLERANCE))
    return 0 if holds else NOT_HELD


def propose(
    deployment: Deployment, first: Mapping[str, Any], started: Started, *, most_bytes: int, headroom: float
) -> dict[str, Any]:
    """The options with which all concurrent sequences fit into the cache at their maximum length, and a part of the
    cache stays free: ``first``, with ``max_model_len`` and ``max_num_seqs``.

    Args:
        deployment: the deployment. Its ``max_num_seqs``, and the context length of the first start, are upper bounds.
        first: the memory options of the first start. ``kv_cache_gib`` (a cache on the CPU) is computed anew.
        started: the figures of the first start.
        most_bytes: bytes of the machine's memory that a replica on the CPU may take.
        headroom: the fraction of the cache that is kept free, for prefixes.

    Raises:
        CommandError: there is not enough memory, or the model has no cache.
    """
    sequences, cache_tokens = deployment.checked_options["max_num_seqs"], started.cache_tokens
    if not cache_tokens:
        raise CommandError("--deployment: expected a model with a cache, got a cacheless model, such as an encoder")
    proposed = dict(first)
    if "kv_cache_gib" in first:
        given_gib = first["kv_cache_gib"]
        fixed_bytes = started.host_bytes - given_gib * GIB
        most_gib = (most_bytes - fixed_bytes) // GIB
        if most_gib < 1:
            raise CommandError(
                f"nothing fits: a replica takes {size_text(fixed_bytes)} besides its cache of at least 1 GiB, and "
                f"{size_text(most_bytes)} is available; give it more memory, or run fewer replicas"
            )
        gib_tokens = cache_tokens / given_gib
        wanted_tokens = sequences * started.context_length / (1 - headroom)
        proposed["kv_cache_gib"] = max(1, min(most_gib, -int(-wanted_tokens // gib_tokens)))
        cache_tokens = int(gib_tokens * proposed["kv_cache_gib"])
    usable = int(cache_tokens * (1 - headroom))
    proposed["max_model_len"] = min(started.context_length, usable)
    proposed["max_num_seqs"] = max(1, min(sequences, usable // max(1, proposed["max_model_len"])))
    return proposed


def _reserved(deployment: Deployment, free: float, *, is_cpu: bool) -> dict[str, Any]:
    """The memory options of the first start."""
    if is_cpu:
        return {"kv_cache_gib": deployment.checked_options["kv_cache_gib"] or 1}
    on_one = -(-deployment.replicas.max // len(deployment.placements))  # replicas that share a GPU
    return {"gpu_memory_utilization": round(free / on_one, 3)}


def _start(source: str, config: Config, name: str, options: Mapping[str, Any]) -> Started:
    """Start one replica with the deployment's options, overridden by ``options``.

    Raises:
        CommandError: the replica doesn't start; the message has the reason.
    """
    deployment = config.deployments[name]
    section = content(deployment)
    section |= {"replicas": 1, "options": {**section.get("options", {}), **options}}
    with serve_point(source, serving_fields(config, name, section), deployment.load_timeout_s + 60) as server:
        limits = server.get(f"/v2/models/{name}/stats")["model_stats"][0]["language_model"]["limits"]
        memory = measure_server(server.pid, server.runtime_dir)
    return Started(limits["cache_tokens"], limits["context_length"], memory.host - memory.server)
