"""What an operator may have done to a running server's models: load, unload, reload. One thing at a time per model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from app.config.schema import Deployment
from app.config.sections import ReplicaBounds
from app.control.messages import Command, CommandAnswer, Drained
from app.control.routing import State
from app.errors import CallableFailed, Conflict, HeadwaterError, NotFound
from app.supervisor.deployments import Deployments, config_of
from app.supervisor.graph_state import GraphState
from app.supervisor.host import Host
from app.supervisor.replica_set import ReplicaSet
from app.supervisor.starter import Retired, stop_or_kill

__all__ = ["Lifecycle"]

logger = logging.getLogger("headwater")


class Lifecycle:
    """Carries out operators' commands.

    Args:
        deployments: everything that is served.
        host: who has the replicas.
    """

    def __init__(self, deployments: Deployments, host: Host) -> None:
        self._deployments = deployments
        self._host = host
        self._busy: dict[str, str] = {}
        """What is under way, by model."""

    async def answer(self, command: Command) -> CommandAnswer:
        """Carry a command out. Whatever keeps it from succeeding is in the answer."""
        actions = {"load": self._load, "unload": self._unload, "reload": self._reload}
        name = command.model
        config = command.arguments.get("config")
        began = time.monotonic()
        try:
            # A name that there isn't may be loaded with a configuration of its own.
            is_new = command.action == "load" and config is not None and self._is_free(name)
            is_scale = command.action == "scale"
            sets, graph = ([], None) if is_new else self._find(name, is_scale=is_scale)
            with self._alone(command.action, name, sets):
                addition = ""
                if config is not None:
                    config = self._deployments.proposed(name, config)
                    addition = f", with a configuration that sets {', '.join(sorted(config.model_fields_set))}"
                logger.info("%s: %s, as an operator wants%s", name, command.action, addition)
                if is_scale:
                    retired = await sets[0].scale(ReplicaBounds.model_validate(command.arguments))
                else:
                    retired = await actions[command.action](name, sets, graph, config)
        except HeadwaterError as error:
            return CommandAnswer(command.id, error.status, {"error": error.message})
        if not is_scale and not self._is_free(name):  # it is there, and perhaps anew
            sets, graph = self._find(name)
        content: dict[str, Any] = {
            "name": name,
            "state": (graph or sets[0]).state.value,
            "took_s": round(time.monotonic() - began, 3),
            **({"replicas": _replicas(sets[0])} if is_scale else {}),
            **(retired.report() if retired is not None else {}),
        }
        if retired is not None and retired.leftovers:
            content = {"error": f"model `{name}`: {command.action}: this remains: {retired.leftovers[0]}", **content}
        if "error" in content:
            logger.error("%s", content["error"])
        return CommandAnswer(command.id, 500 if "error" in content else 200, content)

    def _find(self, name: str, *, is_scale: bool = False) -> tuple[list[ReplicaSet], GraphState | None]:
        """The deployments that go by a name, and the pipeline if it is one's.

        Raises:
            NotFound: there is none.
            Conflict: it is a step; or, for a scaling, it has no replicas itself.
        """
        sets, graphs = self._deployments.sets, self._deployments.graphs
        graph = graphs.get(name)
        if graph is not None:
            own = self._deployments.own_sets(name)
            if is_scale:
                raise Conflict(
                    f"model `{name}`: its steps have replicas, and it has none itself; expected one of "
                    f"{', '.join(f'`{one.name}`' for one in own)}"
                )
            return own, graph
        found = sets.get(name)
        if found is None:
            shown = name if len(name) <= 100 else name[:97] + "..."
            known = [*(one.name for one in sets.values() if one.part_of is None), *graphs]
            raise NotFound(
                f"model {shown!r}: unknown; this server has {', '.join(f'`{one}`' for one in sorted(known))}"
            )
        if found.part_of is not None and not is_scale:
            raise Conflict(
                f"model `{name}`: it is a step of the pipeline `{found.part_of}`, and is loaded and unloaded with it"
            )
        return [found], None

    def is_busy(self, name: str) -> bool:
        """Whether a command is under way with a deployment, or with the pipeline that it is a step of."""
        return name in self._busy

    def _is_free(self, name: str) -> bool:
        """Whether nothing goes by a name."""
        return name not in self._deployments.sets and name not in self._deployments.graphs

    @contextlib.contextmanager
    def _alone(self, action: str, name: str, sets: list[ReplicaSet]) -> Iterator[None]:
        names = dict.fromkeys((name, *(one.name for one in sets)))
        for one in names:
            if one in self._busy:
                raise Conflict(f"model `{one}`: {self._busy[one]} is under way; expected {action} after its end")
        self._busy.update(dict.fromkeys(names, action))
        try:
            yield
        finally:
            for one in names:
                del self._busy[one]
            self._host.on_change()

    async def _load(
        self, name: str, sets: list[ReplicaSet], graph: GraphState | None, config: Deployment | None
    ) -> None:
        loaded = [one for one in sets if one.is_loaded]
        is_whole = len(loaded) == len(sets) and (graph is None or graph.is_loaded)
        is_there = bool(sets) or graph is not None
        if is_there and (is_whole or (loaded and config is not None)):
            state = (graph or sets[0]).state.value
            raise Conflict(
                f"model `{name}` is {state}: it is loaded {'already' if is_whole else 'in part'}; expected reload, or "
                "unload first"
            )
        await self._start_with(name, config)

    async def _start_with(self, name: str, config: Deployment | None) -> None:
        """Start what of a model is not loaded, with another configuration if there is one."""
        kept = self._deployments.kept(name)
        if config is not None:
            self._deployments.adopt(name, config)
        try:
            await self._start(name)
        except Conflict:  # there is no room, so nothing was begun
            if config is not None and not any(one.is_loaded for one in self._deployments.own_sets(name)):
                self._deployments.restore(name, kept)
                self._host.on_change()
            raise

    async def _start(self, name: str) -> None:
        """Start what of a model is not loaded."""
        sets, graph = self._find(name)
        missing = [one for one in sets if not one.is_loaded]
        if graph is None:
            await sets[0].load()
            return
        before = None if graph.is_loaded else (graph.state, graph.reason)
        graph.hold(State.LOADING, "loading its steps, as an operator wants")
        self._host.on_change()
        outcomes = await asyncio.gather(*(one.load() for one in missing), return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, Conflict)]
        if before is not None and refused and len(refused) == len(outcomes) - outcomes.count(None):
            # There is no room for all of it, so none of it stays.
            started = [one for one, outcome in zip(missing, outcomes, strict=True) if outcome is None]
            for one in started:
                await one.begin_unload(0.0)
            await asyncio.gather(*(one.end_unload() for one in started))
            graph.hold(*before)
            self._host.on_change()
            _raise_first(outcomes)
        graph.release()
        self._host.on_change()
        _raise_first(outcomes)
        if graph.state is not State.READY:
            raise CallableFailed(
                f"model `{name}`: its own steps are loaded, but it is {graph.state.value}: {graph.reason}"
            )

    async def _unload(
        self, name: str, sets: list[ReplicaSet], graph: GraphState | None, config: Deployment | None
    ) -> Retired:
        assert config is None
        is_added = self._deployments.is_added(name)
        if is_added:
            self._deployments.check_unneeded(name)
        if not any(one.is_loaded for one in sets) and not (graph is not None and graph.is_loaded) and not is_added:
            served = graph or sets[0]
            raise Conflict(f"model `{name}` is {served.state.value}, so there is nothing to unload: {served.reason}")
        retired = await self._end(sets, graph)
        if is_added and not retired.leftovers:
            self._deployments.forget(name)
            self._host.on_change()
        return retired

    async def _end(self, sets: list[ReplicaSet], graph: GraphState | None) -> Retired:
        """Drain a model, end its replicas, and see what is left of them.

        A pipeline drains first: its requests in flight need its steps to their end.
        """
        left_s = (graph or sets[0]).config.drain_timeout_s
        drained = Drained()
        if graph is not None:
            deadline = time.monotonic() + left_s
            graph.is_set_aside = True
            graph.hold(State.DRAINING, "it is being unloaded; requests in flight are still answered")
            self._host.on_change()
            drained = await self._host.drain(graph.name, left_s, None)
            left_s = max(0.0, deadline - time.monotonic())
        drained = sum(await asyncio.gather(*(one.begin_unload(left_s) for one in sets)), drained)
        if graph is not None:
            graph.hold(State.UNLOADING, "its steps' replicas are being ended")
        retired = sum(await asyncio.gather(*(one.end_unload() for one in sets)), Retired())
        if graph is not None:
            graph.note_unloaded(retired.leftovers)
            self._host.on_change()
        retired.drained = drained
        return retired

    async def _reload(
        self, name: str, sets: list[ReplicaSet], graph: GraphState | None, config: Deployment | None
    ) -> Retired:
        if not (graph.is_loaded if graph is not None else sets[0].is_loaded):
            raise Conflict(f"model `{name}` is not loaded; expected load")
        wanted = config or self._deployments.config.deployments[name]
        if wanted.strategy == "recreate":
            retired = await self._end(sets, graph)
            if not retired.leftovers:
                try:
                    await self._start_with(name, config)
                except Conflict as error:
                    raise error.again(f"{error.message}; model `{name}` is unloaded now") from error
            return retired
        if not self._deployments.is_alike(name, wanted):
            raise Conflict(
                f"model `{name}`: with this configuration it is another kind of model, or a pipeline of other steps, "
                "which can't serve beside the old one; expected strategy recreate, or unload first"
            )
        outcomes = await asyncio.gather(
            *(one.start_fresh(config_of(one, wanted)) for one in sets), return_exceptions=True
        )
        fresh = [(one, outcome) for one, outcome in zip(sets, outcomes, strict=True) if isinstance(outcome, list)]
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        failures += [lost for one, started in fresh if (lost := one.starter.lost(started)) is not None]
        if failures:
            await stop_or_kill([replica for _, started in fresh for replica in started])
            _raise_first(failures, "; what served before goes on serving")
        if config is not None:
            self._deployments.adopt(name, config)
        # All at once: the steps of a pipeline fit each other.
        old = [one.switch(started) for one, started in fresh]
        self._host.on_change()
        retiring = (one.retire(slots) for one, slots in zip(sets, old, strict=True))
        return sum(await asyncio.gather(*retiring), Retired())


def _replicas(one: ReplicaSet) -> dict[str, int]:
    """How many a deployment has, as an operator is told."""
    return {"ready": len(one.ready), "wanted": one.wanted, "min": one.bounds.min, "max": one.bounds.max}


def _raise_first(outcomes: list[Any], addition: str = "") -> None:
    """Raise the first failure among what was gathered."""
    for outcome in outcomes:
        if isinstance(outcome, HeadwaterError):
            raise outcome.again(outcome.message + addition)
        if isinstance(outcome, BaseException):
            raise outcome
