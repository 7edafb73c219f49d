"""What an operator may have done to a running server's models: load, unload, reload. One thing at a time per model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from app.control import Command, CommandAnswer
from app.errors import CallableFailed, Conflict, HeadwaterError, NotFound
from app.graph_state import GraphState
from app.replica_host import Host
from app.replica_set import ReplicaSet, unloaded
from app.retired import Retired
from app.routing import State

__all__ = ["Lifecycle"]

logger = logging.getLogger("headwater")

DRAINING_REASON: Final = "it is being unloaded; requests in flight are still answered"


class Lifecycle:
    """Carries out operators' commands.

    Args:
        sets: every deployment that has replicas, by name.
        graphs: every pipeline whose steps are deployments, by name.
        host: who has them.
    """

    def __init__(self, sets: Mapping[str, ReplicaSet], graphs: Mapping[str, GraphState], host: Host) -> None:
        self._sets = sets
        self._graphs = graphs
        self._host = host
        self._busy: dict[str, str] = {}
        """What is under way, by model."""

    async def answer(self, command: Command) -> CommandAnswer:
        """Carry a command out. Whatever keeps it from succeeding is in the answer."""
        actions = {"load": self._load, "unload": self._unload, "reload": self._reload}
        name = command.model
        began = time.monotonic()
        try:
            sets, graph = self._find(name)
            with self._alone(command.action, name, sets):
                logger.info("%s: %s, as an operator wants", name, command.action)
                retired = await actions[command.action](name, sets, graph)
        except HeadwaterError as error:
            return CommandAnswer(command.id, error.status, {"error": error.message})
        state = graph.state if graph is not None else sets[0].state
        content: dict[str, Any] = {
            "name": name,
            "state": state.value,
            "took_s": round(time.monotonic() - began, 3),
            **(retired.told() if retired is not None else {}),
        }
        if retired is not None and retired.leftovers:
            content = {"error": f"model `{name}`: {command.action}: this remains: {retired.leftovers[0]}", **content}
        if "error" in content:
            logger.error("%s", content["error"])
        return CommandAnswer(command.id, 500 if "error" in content else 200, content)

    def _find(self, name: str) -> tuple[list[ReplicaSet], GraphState | None]:
        """The deployments that go by a name, and the pipeline if it is one's.

        Raises:
            NotFound: there is none.
            Conflict: it is a step.
        """
        graph = self._graphs.get(name)
        if graph is not None:
            return [one for one in self._sets.values() if one.part_of == name], graph
        found = self._sets.get(name)
        if found is None:
            shown = name if len(name) <= 100 else name[:97] + "..."
            known = [*(one.name for one in self._sets.values() if one.part_of is None), *self._graphs]
            raise NotFound(
                f"model {shown!r}: unknown; this server has {', '.join(f'`{one}`' for one in sorted(known))}"
            )
        if found.part_of is not None:
            raise Conflict(
                f"model `{name}`: it is a step of the pipeline `{found.part_of}`, and is loaded and unloaded with it"
            )
        return [found], None

    @contextlib.contextmanager
    def _alone(self, action: str, name: str, sets: list[ReplicaSet]) -> Iterator[None]:
        if name in self._busy:
            raise Conflict(f"model `{name}`: {self._busy[name]} is under way; expected {action} after its end")
        names = {name, *(one.name for one in sets)}
        self._busy.update(dict.fromkeys(names, action))
        try:
            yield
        finally:
            for one in names:
                del self._busy[one]

    async def _load(self, name: str, sets: list[ReplicaSet], graph: GraphState | None) -> None:
        missing = [one for one in sets if not one.is_loaded]
        if not missing and (graph is None or graph.is_loaded):
            state = graph.state if graph is not None else sets[0].state
            raise Conflict(f"model `{name}` is {state.value}: it is loaded already; expected reload, or unload first")
        if graph is None:
            await sets[0].load()
            return
        graph.hold(State.LOADING, "loading its steps, as an operator wants")
        self._host.on_change()
        outcomes = await asyncio.gather(*(one.load() for one in missing), return_exceptions=True)
        graph.is_loaded = True
        graph.is_set_aside = False
        graph.release()
        self._host.on_change()
        _raise_first(outcomes)
        if graph.state is not State.READY:
            raise CallableFailed(
                f"model `{name}`: its own steps are loaded, but it is {graph.state.value}: {graph.reason}"
            )

    async def _unload(self, name: str, sets: list[ReplicaSet], graph: GraphState | None) -> Retired:
        loaded = [one for one in sets if one.is_loaded]
        if not loaded and (graph is None or not graph.is_loaded):
            state, reason = (graph.state, graph.reason) if graph is not None else (sets[0].state, sets[0].reason)
            raise Conflict(f"model `{name}` is {state.value}, so there is nothing to unload: {reason}")
        if graph is not None:
            return await self._unload_graph(graph, loaded)
        drained = await sets[0].begin_unload(sets[0].config.drain_timeout_s)
        retired = await sets[0].end_unload()
        retired.drained = drained
        return retired

    async def _unload_graph(self, graph: GraphState, own: list[ReplicaSet]) -> Retired:
        """Unload a pipeline with its own steps, which its requests in flight need to their end."""
        timeout_s = graph.config.drain_timeout_s
        deadline = time.monotonic() + timeout_s
        graph.is_loaded = False
        graph.is_set_aside = True
        graph.hold(State.DRAINING, DRAINING_REASON)
        self._host.on_change()
        drained = await self._host.drain(graph.name, timeout_s, None)
        left_s = max(0.0, deadline - time.monotonic())
        for more in await asyncio.gather(*(one.begin_unload(left_s) for one in own)):
            drained += more
        graph.hold(State.UNLOADING, "its steps' replicas are being ended")
        retired = Retired()
        for one in await asyncio.gather(*(one.end_unload() for one in own)):
            retired += one
        if retired.leftovers:
            graph.is_set_aside = False
            graph.hold(State.FAILED, f"unloaded, but this remains: {'; '.join(retired.leftovers)}")
        else:
            graph.hold(State.UNAVAILABLE, unloaded(graph.name))
        self._host.on_change()
        retired.drained = drained
        return retired

    async def _reload(self, name: str, sets: list[ReplicaSet], graph: GraphState | None) -> Retired:
        if not (graph.is_loaded if graph is not None else sets[0].is_loaded):
            raise Conflict(f"model `{name}` is not loaded; expected load")
        config = graph.config if graph is not None else sets[0].config
        if config.strategy == "recreate":
            retired = await self._unload(name, sets, graph)
            if not retired.leftovers:
                await self._load(name, sets, graph)
            return retired
        outcomes = await asyncio.gather(*(one.start_fresh() for one in sets), return_exceptions=True)
        if any(isinstance(outcome, BaseException) for outcome in outcomes):
            for one, outcome in zip(sets, outcomes, strict=True):
                if not isinstance(outcome, BaseException):
                    await one.discard(outcome)
            _raise_first(outcomes, "; what served before goes on serving")
        # All at once: the steps of a pipeline fit each other.
        old = [one.switch(fresh) for one, fresh in zip(sets, outcomes, strict=True) if isinstance(fresh, list)]
        retired = Retired()
        for more in await asyncio.gather(*(one.retire(slots) for one, slots in zip(sets, old, strict=True))):
            retired += more
        return retired


def _raise_first(outcomes: list[Any], addition: str = "") -> None:
    """Raise the first failure among what was gathered."""
    for outcome in outcomes:
        if isinstance(outcome, HeadwaterError):
            raise outcome.again(outcome.message + addition)
        if isinstance(outcome, BaseException):
            raise outcome
