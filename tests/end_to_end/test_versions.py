"""Versions of a deployment: which one answers, commands on them, and what the server says of them."""

from __future__ import annotations

import http.client
import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from headwater_server.supervisor.canary import WINDOW_S
from tests.browser import chromium, open_browser
from tests.running import Running, in_background, leaves_nothing, wait_for

REPOSITORY = Path(__file__).parents[2]
TRAFFIC = {"1": 0.95, "2": 0.05, "sticky": "X-User"}


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that makes version 2 worse."""
    return tmp_path_factory.mktemp("fault") / "fault"


@pytest.fixture(scope="module")
def running(fault: Path) -> Iterator[Running]:
    """A server with ``c``, whose versions answer their number; every test leaves its traffic as configured."""
    config = {
        "deployments": {
            "c": {
                "model": "canary:Canary",
                "versions": {
                    "1": {"options": {"version": 1}},
                    "2": {"options": {"version": 2, "fault": str(fault)}},
                },
                "traffic": TRAFFIC,
                "warmup_batch_sizes": [],
            }
        },
        "server": {"workers": 2, "allow_load": "any", "access_log": False},
    }
    with leaves_nothing(config) as running:
        yield running


def ask(running: Running, path: str = "", **headers: str) -> httpx.Response:
    return ask_over(running.client, f"{running.url}/v2/models/c{path}/infer", headers)


def ask_over(client: httpx.Client, url: str, headers: dict[str, str]) -> httpx.Response:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0]}]}
    return client.post(url, json=body, headers=headers)


def version(answer: httpx.Response) -> str:
    """The version that answered, which the answer says in three places."""
    assert answer.status_code == 200, answer.text
    told = answer.json()
    found = {str(told["outputs"][0]["data"][0]), told["model_version"], answer.headers["headwater-version"]}
    assert (len(found), told["model_name"]) == (1, "c")
    return str(found.pop())


def reload(running: Running, config: dict[str, Any]) -> httpx.Response:
    body = {"parameters": {"config": json.dumps(config)}}
    return running.client.post(f"{running.url}/v2/repository/models/c/reload", json=body)


def command_line(running: Running, *arguments: str) -> str:
    command = [sys.executable, "-m", "headwater_server", *arguments, "--url", running.url]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_requests_are_shared_as_configured_unless_they_choose(running: Running) -> None:
    def ask_some(first: int) -> list[str]:
        # A client for each thread: httpcore may take a connection that another thread has just used for a closed one.
        with httpx.Client(timeout=60, trust_env=False) as client:
            url = f"{running.url}/v2/models/c/infer"
            return [version(ask_over(client, url, {"X-Request-Id": f"r{first + n}"})) for n in range(50)]

    with ThreadPoolExecutor(10) as pool:
        found = Counter(itertools.chain.from_iterable(pool.map(ask_some, range(0, 1000, 50))))
    assert abs(found["2"] / 1000 - 0.05) < 0.03
    for one in ("1", "2"):
        assert version(ask(running, f"/versions/{one}")) == one
    assert "expected '1' or '2', got '3'" in ask(running, "/versions/3").json()["error"]


def test_a_user_gets_the_same_version_every_time(running: Running) -> None:
    first = [version(ask(running, **{"X-User": f"user{n}"})) for n in range(60)]
    assert set(first) == {"1", "2"}
    assert [version(ask(running, **{"X-User": f"user{n}"})) for n in range(60)] == first


def test_all_that_is_said_of_a_model_names_its_versions(running: Running) -> None:
    assert running.get("/v2/models/c").json()["versions"] == ["1", "2"]
    assert running.get("/v2/models/c/versions/2").json()["name"] == "c"
    index = running.get("/v2/repository/index").json()
    assert [(one["name"], one["version"], one["state"], one["share"]) for one in index] == [
        ("c", "1", "READY", 0.95), ("c", "2", "READY", 0.05),
    ]  # fmt: skip
    statistics = running.get("/v2/models/c/stats").json()["model_stats"]
    assert [(one["name"], one["version"]) for one in statistics] == [("c", "1"), ("c", "2")]
    status = {one["name"]: one for one in running.get("/v2/status").json()["deployments"]}
    assert (status["c"]["traffic"], status["c"]["default"]) == ({"1": 0.95, "2": 0.05}, "1")
    assert status["c"]["accepted"] == status["c.1"]["accepted"] + status["c.2"]["accepted"]
    assert (status["c.2"]["kind"], status["c.2"]["part_of"]) == ("version", "c")
    paths = running.get("/openapi.json").json()["paths"]
    assert {"/v2/models/c/infer", "/v2/models/c/versions/2/infer"} <= set(paths)
    table, versions = (part.splitlines() for part in command_line(running, "status").split("\n\n"))
    assert [line.split()[:4] for line in table[1:]] == [["c", "1", "(95", "%)"], ["c", "2", "(5", "%)"]]
    assert [line.split()[:3] for line in versions[1:3]] == [["c", "1", "all"], ["c", "2", "all"]]


@pytest.mark.skipif(chromium() is None, reason="no Chromium; on Debian: apt-get install chromium-headless-shell")
def test_the_playground_asks_the_version_that_is_chosen(running: Running) -> None:
    def answered_by() -> str:
        page.click("#panel button[type=submit]")
        page.wait("document.querySelector('#panel [role=status]').innerText.includes('by version')")
        return page.text("#panel [role=status]").rpartition("by version ")[2]

    with open_browser() as browser, browser.page() as page:
        page.open(f"{running.url}/#/playground/c")
        page.find("#panel[data-model=c]")
        texts = page.value("[...document.querySelectorAll('#version-choice option')].map((one) => one.textContent)")
        assert [text.replace("\u00a0", " ") for text in texts] == ["by their shares", "1 (95 %)", "2 (5 %)"]
        assert answered_by() in ("1.", "2.")
        for one in ("2", "1"):
            page.value(
                f"""(() => {{
                    const select = document.querySelector('#version-choice');
                    select.value = '{one}';
                    select.dispatchEvent(new Event('change'));
                }})()"""
            )
            page.wait(f"document.querySelector('#panel .curl pre')?.textContent.includes('/versions/{one}/infer')")
            assert answered_by() == f"{one}."
        assert page.complaints == []


def test_promote_and_rollback(running: Running) -> None:
    told = command_line(running, "promote", "c", "2")
    assert told == "c: promote done: 0 % to 1, 100 % to 2; default 2\n"
    assert {version(ask(running)) for _ in range(20)} == {"2"}
    assert command_line(running, "rollback", "c") == "c: rollback done: 95 % to 1, 5 % to 2; default 1\n"
    refused = running.client.post(f"{running.url}/v2/repository/models/c/rollback", json={})
    assert (refused.status_code, "--undo" in refused.json()["error"]) == (409, True)
    unknown = running.client.post(f"{running.url}/v2/repository/models/c/rollback", json={"redo": True})
    assert (unknown.status_code, "redo" in unknown.json()["error"]) == (400, True)
    assert {version(ask(running, **{"X-User": f"user{n}"})) for n in range(60)} == {"1", "2"}
    refused = running.client.post(f"{running.url}/v2/repository/models/c/promote", json={"version": "9"})
    assert (refused.status_code, "expected one of `1`, `2`, got '9'" in refused.json()["error"]) == (409, True)


def test_versions_come_and_go_while_requests_are_answered(running: Running) -> None:
    before = [running.replica_pid(f"c.{one}") for one in ("1", "2")]
    third = {"versions": {"3": {"options": {"version": 3}}}, "traffic": {"1": 0.5, "3": 0.5}}
    with ThreadPoolExecutor(4) as pool:
        is_over = False
        seen: set[str] = set()

        def asking() -> Counter[str]:
            found: Counter[str] = Counter()
            while not is_over:
                found[answered := version(ask(running))] += 1
                seen.add(answered)
            return found

        askers = [pool.submit(asking) for _ in range(4)]
        try:
            assert reload(running, third).json()["state"] == "READY"
            wait_for(lambda: "3" in seen, what="an answer of version 3")
            assert reload(running, {}).json()["state"] == "READY"
        finally:
            is_over = True
        found = sum((asker.result() for asker in askers), Counter[str]())
    assert set(found) == {"1", "2", "3"}
    assert [running.replica_pid(f"c.{one}") for one in ("1", "2")] == before
    assert running.replica_folders("c.3") == []


def shadow_count(running: Running, name: str, **labels: str) -> float:
    """A series of version 2's, summed over all labels but these."""
    lines = re.findall(rf"^headwater_shadow_{name}{{(.*?)}} (\S+)$", running.get("/metrics").text, re.MULTILINE)
    wanted = {f'{label}="{value}"' for label, value in {"deployment": "c.2", **labels}.items()}
    return sum(float(value) for told, value in lines if wanted <= set(told.split(",")))


def test_a_shadow_is_compared_and_changes_nothing_for_clients(running: Running, fault: Path) -> None:
    text = (REPOSITORY / "docs/operations.md").read_text().partition("### Trying a version on real traffic")[2]
    shown = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    (told,) = shown["deployments"].values()
    pids = [running.replica_pid(f"c.{one}") for one in ("1", "2")]
    assert reload(running, {"traffic": told["traffic"]}).json()["state"] == "READY"
    wait_for(lambda: "shadow" in running.get("/v2/repository/index").json()[1], what="the shadow")
    assert command_line(running, "status").splitlines()[2].split()[:3] == ["c", "2", "(shadow)"]

    def asked(count: int) -> None:
        assert {version(ask(running)) for _ in range(count)} == {"1"}

    def disagreements() -> float:
        return shadow_count(running, "disagreements_total", output="scores")

    try:
        asked(50)
        wait_for(lambda: shadow_count(running, "requests_total", result="compared") == 50, what="50 comparisons")
        assert shadow_count(running, "difference_bucket", output="scores", le="0.0") == 50
        assert shadow_count(running, "difference_bucket", output="version", le="0.0") == 0  # which are 1 and 2
        assert (disagreements(), shadow_count(running, "rows_total")) == (0, 50)
        fault.write_text("wrong")
        asked(20)
        wait_for(lambda: shadow_count(running, "requests_total", result="compared") == 70, what="20 more")
        assert disagreements() == 20
        assert shadow_count(running, "difference_sum", output="scores") == pytest.approx(20 * 0.5)
        fault.write_text("fails")
        asked(20)
        wait_for(lambda: shadow_count(running, "requests_total", result="failed") == 20, what="20 failures")
        fault.write_text("hangs")
        asked(120)
        assert shadow_count(running, "requests_total") == 90  # the shadow has answered none of them
        assert shadow_count(running, "dropped_total", reason="load") > 0
        one = next(one for one in running.get("/v2/status").json()["deployments"] if one["name"] == "c.2")
        assert (one["compared"]["requests"], one["compared"]["disagreements"], one["compared"]["failed"]) == (
            70,
            20,
            20,
        )
        assert one["accepted"] == sum(one["outcomes"].values())
    finally:
        fault.unlink(missing_ok=True)
        assert reload(running, {"traffic": TRAFFIC}).json()["state"] == "READY"
    assert [running.replica_pid(f"c.{one}") for one in ("1", "2")] == pids
    assert 'deployment="c.2",route="infer"' in running.get("/metrics").text


REQUESTS = 10_000
FAULTY_FROM = 5_000


def test_a_version_that_begins_to_fail_loses_its_share_by_itself_and_no_request_is_lost(
    running: Running, fault: Path
) -> None:
    rule = {"errors": 2, "p99": 100, "min_requests": 100}  # a busy machine may hold up one version's replica
    assert reload(running, {"traffic": {"1": 0.95, "2": 0.05, "rollback": rule}}).json()["state"] == "READY"
    numbers = iter(range(REQUESTS))
    answers: dict[int, tuple[int, str]] = {}
    host, _, port = running.url.removeprefix("http://").rpartition(":")
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [0]}]})
    lock = threading.Lock()
    broke_s: list[float] = []

    def asking() -> None:
        connection = http.client.HTTPConnection(host, int(port), timeout=60)
        while True:
            with lock:
                number = next(numbers, None)
                if number == FAULTY_FROM:
                    fault.write_text("fails")
                    broke_s.append(time.monotonic())
            if number is None:
                break
            headers = {"content-type": "application/json", "x-request-id": f"r{number}"}
            connection.request("POST", "/v2/models/c/infer", body, headers)
            answer = connection.getresponse()
            answers[number] = answer.status, answer.headers["headwater-version"]
            answer.read()
        connection.close()

    def entry() -> dict[str, Any]:
        found: list[dict[str, Any]] = running.get("/v2/status").json()["deployments"]
        return next(one for one in found if one["name"] == "c")

    try:
        with in_background(*[asking] * 16) as failures:
            wait_for(lambda: entry()["traffic"] == {"1": 1.0, "2": 0.0}, 120, "the rollback")
            took_s = time.monotonic() - broke_s[0]
        assert failures == [None] * 16
    finally:
        fault.unlink(missing_ok=True)
    assert sorted(answers) == list(range(REQUESTS))
    before = Counter(answers[number][1] for number in range(FAULTY_FROM - 16))
    assert abs(before["2"] / (FAULTY_FROM - 16) - 0.05) < 0.01
    found = Counter(answers.values())
    assert set(found) == {(200, "1"), (200, "2"), (500, "2")}
    print(f"rolled back {took_s:.1f} s after the fault, which {found[500, '2']} requests met")
    assert took_s < WINDOW_S
    assert "version `2` lost its share by itself" in entry()["reason"]
    assert 'headwater_rollbacks_total{deployment="c",version="2"} 1.0' in running.get("/metrics").text
    assert {version(ask(running)) for _ in range(20)} == {"1"}
    refused = running.client.post(f"{running.url}/v2/repository/models/c/rollback")
    assert (refused.status_code, "version `2` lost its share by itself: " in refused.json()["error"]) == (409, True)
    assert entry()["traffic"] == {"1": 1.0, "2": 0.0}
    told = command_line(running, "rollback", "c", "--undo")
    assert told == "c: rollback done: 95 % to 1, 5 % to 2; default 1\n"
    assert entry()["reason"] == "all versions ready"
    assert reload(running, {"traffic": TRAFFIC}).json()["state"] == "READY"


def test_a_version_slower_than_the_rule_allows_loses_its_share_by_itself(running: Running, fault: Path) -> None:
    rule = {"errors": 100, "p99": 2, "min_requests": 50}
    fault.write_text("slow 0.5")
    is_over = False

    def asking() -> None:
        while not is_over:
            assert ask(running).status_code == 200

    def shares() -> dict[str, float]:
        found: list[dict[str, Any]] = running.get("/v2/status").json()["deployments"]
        one = next(one for one in found if one["name"] == "c")
        reasons.append(one["reason"])
        return dict(one["traffic"])

    reasons: list[str] = []
    try:
        traffic = {"1": 0.5, "2": 0.5, "rollback": rule}
        assert reload(running, {"traffic": traffic}).json()["state"] == "READY"
        with in_background(*[asking] * 16) as failures:
            try:
                wait_for(lambda: shares() == {"1": 1.0, "2": 0.0}, 120, "the rollback")
            finally:
                is_over = True
        assert failures == [None] * 16
        assert re.search(r"version `2` lost its share by itself: its p99 is over [\d.e+]+ ms", reasons[-1]), reasons[-1]
    finally:
        fault.unlink(missing_ok=True)
        assert reload(running, {"traffic": TRAFFIC}).json()["state"] == "READY"
