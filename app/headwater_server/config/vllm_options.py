"""The ``options`` of a deployment that vLLM computes: permitted options of vLLM's engine, checked before a start."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from ipaddress import IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from headwater_server.config.sections import PositiveInt, PositiveSeconds, Section
from headwater_server.config.validation import describe

__all__ = ["VllmOptions", "option_faults"]

_Fraction = Annotated[float, Field(gt=0, le=1)]
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?)(?::([0-9]{1,5}))?")
_Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


def _flag_of_generation_config(value: str) -> str:
    return "vllm" if value == "none" else value


def _media_host(value: str) -> str:
    """A host in the form in which `headwater_server.vllm.media_fetch` compares hosts.

    Raises:
        ValueError: it is no host's name or address, with or without a port.
    """
    match = _HOST.fullmatch(value.lower())
    host, port = match.groups() if match is not None else ("", None)
    if host.startswith("["):
        try:
            host = f"[{IPv6Address(host[1:-1]).compressed}]"
        except ValueError:
            host = ""
    if not host or not 0 < int(port or 1) < 65_536:
        expected = "expected a host's name or address such as images.example.com, [2001:db8::1] or 127.0.0.1:8080"
        raise ValueError(f"{expected}, got {value!r}")
    return host if port is None else f"{host}:{int(port)}"


class VllmOptions(Section):
    """Options of vLLM's engine, under the names of its flags, and Headwater's options ``adapters``, ``kv_cache_gib``,
    ``max_step_s``, ``media_hosts`` and ``prefix_affinity``. See docs/vllm.md.

    Options of vLLM are left out if they would let clients bypass the gateway (host, port, API keys, middleware), run
    code of a model's folder, or change behaviour that the gateway relies on.
    """

    runner: Literal["auto", "generate", "pooling"] = "auto"
    """Whether the model generates text, or pools its input to embeddings; ``auto``: vLLM decides by the model's folder.
    """
    max_model_len: PositiveInt | None = None
    """The most tokens of a prompt and its answer together; default: the model's limit."""
    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] = 256
    """The most sequences computed together."""
    max_num_batched_tokens: PositiveInt | None = None
    """The most tokens computed in one step; default: vLLM's."""
    max_num_queued_reqs: Annotated[int, Field(ge=1, le=100_000)] = 1024
    """Sequences (of an embedding model: inputs) that a replica may have, computed and waiting together; further
    requests are refused with 429."""
    gpu_memory_utilization: _Fraction | None = None
    """The fraction of a GPU's memory that one replica takes; default: vLLM's, 0.92."""
    kv_cache_gib: Annotated[int, Field(ge=1, le=4096)] | None = None
    """On the CPU: memory of the key/value cache in GiB; default: VLLM_CPU_KVCACHE_SPACE in ``environment``, else 1."""
    kv_cache_dtype: _Word | None = None
    """Data type of the cache, such as ``fp8``; default: the model's."""
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = "auto"
    """Data type of weights and activations."""
    quantization: _Word | None = None
    """How the weights are quantized; default: read from the model's folder."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """The number of GPUs that a replica is spread over, starting with its ``device``."""
    enforce_eager: bool = False
    """Whether to compute without CUDA graphs, which saves memory and start-up time."""
    enable_prefix_caching: bool | None = None
    """Whether prompts that share a prefix with earlier prompts reuse their keys and values; default: if the model
    supports it."""
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0
    """Seed of sampling, for requests without a seed."""
    max_logprobs: Annotated[int, Field(ge=0, le=100)] = 20
    """The most alternatives that a request may ask for at each token."""
    generation_config: Annotated[Literal["auto", "none", "vllm"], AfterValidator(_flag_of_generation_config)] = "auto"
    """``auto``: sampling defaults come from the folder's ``generation_config.json``; ``none``, which vLLM calls
    ``vllm``: from OpenAI's API."""
    adapters: dict[str, Annotated[str, Field(min_length=1)]] = Field(default_factory=dict)
    """Folders of LoRA adapters of the model, by the names that they are served under."""
    max_loras: Annotated[int, Field(ge=1, le=256)] | None = None
    """The most LoRA adapters that may be used together in a step; default: the number of ``adapters`` at the start.
    Set it to load adapters later if there are none at the start."""
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] | None = None
    """The highest rank of an adapter; default: the lowest permitted value that fits all adapters at the start."""
    chat_template: Annotated[Path, AfterValidator(Path.expanduser), AfterValidator(Path.absolute)] | None = None
    """The file with the chat template; default: the model's."""
    tool_call_parser: _Word | None = None
    """vLLM's parser for the model's tool calls, such as ``hermes``; default: the model calls a tool only if the request
    names a tool or requires a call."""
    reasoning_parser: _Word | None = None
    """vLLM's parser for the model's reasoning, such as ``deepseek_r1``; default: reasoning is a part of the text."""
    max_step_s: PositiveSeconds = 60
    """Seconds that the engine may go without progress while it has requests, before the replica is replaced."""
    prefix_affinity: Annotated[float, Field(ge=0, le=100)] = 2
    """With several replicas: a request for text goes to the replica that had its prefix, if that replica has at most
    this many times the requests of the least busy replica; else, or if this is 0, to the least busy replica."""

    media_hosts: Annotated[list[Annotated[str, AfterValidator(_media_host)]], Field(max_length=1000)] = Field(
        default_factory=list
    )
    """Hosts that the gateway fetches images, recordings and videos from, if a request names them by URL: names or
    addresses, each with a port (then only at this port) or without (ports 80 and 443). Names must resolve to public
    addresses."""

    def _faults(self) -> Iterator[str]:
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            expected = f"expected at least max_num_seqs = {self.max_num_seqs}"
            yield f"max_num_batched_tokens: {expected}, got {self.max_num_batched_tokens}"


FORBIDDEN = {
    "host": "the gateway listens, vLLM doesn't",
    "port": "the gateway listens, vLLM doesn't",
    "uds": "the replica's socket is in its own folder",
    "api_key": "keys are the gateway's: `security.keys_file`",
    "middleware": "it would run code in front of the engine",
    "trust_remote_code": "it would run code of the model's folder",
    "served_model_name": "it is the deployment's name",
    "model": "it is the deployment's `model`",
    "enable_lora": "name `adapters` instead",
    "lora_modules": "name `adapters` instead",
}
"""The reason, or the option to use instead, for some refused flags of vLLM."""


def option_faults(options: Mapping[str, Any]) -> Iterator[str]:
    """Messages about faults in a deployment's ``options``; each message names the field."""
    try:
        VllmOptions.model_validate(dict(options))
    except ValidationError as error:
        yield from describe(error, VllmOptions, ("options",), refused=FORBIDDEN)
