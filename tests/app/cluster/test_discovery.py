"""How a gateway finds the cluster's supervisor; the process that asks Ray is a script here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headwater_server.cluster import discovery
from headwater_server.cluster.cluster_supervisor import Announcement, SupervisorSpec
from headwater_server.cluster.discovery import Trouble, announcements
from headwater_server.cluster.holder import write_spec
from headwater_server.cluster.ray_client import ActorGone
from headwater_server.config.schema import Config
from headwater_server.errors import StartError

SEARCH = """
import sys
from pathlib import Path
from headwater_server.cluster.holder import read_spec
from headwater_server.cluster.cluster_supervisor import SupervisorSpec
spec = read_spec(sys.stdin.buffer)
with Path(sys.argv[1]).open("a") as log:
    print(" ".join(SupervisorSpec.decoded(spec).config.deployments) if spec else "none", file=log)
for line in sys.argv[2:]:
    print(line, flush=True)
"""
SPEC = SupervisorSpec(Config.model_validate({"deployments": {"a": {"model": "m:M"}}}), ())


def announcement(epoch: int) -> Announcement:
    return Announcement(f"10.0.0.1:{epoch}", "secret", epoch, "digest", {}, {}, False, None)


def said(epoch: int) -> str:
    return msgspec.json.encode(announcement(epoch)).decode()


MAIN = """
import sys
from headwater_server.cluster import discovery
from headwater_server.cluster.ray_client import ActorGone
from headwater_server.errors import StartError
answers = iter(sys.argv[2:])
class Ray:
    def __init__(self, address):
        assert address == "head:6379"
        print("printed by a library")
        if sys.argv[2] == "no ray":
            raise StartError("cluster.address: no Ray")
    def start_supervisor(self, name, command, spec, environment):
        from headwater_server.cluster.cluster_supervisor import SupervisorSpec
        print("started", name, *command[1:], *SupervisorSpec.decoded(spec).config.deployments, file=sys.stderr)
    def head_trouble(self, timeout_s):
        return ""
    def find(self, name):
        assert name == "supervisor"
        self.answer = next(answers, "silent")
        if self.answer == "gone":
            raise ActorGone(name)
        return self.answer
    def ask(self, actor, timeout_s):
        if actor == "silent":
            raise TimeoutError
        return "" if actor == "empty" else actor
discovery.RayClient = Ray
discovery.LOOK_EVERY_S = 0.01
discovery.main()
"""


def main_of(*answers: str) -> subprocess.Popen[bytes]:
    """The process that asks Ray, which answers so one time after the other, and nothing after that."""
    command = [sys.executable, "-c", MAIN, "head:6379", *answers]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("spec", [SPEC, None])
def test_the_search_says_what_has_changed_until_its_input_ends(spec: SupervisorSpec | None) -> None:
    with main_of("silent", said(1), "empty", said(1), "gone", "silent", said(2)) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        write_spec(process.stdin, b"" if spec is None else spec.encoded())
        found = [json.loads(process.stdout.readline()) for _ in range(3)]
        assert [one.get("epoch") for one in found] == [1, None, 2]
        assert found[1]["error"].startswith("cluster: no server runs there; run `headwater serve CONFIG`")
        process.stdin.close()
        assert (process.stdout.read(), process.wait(30)) == (b"", 0)
        started = b"started supervisor -m headwater_server.cluster.cluster_supervisor a\n" in process.stderr.read()
        assert started is (spec is not None)


def test_the_search_ends_where_there_is_no_ray() -> None:
    with main_of("no ray") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        write_spec(process.stdin, b"")
        assert json.loads(process.stdout.read()) == {"error": "cluster.address: no Ray"}
        assert process.wait(30) == 0


@pytest.fixture
def searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """What one search after the other says; the last one says it again and again."""
    monkeypatch.setattr(discovery, "RESTART_S", 0.01)
    found: list[list[str]] = []
    started: list[subprocess.Popen[bytes]] = []

    popen = subprocess.Popen

    def search(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert command == [sys.executable, "-m", "headwater_server.cluster.discovery", "head:6379"]
        lines = found.pop(0) if len(found) > 1 else found[0]
        started.append(popen([sys.executable, "-c", SEARCH, str(tmp_path / "log"), *lines], **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", search)
    yield found
    for process in started:
        process.wait()


def first(count: int, spec: SupervisorSpec | None) -> list[Announcement | Trouble]:
    """So many of the announcements that come first."""

    async def main() -> list[Announcement | Trouble]:
        found: list[Announcement | Trouble] = []
        async with contextlib.aclosing(announcements("head:6379", spec)) as all_of_them:
            async for one in all_of_them:
                found.append(one)
                if len(found) == count:
                    break
        return found

    return asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.slow
def test_each_supervisor_is_told_over_searches_that_end(searches: list[list[str]], tmp_path: Path) -> None:
    trouble = Trouble("Ray is gone for now")
    searches += [[said(1), said(2)], [msgspec.json.encode(trouble).decode()], [said(3)]]
    assert first(4, SPEC) == [announcement(1), announcement(2), trouble, announcement(3)]
    # Only the first search may start a supervisor: a later one would serve again what was stopped.
    assert (tmp_path / "log").read_text().split() == ["a", "none", "none"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"error": "cluster.address: no Ray at auto"}'], r"^cluster\.address: no Ray at auto$"),
        ([], r"^cluster: the search for the supervisor ended without a result"),
    ],
)
def test_what_is_wrong_at_the_start_is_told(searches: list[list[str]], lines: list[str], message: str) -> None:
    searches.append(lines)
    with pytest.raises(StartError, match=message):
        first(1, None)


class Ray:
    """A connection to Ray, whose supervisor says or raises this."""

    def __init__(self, answer: str | Exception, trouble: str = "") -> None:
        self.answer = answer
        self.trouble = trouble

    def head_trouble(self, timeout_s: float) -> str:
        return self.trouble

    def find(self, name: str) -> str:
        return name

    def ask(self, actor: str, timeout_s: float) -> str:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("ray", "expected"),
    [
        (Ray(said(7)), announcement(7)),
        (Ray('{"error": "no certificates"}'), Trouble("no certificates")),
        (Ray(""), None),
        (Ray(TimeoutError()), None),
        (Ray(ActorGone()), "cluster: no server runs there; run `headwater serve CONFIG`"),
        (Ray(said(7), "Ray's head is gone"), Trouble("cluster: Ray's head is gone")),
    ],
)
def test_what_is_found_of_the_supervisor(ray: Any, expected: Announcement | Trouble | str | None) -> None:
    found = discovery.look(ray)
    if isinstance(expected, str):
        assert isinstance(found, Trouble)
        assert found.error.startswith(expected)
    else:
        assert found == expected
