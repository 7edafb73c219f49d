"""One server with API keys, HTTPS and two gateway workers: what clients, operators and other users can do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from headwater_server.security.keys import Key, make_key
from headwater_server.security.keys_file import change_file
from tests.end_to_end.conftest import language_model
from tests.running import Running, processes_of, serve, wait_for

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")

LIMITS: dict[str, dict[str, Any]] = {
    "alice": {"scopes": ("infer",)},
    "mallory": {"scopes": ("infer",)},
    "operator": {"scopes": ("admin",)},
    "prometheus": {"scopes": ("metrics",)},
    "single": {"scopes": ("infer",), "concurrent": 1},
    "brisk": {"scopes": ("infer",), "requests_per_second": 5},
    "thrifty": {"scopes": ("infer",), "tokens_per_minute": 20},
}


class Secured:
    """The server, and the texts of its keys."""

    def __init__(self, running: Running, keys_file: Path, texts: dict[str, str]) -> None:
        self.running = running
        self.keys_file = keys_file
        self.texts = texts

    def get(self, path: str, name: str) -> httpx.Response:
        """One GET with a key."""
        return self.running.client.get(self.running.url + path, headers={"x-api-key": self.texts[name]})

    def openai(self, text: str) -> openai.OpenAI:
        """OpenAI's client with a key."""
        client = openai.DefaultHttpxClient(verify=False, trust_env=False)
        return openai.OpenAI(base_url=f"{self.running.url}/v1", api_key=text, http_client=client, max_retries=0)

    def command(self, *arguments: str, key: str = "") -> subprocess.CompletedProcess[str]:
        """The command line, with the key in the environment."""
        return subprocess.run(
            [sys.executable, "-m", "headwater_server", *arguments],
            env={**os.environ, "HEADWATER_KEY": self.texts.get(key, "")}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("security")
    tls = {"certificate": str(folder / "server.pem"), "key": str(folder / "server.key")}
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj",
         "/CN=localhost", "-days", "2", "-keyout", tls["key"], "-out", tls["certificate"]],
        check=True, capture_output=True,
    )  # fmt: skip
    texts: dict[str, str] = {}
    keys = []
    for name, fields in LIMITS.items():
        texts[name], digest = make_key()
        keys.append(Key(name, digest, **fields))
    keys_file = folder / "keys.json"
    change_file(keys_file, lambda _: keys)
    config = {
        "deployments": {
            "light": {"model": "light:Trunk"},
            "null": language_model("null", step_s=0.05, max_sequences=4),
        },
        "server": {"workers": 2, "tls": tls},
        "security": {"keys_file": str(keys_file)},
    }
    with serve(config) as running:
        yield Secured(running, keys_file, texts)


def chat(client: openai.OpenAI, **arguments: Any) -> Any:
    messages: Any = [{"role": "user", "content": "import os"}]
    return client.chat.completions.create(model="null", messages=messages, **{"max_tokens": 2, **arguments})


def test_openais_client_brings_its_key(secured: Secured) -> None:
    with secured.openai(secured.texts["alice"]) as client:
        assert chat(client).usage.completion_tokens == 2
    with secured.openai("hw_wrong") as client, pytest.raises(openai.AuthenticationError, match="API key: expected"):
        chat(client)
    prometheus = secured.openai(secured.texts["prometheus"])
    with prometheus as client, pytest.raises(openai.PermissionDeniedError, match="scope infer"):
        chat(client)


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_brings_its_key_in_either_header(secured: Secured) -> None:
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]})

    def curl(header: str) -> str:
        url = f"{secured.running.url}/v2/models/light/infer"
        command = ["curl", "-sk", "--noproxy", "*", "-o", "/dev/null", "-w", "%{http_code}", "-d", body]
        command += ["-H", "Content-Type: application/json", "-H", "@-", url]  # what is in `ps` has no key
        return subprocess.run(command, input=header, capture_output=True, text=True, check=True).stdout

    text = secured.texts["alice"]
    headers = (f"X-API-Key: {text}", f"Authorization: Bearer {text}", f"X-API-Key: {text}x", "X-Other: 1")
    assert [curl(header) for header in headers] == ["200", "200", "401", "401"]


def test_metrics_want_their_own_scope(secured: Secured) -> None:
    assert [secured.get("/metrics", name).status_code for name in ("prometheus", "alice")] == [200, 403]
    assert secured.running.get("/metrics").status_code == 401
    assert secured.running.get("/v2/health/ready").status_code == 200


def test_a_limit_of_requests_at_once_holds_over_both_workers(secured: Secured) -> None:
    with secured.openai(secured.texts["single"]) as client:
        stream = chat(client, stream=True, max_tokens=600)
        next(iter(stream))
        assert {secured.get("/v2", "single").status_code for _ in range(8)} == {429}
        assert secured.get("/v2", "alice").status_code == 200
        stream.close()
    wait_for(lambda: secured.get("/v2", "single").status_code == 200, 60, "the stream's place")


def test_a_limit_of_requests_a_second_holds_over_both_workers(secured: Secured) -> None:
    began_s = time.monotonic()
    answers = [secured.get("/v2", "brisk") for _ in range(40)]
    took_s = time.monotonic() - began_s
    passed = sum(answer.status_code == 200 for answer in answers)
    assert 5 <= passed <= 6 + 5 * took_s
    assert {answer.headers["retry-after"] for answer in answers if answer.status_code == 429} <= {"1"}


def test_a_limit_of_tokens_counts_prompts_and_answers(secured: Secured) -> None:
    with secured.openai(secured.texts["thrifty"]) as client:
        used = chat(client, max_tokens=40).usage.total_tokens
        assert used >= 40
        with pytest.raises(openai.RateLimitError, match="20 tokens a minute") as caught:
            chat(client)
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60 * (used - 20) / 20 + 1
    assert secured.get("/v2", "thrifty").status_code == 200


def test_nobody_cancels_what_another_key_asked(secured: Secured) -> None:
    url = f"{secured.running.url}/v2/requests/mine/cancel"
    with secured.openai(secured.texts["alice"]) as client:
        stream = chat(client, stream=True, max_tokens=600, extra_headers={"x-request-id": "mine"})
        next(iter(stream))
        statuses = [
            secured.running.client.post(url, headers={"x-api-key": secured.texts[name]}).status_code
            for name in ("mallory", "alice")
        ]
        assert statuses == [404, 200]
        stream.close()


def test_an_operator_commands_with_his_key(secured: Secured) -> None:
    for key, expected in (("", "HEADWATER_KEY"), ("alice", "scope admin")):
        refused = secured.command("unload", "light", "--url", secured.running.url, key=key)
        assert refused.returncode == 1
        assert expected in refused.stderr
    listed = secured.command("status", "--url", secured.running.url, key="operator")
    assert "light" in listed.stdout, listed.stderr


def test_a_revoked_key_is_good_no_more(secured: Secured) -> None:
    assert secured.get("/v2", "mallory").status_code == 200
    revoked = secured.command("keys", "revoke", "mallory", "--file", str(secured.keys_file))
    assert revoked.returncode == 0, revoked.stderr
    # Each on a connection of its own: both workers are asked.
    wait_for(lambda: {secured.get("/v2", "mallory").status_code for _ in range(8)} == {401}, 60, "the revocation")
    assert secured.get("/v2", "alice").status_code == 200


def test_no_key_is_told_by_logs_or_command_lines(secured: Secured) -> None:
    assert secured.get("/v2", "alice").status_code == 200
    wait_for(lambda: '"key":"alice"' in secured.running.log.read_text(), what="the request to be logged")
    shown = secured.running.log.read_text() + " ".join(processes_of(secured.running.folder).values())
    assert "headwater_server.gateway.worker" in shown
    for name, text in secured.texts.items():
        assert text not in shown, name
    assert "hw_wrong" not in shown
    assert 'Add an API key to these commands: -H "X-API-Key: $HEADWATER_KEY"' in shown


def test_a_worker_that_ends_while_the_certificate_is_missing_is_replaced(secured: Secured, tmp_path: Path) -> None:
    before = secured.running.workers()
    pair = [secured.keys_file.with_name(name) for name in ("server.pem", "server.key")]
    for path in pair:
        shutil.move(path, tmp_path)
    try:
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: len(set(secured.running.workers()) - set(before)) == 2, 60, "two other workers")
        answered = wait_for(lambda: secured.running.is_ready() and secured.get("/v2", "alice"), 60, "an answer")
        assert answered.status_code == 200
        log = secured.running.log.read_text()
        assert "ended with -9: Killed; starting another" in log
        assert f"using the previous one: server.tls.certificate: {pair[0]}: can't be read: No such file" in log
    finally:
        for path in pair:
            shutil.move(tmp_path / path.name, path)


SOMEBODY_ELSE = """
import json, os, socket, sys
folder, paths = json.load(sys.stdin)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print("folder", oct(os.stat(folder).st_mode & 0o777))
for path in paths:
    try:
        if path.endswith(".json"):
            open(path)
        else:
            socket.socket(socket.AF_UNIX).connect(path)
    except PermissionError:
        continue
    print("reached", path)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_reaches_no_socket(secured: Secured) -> None:
    (folder,) = secured.running.folder.glob("headwater-*")
    for outer in folder.parents[:2]:  # the test's own, private as temporary folders are
        outer.chmod(0o755)
    files = [path for path in folder.rglob("*") if path.is_socket() or path.suffix == ".json"]
    assert folder / "control" in files
    found = subprocess.run(
        [sys.executable, "-c", SOMEBODY_ELSE], input=json.dumps([str(folder), list(map(str, files))]),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout == "folder 0o700\n"
