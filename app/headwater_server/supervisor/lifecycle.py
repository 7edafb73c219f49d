"""Operators' commands on a running server's models: load, unload, reload, scale, promote, rollback. Commands on the
same model never overlap: a command is refused while another command changes the model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from headwater.errors import LoadError
from headwater_server.config.schema import Deployment
from headwater_server.config.sections import ReplicaBounds
from headwater_server.control.messages import Command, CommandAnswer, Drained
from headwater_server.control.model_commands import ModelCommands
from headwater_server.control.routing import State
from headwater_server.errors import CallableFailed, Conflict, HeadwaterError, NotFound
from headwater_server.process.adapter_folders import find_adapters
from headwater_server.supervisor.adapters import changed_adapters, fit
from headwater_server.supervisor.child_processes import ChildProcesses
from headwater_server.supervisor.deployments import Deployments
from headwater_server.supervisor.replacement import Replacement, raise_first
from headwater_server.supervisor.replica_set import ReplicaSet
from headwater_server.supervisor.script_settings import Scripts, scripts_of
from headwater_server.supervisor.slot import Retired
from headwater_server.supervisor.states import VersionsState

__all__ = ["Lifecycle"]

logger = logging.getLogger("headwater")

TRAFFIC_ACTIONS: Final = ("promote", "rollback")


class Lifecycle:
    """Carries out operators' commands."""

    def __init__(self, deployments: Deployments, children: ChildProcesses) -> None:
        self._deployments = deployments
        self._children = children
        self._busy: dict[str, str] = {}
        """The running command, by model."""

    async def answer(
        self, command: Command, section: Deployment | None = None, why: str = "at an operator's request"
    ) -> CommandAnswer:
        """Carry out a command. A `HeadwaterError` is returned in the answer.

        Args:
            command: the operator's command.
            section: for a load or reload, the deployment's new configuration, which needs no permission; None: the
                command's ``config``, or the present configuration.
            why: the reason, for the log.
        """
        name, began = command.model, time.monotonic()
        base = self._deployments.base_of(name) if self._is_free(name) else None
        try:
            if base is not None:
                state, retired = await self._change_adapter(command, base)
            elif command.action in TRAFFIC_ACTIONS:
                return CommandAnswer(command.id, 200, self._change_traffic(command))
            else:
                state, retired = await self._change_replicas(command, section, why)
        except HeadwaterError as error:
            return CommandAnswer(command.id, error.status, {"error": error.message})
        content: dict[str, Any] = {
            "name": name,
            "state": state.value,
            "took_s": round(time.monotonic() - began, 3),
            **(retired.report() if retired is not None else {}),
        }
        if command.action == "scale":
            replica_set = self._deployments.sets[name]
            content["replicas"] = {
                "ready": len(replica_set.ready),
                "wanted": replica_set.wanted,
                "min": replica_set.bounds.min,
                "max": replica_set.bounds.max,
            }
        if retired is not None and retired.leftovers:
            content["error"] = f"model `{name}`: {command.action}: this remains: {retired.leftovers[0]}"
            logger.error("%s", content["error"])
        return CommandAnswer(command.id, 500 if "error" in content else 200, content)

    async def _change_replicas(
        self, command: Command, config: Deployment | None, why: str
    ) -> tuple[State, Retired | None]:
        """Load, unload, reload or scale a model. Returns the model's state afterwards, and the result of ending
        replicas; None: a load, or a ``scale`` that ended no replica. For ``config`` and ``why`` see `answer`."""
        actions = {"load": self._load, "unload": self._unload, "reload": self._reload}
        name, action, text = command.model, command.action, command.arguments.get("config")
        # An unknown name may be loaded if the command brings a configuration.
        if not (action == "load" and self._is_free(name) and (config or text) is not None):
            self._check(name, is_scale=action == "scale")
        with self._alone(action, name):
            addition = ""
            if config is None and text is not None:
                config = await self._proposed(name, text)
            if config is not None:
                addition = f", with a configuration that sets {', '.join(sorted(config.model_fields_set))}"
            logger.info("%s: %s, %s%s", name, action, why, addition)
            if action == "scale":
                retired = await self._deployments.sets[name].scale(ReplicaBounds.model_validate(command.arguments))
            else:
                retired = await actions[action](name, config)
        is_gone = self._is_free(name)  # unloaded, and not in the server's configuration
        return State.UNAVAILABLE if is_gone else self._deployments.served(name).state, retired

    async def _proposed(self, name: str, text: object) -> Deployment:
        """See `Deployments.proposed`. If the PyTriton scripts that the merged section names differ from the scripts in
        the server's configuration, all of them are run first, to see which fields they set."""
        proposed, original = self._deployments.proposed(name, text), self._deployments.first(name)
        if set(scripts_of(proposed)) == (set() if original is None else set(scripts_of(original))):
            return proposed
        both = [proposed] if original is None else [proposed, original]
        scripts = Scripts(self._children.search)
        await asyncio.to_thread(scripts.run, both)
        for warning in scripts.warnings():
            logger.warning("%s", warning)
        return self._deployments.proposed(name, text, scripts)

    def _change_traffic(self, command: Command) -> dict[str, Any]:
        """Change how requests are shared among versions, which takes effect at once. Returns the answer's content."""
        name, action, is_undo = command.model, command.action, bool(command.arguments.get("undo"))
        self._check(name)
        state = self._deployments.composites.get(name)
        if not isinstance(state, VersionsState):
            raise Conflict(f"model `{name}`: expected a deployment with `versions`; it has none")
        with self._alone(action, name):
            if action == "promote":
                config = state.promoted(str(command.arguments.get("version", "")))
            else:
                config = state.traffic_before(is_undo=is_undo)
            before = _shares(state.config)
            logger.info("%s: %s, at an operator's request: %s", name, action, _shares(config))
            self._deployments.adopt(name, config)
            if action == "rollback" and not is_undo:
                state.rolled_back = f"rolled back at an operator's request, from {before}"
        traffic = config.shared_traffic
        return {"name": name, "state": state.state.value, "traffic": traffic.shares, "default": traffic.default}

    async def _change_adapter(self, command: Command, base: str) -> tuple[State, Retired | None]:
        """Load or unload a LoRA adapter of the deployment ``base``. Returns the adapter's state afterwards, and the
        result of ending replicas."""
        name, action = command.model, command.action
        is_load = action == "load"
        is_there = name in self._deployments.config.deployments[base].adapters
        if action not in ("load", "unload") or command.arguments:
            expected = f"expected load or unload, without a configuration; or reload of `{base}`, with one"
            raise Conflict(f"model `{name}`: it is a LoRA adapter of `{base}`: {expected}")
        if is_there is is_load:
            raise Conflict(f"model `{name}`: the LoRA adapter is {'already' if is_there else 'not'} loaded")
        self._check(base)
        with self._alone(action, base):
            logger.info("%s: %s of the adapter `%s`, at an operator's request", base, action, name)
            retired = await self._reload(base, self._deployments.with_adapter(base, name, is_loaded=is_load))
        return self._deployments.sets[base].state if is_load else State.UNAVAILABLE, retired

    def _check(self, name: str, *, is_scale: bool = False) -> None:
        """Check that a command on a model is possible.

        Raises:
            NotFound: the model is unknown.
            Conflict: the model is a step or a version, on which only ``scale`` is allowed; or ``scale`` was asked of a
                model that has no replicas itself.
        """
        if self._is_free(name):
            shown = name if len(name) <= 100 else name[:97] + "..."
            models = ", ".join(f"`{model}`" for model in sorted(self._deployments.config.deployments))
            raise NotFound(f"model {shown!r}: unknown; this server has {models}")
        sets = self._deployments.own_sets(name)
        composite = self._deployments.composites.get(name)
        if composite is not None and is_scale:
            set_names = ", ".join(f"`{replica_set.name}`" for replica_set in sets)
            has = f"its {composite.parts} have replicas, and the model itself has no replicas"
            raise Conflict(f"model `{name}`: {has}; expected one of {set_names}")
        if composite is None and sets[0].part_of is not None and not is_scale:
            role = "version of" if sets[0].version else "step of the pipeline"
            text = f"it is a {role} `{sets[0].part_of}`, and is loaded and unloaded with it"
            raise Conflict(f"model `{name}`: {text}")

    def is_busy(self, name: str) -> bool:
        """Whether a command is running on a deployment, or on the pipeline or the deployment with versions that it
        belongs to."""
        return name in self._busy

    def _is_free(self, name: str) -> bool:
        """Whether a name is unknown."""
        return name not in self._deployments.sets and name not in self._deployments.composites

    @contextlib.contextmanager
    def _alone(self, action: str, name: str) -> Iterator[None]:
        """A context in which no other command on the model or its parts runs; publishes the state at its end.

        Raises:
            Conflict: another command is under way.
        """
        names = dict.fromkeys((name, *(replica_set.name for replica_set in self._deployments.own_sets(name))))
        for model in names:
            if model in self._busy:
                raise Conflict(f"model `{model}`: {self._busy[model]} is under way; expected {action} after its end")
        self._busy.update(dict.fromkeys(names, action))
        try:
            yield
        finally:
            for model in names:
                del self._busy[model]
            self._children.on_change()

    async def _load(self, name: str, config: Deployment | None) -> None:
        sets, composite = self._deployments.own_sets(name), self._deployments.composites.get(name)
        loaded = [replica_set for replica_set in sets if replica_set.is_loaded and not replica_set.slots.is_failing]
        is_whole = len(loaded) == len(sets) and (composite is None or composite.is_loaded)
        if not self._is_free(name) and (is_whole or (loaded and config is not None)):
            state = self._deployments.served(name).state.value
            loaded_text = "already loaded" if is_whole else "loaded in part"
            raise Conflict(f"model `{name}` is {state}: it is {loaded_text}; expected reload, or unload first")
        await asyncio.gather(*(replica_set.slots.end_failing() for replica_set in sets))
        await self._start_with(name, config)

    async def _start_with(self, name: str, config: Deployment | None) -> None:
        """Start the parts of a model that are not loaded, with another configuration if it is given. If there is no
        capacity and no part runs, the configuration before is restored."""
        undo = self._deployments.adopt(name, config) if config is not None else None
        try:
            await self._start(name)
        except Conflict:  # no capacity, perhaps only for a part
            if undo is not None and not any(replica_set.is_loaded for replica_set in self._deployments.own_sets(name)):
                undo()
            raise

    async def _start(self, name: str) -> None:
        """Start the parts of a model that are not loaded."""
        composite = self._deployments.composites.get(name)
        if composite is None:
            await self._deployments.sets[name].load()
            return
        missing = [replica_set for replica_set in self._deployments.own_sets(name) if not replica_set.is_loaded]
        before = None if composite.is_loaded else (composite.state, composite.reason)
        composite.hold(State.LOADING, f"loading its {composite.parts}, at an operator's request")
        self._children.on_change()
        outcomes = await asyncio.gather(*(replica_set.load() for replica_set in missing), return_exceptions=True)
        refused = [outcome for outcome in outcomes if isinstance(outcome, Conflict)]
        if before is not None and refused and len(refused) == len(outcomes) - outcomes.count(None):
            # There is no capacity for all parts, so the parts that did start are unloaded again.
            started = [replica_set for replica_set, outcome in zip(missing, outcomes, strict=True) if outcome is None]
            for replica_set in started:
                await replica_set.begin_unload(0.0)
            await asyncio.gather(*(replica_set.end_unload() for replica_set in started))
            composite.hold(*before)
            self._children.on_change()
            raise_first(outcomes)
        composite.release()
        self._children.on_change()
        raise_first(outcomes)
        if composite.state is not State.READY:
            text = f"its {composite.parts} are loaded, but it is {composite.state.value}: {composite.reason}"
            raise CallableFailed(f"model `{name}`: {text}")

    async def _unload(self, name: str, config: Deployment | None) -> Retired:
        assert config is None
        is_added, served = self._deployments.first(name) is None, self._deployments.served(name)
        if is_added:
            self._deployments.check_unneeded(name)
        elif not any(part.is_loaded for part in (served, *self._deployments.own_sets(name))):
            raise Conflict(f"model `{name}` is {served.state.value}, so there is nothing to unload: {served.reason}")
        retired = await self._end(name)
        ModelCommands(self._children.folder, name).forget()
        if is_added and not retired.leftovers:
            self._deployments.forget(name)
        return retired

    async def _end(self, name: str) -> Retired:
        """Drain a model and end its replicas. A pipeline drains before its steps, since its requests need them, and a
        deployment before its versions."""
        sets, composite = self._deployments.own_sets(name), self._deployments.composites.get(name)
        left_s = self._deployments.served(name).config.drain_timeout_s
        drained = Drained()
        if composite is not None:
            deadline = time.monotonic() + left_s
            composite.is_set_aside = True
            composite.hold(State.DRAINING, "it is being unloaded; requests in flight are still answered")
            self._children.on_change()
            drained = await self._children.drain(composite.name, left_s, None)
            left_s = max(0.0, deadline - time.monotonic())
        drained = sum(await asyncio.gather(*(replica_set.begin_unload(left_s) for replica_set in sets)), drained)
        if composite is not None:
            composite.hold(State.UNLOADING, f"its {composite.parts}' replicas are being ended")
        retired = sum(await asyncio.gather(*(replica_set.end_unload() for replica_set in sets)), Retired())
        if composite is not None:
            composite.note_unloaded(retired.leftovers)
            self._children.on_change()
        retired.drained = drained
        return retired

    async def _reload(self, name: str, config: Deployment | None) -> Retired:
        sets, served = self._deployments.own_sets(name), self._deployments.served(name)
        if not served.is_loaded:
            raise Conflict(f"model `{name}` is not loaded; expected load")
        if config is not None and isinstance(served, ReplicaSet):
            retired = await self._adapt(name, served, config)
            if retired is not None:
                return retired
        now = self._deployments.config.deployments[name]
        wanted = config or now
        if now.versions and wanted.versions and (wanted.strategy == "beside" or not _changed_versions(now, wanted)):
            return await self._reload_versions(name, wanted)
        if wanted.strategy == "recreate":
            retired = await self._end(name)
            if not retired.leftovers:
                try:
                    await self._start_with(name, config)
                except Conflict as error:
                    raise error.again(f"{error.message}; model `{name}` is unloaded now") from error
            return retired
        if not self._deployments.is_alike(name, wanted):
            raise Conflict(
                f"model `{name}`: this configuration changes the kind of the model or the steps of the pipeline, so "
                "old and new replicas can't serve together; expected strategy recreate, or unload the model first"
            )
        replacement = Replacement(self._deployments, self._children)
        await replacement.start(sets, wanted)
        if config is not None:
            self._deployments.adopt(name, config)
        return await replacement.take_over()

    async def _reload_versions(self, name: str, wanted: Deployment) -> Retired:
        """Start replicas of new and changed versions, or of all versions if the configuration is unchanged; then end
        removed versions and replaced replicas. A version that keeps its replicas only gets its new share of the
        traffic."""
        now, sets = self._deployments.config.deployments[name], self._deployments.sets
        wanted_sets = self._deployments.made(name, wanted)
        fresh = {set_name: replica_set for set_name, replica_set in wanted_sets.items() if set_name not in sets}
        gone = [replica_set for replica_set in self._deployments.own_sets(name) if replica_set.name not in wanted_sets]
        is_same = not fresh and not gone and now.shared_traffic == wanted.shared_traffic
        changed = _changed_versions(now, wanted) or (list(wanted.versions) if is_same else [])
        starting = [*fresh.values(), *(sets[f"{name}.{version}"] for version in changed)]
        replacement = Replacement(self._deployments, self._children)
        await replacement.start(starting, wanted)
        self._deployments.adopt_versions(name, wanted, fresh)
        return await replacement.take_over(gone)

    async def _adapt(self, name: str, replica_set: ReplicaSet, config: Deployment) -> Retired | None:
        """Load and unload adapters in serving replicas. Returns None, with nothing done, unless only adapters change,
        and the replicas can load the new adapters: a replica is ready, and no adapter's rank is too large.

        Raises:
            CallableFailed: an adapter can't be found, or a replica did not load it. Adapters that were loaded before
                serve on.
        """
        changed = changed_adapters(replica_set.config, config)
        signature = replica_set.signature
        if changed is None or signature is None or signature.vllm is None:
            return None
        (added, removed), search = changed, self._children.search
        try:
            new_adapters = await asyncio.to_thread(find_adapters, added, search)
        except LoadError as error:
            raise CallableFailed(str(error)) from error
        if added and not (
            replica_set.ready and all(a.rank <= signature.vllm.max_lora_rank for a in new_adapters.values())
        ):
            return None
        before = replica_set.config.adapters
        try:
            await _fit_all(replica_set, {**before, **added}, search)
        except CallableFailed as error:
            with contextlib.suppress(CallableFailed):
                await _fit_all(replica_set, before, search)
            raise error.again(f"{error.message}; the previous configuration still serves") from error
        replica_set.adapter_loads.update(added.keys())
        self._deployments.adopt(name, config)
        self._children.on_change()
        retired = Retired()
        if removed:
            retired.drained = await self._children.drain(name, config.drain_timeout_s, None, removed)
            try:
                await _fit_all(replica_set, config.adapters, search)
            except CallableFailed as error:  # no request reaches the adapter any more
                retired.warnings.append(error.message)
        return retired


def _shares(config: Deployment) -> str:
    """The shares of a deployment's versions, in words."""
    return ", ".join(
        f"{100 * share:g} % to version `{version}`" for version, share in config.shared_traffic.shares.items()
    )


def _changed_versions(now: Deployment, wanted: Deployment) -> list[str]:
    """Versions in both configurations with fields that differ."""
    both = [version for version in now.versions if version in wanted.versions]
    return [version for version in both if now.version(version) != wanted.version(version)]


async def _fit_all(replica_set: ReplicaSet, adapters: Mapping[str, str], search: list[str]) -> None:
    """Have all serving replicas load and unload adapters; raises as `fit`. On return every serving replica has exactly
    these adapters: nothing is awaited between that check and the return."""
    while late := [replica for replica in replica_set.ready.values() if replica.adapters != adapters]:
        fits = (fit(replica, adapters, search, replica_set.config.load_timeout_s) for replica in late)
        raise_first(await asyncio.gather(*fits, return_exceptions=True))
