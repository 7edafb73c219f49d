"""What the OpenAPI schema promises, held against generated requests, right ones and wrong ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.running import Running

# Models that fail or wait by design are left out. Of the others 504 alone is right, since the requests made up ask for
# deadlines of microseconds too.
LEFT_OUT = r"/(faulty|slow)/"
SETTINGS = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]
"""
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_generated_requests_get_what_the_schema_promises(services: Running, tmp_path: Path) -> None:
    # A process of its own: Schemathesis brings hooks and warnings that the other tests should not see.
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{services.url}/openapi.json"),
        *("--exclude-path-regex", LEFT_OUT),
        *("--checks", CHECKS),
        *("--phases", "examples,coverage,fuzzing"),
        *("--max-examples", "50", "--generation-deterministic"),
        *("--request-timeout", "10", "--workers", "1", "--no-color", "--suppress-health-check", "all"),
    ]
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, f"{ended.stdout[-8000:]}\n{ended.stderr[-2000:]}"
    assert services.is_ready()
