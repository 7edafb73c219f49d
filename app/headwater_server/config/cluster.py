"""The section ``cluster``, for replicas on several machines; see docs/ray.md."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from headwater_server.config.sections import NodePlacement, Section

__all__ = ["Cluster", "placement_of"]


class Cluster(Section):
    """The cluster whose nodes run the replicas. It is read separately from the other sections of a `Config`, which are
    the same for one machine and for many."""

    engine: Literal["ray"]
    address: Annotated[str, Field(min_length=1)] = "auto"
    """Address of Ray's head, ``HOST:PORT``; ``auto``: the Ray cluster that this machine belongs to."""
    host: str | None = None
    """The address that the supervisor and replicas' ports listen on, on every node. Default: with ``tls`` each node's
    address in Ray; without it 127.0.0.1, which only gateways on the same machine reach."""
    tls: Annotated[Path, AfterValidator(Path.expanduser), AfterValidator(Path.absolute)] | None = None
    """The folder with ``ca.crt``, ``tls.crt`` and ``tls.key``, by which gateways, supervisors and replicas' ports prove
    to each other that they belong to the cluster; the same path on every node. Default: no TLS."""

    def _faults(self) -> Iterator[str]:
        if self.tls is None and self.host is not None and not _is_loopback(self.host):
            why = "whoever reaches the replicas' ports could use them; set `cluster.tls`"
            yield f"host: expected a loopback address without `cluster.tls`, got {self.host!r}: {why}"


def placement_of(device: str | tuple[str, ...] | NodePlacement, gpus: int) -> NodePlacement:
    """The placement that a deployment's ``device`` means in a cluster.

    Args:
        device: the field's value; ``auto`` means a CPU here.
        gpus: the number of GPUs that a replica is spread over, if ``device`` is ``cuda``.

    Raises:
        ValueError: the field names GPUs of a machine, but in a cluster Ray chooses the GPUs.
    """
    if isinstance(device, NodePlacement):
        return device
    if device == "cuda":
        return NodePlacement(gpus=gpus)
    if device in ("auto", "cpu"):
        return NodePlacement()
    expected = "expected cpu, cuda, or {gpus, cpus, labels, pack}, since Ray chooses the GPUs"
    raise ValueError(f"device: {expected}, got {device!r}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
