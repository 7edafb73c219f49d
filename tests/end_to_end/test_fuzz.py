"""What the OpenAPI schema promises, held against generated requests, right and wrong ones, with keys and without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater_server.security.keys import Key, make_key
from headwater_server.security.keys_file import change_file
from headwater_server.security.scopes import Scope
from tests.end_to_end.conftest import language_model
from tests.running import Running, serve

# Models that fail or wait by design are left out. Of the others 504 alone is right, since the requests made up ask for
# deadlines of microseconds too.
LEFT_OUT = r"/(faulty|slow)/"
OPERATIONS = r"^/v2/repository/models/"
SETTINGS = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]
"""
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
SCOPES: dict[str, tuple[Scope, ...]] = {"client": ("infer", "metrics"), "operator": ("admin",)}


def schemathesis(
    running: Running, folder: Path, *arguments: str, examples: int, phases: str = "fuzzing", checks: str = CHECKS
) -> None:
    """Ask a server what its schema lets one ask."""
    # A process of its own: Schemathesis brings hooks and warnings that the other tests should not see.
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{running.url}/openapi.json"),
        *("--checks", checks),
        *("--phases", phases),
        *("--max-examples", str(examples), "--generation-deterministic"),
        *("--request-timeout", "10", "--workers", "1", "--no-color", "--suppress-health-check", "all"),
        *arguments,
    ]
    (folder / "schemathesis.toml").write_text(SETTINGS)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "HYPOTHESIS_STORAGE_DIRECTORY": str(folder)}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, f"{ended.stdout[-8000:]}\n{ended.stderr[-2000:]}"


def test_generated_requests_get_what_the_schema_promises(services: Running, tmp_path: Path) -> None:
    arguments = ("--exclude-path-regex", LEFT_OUT)
    schemathesis(services, tmp_path, *arguments, examples=25, phases="examples,coverage,fuzzing")
    assert services.is_ready()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, dict[str, str]]]:
    """A server with keys, and their texts; it is these tests' own, for they may unload its models."""
    made = {name: make_key() for name in SCOPES}
    keys_file = tmp_path_factory.mktemp("keys") / "keys.json"
    change_file(keys_file, lambda _: [Key(name, digest, SCOPES[name]) for name, (_, digest) in made.items()])
    config = {
        "deployments": {"light": {"model": "light:Trunk"}, "null": language_model("null", max_sequences=4)},
        "security": {"keys_file": str(keys_file)},
    }
    with serve(config) as running:
        yield running, {name: text for name, (text, _) in made.items()}
        assert running.stop() == 0


def test_with_a_clients_key_and_without_one(guarded: tuple[Running, dict[str, str]], tmp_path: Path) -> None:
    running, keys = guarded
    # `ignored_auth` asks again without the key, and with another one, and wants 401.
    schemathesis(
        running, tmp_path, "--header", f"Authorization: Bearer {keys['client']}", examples=4,
        checks=f"{CHECKS},ignored_auth",
    )  # fmt: skip
    assert re.search(r"/infer 401\b", running.log.read_text()), "nobody asked without a key"
    for model in ("light", "null"):  # nothing was unloaded
        assert running.get(f"/v2/models/{model}/ready").status_code == 200


def test_with_an_operators_key(guarded: tuple[Running, dict[str, str]], tmp_path: Path) -> None:
    running, keys = guarded
    header = ("--header", f"X-API-Key: {keys['operator']}")
    schemathesis(running, tmp_path, *header, "--include-path-regex", OPERATIONS, examples=10)
    assert running.get("/v2/health/live").status_code == 200
