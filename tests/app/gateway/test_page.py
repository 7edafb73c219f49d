"""The status page's files: served from here, under a strict policy, and nothing else with them."""

from __future__ import annotations

import asyncio
import re
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest

from app.config.schema import Server
from app.gateway.app import create_app
from app.gateway.models import Models
from app.gateway.routes.pages import FOLDER

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


async def ask(path: str, method: str = "GET", **server: bool) -> httpx.Response:
    """One request to a gateway without models, its path as it is."""
    app = create_app(Models(), Server(access_log=False, **server))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        request = client.build_request(method, "/")
        request.url = request.url.copy_with(raw_path=path.encode())
        return await client.send(request)


def run(path: str, method: str = "GET", **server: bool) -> httpx.Response:
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


@pytest.mark.parametrize("path", ["/", "/static/main.js", "/static/style.css"])
def test_it_can_be_switched_off(path: str) -> None:
    assert run(path, ui=False).status_code == 404
    assert run("/v2/health/live", ui=False).status_code == 200


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
    patterns = re.findall(r"^app = \[(.*)\]$", pyproject, re.MULTILINE)[0].replace('"', "").split(", ")
    assert all(any(fnmatch(f"static/{name}", pattern) for pattern in patterns) for name in FILES)
