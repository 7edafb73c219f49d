"""The status page's files: served from here, under a strict policy, and nothing else with them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from headwater_server.config.schema import Server
from headwater_server.gateway.app import create_app
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.pages import FOLDER
from tests.browser import chromium, open_browser

pytestmark = pytest.mark.heavy
FILES = sorted(path.name for path in FOLDER.iterdir())
MODULES = [name for name in FILES if name.endswith(".js")]
TRICKS = [
    "/static/../config.py",
    "/static/%2e%2e/config.py",
    "/static/..%2fconfig.py",
    "/static/..%5cconfig.py",
    "/static//etc/passwd",
    "/static/%2fetc%2fpasswd",
    "/static/main.js%00.css",
    "/static/main.js/",
    "/static/",
    "/static",
    "/static/.",
    "/static/MAIN.JS",
    "/index.html",
]


async def ask(path: str, method: str = "GET", **server: Any) -> httpx.Response:
    """One request to a gateway without models, its path as it is."""
    app = create_app(Models(), Server(access_log=False, **server))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        request = client.build_request(method, "/")
        request.url = request.url.copy_with(raw_path=path.encode())
        return await client.send(request)


def run(path: str, method: str = "GET", **server: Any) -> httpx.Response:
    return asyncio.run(ask(path, method, **server))


@pytest.mark.parametrize("path", ["/", *(f"/static/{name}" for name in FILES)])
def test_each_file_is_served_under_the_policy(path: str) -> None:
    answer = run(path)
    assert answer.status_code == 200
    assert answer.content == (FOLDER / (path.removeprefix("/static/").strip("/") or "index.html")).read_bytes()
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert (policy["script-src"], policy["style-src"], policy["connect-src"]) == ("'self'", "'self'", "'self'")
    assert answer.headers["x-content-type-options"] == "nosniff"
    expected = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(expected[(path.rpartition(".")[2]) if "." in path else "html"])


def test_head_has_no_body() -> None:
    answer = run("/", "HEAD")
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("path", TRICKS)
def test_no_path_leads_out_of_the_files(path: str) -> None:
    answer = run(path)
    assert answer.status_code == 404
    assert list(answer.json()) == ["error"]


@pytest.mark.parametrize(("path", "status"), [("/", 405), ("/static/main.js", 404), ("/static/style.css", 404)])
def test_it_can_be_switched_off(path: str, status: int) -> None:
    assert run(path, pages=[]).status_code == status  # requests of huggingface_hub's client are posted to /
    assert run("/v2/health/live", pages=[]).status_code == 200


class _Document(HTMLParser):
    """What a page holds that matters here."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.inline: list[str] = []
        self._tag = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        for name, value in attrs:
            if name == "id":
                self.ids.add(value or "")
            if name in ("src", "href"):
                self.links.append(value or "")
            if name == "style" or name.startswith("on"):
                self.inline.append(f"{tag} {name}")

    def handle_data(self, data: str) -> None:
        if self._tag in ("script", "style") and data.strip():
            self.inline.append(data)


def _document() -> _Document:
    document = _Document()
    document.feed((FOLDER / "index.html").read_text())
    return document


def test_the_page_has_nothing_inline_and_only_links_that_are_here() -> None:
    document = _document()
    assert document.inline == []
    known = {"/docs", "/metrics", "/v2/repository/index", *(f"/static/{name}" for name in FILES)}
    assert {link for link in document.links if not link.startswith("#")} <= known


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_and_finds_what_is_there(name: str) -> None:
    text = (FOLDER / name).read_text()
    for imported, source in re.findall(r'import (?:\* as \w+|\{([^}]*)\}) from "\./([^"]+)"', text):
        assert source in MODULES
        there = (FOLDER / source).read_text()
        for word in filter(None, (part.partition(" as ")[0].strip() for part in imported.split(","))):
            assert re.search(rf"export (?:async )?(?:class|function\*?|const) {word}\b", there), (source, word)
    assert set(re.findall(r'byId\("([^"]+)"\)', text)) <= _document().ids
    assert "innerHTML" not in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_the_package_brings_all_files() -> None:
    pyproject = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    patterns = re.findall(r"^headwater_server = \[(.*)\]$", pyproject, re.MULTILINE)[0].replace('"', "").split(", ")
    assert all(any(fnmatch(f"gateway/static/{name}", pattern) for pattern in patterns) for name in FILES)


HISTOGRAM = {"counts": [0, 0, 0], "sum": 0}
OUTCOMES = {
    "ok": 9,
    "client_error": 2,
    "cancelled": 3,
    "shed": 10,
    "timeout": 20,
    "failed": 30,
    "unavailable": 1,
    "lost": 0,
}
STATUS: dict[str, Any] = {
    "version": "0", "now_s": 1e9, "draining": False, "scope": "server", "bounds": {"seconds": [1, 2], "rows": [1, 2]},
    "deployments": [{
        "name": "m", "version": "1", "state": "READY", "reason": "", "since": "", "kind": "model", "part_of": None,
        "since_s": 0, "replica_list": [], "accepted": 75, "in_flight": 0, "outcomes": OUTCOMES, "seconds": HISTOGRAM,
        "rows": HISTOGRAM, "waiting": 0, "retries": 0,
    }],
}  # fmt: skip


class _StandIn(SimpleHTTPRequestHandler):
    """Serves the page's files, and of a server nothing but these answers to ``/v2/status``; the last one stays."""

    def __init__(self, answers: list[Any], *arguments: Any) -> None:
        self._answers = answers
        super().__init__(*arguments)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/v2/status":
            answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
            content, kind = json.dumps(answer).encode(), "application/json"
        else:
            file = FOLDER / (path.rpartition("/")[2] or "index.html")
            content, kind = file.read_bytes() if file.is_file() else b"{}", self.guess_type(str(file))
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def _stand_in(*answers: Any) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_StandIn, list(answers))) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.skipif(chromium() is None, reason="no Chromium; on Debian: apt-get install chromium-headless-shell")
def test_the_page_goes_on_after_a_failure_of_its_own_and_tells_clients_errors_from_failures() -> None:
    broken = {**STATUS, "now_s": 0.9e9, "deployments": None}
    with _stand_in(broken, STATUS) as url, open_browser() as browser, browser.page() as page:
        page.open(f"{url}/")
        page.wait("document.querySelector('#banner').innerText.startsWith('This page failed to show')")
        page.find("#deployments tr")
        assert page.text("#banner") == ""
        cells = page.value("[...document.querySelectorAll('#deployments td')].map((cell) => cell.innerText)")
        assert cells[-2:] == ["5", "61"]


@pytest.mark.skipif(chromium() is None, reason="no Chromium; on Debian: apt-get install chromium-headless-shell")
def test_a_language_model_shows_how_full_its_cache_is() -> None:
    plain: dict[str, Any] = STATUS["deployments"][0]
    text = dict.fromkeys(("prompt_tokens", "cached_prompt_tokens", "generated_tokens", "waiting_sequences"), 0)
    text |= {"active_sequences": 3, "cache_used_tokens": 120, "cache_limit_tokens": 1000}
    times = {"first_token": HISTOGRAM, "inter_token": HISTOGRAM}
    model = {**plain, "name": "chat", "kind": "language model", "waiting": 7, "language_model": {**text, **times}}
    with _stand_in({**STATUS, "deployments": [plain, model]}) as url, open_browser() as browser, browser.page() as page:
        page.open(f"{url}/")
        page.find("#deployments tr")
        waiting = page.value(
            "[...document.querySelectorAll('#deployments [data-label=Waiting]')].map((c) => c.innerText)"
        )
        assert [one.split() for one in waiting] == [["0"], ["7", "cache", "12", "%"]]
        assert page.complaints == []


@pytest.mark.skipif(chromium() is None, reason="no Chromium; on Debian: apt-get install chromium-headless-shell")
def test_a_replica_on_another_machine_has_that_machines_address() -> None:
    about = {"state": "READY", "device": "cpu", "threads": 3, "resident_bytes": 1, "batch_limit": 0, "gpu_bytes": None}
    replicas = [{"id": f"m-{at}", "node": node, **about} for at, node in enumerate(("10.0.0.3", None))]
    model = {**STATUS["deployments"][0], "replica_list": replicas}
    with _stand_in({**STATUS, "deployments": [model]}) as url, open_browser() as browser, browser.page() as page:
        page.open(f"{url}/")
        page.find("#replicas tr")
        cells = page.value("[...document.querySelectorAll('#replicas [data-label=Device]')].map((c) => c.innerText)")
        assert [one.split() for one in cells] == [["cpu", "on", "10.0.0.3"], ["cpu"]]
        assert page.complaints == []


@pytest.mark.skipif(chromium() is None, reason="no Chromium; on Debian: apt-get install chromium-headless-shell")
def test_an_embedding_model_of_vllms_has_the_line_that_asks_it() -> None:
    model = {**STATUS["deployments"][0], "name": "embed", "kind": "embedding model"}
    with _stand_in({**STATUS, "deployments": [model]}) as url, open_browser() as browser, browser.page() as page:
        page.open(f"{url}/#/playground/embed")
        page.find("#panel[data-model=embed]")
        assert f"{url}/v1/embeddings" in page.text("#panel pre")
        assert '"model":"embed"' in page.text("#panel pre").replace(" ", "")
        assert page.complaints == []


@pytest.mark.skipif(chromium() is None, reason="no Chromium; on Debian: apt-get install chromium-headless-shell")
def test_versions_are_shown_with_their_shares_and_what_a_shadow_s_answers_were_like() -> None:
    plain: dict[str, Any] = STATUS["deployments"][0]
    traffic = {"traffic": {"1": 0.9, "2": 0.1, "3": 0}, "default": "1", "before": {"1": 1, "2": 0}, "watched": True}
    compared = {
        "requests": 40, "failed": 2, "dropped": 3, "rows": 50, "disagreements": 5,
        "difference": {"counts": [0, 30, 10, 0], "sum": 1}, "mean_s": {"answer": 0.2, "shadow": 0.3},
    }  # fmt: skip
    one, two, three = (
        {**plain, "name": f"c.{name}", "kind": "version", "part_of": "c", "share": share}
        for name, share in traffic["traffic"].items()  # type: ignore[attr-defined]
    )
    deployments = [{**plain, "name": "c", **traffic}, one, two, {**three, "compared": compared}]
    bounds = {**STATUS["bounds"], "difference": [0, 0.001, 0.01]}
    told = {**STATUS, "bounds": bounds, "deployments": deployments}
    with _stand_in(told) as url, open_browser() as browser, browser.page() as page:
        page.open(f"{url}/")
        page.find("#deployments tr")
        names = page.value("[...document.querySelectorAll('#deployments th')].map((one) => one.textContent)")
        assert [name.replace("\u00a0", " ") for name in names] == [
            "cmodel with versions, default 1, compared for a rollback; a rollback gives 100 % to 1, 0 % to 2",
            "c.1version of c, 90 % of the requests",
            "c.2version of c, 10 % of the requests",
            "c.3version of c, shadow: 40 compared, differences at most 0.01, 5 disagreements, 1.5 times as long, "
            "2 failed, 3 dropped",
        ]
        assert page.complaints == []
