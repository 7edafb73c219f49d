"""All calls of Ray, except in `holder`. Each call may take long: coroutine methods make it in a thread, and other
methods block the calling thread.

Of Ray's private parts it uses only `ray.experimental.internal_kv`, the key-value store, and
`ray._private.state.available_resources_per_node`, as Ray Serve does; tests/app/cluster/test_ray_client.py names the
functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

from headwater.environment import install_command
from headwater_server.cluster import holder
from headwater_server.cluster.nodes import Node, choose, needs, shortage
from headwater_server.config.sections import NodePlacement
from headwater_server.errors import StartError

__all__ = ["PREFIX", "ActorGone", "RayClient"]

logger = logging.getLogger("headwater")

PREFIX: Final = "replica:"
"""Prefix of the name of a replica's actor; the replica's id follows."""
NAMESPACE: Final = "headwater"
ORDER_TIMEOUT_S: Final = 5.0
CONNECT_TIMEOUT_S: Final = 30.0
ANSWER_TIMEOUT_S: Final = 1.0
THREADS: Final = 32
"""Limit of the threads that call Ray at once."""


class ActorGone(Exception):
    """An actor has ended for good, or there is no such actor."""


class RayClient:
    """A connection to Ray.

    Args:
        address: address of Ray's head, or ``auto``.

    Raises:
        StartError: Ray is not installed, there is no Ray at the address, or it does not answer in time.
    """

    def __init__(self, address: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise StartError(f"cluster.engine: Ray isn't installed: {install_command('cluster', 'ray')}") from error
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray: Any = ray
        self._connect(address)
        ray.cloudpickle.register_pickle_by_value(holder)
        self._threads = ThreadPoolExecutor(THREADS, "ray")
        self._asked_head: Future[object] | None = None
        self.head = str(ray.get_runtime_context().gcs_address)
        """Address of Ray's head."""

    def close(self) -> None:
        """End the connection; detached actors keep running."""
        self._ray.shutdown()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _connect(self, address: str) -> None:
        """Call `ray.init` with a time limit. By itself it waits forever and silently for a head that is gone."""
        done: Future[None] = Future()

        def connect() -> None:
            try:
                self._ray.init(
                    address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING,
                    configure_logging=False,
                )  # fmt: skip
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        # Ray would log that only a main thread can handle SIGTERM.
        logging.getLogger("ray._private.worker").setLevel(logging.ERROR)
        threading.Thread(target=connect, daemon=True).start()
        try:
            wait([done], CONNECT_TIMEOUT_S)
            if not done.done():
                raise TimeoutError(f"no answer within {CONNECT_TIMEOUT_S:g} s")
            done.result()
        except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
            text = _first_line(error)
            raise StartError(
                f"cluster.address: no Ray at {address!r}: {text}; start Ray with `ray start --head`, or name its head "
                "as HOST:PORT"
            ) from error

    def head_trouble(self, timeout_s: float) -> str:
        """The trouble with Ray's head, as text; empty: it answered within the timeout.

        A call that is still unanswered stays pending, and the next check waits for the same call.
        """
        if self._asked_head is None or self._asked_head.done():
            self._asked_head = self._threads.submit(self._kv("_internal_kv_get"), b"", NAMESPACE.encode())
        wait([self._asked_head], timeout_s)
        error = self._asked_head.exception() if self._asked_head.done() else TimeoutError()
        if error is None:
            return ""
        if "WrongClusterID" in str(error):
            return (
                f"Ray's head at {self.head} was restarted without its stored state: running replicas serve until Ray "
                "ends them; give the head a storage, and now run `ray stop` and `ray start` on every machine, then "
                "`headwater serve`"
            )
        return (
            f"Ray's head at {self.head} doesn't answer: running replicas serve, but no replica is placed, replaced or "
            "scaled; restart the head at this address"
        )

    async def _call(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    # Actors

    async def start_replica(
        self,
        name: str,
        command: Sequence[str],
        spec: bytes,
        environment: Mapping[str, str],
        placement: NodePlacement,
        memory: int | None,
        node: str = "",
    ) -> Any:
        """Start an actor that holds a replica's process, and return the actor. It may still wait for Ray to place it.

        Args:
            name: the actor's name.
            command: see `Holder`.
            spec: see `Holder`.
            environment: see `Holder`.
            placement: the deployment's placement.
            memory: see `needs`.
            node: the id of the preferred machine; empty: Ray chooses. If that machine has no capacity, the actor waits
                for it, and Ray's autoscaler starts no other machine.
        """
        takes = needs(placement, memory)
        options: dict[str, Any] = {"num_gpus": takes.pop("GPU"), "num_cpus": takes.pop("CPU"), "max_restarts": 0}
        options |= takes
        if placement.labels:
            options["label_selector"] = dict(placement.labels)
        if node:
            strategies = self._ray.util.scheduling_strategies
            options["scheduling_strategy"] = strategies.NodeAffinitySchedulingStrategy(node, soft=True)
        else:
            options["scheduling_strategy"] = "DEFAULT" if placement.pack else "SPREAD"
        return await self._call(self._start, name, list(command), spec, dict(environment), options)

    def start_supervisor(self, name: str, command: Sequence[str], spec: bytes, environment: Mapping[str, str]) -> Any:
        """Start an actor that holds the supervisor, or find the existing actor. Returns the actor. Ray
        restarts it, unless its process ends with status 0."""
        options = {"num_cpus": 0, "max_restarts": -1, "get_if_exists": True}
        return self._start(name, list(command), spec, dict(environment), options)

    def _start(
        self, name: str, command: list[str], spec: bytes, environment: dict[str, str], options: dict[str, Any]
    ) -> Any:
        is_restarted = options["max_restarts"] != 0
        kind = self._ray.remote(holder.Holder)
        actor_class = kind.options(name=name, lifetime="detached", max_concurrency=16, **options)
        return actor_class.remote(command, spec, environment, is_restarted)

    def find(self, name: str) -> Any:
        """The actor of this name.

        Raises:
            ActorGone: no actor has this name.
        """
        try:
            return self._ray.get_actor(name)
        except ValueError as error:
            raise ActorGone(name) from error

    async def replicas(self) -> dict[str, Any]:
        """The replicas' actors, by name."""

        def look() -> dict[str, Any]:
            actors = {}
            for name in self._ray.util.list_named_actors():
                if name.startswith(PREFIX):
                    try:
                        actors[name] = self._ray.get_actor(name)
                    except ValueError:  # the actor has ended
                        continue
            return actors

        actors: dict[str, Any] = await self._call(look)
        return actors

    async def said(self, actor: Any) -> str:
        """Wait for the first line that the actor's process writes; see `Holder.said`. No thread waits meanwhile.

        Raises:
            ActorGone: the actor has ended.
            TimeoutError: the actor can't be reached now.
        """
        reference = await self._call(actor.said.remote)
        with self._translated():
            return str(await asyncio.wrap_future(reference.future()))

    def ask(self, actor: Any, timeout_s: float) -> str:
        """Wait for the first line of the actor's process (see `said`) in the calling thread.

        Raises:
            ActorGone: the actor has ended.
            TimeoutError: the actor can't be reached now, or there is no line within ``timeout_s``.
        """
        with self._translated():
            return str(self._ray.get(actor.said.remote(), timeout=timeout_s))

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        errors = self._ray.exceptions
        try:
            yield
        except errors.GetTimeoutError as error:
            raise TimeoutError("no answer") from error
        except errors.ActorUnavailableError as error:
            raise TimeoutError(_first_line(error)) from error
        except errors.RayError as error:
            raise ActorGone(_first_line(error)) from error

    def ask_order(self, actor: Any, line: str) -> None:
        """Have an actor write a line to its process's standard input. Raises as `ask`, after `ORDER_TIMEOUT_S`."""
        with self._translated():
            self._ray.get(actor.order.remote(line), timeout=ORDER_TIMEOUT_S)

    async def kill(self, actor: Any) -> None:
        """End an actor, and its process with it; best effort."""

        def kill() -> None:
            try:
                self._ray.kill(actor, no_restart=True)
            except Exception as error:
                logger.debug("an actor could not be killed: %s", error)

        await self._call(kill)

    async def node_addresses(self) -> set[str]:
        """The addresses of the machines that are alive."""
        return {str(node["NodeManagerAddress"]) for node in await self._call(self._ray.nodes) if node["Alive"]}

    async def nodes(self) -> list[Node]:
        """The machines that are alive."""

        def look() -> list[Node]:
            free = self._ray._private.state.available_resources_per_node()
            return [
                Node(
                    id,
                    node["Resources"],
                    free.get(id, node["Resources"]),
                    node.get("Labels") or {},
                    f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}",
                )
                for node in self._ray.nodes()
                if node["Alive"] and (id := node["NodeID"])  # a new machine may not be in `free` yet
            ]

        nodes: list[Node] = await self._call(look)
        return nodes

    @staticmethod
    async def answers(node: Node) -> bool:
        """Whether a machine's raylet accepts connections. A failure shows that a machine is gone before Ray reports
        it."""
        host, _, port = node.address.rpartition(":")
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), ANSWER_TIMEOUT_S)
        except (OSError, asyncio.TimeoutError):
            return False
        writer.close()
        return True

    async def look(self, placement: NodePlacement, memory: int | None) -> tuple[str, bool]:
        """Why no machine of Ray's can ever have a replica (empty: a machine can; see `shortage`); and whether a machine
        has capacity for it now."""
        nodes = await self.nodes()
        return shortage(placement, nodes), bool(choose(placement, memory, nodes, {}, {}))

    # Storage

    async def put(self, key: str, value: bytes) -> None:
        """Store a value in Ray's head, in place of an earlier value."""
        await self._call(self._kv("_internal_kv_put"), key.encode(), value, True, NAMESPACE.encode())

    async def get(self, key: str) -> bytes | None:
        """A stored value; None: nothing is stored."""
        content: bytes | None = await self._call(self._kv("_internal_kv_get"), key.encode(), NAMESPACE.encode())
        return content

    async def delete(self, key: str) -> None:
        """Remove a stored value."""
        function = self._kv("_internal_kv_del")
        await self._call(lambda: function(key.encode(), namespace=NAMESPACE.encode()))

    def _kv(self, name: str) -> Any:
        from ray.experimental import internal_kv

        function = getattr(internal_kv, name)
        if name == "_internal_kv_get":
            return lambda key, namespace: function(key, namespace=namespace)
        if name == "_internal_kv_put":
            return lambda key, value, overwrite, namespace: function(
                key, value, overwrite=overwrite, namespace=namespace
            )
        return function


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
