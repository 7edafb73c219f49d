"""``agent_cases.py NAME``: a coding agent as a user starts it, with a home of its own. It writes a file, reads another
and says what that has, by the answers of `tests/services/obedient.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from cases import OBEDIENT as MODEL
from cases import URL, run, script

V1: Final = f"{URL}/v1"
TIMEOUT_S: Final = 300
SECRET: Final = "heliotrope"
"""What the file has that the agent reads."""
SAYS: Final = "The file says: "


class Agent(NamedTuple):
    """How an agent is run."""

    command: list[str]
    """The last argument is followed by the task."""
    steps: list[Any]
    """The model's answers, as `script` takes them. ``PROJECT`` stands for the project's folder."""
    files: Mapping[str, str] = MappingProxyType({})
    """What its home has: its configuration."""
    variables: Mapping[str, str] = MappingProxyType({})
    says: str = SAYS
    """What the agent says before `SECRET`."""


def calls(write: tuple[str, dict[str, Any]], read: tuple[str, dict[str, Any]]) -> list[Any]:
    """The answers of a model that calls both at once, and then says what came of the second."""
    return [[write, read], f"{SAYS}{{result}}"]


CODEX: Final = f"""
model = "{MODEL}"
model_provider = "headwater"
model_reasoning_effort = "high"
check_for_update_on_startup = false
[model_providers.headwater]
name = "headwater"
base_url = "{V1}"
wire_api = "responses"
"""
OPENCODE: Final = {
    "autoupdate": False,
    "share": "disabled",
    "model": f"headwater/{MODEL}",
    "provider": {
        "headwater": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": V1, "apiKey": "none"},
            "models": {MODEL: {"reasoning": True, "limit": {"context": 1_000_000, "output": 8192}}},
        }
    },
}
PI: Final = {
    "providers": {
        api: {
            "baseUrl": V1,
            "api": api,
            "apiKey": "none",
            "models": [{"id": MODEL, "reasoning": True, "contextWindow": 1_000_000, "maxTokens": 32_000}],
        }
        for api in ("openai-completions", "openai-responses")
    }
}
CLINE: Final = {
    "version": 1,
    "lastUsedProvider": "openai-compatible",
    "modes": {},
    "providers": {
        "openai-compatible": {
            "settings": {"provider": "openai-compatible", "apiKey": "none", "model": MODEL, "baseUrl": V1},
            "updatedAt": "2026-11-28T00:00:00.000Z",
            "tokenSource": "manual",
        }
    },
}
CONTINUE: Final = f"""
name: headwater
version: 0.0.1
schema: v1
models:
  - name: {MODEL}
    provider: openai
    model: {MODEL}
    apiBase: {V1}
    apiKey: none
    roles: [chat]
    capabilities: [tool_use]
    defaultCompletionOptions: {{contextLength: 1000000, maxTokens: 8192}}
"""
VIBE: Final = f"""
active_model = "{MODEL}"
enable_telemetry = false
enable_update_checks = false
enable_auto_update = false
[[providers]]
name = "headwater"
api_base = "{V1}"
api_style = "openai"
backend = "generic"
[[models]]
name = "{MODEL}"
provider = "headwater"
alias = "{MODEL}"
thinking = "high"
"""


def pi(api: str) -> Agent:
    """pi by this protocol."""
    return Agent(
        ["pi", "--provider", api, "--model", MODEL, "--thinking", "high", "-p"],
        calls(("write", {"path": "made.txt", "content": "made"}), ("read", {"path": "notes.txt"})),
        {".pi/agent/models.json": json.dumps(PI)},
        {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
    )


AGENTS: Final = {
    "codex": {
        "responses": Agent(
            ["codex", "exec", "--skip-git-repo-check", "-s", "danger-full-access"],
            calls(("exec_command", {"cmd": "printf made > made.txt"}), ("exec_command", {"cmd": "cat notes.txt"})),
            {".codex/config.toml": CODEX},
        ),
    },
    "claude": {
        "messages": Agent(
            ["claude", "--model", MODEL, "--effort", "high", "--permission-mode", "acceptEdits", "-p"],
            calls(
                ("Write", {"file_path": "PROJECT/made.txt", "content": "made"}),
                ("Read", {"file_path": "PROJECT/notes.txt"}),
            ),
            variables={
                "ANTHROPIC_BASE_URL": URL,
                "ANTHROPIC_AUTH_TOKEN": "none",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_AUTOUPDATER": "1",
                "DISABLE_TELEMETRY": "1",
            },
        ),
    },
    "opencode": {
        "chat": Agent(
            ["opencode", "run", "--format", "json"],
            calls(
                ("write", {"filePath": "PROJECT/made.txt", "content": "made"}),
                ("read", {"filePath": "PROJECT/notes.txt"}),
            ),
            {".config/opencode/opencode.json": json.dumps(OPENCODE)},
            {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        ),
    },
    "qwen": {
        "chat": Agent(
            ["qwen", "--approval-mode", "yolo", "--auth-type", "openai", "-p"],
            calls(
                ("write_file", {"file_path": "PROJECT/made.txt", "content": "made"}),
                ("read_file", {"file_path": "PROJECT/notes.txt"}),
            ),
            variables={"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": V1, "OPENAI_MODEL": MODEL},
        ),
    },
    "cline": {
        "chat": Agent(
            ["cline", "--json", "--thinking", "high", "-P", "openai-compatible", "-m", MODEL],
            calls(
                ("run_commands", {"commands": ["printf made > made.txt"]}),
                ("read_files", {"files": [{"path": "PROJECT/notes.txt"}]}),
            ),
            {".cline/data/settings/providers.json": json.dumps(CLINE)},
        ),
    },
    "pi": {"chat": pi("openai-completions"), "responses": pi("openai-responses")},
    "continue": {
        "chat": Agent(
            ["cn", "--auto", "-p"],
            calls(
                ("Write", {"filepath": "PROJECT/made.txt", "content": "made"}),
                ("Read", {"filepath": "PROJECT/notes.txt"}),
            ),
            {".continue/config.yaml": CONTINUE},
            {"CONTINUE_TELEMETRY_ENABLED": "0"},
        ),
    },
    "mistral_vibe": {
        "chat": Agent(
            ["vibe", "--auto-approve", "--trust", "--output", "json", "-p"],
            calls(("write_file", {"path": "made.txt", "content": "made"}), ("read_file", {"path": "notes.txt"})),
            {".vibe/config.toml": VIBE},
        ),
    },
    "aider": {
        "chat": Agent(
            [
                "aider", "--model", f"openai/{MODEL}", "--openai-api-base", V1, "--openai-api-key", "none",
                "--edit-format", "whole", "--reasoning-effort", "high", "--yes-always", "--no-git",
                "--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--message",
            ],
            [f"This is the file.\n\nmade.txt\n```\nmade\n```\n\n{SAYS}{SECRET}."],
        ),
    },
}  # fmt: skip
"""By client and protocol."""


def does_its_task(agent: Agent) -> None:
    """Run an agent; check the file that it makes, and what it says at the end."""
    with tempfile.TemporaryDirectory(prefix="hw-agent-") as folder:
        home, project = Path(folder, "home"), Path(folder, "project")
        project.mkdir()
        (project / "notes.txt").write_text(f"{SECRET}\n")
        for name, text in agent.files.items():
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        home.mkdir(exist_ok=True)
        steps = json.loads(json.dumps(agent.steps).replace("PROJECT", str(project)))
        environment = {**os.environ, **agent.variables, "HOME": str(home), "PWD": str(project), "TERM": "dumb"}
        ended = subprocess.run(
            [*agent.command, f"Do this: {script(*steps)}"],
            cwd=project,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        said = f"ended with {ended.returncode}: {ended.stdout[-3000:]}{ended.stderr[-3000:]}"
        assert ended.returncode == 0, said
        made = project / "made.txt"
        assert made.exists(), said
        assert made.read_text().strip() == "made"
        assert agent.says in ended.stdout, said
        assert SECRET in ended.stdout.rpartition(agent.says)[2], said


def main() -> None:
    """Run the agent by each of its protocols."""
    for protocol, agent in AGENTS[sys.argv[1]].items():

        def case(agent: Agent = agent) -> None:
            does_its_task(agent)

        case.__name__ = f"task_by_{protocol}"
        run(case)


main()
