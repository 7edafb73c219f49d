"""The machines in Ray's cluster, and the choice of a machine for a replica."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from headwater_server.config.sections import NodePlacement

__all__ = ["Node", "choose", "needs", "shortage"]

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]*\Z")


class Node(NamedTuple):
    """A machine that is alive."""

    id: str
    resources: Mapping[str, float]
    """Resources of the machine, by Ray's names."""
    free: Mapping[str, float]
    """Unreserved resources, by Ray's names, as far as Ray knows."""
    labels: Mapping[str, str]
    """Ray's labels of the machine: values by name."""
    address: str = ""
    """Address of the machine's raylet, ``HOST:PORT``."""


def needs(placement: NodePlacement, memory: int | None) -> dict[str, float]:
    """The resources that a replica reserves, by Ray's names.

    Args:
        placement: the deployment's placement.
        memory: the deployment's memory per replica, in bytes; None: none is declared. With GPUs this is GPU memory,
            which Ray does not reserve.
    """
    resources = {"GPU": placement.gpus, "CPU": placement.cpus}
    return resources if memory is None or placement.gpus else {**resources, "memory": memory}


def choose(
    placement: NodePlacement,
    memory: int | None,
    nodes: Iterable[Node],
    replica_counts: Mapping[str, int],
    reserved: Mapping[str, Iterable[Mapping[str, float]]],
) -> str:
    """The id of the machine for a replica; empty: no machine with the placement's labels has the resources now.

    A placement with ``pack`` prefers the machine with the most of the deployment's replicas, otherwise with the fewest.
    A replica that takes no GPU avoids machines with GPUs: with ``pack`` always, otherwise if another machine has no
    more of the deployment's replicas.

    Args:
        placement: the deployment's placement.
        memory: see `needs`.
        nodes: the machines that are alive.
        replica_counts: the number of the deployment's replicas on each machine.
        reserved: the reservations of all deployments' replicas, by machine. Ray may not know the newest of them yet.
    """
    takes = needs(placement, memory)

    def has_capacity(node: Node) -> bool:
        ours = list(reserved.get(node.id, ()))
        for name, amount in takes.items():
            unreserved = node.resources.get(name, 0) - sum(reservation.get(name, 0) for reservation in ours)
            if min(unreserved, node.free.get(name, 0)) < amount:
                return False
        return all(_is_selected(node.labels.get(name), value) for name, value in placement.labels.items())

    def cost(node: Node) -> tuple[float, ...]:
        wastes_gpus = bool(not placement.gpus and node.resources.get("GPU"))
        count, total = replica_counts.get(node.id, 0), len(list(reserved.get(node.id, ())))
        return (wastes_gpus, -count, -total) if placement.pack else (count, wastes_gpus, total)

    fitting = [node for node in nodes if has_capacity(node)]
    return min(fitting, key=lambda node: (cost(node), node.id)).id if fitting else ""


def shortage(placement: NodePlacement, nodes: Sequence[Node]) -> str:
    """Why no machine could have a replica even if it were empty; empty text: a machine could.

    Memory is not considered. Label selectors other than plain values are left to Ray.
    """
    if not nodes:
        return "Ray has no node"
    wants = {"GPU": placement.gpus, "CPU": placement.cpus}
    plain = {name: value for name, value in placement.labels.items() if _PLAIN.match(value)}
    fitting = [node for node in nodes if plain.items() <= node.labels.items()]
    if not fitting:
        return f"no node has the labels {plain}"
    for name, wanted in wants.items():
        largest = max(node.resources.get(name, 0) for node in fitting)
        if wanted > largest:
            return f"it takes {wanted:g} {name}, and the largest{' such' * bool(plain)} node has {largest:g}"
    if not any(all(node.resources.get(name, 0) >= wanted for name, wanted in wants.items()) for node in fitting):
        return f"no{' such' * bool(plain)} node has the {placement.gpus:g} GPU and {placement.cpus:g} CPU that it takes"
    return ""


def _is_selected(label: str | None, selector: str) -> bool:
    """Whether a label matches Ray's selector: ``a``, ``!a``, ``in(a,b)`` or ``!in(a,b)``."""
    bare = selector.removeprefix("!")
    values = bare[3:-1].split(",") if bare.startswith("in(") else [bare]
    return (label in {value.strip() for value in values}) is (bare == selector)
