"""``/docs``: Swagger UI from files of our own, so that it works without the internet."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

__all__ = ["docs_routes"]

ASSETS = "/docs/assets"


def docs_routes(gateway: FastAPI) -> None:
    """Add the routes."""
    gateway.mount(ASSETS, StaticFiles(directory=_static_folder()), name="docs-assets")

    @gateway.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="Headwater",
            swagger_js_url=f"{ASSETS}/swagger-ui-bundle.js",
            swagger_css_url=f"{ASSETS}/swagger-ui.css",
            swagger_favicon_url=f"{ASSETS}/favicon.png",
        )


def _static_folder() -> Path:
    """Where fastapi-offline keeps its copy of Swagger UI; of that package only these files are used."""
    spec = importlib.util.find_spec("fastapi_offline")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "static"
