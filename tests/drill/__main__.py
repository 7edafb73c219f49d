"""``python -m tests.drill [--scale 5] [--clients 12]``: rolling restarts under load, one pod killed, one hung.

The timings are those of the chart's Deployment, divided by the scale. Prints what each step lost; the exit status is 1
if that was more than it may be: nothing in a rolling restart, else what was in flight on the pod.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deploy.charts import only, variants
from tests.drill.balancer import Balancer, Place, balancer
from tests.drill.load import Load, load
from tests.running import Running, leftovers, processes_of, segments_of, serve, wait_for

PODS = 3
COMPUTE_S = 0.05
QUIET = 200
"""Answers before and after each step."""


@dataclass(frozen=True)
class Timings:
    """The chart's, in seconds, scaled."""

    ready_every_s: float
    ready_failures: int
    live_every_s: float
    live_failures: int
    pre_stop_s: float
    drain_delay_s: float
    shutdown_s: float
    grace_s: float
    """Not scaled: ending takes this machine as long as it takes."""


def chart_timings(scale: float) -> Timings:
    """The timings of the Deployment that the chart makes of its own values."""
    pod = only(variants()["default"], "Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    ready, live = container["readinessProbe"], container["livenessProbe"]
    return Timings(
        ready_every_s=ready["periodSeconds"] / scale,
        ready_failures=ready["failureThreshold"],
        live_every_s=live["periodSeconds"] / scale,
        live_failures=live["failureThreshold"],
        pre_stop_s=container["lifecycle"]["preStop"]["sleep"]["seconds"] / scale,
        drain_delay_s=float(variables["HEADWATER_SERVER__DRAIN_DELAY_S"]) / scale,
        shutdown_s=float(variables["HEADWATER_SERVER__SHUTDOWN_TIMEOUT_S"]) / scale,
        grace_s=pod["terminationGracePeriodSeconds"],
    )


class Pods:
    """The pods: what the kubelet and the controllers do to them."""

    def __init__(self, balancer: Balancer, timings: Timings) -> None:
        self._balancer = balancer
        self._timings = timings
        self._running: dict[int, tuple[Running, contextlib.ExitStack, set[str]]] = {}
        """The pod of each place, what ends it, and its shared memory."""

    @property
    def places(self) -> list[int]:
        """Where there are pods, the oldest first."""
        return list(self._running)

    def start(self, place: int) -> None:
        """Start a pod and wait until it gets connections."""
        own = contextlib.ExitStack()
        server = {
            "port": self._balancer.pods[place],
            "drain_delay_s": self._timings.drain_delay_s,
            "shutdown_timeout_s": self._timings.shutdown_s,
        }
        model = {"model": "scaled:Slow", "options": {"seconds": COMPUTE_S}, "warmup_batch_sizes": [1]}
        running = own.enter_context(serve({"deployments": {"slow": model}, "server": server}))
        self._running[place] = running, own, segments_of(running.folder)
        self._balancer.wait_until_up(place)

    def delete(self, place: int, *, by_endpoint: bool) -> None:
        """End a pod in order.

        Args:
            by_endpoint: as Kubernetes does, where new connections end during ``preStop``; else SIGTERM comes at once,
                and only checks tell.
        """
        running = self._running[place][0]
        if by_endpoint:
            late = threading.Timer(self._timings.pre_stop_s / 2, self._balancer.set_state, (place, "drain"))
            late.start()
            time.sleep(self._timings.pre_stop_s)
            late.join()
        running.popen.send_signal(signal.SIGTERM)
        status = running.popen.wait(self._timings.grace_s)
        assert status == 0, f"the pod ended with {status}:\n{running.log.read_text()[-3000:]}"
        self._forget(place)
        if by_endpoint:
            self._balancer.set_state(place, "ready")

    def gateway(self, place: int) -> list[int]:
        """The processes of a pod that answer clients, and the supervisor."""
        running = self._running[place][0]
        return [running.pid, *running.workers()]

    def kill(self, place: int) -> None:
        """Kill a pod."""
        running = self._running[place][0]
        for pid in self.gateway(place):
            os.kill(pid, signal.SIGKILL)
        running.popen.wait()
        wait_for(lambda: not processes_of(running.folder), 60, "the pod's processes to end")
        # The supervisor's folder stays, as a volume of the pod that goes with it.
        shutil.rmtree(running.folder)
        self._forget(place)

    def wait_for_liveness_failure(self, place: int) -> None:
        """Ask a pod as the liveness probe does, until it would be restarted."""
        failures = 0
        while failures < self._timings.live_failures:
            began_s = time.monotonic()
            probe = http.client.HTTPConnection(
                "127.0.0.1", self._balancer.pods[place], timeout=self._timings.live_every_s
            )
            with contextlib.closing(probe):
                try:
                    probe.request("GET", "/v2/health/live")
                    failures = 0 if probe.getresponse().status == 200 else failures + 1
                except (OSError, http.client.HTTPException):
                    failures += 1
            time.sleep(max(0.0, began_s + self._timings.live_every_s - time.monotonic()))

    def end(self) -> None:
        """End all."""
        with contextlib.ExitStack() as ends:
            for place, (running, own, _) in self._running.items():
                ends.push(own)
                ends.callback(self._forget, place)
                ends.callback(running.stop)

    def _forget(self, place: int) -> None:
        running, own, segments = self._running.pop(place)
        with own:
            left = leftovers(running.folder, segments)
        assert not left, f"left by a pod: {left}"


def roll(pods: Pods, *, by_endpoint: bool) -> None:
    """Replace all pods, each by one that is ready before it leaves."""
    for place in pods.places:
        (free,) = set(range(PODS + 1)) - set(pods.places)
        pods.start(free)
        pods.delete(place, by_endpoint=by_endpoint)


def kill(pods: Pods) -> None:
    """Kill a pod; it is started anew."""
    place = pods.places[0]
    pods.kill(place)
    pods.start(place)


def hang(pods: Pods) -> None:
    """Stop a pod's processes; it is killed when the liveness probe has failed, and started anew."""
    place = pods.places[0]
    for pid in pods.gateway(place):
        os.kill(pid, signal.SIGSTOP)
    pods.wait_for_liveness_failure(place)
    pods.kill(place)
    pods.start(place)


def connections_since(front: Balancer, place: int, before: Sequence[Place]) -> int:
    """How many connections a place had then or has got since; each can have lost one request."""
    was = before[place]
    return was.connections + front.places()[place].opened - was.opened


def step(name: str, act: Callable[[], None], seen: Load, bound: Callable[[], int]) -> bool:
    """Do something under load, print what was lost, and return whether that was too much."""

    def go_on() -> None:
        target = seen.answered + QUIET
        wait_for(lambda: seen.answered >= target, 60, f"{QUIET} answers")

    go_on()
    answered, lost, began_s = seen.answered, len(seen.lost), time.monotonic()
    act()
    took_s = time.monotonic() - began_s
    go_on()
    losses = seen.lost[lost:]
    most = bound()
    print(
        f"{name}: {seen.answered - answered} answered, {len(losses)} lost of at most {most}, {took_s:.1f} s", flush=True
    )
    for why, count in Counter(losses).most_common():
        print(f"    {count}: {why}")
    return len(losses) > most


def drill(scale: float, clients: int) -> bool:
    """All steps. Returns whether too much was lost."""
    timings = chart_timings(scale)
    print(timings)
    with tempfile.TemporaryDirectory(prefix="hw-") as folder, contextlib.ExitStack() as stack:
        front = stack.enter_context(balancer(Path(folder), PODS + 1, timings.ready_every_s, timings.ready_failures))
        pods = Pods(front, timings)
        try:
            for place in range(PODS):
                pods.start(place)
            with load(front.port, "slow", clients) as seen:
                results = [
                    step(f"rolling, {how}", functools.partial(roll, pods, by_endpoint=by), seen, lambda: 0)
                    for how, by in (("by endpoints", True), ("by checks", False))
                ]
                for name, act in (("one killed", kill), ("one hung", hang)):
                    bound = functools.partial(connections_since, front, pods.places[0], front.places())
                    results.append(step(name, functools.partial(act, pods), seen, bound))
        finally:
            pods.end()
    return any(results)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--scale", type=float, default=5, help="by what the chart's timings are divided; default: %(default)s"
    )
    parser.add_argument("--clients", type=int, default=12, help="that ask at once; default: %(default)s")
    options: Any = parser.parse_args()
    sys.exit(1 if drill(options.scale, options.clients) else 0)


if __name__ == "__main__":
    main()
