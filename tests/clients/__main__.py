"""``python -m tests.clients [NAME ...]``: run each client's cases against one server.

A client's cases are ``NAME_cases.py``, which its own environment's interpreter runs, ``NAME_cases.mjs``,
``go_cases.go``, or an agent's in ``agent_cases.py``. They print a line of JSON each. Where the system allows it, the
server and the clients run in a network of their own, which has nothing but the loopback interface.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.environments import Environments
from headwater_server.security.keys import Key, make_key
from headwater_server.security.keys_file import change_file
from tests.app.lm.scripted import FOLDER as TINY_LM
from tests.app.lm.tool_text import tool_folder
from tests.clients import go_client
from tests.clients.npm_packages import (
    AGENTS_FOLDER,
    make_packages,
    packages_are_made,
    path_of_packages,
    version_of_package,
)
from tests.clients.triton_models import MODELS
from tests.inference.hf.folders import bert
from tests.repositories import write_repository
from tests.running import serve

__all__: list[str] = []

FOLDER: Final = Path(__file__).parent
ROOT: Final = FOLDER.parents[1]
CLIENTS: Final = Environments(
    ".venv-clients",
    FOLDER,
    {
        "openai": "openai",
        "anthropic": "anthropic",
        "langchain": "langchain-openai",
        "litellm": "litellm",
        "llamaindex": "llama-index-llms-openai-like",
        "instructor": "instructor",
        "aiperf": "aiperf",
        "guidellm": "guidellm",
        "kserve": "kserve",
        "cohere": "cohere",
        "tei": "huggingface_hub",
        "tritonclient": "tritonclient",
        "canitoolcall": "canitoolcall",
        "openai_harmony": "openai-harmony",
        "mistral_vibe": "mistral-vibe",
        "aider": "aider-chat",
        "pydantic_ai": "pydantic-ai-slim",
        "openai_agents": "openai-agents",
        "smolagents": "smolagents",
        "dspy": "dspy",
        "langchain_anthropic": "langchain-anthropic",
    },
    {"mistral_vibe": "python3.12"},
)
PACKAGES: Final = {
    "codex": "@openai/codex",
    "claude": "@anthropic-ai/claude-code",
    "opencode": "opencode-ai",
    "qwen": "@qwen-code/qwen-code",
    "cline": "cline",
    "pi": "@mariozechner/pi-coding-agent",
    "continue": "@continuedev/cli",
    "ai_sdk": "ai",
    "anthropic_sdk": "@anthropic-ai/sdk",
}
"""The packages of npm, by client."""
AGENTS: Final = ("aider", "mistral_vibe")
"""The environments of agents, which are commands."""
OBEDIENT: Final = "obedient"
GO: Final = "go"
LOOPBACK: Final = "HEADWATER_LOOPBACK"
"""Set in a network of its own."""
CONTEXT_LENGTH: Final = 2048
TIMEOUT_S: Final = 600


class Result(NamedTuple):
    """What became of a client's cases."""

    passed: list[str]
    failed: dict[str, str]
    """Why, by case."""


def configuration(folder: Path) -> dict[str, Any]:
    """What the server serves: tiny-lm, made in this folder, with a chat template that knows tools and a context that
    holds their schemas; ``thinker``, the same model with a template that has it think; a model that answers by the
    prompt's script; networks with random weights that rank and classify; a Triton repository; and other models."""
    language_models = {"tiny-lm": "hermes", "thinker": "reasoning"}
    for name, template in language_models.items():
        model = tool_folder(folder / name, template)
        shutil.copy(TINY_LM / "model.safetensors", model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": CONTEXT_LENGTH}))
    bert(folder / "reranker", "BertForSequenceClassification", ("relevant",))
    bert(folder / "classifier", "BertForSequenceClassification", ("tax", "animal"))
    return {
        "deployments": {
            **{name: {"model": f"lm:{folder / name}"} for name in language_models},
            OBEDIENT: {
                "model": f"lm:{tool_folder(folder / 'obedient', 'reasoning')}",
                "options": {"engine": "obedient:engine"},
            },
            "text": {"model": "headwater.zoo.text:Text", "threads": 1},
            "mirror": {"model": "typed:Mirror", "batching": {"max_batch_size": 8}},
            **{name: {"model": f"hf:{folder / name}", "threads": 1} for name in ("reranker", "classifier")},
            "repository": triton_repository(folder / "repository"),
        },
        "server": {"grpc_port": 0},
    }


def triton_repository(folder: Path) -> dict[str, Any]:
    """The deployment of a Triton repository, which is made in this folder."""
    write_repository(folder, MODELS)
    return {"model": f"triton:{folder}", "options": {"model_control": "explicit", "load_models": ["*"]}}


def keyed_configuration(folder: Path) -> tuple[dict[str, Any], str]:
    """A server that requires keys, and a key of it for inference."""
    text, digest = make_key()
    change_file(folder / "keys.json", lambda _: [Key("client", digest, scopes=("infer",))])
    configuration = {
        "deployments": {"repository": triton_repository(folder / "keyed")},
        "security": {"keys_file": str(folder / "keys.json")},
        "server": {"grpc_port": 0},
    }
    return configuration, text


def client_of(name: str, address: str, folder: Path) -> tuple[str, list[str]]:
    """A client's package with its version, and the command that runs its cases.

    Args:
        name: the client's.
        address: of the server, for gRPC.
        folder: for what is generated; must not exist.

    Raises:
        RuntimeError: the client can't be made.
    """
    if name == GO:
        return f"grpc-go {go_client.version()}", [str(go_client.build(address, folder))]
    if name in PACKAGES:
        title = f"{PACKAGES[name]} {version_of_package(PACKAGES[name])}"
        cases = FOLDER / f"{name}_cases.mjs"
        return title, ["node", str(cases)] if cases.exists() else _agent(name)
    title = f"{CLIENTS.packages[name]} {CLIENTS.version_of(name)}"
    return title, _agent(name) if name in AGENTS else [str(CLIENTS.python_of(name)), str(FOLDER / f"{name}_cases.py")]


def _agent(name: str) -> list[str]:
    return [sys.executable, str(FOLDER / "agent_cases.py"), name]


def is_made(name: str) -> bool:
    """Whether a client is installed."""
    if name in PACKAGES:
        return packages_are_made()
    return name == GO or CLIENTS.is_made(name)


def enter_loopback(names: list[str]) -> None:
    """Go on in a network of its own, if the system allows it; what the clients start ends with it."""
    alone = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
    command = [*alone, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"not in a network of its own: {error}", file=sys.stderr)
        return
    module = [sys.executable, "-m", "tests.clients", *names]
    os.execvpe(command[0], [*command, *module], {**os.environ, LOOPBACK: "1"})


def run(name: str, command: list[str], variables: dict[str, str]) -> Result:
    """Run a client's cases with these variables in its environment."""
    folders = [str(CLIENTS.python_of(name).parent)] if name in AGENTS else []
    environment = {
        **os.environ,
        **variables,
        "PATH": os.pathsep.join([*folders, path_of_packages()]),
        "HEADWATER_PACKAGES": str(AGENTS_FOLDER),
        "HEADWATER_TOKENIZER": str(TINY_LM),
        "HEADWATER_PYTHON": sys.executable,
        "HEADWATER_PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("app", "inference", "")),
        "NO_PROXY": "127.0.0.1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it fetches a list of prices at every start
    }
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Result([], {"all": f"did not end within {TIMEOUT_S} s"})
    results = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"case":')]
    failed = {one["case"]: one["error"] for one in results if one["error"]}
    if ended.returncode or not results:
        failed = failed or {"all": ended.stderr[-3000:]}
    return Result([one["case"] for one in results if not one["error"]], failed)


def main() -> None:
    """Run the clients named, or all."""
    names = sys.argv[1:] or [*CLIENTS.packages, *PACKAGES, GO]
    if unknown := {*names} - {*CLIENTS.packages, *PACKAGES, GO}:
        raise SystemExit(
            f"expected names among {', '.join([*CLIENTS.packages, *PACKAGES, GO])}, got {', '.join(unknown)}"
        )
    if LOOPBACK not in os.environ:
        if environments := [name for name in names if name in CLIENTS.packages]:
            CLIENTS.make_missing(environments)
        if any(name in PACKAGES for name in names):
            make_packages()
        enter_loopback(names)
    made = [name for name in names if is_made(name)]
    is_good = len(made) == len(names)
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="hw-")))
        running = ends.enter_context(serve(configuration(folder)))
        keyed_config, key = keyed_configuration(folder)
        keyed = ends.enter_context(serve(keyed_config))
        variables = {
            "HEADWATER_URL": running.url,
            "HEADWATER_GRPC": running.grpc_address,
            "HEADWATER_KEYED_GRPC": keyed.grpc_address,
            "HEADWATER_KEY": key,
        }
        for name in made:
            try:
                title, command = client_of(name, running.grpc_address, folder / name)
            except RuntimeError as error:
                print(f"left out: {name}: {error}", file=sys.stderr)
                is_good = False
                continue
            result = run(name, command, variables)
            count = len(result.passed) + len(result.failed)
            print(f"{title}: {len(result.passed)} of {count}", flush=True)
            for case, why in result.failed.items():
                print(f"  {case}: {why}")
            is_good = is_good and not result.failed
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
