"""The command line against a running server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater_server.cli.main import main
from headwater_server.cli.server_client import ServerClient, command_line, status_table
from headwater_server.errors import CommandError

UNLOADED = {
    "name": "a", "state": "UNAVAILABLE", "took_s": 1.25, "drained": 3, "ended": 1,
    "freed": {"host_bytes": 300 * 1024 * 1024, "gpu_bytes": None}, "leftovers": [],
}  # fmt: skip


def client(answer: httpx.Response | Exception, asked: list[httpx.Request] | None = None) -> ServerClient:
    def handle(request: httpx.Request) -> httpx.Response:
        if asked is not None:
            asked.append(request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ServerClient("http://127.0.0.1:8000/", httpx.MockTransport(handle))


def test_it_asks_the_route_of_the_action() -> None:
    asked: list[httpx.Request] = []
    assert client(httpx.Response(200, json=UNLOADED), asked).command("unload", "a b/c") == UNLOADED
    assert (asked[0].method, str(asked[0].url)) == (
        "POST",
        "http://127.0.0.1:8000/v2/repository/models/a%20b%2Fc/unload",
    )


@pytest.mark.parametrize("is_told", [True, False])
def test_metadata_says_which_inputs_are_optional_if_the_server_does(*, is_told: bool) -> None:
    tensors = [{"name": name, "datatype": "FP32", "shape": [-1, 1]} for name in ("x", "more")]

    def handle(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("/config"):
            return httpx.Response(200, json={"name": "a", "inputs": tensors})
        config = {"name": "a", "input": [{"name": "x"}, {"name": "more", "optional": True}]}
        return httpx.Response(200, json=config) if is_told else httpx.Response(404)

    found = ServerClient("http://127.0.0.1:8000/", httpx.MockTransport(handle)).metadata("a")
    assert [one.optional for one in found.inputs] == [False, is_told]


def test_a_config_travels_as_the_text_that_it_is() -> None:
    asked: list[httpx.Request] = []
    client(httpx.Response(200, json={"state": "READY"}), asked).command("load", "a", '{"timeout_s": 3}')
    assert json.loads(asked[0].content) == {"parameters": {"config": '{"timeout_s": 3}'}}


def test_a_section_is_given_as_json_or_as_a_file_of_it_or_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sections: list[str] = []

    def command(self: ServerClient, action: str, name: str, config: str) -> dict[str, Any]:
        sections.append(config)
        return UNLOADED

    def load(section: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["load", "a", "--config", section])
        return int(ended.value.code or 0)

    monkeypatch.setattr(ServerClient, "command", command)
    assert load(' {"timeout_s": 3}') == 0
    assert sections.pop() == ' {"timeout_s": 3}'
    for name, text in (("a.json", '{"timeout_s": 3}'), ("a.yaml", "timeout_s: 3\n")):
        (tmp_path / name).write_text(text)
        assert load(str(tmp_path / name)) == 0
        assert json.loads(sections.pop()) == {"timeout_s": 3}
    (tmp_path / "dates.yaml").write_text("when: 2026-01-01\n")
    for given, told in (
        ("nowhere.yaml", "can't be read"),
        (str(tmp_path / "dates.yaml"), "expected values that JSON can represent"),
    ):
        assert load(given) == 1
        assert told in capsys.readouterr().err
    assert sections == []


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (httpx.Response(409, json={"error": "model `a` is READY"}), "model `a` is READY"),
        (httpx.Response(404, json={"detail": "?"}), "status 404"),
        (httpx.Response(502, text="<html>"), "status 502 with something else"),
        (httpx.Response(200, json=[]), "is it a Headwater server?"),
        (httpx.ConnectError("refused"), "is the server running there?"),
    ],
)
def test_a_failure_is_told_as_the_server_tells_it(answer: httpx.Response | Exception, told: str) -> None:
    with pytest.raises(CommandError) as raised:
        client(answer).command("load", "a")
    assert told in str(raised.value)


@pytest.mark.parametrize(
    "url",
    ["nonsense", "ftp://127.0.0.1", "http://", "http://[::1", "http://[x]", "http://a:b", "http://..", "http://\1"],
)
def test_a_url_that_is_none_is_told(url: str) -> None:
    with pytest.raises(CommandError) as raised:
        ServerClient(url, option="URL").index()
    expected = "URL: expected a server's URL such as http://127.0.0.1:8000"
    assert str(raised.value).startswith(f"{expected}, got {url.rstrip('/')!r}: ")


@pytest.mark.parametrize(("command", "option"), [(["bench"], "URL"), (["status", "--url"], "--url")])
def test_a_command_with_a_url_that_is_none_ends_in_one_line(
    command: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "http://[::1"])
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"headwater: {option}: expected a server's URL")


def test_the_table_has_a_line_per_model_with_columns_below_each_other() -> None:
    since = "2026-01-02T03:04:05.678Z"
    scaled = {"ready": 1, "wanted": 2, "min": 1, "max": 3}
    index: list[dict[str, Any]] = [
        {
            "name": "a", "version": "1", "state": "READY", "since": since, "reason": "replica a-1",
            "replicas": scaled, "devices": ["cuda:0", "cuda:1"], "shortage": "no room",
        },
        {
            "name": "longer", "version": "1", "state": "UNAVAILABLE", "since": since, "reason": "",
            "replicas": {"ready": 0, "wanted": 1, "min": 1, "max": 1}, "devices": [],
        },
        {"name": "graph", "version": "1", "state": "READY", "since": since, "reason": "its steps are"},
    ]  # fmt: skip
    assert status_table(client(httpx.Response(200, json=index)).index()).splitlines() == [
        "MODEL   VERSION  STATE        REPLICAS      DEVICES        SINCE                     REASON",
        "a       1        READY        1/2 (1 to 3)  cuda:0,cuda:1  2026-01-02T03:04:05.678Z  replica a-1; no room",
        "longer  1        UNAVAILABLE  0/1                          2026-01-02T03:04:05.678Z",
        "graph   1        READY                                     2026-01-02T03:04:05.678Z  its steps are",
    ]


def test_what_replicas_run_with_stands_below_the_table() -> None:
    def run_with(numpy: str, *replicas: str) -> dict[str, Any]:
        versions = {"python": "3.13.0", "numpy": numpy, "headwater-python": "3.11.7", "headwater-numpy": "1.26.4"}
        return {"versions": versions, "replicas": replicas}

    index: list[dict[str, Any]] = [
        {"name": "a", "version": "1", "environments": [run_with("2.5.5", "a-1", "a-2")]},
        {
            "name": "b",
            "version": "2",
            "environments": [run_with("2.5.5", "b-1"), run_with("2.4.0", "b-2", "b-3", "b-4", "b-5")],
        },
        {"name": "c", "version": "1", "environments": [{"versions": {"vllm": "0.32.0"}, "replicas": ["c-1"]}]},
        {"name": "graph", "version": "1"},
    ]
    assert status_table(index).partition("\n\n")[2].splitlines() == [
        "MODEL             VERSION  REPLICAS            RUNS WITH",
        "a                 1        all                 python 3.13.0, numpy 2.5.5",
        "b                 2        b-1                 python 3.13.0, numpy 2.5.5",
        "b                 2        b-2, b-3, b-4, ...  python 3.13.0, numpy 2.4.0",
        "c                 1        all                 vllm 0.32.0",
        "Headwater itself                               python 3.11.7, numpy 1.26.4",
    ]


def test_the_table_says_on_which_machines_replicas_are_where_there_are_several() -> None:
    about = {"version": "1", "state": "READY", "since": "2026", "reason": "", "devices": ["cpu"]}
    index: list[dict[str, Any]] = [
        {"name": "a", **about, "nodes": {"10.0.0.3": 2, "10.0.0.4": 1}},
        {"name": "b", **about},
    ]
    assert status_table(index).splitlines() == [
        "MODEL  VERSION  STATE  REPLICAS  DEVICES  NODES                  SINCE  REASON",
        "a      1        READY            cpu      10.0.0.3 (2),10.0.0.4  2026",
        "b      1        READY            cpu                             2026",
    ]


def test_a_scaling_says_how_many_replicas_there_are() -> None:
    answer = {
        "name": "a", "state": "READY", "took_s": 1.25, "replicas": {"ready": 3, "wanted": 3, "min": 3, "max": 3},
    }  # fmt: skip
    told = client(httpx.Response(200, json=answer)).scale("a", {"replicas": 3})
    assert command_line("scale", told) == "a: scale done in 1.2 s, now READY; 3/3 replicas"


def test_what_came_of_a_command_is_one_line() -> None:
    assert command_line("unload", UNLOADED) == (
        "a: unload done in 1.2 s, now UNAVAILABLE; 3 requests finished, 1 ended; freed 300 MiB"
    )
    assert command_line("load", {"name": "a", "state": "READY", "took_s": 4.06}) == "a: load done in 4.1 s, now READY"
    on_gpu = {**UNLOADED, "freed": {"host_bytes": 0, "gpu_bytes": 1024 * 1024}, "warnings": ["unload() raised"]}
    assert command_line("unload", on_gpu).endswith("; freed 0 MiB, 1 MiB on GPUs; unload() raised")
    unmeasured = {**UNLOADED, "freed": {"host_bytes": None, "gpu_bytes": None}}
    assert command_line("unload", unmeasured).endswith("1 ended; freed an unknown size")
