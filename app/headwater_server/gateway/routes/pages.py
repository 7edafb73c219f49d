"""``/``, the status page, and ``/docs``, Swagger UI. All files are local, so both work without the internet."""

from __future__ import annotations

import importlib.util
import mimetypes
from pathlib import Path
from typing import Final

from fastapi import APIRouter, FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from headwater_server.errors import NotFound

__all__ = ["docs_routes", "page_routes"]

ASSETS: Final = "/docs/assets"
FRAME_HEADERS: Final = {"content-security-policy": "frame-ancestors 'none'", "x-content-type-options": "nosniff"}
"""Headers that forbid other pages to frame this page, and browsers to guess another content type."""


def docs_routes(gateway: FastAPI) -> None:
    """Add ``/docs``, its assets and ``/openapi.json``. Only the folder with Swagger UI is used of fastapi-offline."""
    spec = importlib.util.find_spec("fastapi_offline")
    assert spec is not None
    assert spec.origin is not None
    gateway.mount(ASSETS, StaticFiles(directory=Path(spec.origin).parent / "static"), name="docs-assets")

    @gateway.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        page = get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="Headwater",
            swagger_js_url=f"{ASSETS}/swagger-ui-bundle.js",
            swagger_css_url=f"{ASSETS}/swagger-ui.css",
            swagger_favicon_url=f"{ASSETS}/favicon.png",
        )
        page.headers.update(FRAME_HEADERS)
        return page

    @gateway.get("/openapi.json", include_in_schema=False)
    async def description() -> JSONResponse:
        return JSONResponse(gateway.openapi(), headers=FRAME_HEADERS)


FOLDER: Final = Path(__file__).parents[1] / "static"
INDEX: Final = "index.html"
HEADERS: Final = {
    # Inline scripts and styles, content from other hosts and framing by other pages are forbidden.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def page_routes() -> APIRouter:
    """``/`` and ``/static/{name}``. The files are read once and found by name, so a request can't lead to another
    path."""
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.is_file()}
    router = APIRouter()

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", INDEX)
        content = files.get(name)
        if content is None:
            raise NotFound(f"file {name[:100]!r}: unknown; this page has no such file", field="name")
        kind = "text/javascript" if name.endswith(".js") else mimetypes.guess_type(name)[0]
        return Response(content, headers=HEADERS, media_type=kind)

    router.routes += [Route(path, file, methods=["GET"]) for path in ("/", "/static/{name}")]
    return router
