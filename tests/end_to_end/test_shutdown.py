"""How a server ends, and what it is like to be without a part of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.running import SERVICES, Running, in_background, leftovers, processes_of, segments_of, serve, wait_for
from tests.token_streams import worker_of


def slow(marker: Path, **server: Any) -> dict[str, Any]:
    """A configuration with one deployment, `slow`."""
    deployment = {
        "model": "faulty:Slow",
        "options": {"marker": str(marker)},
        "batching": {"max_batch_size": 4, "max_queue_size": 8, "max_in_flight": 1},
        "warmup_batch_sizes": [],
    }
    return {"deployments": {"slow": deployment}, "server": server}


def sleep(running: Running, seconds: float) -> httpx.Response:
    """A request that takes so long."""
    return running.infer("slow", [seconds], shape=[1, 1])


def _is_refused(running: Running) -> bool:
    try:
        running.client.get(running.url + "/v2/health/live", timeout=5)
    except httpx.ConnectError:
        return True
    except (httpx.NetworkError, httpx.RemoteProtocolError):  # it waited when the gateway ended
        return False
    return False


def _takes_nothing_new(running: Running) -> bool:
    with contextlib.suppress(httpx.TransportError):  # a worker with nothing under way ends
        return running.get("/v2/models/slow").status_code == 503
    return False


@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGINT,), (signal.SIGTERM,), (signal.SIGHUP, signal.SIGHUP)],
    ids=lambda numbers: numbers[0].name,
)
def test_a_signal_drains_then_nobody_listens_and_nothing_is_left(
    tmp_path: Path, numbers: tuple[signal.Signals, ...]
) -> None:
    with serve(slow(tmp_path / "marker")) as running:
        segments = segments_of(running.folder)
        assert segments
        gate = running.gate()
        with in_background(lambda: sleep(running, gate.value), lambda: running.popen.wait(60)) as ends:
            wait_for(gate.has_begun, what="the call")
            for number in numbers:
                running.popen.send_signal(number)
                wait_for(lambda: running.get("/v2/health/ready").status_code == 503, 20, "not to be ready")
            assert running.get("/v2/health/live").status_code == 200
            refused = sleep(running, 0.0)
            assert (refused.status_code, "stopping" in refused.text) == (503, True)
            assert int(refused.headers["retry-after"]) >= 1
            gate.open()
            wait_for(lambda: _is_refused(running), 30, "connections to be refused, rather than to hang")
        answer, status = ends
        assert answer.status_code == 200, answer
        assert answer.json()["outputs"][0]["data"] == [gate.value]
        assert status == 0
        assert leftovers(running.folder, segments) == []


def test_under_nohup_the_end_of_the_terminal_ends_nothing(tmp_path: Path) -> None:
    with serve(slow(tmp_path / "marker"), prefix=("nohup",)) as running:
        running.popen.send_signal(signal.SIGHUP)
        running.popen.send_signal(signal.SIGTERM)
        assert running.popen.wait(60) == 0
        assert "SIGHUP" not in running.log.read_text()


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with serve(slow(tmp_path / "marker")) as running:
        segments = segments_of(running.folder)
        with in_background(lambda: sleep(running, 25.0)):
            wait_for((tmp_path / "marker").exists, what="the call")
            running.popen.send_signal(signal.SIGINT)
            wait_for(lambda: "SIGINT: stopping" in running.log.read_text(), what="the first to be taken")
            started = time.monotonic()
            running.popen.send_signal(signal.SIGINT)
            running.popen.wait(30)
            assert time.monotonic() - started < 20  # the call takes longer, and the first signal waits for it
        assert leftovers(running.folder, segments) == []


def answer_of_any(running: Running, path: str, body: bytes = b"") -> tuple[int, int, dict[str, str]]:
    """The worker that took a new connection, and its answer's status and headers."""
    with running.raw() as connection:
        port = connection.socket.getsockname()[1]
        worker: int = wait_for(lambda: worker_of(running, port), what="a worker to take the connection")
        method = b"POST" if body else b"GET"
        head = b"%b %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        connection.send(head % (method, path.encode(), len(body)) + body)
        status, headers, _ = connection.answer(method.decode())
        return worker, status, headers


def test_before_it_drains_the_server_says_everywhere_that_it_is_not_ready_and_serves_on(tmp_path: Path) -> None:
    with serve(slow(tmp_path / "marker", workers=2, drain_delay_s=600)) as running:
        segments = segments_of(running.folder)
        workers = set(running.workers())
        assert len(workers) == 2

        def every_worker_answers(status: int, path: str, body: bytes = b"") -> None:
            answered: set[int] = set()

            def all_have() -> bool:
                worker, got, headers = answer_of_any(running, path, body)
                assert (got, headers.get("connection")) == (status, "close"), (path, got, headers)
                answered.add(worker)
                return answered == workers

            wait_for(all_have, 60, f"{status} of {path} from every worker")

        assert answer_of_any(running, "/v2/health/ready")[1] == 200
        running.popen.send_signal(signal.SIGTERM)
        told: set[int] = set()

        def all_are_told() -> bool:
            worker, status, _ = answer_of_any(running, "/v2/health/ready")
            told.update({worker} if status == 503 else ())
            return told == workers

        wait_for(all_are_told, 60, "every worker to be told")
        every_worker_answers(503, "/v2/health/ready")
        every_worker_answers(503, "/v2/models/slow/ready")
        every_worker_answers(200, "/v2/health/live")
        every_worker_answers(200, "/v2/models/slow/generate", b'{"x": [0.0]}')
        gate = running.gate()
        with in_background(lambda: sleep(running, gate.value)) as answers:
            wait_for(gate.has_begun, what="the call")
            running.popen.send_signal(signal.SIGTERM)  # ends the delay, and nothing else
            wait_for(lambda: _takes_nothing_new(running), 20, "new requests to be refused")
            gate.open()
        assert answers[0].status_code == 200, answers[0]
        assert running.popen.wait(60) == 0
        assert leftovers(running.folder, segments) == []


@pytest.mark.parametrize(
    ("number", "delay_s", "least_s"),
    [(signal.SIGTERM, 1, 1), (signal.SIGHUP, 1, 1), (signal.SIGINT, 600, 0)],
    ids=["SIGTERM", "SIGHUP", "SIGINT"],
)
def test_only_sigint_is_followed_by_no_delay(
    tmp_path: Path, number: signal.Signals, delay_s: float, least_s: float
) -> None:
    with serve(slow(tmp_path / "marker", drain_delay_s=delay_s)) as running:
        started = time.monotonic()
        running.popen.send_signal(number)
        assert running.popen.wait(60) == 0
        assert time.monotonic() - started >= least_s
        assert leftovers(running.folder) == []


def test_a_request_that_outlasts_the_shutdown_timeout_gets_503(tmp_path: Path) -> None:
    with serve(slow(tmp_path / "marker", shutdown_timeout_s=1)) as running:
        with in_background(lambda: sleep(running, 25.0)) as answers:
            wait_for((tmp_path / "marker").exists, what="the call")
            started = time.monotonic()
            assert running.stop() == 0
            assert time.monotonic() - started < 20  # the call takes longer
        assert answers[0].status_code == 503, answers[0]


def test_nothing_survives_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    with serve(slow(tmp_path / "marker")) as running:
        segments = segments_of(running.folder)
        replica = running.replica_folder("slow")
        running.popen.kill()
        wait_for(lambda: not processes_of(running.folder), 60, "every process to end")
        wait_for(lambda: leftovers(replica, segments) == [], 60, "the replica's files and segments to be gone")
        # Nobody is left who could remove the instance's own folder: the next start does.
        stale = next(running.folder.glob("headwater-*"))
        with serve(slow(tmp_path / "marker", runtime_dir=str(running.folder))) as following:
            assert not stale.exists()
            assert str(stale) in following.log.read_text()
            assert following.stop() == 0
        assert leftovers(running.folder, segments) == []


def test_what_a_kill_of_everything_leaves_is_swept_by_the_next_start(tmp_path: Path) -> None:
    with serve(slow(tmp_path / "marker")) as running:
        segments = segments_of(running.folder)
        os.kill(running.process("slow", "guardian"), signal.SIGSTOP)  # can't sweep
        pids = processes_of(running.folder)
        for pid in (running.pid, *pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not processes_of(running.folder), 60, "every process to end")
        assert leftovers(running.folder, segments)
        with serve(slow(tmp_path / "marker", runtime_dir=str(running.folder))) as following:
            assert following.stop() == 0
        assert leftovers(running.folder, segments) == []


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with two gateway workers."""
    with serve(slow(tmp_path_factory.mktemp("pair") / "marker", workers=2)) as running:
        yield running
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


def test_a_second_server_with_the_same_runtime_dir_leaves_the_first_alone(pair: Running, tmp_path: Path) -> None:
    with serve(slow(tmp_path / "marker", runtime_dir=str(pair.folder))) as second:
        assert sleep(pair, 0.0).status_code == 200
        assert second.stop() == 0
    assert sleep(pair, 0.0).status_code == 200


def test_limits_are_shared_by_two_workers(pair: Running) -> None:
    # At most 4 rows compute for each worker, and at most half of the queue of 8 waits in each.
    gate = pair.gate()
    with in_background(*[lambda: sleep(pair, gate.value)] * 60) as answers:

        def all_are_decided() -> bool:
            return sum(answer is not None for answer in answers) + pair.in_flight("slow") == 60

        try:
            wait_for(all_are_decided, what="every request to wait or be refused")
        finally:
            gate.open()
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert 1 + 4 <= statuses.count(200) <= 2 * (4 + 4)


def test_a_gateway_worker_that_was_killed_is_replaced(pair: Running) -> None:
    before = pair.workers()
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    wait_for(lambda: len(set(pair.workers()) | set(before)) == 3 and len(pair.workers()) == 2, 180, "another worker")
    # The other goes on meanwhile, and the new one takes its share of the connections.
    answered: set[int | None] = set()

    def both_answer() -> bool:
        with httpx.Client(base_url=pair.url) as client:  # a connection of its own
            answer = client.post("/v2/models/slow/generate", json={"x": [0.0]})
            assert answer.status_code == 200
            _, port = answer.extensions["network_stream"].get_extra_info("client_addr")
            answered.add(worker_of(pair, port))
        return set(pair.workers()) <= answered

    wait_for(both_answer, 20, "both workers to answer")


def test_a_gateway_worker_that_is_stopped_is_replaced_and_may_go_on_too_late(pair: Running) -> None:
    before = pair.workers()
    assert len(before) == 2
    os.kill(before[0], signal.SIGSTOP)
    wait_for(lambda: before[0] not in pair.workers(), what="the end of the one that is stopped")
    with contextlib.suppress(ProcessLookupError):
        os.kill(before[0], signal.SIGCONT)
    wait_for(lambda: len(pair.workers()) == 2, 180, "another worker")
    assert f"({before[0]}) is stopped: killing it" in pair.log.read_text()
    assert sleep(pair, 0.0).status_code == 200


def test_the_only_gateway_worker_that_was_killed_is_replaced(tmp_path: Path) -> None:
    with serve(slow(tmp_path / "marker")) as running:
        replica = running.replica_folder("slow")
        os.kill(running.workers()[0], signal.SIGKILL)
        wait_for(lambda: running.is_ready(), 180, "another worker")
        assert sleep(running, 0.0).status_code == 200
        assert running.replica_folder("slow") == replica
        assert running.stop() == 0


def test_a_port_that_is_taken_ends_the_start_and_is_named(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config.write_text(yaml.safe_dump(slow(tmp_path / "marker", port=port, runtime_dir=str(tmp_path / "run"))))
        command = [sys.executable, "-m", "headwater_server", "serve", str(config)]
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        ended = subprocess.run(command, cwd=SERVICES, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "server.port" in ended.stderr
    assert str(port) in ended.stderr
    assert "Traceback" not in ended.stderr
    assert leftovers(tmp_path / "run") == []


def test_a_runtime_dir_too_deep_for_sockets_ends_the_start_and_is_named(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    deep = tmp_path / ("d" * 90)
    config.write_text(yaml.safe_dump(slow(tmp_path / "marker", port=0, runtime_dir=str(deep))))
    command = [sys.executable, "-m", "headwater_server", "serve", str(config)]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    ended = subprocess.run(command, cwd=SERVICES, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "server.runtime_dir" in ended.stderr
    assert "a unix socket's has 107" in ended.stderr
    assert leftovers(deep) == []


def _can_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return False
    command = ["unshare", "--fork", "--pid", "--mount-proc", "true"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not _can_make_namespaces(), reason="needs root, and leave to make a process namespace")
def test_as_process_1_it_reaps_orphans(tmp_path: Path) -> None:
    with serve(
        slow(tmp_path / "marker"), prefix=("unshare", "--fork", "--pid", "--mount-proc", "--kill-child")
    ) as running:
        supervisor = _children(running.pid)[0]
        assert _status(supervisor, "NSpid").split()[-1] == "1"
        # A shell in its namespace leaves a child behind, which becomes the supervisor's.
        enter = ["nsenter", "--target", str(supervisor), "--pid", "--mount"]
        script = "sleep 600 >/dev/null & echo started"
        entered = subprocess.run([*enter, "sh", "-c", script], stdout=subprocess.PIPE, text=True, timeout=30)
        assert "started" in entered.stdout
        (orphan,) = wait_for(
            lambda: [one for one in _children(supervisor) if _status(one, "Name") == "sleep"], what="the orphan"
        )
        os.kill(orphan, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{orphan}").exists(), 60, "the orphan to end and be reaped")
        assert sleep(running, 0.0).status_code == 200
        os.kill(supervisor, signal.SIGTERM)
        assert running.popen.wait(60) == 0
        assert leftovers(running.folder) == []


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _status(int(entry.name), "PPid") == str(parent):
            found.append(int(entry.name))
    return found


def _status(pid: int, field: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return line.partition(":")[2].strip()
    return ""
