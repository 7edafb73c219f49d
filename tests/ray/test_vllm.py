"""A real vLLM on a cluster: asked, cancelled, adapted, killed and unloaded through gateways on other nodes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.certificates import authority, issue
from tests.app.lm.scripted import FOLDER as TINY_LM
from tests.ray.conftest import Served
from tests.ray.raylets import Gateway, gateway, hosts, raylets, stop_cluster
from tests.running import wait_for
from tests.vllm.conftest import vllm_python
from tests.vllm.test_adapters import PROMPT, write_adapter

__all__ = ["vllm_python"]

pytestmark = [pytest.mark.heavy, pytest.mark.ray, pytest.mark.vllm]

START_S = 300.0
REPLICAS = 2


@pytest.fixture(scope="module")
def served(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A cluster of three nodes with two replicas of ``tiny``, each on a node of its own, and its adapter ``first``."""
    pytest.importorskip("ray", reason="needs Ray: run `make test-ray`")
    folder = tmp_path_factory.mktemp("ray")
    tls = issue(authority(folder), folder / "peer")
    shutil.copytree(TINY_LM, folder / "tiny_lm")
    config = json.loads((folder / "tiny_lm" / "config.json").read_text())
    (folder / "tiny_lm" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16_384}))
    adapter = write_adapter(folder / "first", 0)
    tiny = {
        "model": f"vllm:{folder / 'tiny_lm'}",
        "python": vllm_python,
        "replicas": REPLICAS,
        "options": {"dtype": "float32", "max_num_seqs": 4, "adapters": {"first": str(adapter)}},
        "drain_timeout_s": 2,
    }
    with raylets(own_cores=True) as found:
        try:
            with (
                gateway(found.address, folder, {"tiny": tiny}, tls=tls, within_s=START_S) as serving,
                gateway(found.address, folder, None) as joined,
            ):
                wait_for(lambda: joined.replicas("tiny") == REPLICAS, START_S, "all replicas", every_s=0.5)
                yield Served(found, serving, joined)
        finally:
            stop_cluster(found.address)


class Chat:
    """A chat completion that streams, read in a thread to its end."""

    def __init__(self, gateway: Gateway, id: str, tokens: int = 15_000, model: str = "tiny") -> None:
        self.events: list[str] = []
        self._gateway, self._id = gateway, id
        message = {"role": "user", "content": "Once"}
        self._body = {"model": model, "messages": [message], "stream": True, "max_tokens": tokens, "ignore_eos": True}
        self.thread = threading.Thread(target=self._read)
        self.thread.start()
        wait_for(lambda: len(self.events) > 3 or not self.thread.is_alive(), 60, "the stream to run")

    def _read(self) -> None:
        ask = self._gateway.client.stream(
            "POST", "/v1/chat/completions", json=self._body, headers={"X-Request-Id": self._id}
        )
        with ask as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))

    def ended(self) -> str:
        """The event before the last one, once it has ended."""
        self.thread.join(60)
        assert self.events[-1] == "[DONE]"
        return self.events[-2]


def engines(served: Served) -> list[psutil.Process]:
    """vLLM's servers, one for each replica."""
    found = []
    for node in served.raylets.nodes:
        for process in served.raylets.tree(node):
            with contextlib.suppress(psutil.Error):
                if "vllm.entrypoints.openai.api_server" in process.cmdline():
                    found.append(process)
    return found


def completion(gateway: Gateway, model: str = "tiny") -> tuple[int, str]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    answer = gateway.client.post("/v1/completions", json=body)
    found = answer.json()
    return answer.status_code, found["choices"][0]["text"] if answer.status_code == 200 else str(found)


def counts_active(gateway: Gateway, count: int) -> bool:
    """Whether a gateway's ``/metrics`` say that the engines compute so many sequences."""
    text = gateway.client.get("/metrics").text
    found = re.findall(r"^headwater_active_sequences(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found)) == count


def test_each_gateway_streams_from_replicas_on_other_nodes(served: Served) -> None:
    assert len(engines(served)) == REPLICAS
    for one in (served.serving, served.joined):
        chat = Chat(one, "short", tokens=40)
        assert '"finish_reason":"length"' in chat.ended()


def test_both_replicas_loads_are_seen_by_each_gateway(served: Served) -> None:
    chats = [Chat(served.serving, f"seen-{number}") for number in range(2 * REPLICAS)]
    for one in (served.serving, served.joined):  # the second has no request of its own
        wait_for(functools.partial(counts_active, one, len(chats)), 20, "all sequences to be counted")
    for number, chat in enumerate(chats):
        answer = served.joined.client.post(f"/v2/requests/seen-{number}/cancel")  # they run at the other gateway
        assert (answer.status_code, answer.json()["cancelled"]) == (200, 1)
        assert "cancelled" in chat.ended()
    for one in (served.serving, served.joined):
        wait_for(functools.partial(counts_active, one, 0), 20, "the engines to be idle")


def test_an_adapter_is_unloaded_and_loaded_on_all_replicas(served: Served) -> None:
    before = completion(served.serving, "first")
    assert before[0] == 200
    assert before != completion(served.serving)
    assert served.joined.command("unload", "first").status_code == 200
    wait_for(lambda: completion(served.serving, "first")[0] == 404)
    assert served.serving.command("load", "first").status_code == 200
    wait_for(lambda: completion(served.joined, "first")[0] == 200)
    assert all(completion(one, "first") == before for one in (served.serving, served.joined) for _ in range(4))


def test_a_replica_that_is_killed_ends_its_streams_and_comes_back_with_its_adapters(served: Served) -> None:
    chats = [Chat(served.joined, f"killed-{number}") for number in range(2 * REPLICAS)]
    old = engines(served)
    os.kill(old[0].pid, signal.SIGKILL)
    wait_for(lambda: served.joined.replicas("tiny") == 1, 10, "the loss to be noticed")
    wait_for(lambda: any(not chat.thread.is_alive() for chat in chats), 10, "its streams to end")
    lost = [chat for chat in chats if "[DONE]" in chat.events]
    assert len(lost) < len(chats)
    assert all("error" in chat.ended() for chat in lost)
    assert completion(served.joined)[0] == 200
    for number, chat in enumerate(chats):
        if chat not in lost:
            served.serving.client.post(f"/v2/requests/killed-{number}/cancel")
            chat.ended()
    wait_for(lambda: served.joined.replicas("tiny") == REPLICAS, START_S, "another replica", every_s=0.5)
    answers = {completion(served.joined, "first") for _ in range(8)}
    assert len(answers) == 1
    assert next(iter(answers))[0] == 200


def test_unload_ends_all_processes(served: Served) -> None:
    wait_for(lambda: served.joined.replicas("tiny") == REPLICAS, START_S, "all replicas", every_s=0.5)
    folders = set(Path("/dev/shm").iterdir())
    old = [
        one for engine in engines(served) for one in (engine, *engine.parents()[:1], *engine.children(recursive=True))
    ]
    assert len(old) >= 4 * REPLICAS  # each host, server, engine and worker
    answer = served.joined.command("unload", "tiny")
    assert (answer.status_code, answer.json()["leftovers"]) == (200, [])
    assert answer.json()["freed"]["host_bytes"] > REPLICAS * 2**28
    assert [one for one in old if one.is_running()] == []
    assert hosts(served.address) == []
    assert set(Path("/dev/shm").iterdir()) <= folders
    assert completion(served.serving)[0] in (404, 503)
