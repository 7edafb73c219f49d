"""The command line: ``headwater serve`` and ``check``, and what commands a running server."""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import app
from app.bench.options import add_bench_command
from app.config import Unparsed, load_what, read_yaml
from app.errors import CommandError, ConfigError, StartError
from app.health import default_url, health_status
from app.logs import set_up_logging
from app.openapi import example_body
from app.plan.options import add_plan_command
from app.security.key_commands import add_key_commands
from app.security.keys_file import keys_are_wanted
from inference.signature import Signature

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; ends the process with its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        status = int(options.run(options))
    except (ConfigError, StartError, CommandError) as error:
        print(f"headwater: {error}", file=sys.stderr)
        status = 1
    sys.exit(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="headwater", description="Serve PyTorch models over HTTP, through PyTriton.")
    parser.add_argument("--version", action="version", version=f"headwater {app.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve what a configuration names, or one model")
    serve.add_argument(
        "what",
        metavar="CONFIG | MODULE:CLASS | onnx:PATH",
        help="a YAML file, or a model such as my.models:Scale or onnx:head.onnx",
    )
    serve.add_argument("--host", help="address to listen on")
    serve.add_argument("--port", type=int, help="port to listen on; 0 takes a free one")
    serve.add_argument("--workers", type=int, help="gateway processes")
    _add_set(serve)
    serve.set_defaults(run=_serve)

    check = commands.add_parser("check", help="check the environment, and a configuration if one is given")
    check.add_argument("what", nargs="?", metavar="CONFIG | MODULE:CLASS | onnx:PATH", help="as of `headwater serve`")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.add_argument("--host")
    check.add_argument("--port", type=int)
    _add_set(check)
    check.set_defaults(run=_check)

    status = commands.add_parser("status", help="show the models of a running server, and their states")
    _add_url(status)
    status.set_defaults(run=_status)
    health = commands.add_parser("health", help="whether a running server is ready: exit status 0, or 1 and why not")
    health.add_argument("--url", default=default_url(), help="the server's; default: %(default)s")
    health.set_defaults(run=_health)
    for action, what in (
        ("load", "load a model that is not loaded"),
        ("unload", "unload a model, and see that nothing of it remains"),
        ("reload", "replace a model's replicas without a gap"),
    ):
        command = commands.add_parser(action, help=f"{what}, on a running server on this machine")
        command.add_argument("name", metavar="NAME", help="the deployment")
        if action != "unload":
            command.add_argument(
                "--config", metavar="FILE | JSON",
                help="a deployment's section, laid over the one that the server was started with: a YAML or JSON file, "
                "or JSON such as '{\"timeout_s\": 5}'",
            )  # fmt: skip
        _add_url(command)
        command.set_defaults(run=_command, action=action)
    scale = commands.add_parser("scale", help="have another number of a model's replicas, on a running server")
    scale.add_argument("name", metavar="NAME", help="the deployment, or PIPELINE.STEP")
    scale.add_argument("replicas", metavar="N | MIN-MAX", type=_bounds, help="how many, or between how many it scales")
    _add_url(scale)
    scale.set_defaults(run=_scale)
    add_bench_command(commands)
    add_plan_command(commands, lambda options: load_what(options.what, flags=_flags(options)))
    add_key_commands(commands)
    return parser


def _bounds(text: str) -> dict[str, int]:
    least, separator, most = text.partition("-")
    try:
        return {"min": int(least), "max": int(most)} if separator else {"replicas": int(text)}
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number such as 3, or 1-3, got {text!r}") from None


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000",
        help="the server's; default: %(default)s; its API key is taken from the environment variable HEADWATER_KEY",
    )  # fmt: skip


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", dest="fields",
        help="set any field of the configuration, such as deployments.text.timeout_s=5; may be repeated",
    )  # fmt: skip


def _flags(options: argparse.Namespace) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    for pair in options.fields:
        name, separator, value = pair.partition("=")
        if not separator:
            raise ConfigError(f"flag --set: expected FIELD=VALUE, got {pair!r}")
        flags[name] = Unparsed(value)
    for name in ("host", "port", "workers"):
        if getattr(options, name, None) is not None:
            flags[f"server.{name}"] = getattr(options, name)
    return flags


def _serve(options: argparse.Namespace) -> int:
    if os.getpid() == 1:
        # The kernel drops a signal that process 1 has no handler for, and the supervisor's comes a second later.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    from app.supervisor import Supervisor

    config, user_paths = load_what(options.what, flags=_flags(options))
    set_up_logging(config.server.log_format)
    asks_for_keys = keys_are_wanted(config.security.keys_file)
    announce = (
        _log_what_is_served
        if config.server.log_format == "json"
        else functools.partial(_announce, asks_for_keys=asks_for_keys)
    )
    return asyncio.run(Supervisor(config, user_paths, announce).run())


def _check(options: argparse.Namespace) -> int:
    from app.check import check

    return check(options.what, as_json=options.json, flags=_flags(options))


def _status(options: argparse.Namespace) -> int:
    from app.server_client import ServerClient, status_table

    print(status_table(ServerClient(options.url).index()))
    return 0


def _health(options: argparse.Namespace) -> int:
    return health_status(options.url)


def _command(options: argparse.Namespace) -> int:
    from app.server_client import ServerClient, command_line

    given = getattr(options, "config", None)
    config = None if given is None else _section(given)
    print(command_line(options.action, ServerClient(options.url).command(options.action, options.name, config)))
    return 0


def _scale(options: argparse.Namespace) -> int:
    from app.server_client import ServerClient, command_line

    print(command_line("scale", ServerClient(options.url).scale(options.name, options.replicas)))
    return 0


def _section(given: str) -> str:
    """A deployment's section as JSON text, of JSON or of a file that holds it or YAML."""
    if given.lstrip().startswith("{"):
        return given
    try:
        return json.dumps(read_yaml(Path(given)))
    except (TypeError, ValueError) as error:  # YAML has dates, and keys of any type
        raise ConfigError(f"{given}: expected what JSON can say: {error}") from error


def _announce(url: str, served: list[tuple[str, Signature | None, str]], *, asks_for_keys: bool = False) -> None:
    """Print what is served, with a line to paste for each."""
    if any(signature is not None for _, signature, _ in served):
        print(f"\nHeadwater serves at {url}   (docs: {url}/docs)\n")
    else:
        print(f"\nHeadwater listens at {url}, but serves nothing yet\n")
    if asks_for_keys:
        print('  To what follows, add an API key: -H "X-API-Key: $HEADWATER_KEY"\n')
    for name, signature, reason in served:
        if signature is None:
            print(f"  {name}: not served: {reason}\n")
            continue
        if signature.language_model is not None:
            _announce_language_model(url, signature)
            continue
        shapes = [", ".join(f"{spec.name} {spec.datatype}{_dims(spec.shape)}" for spec in side)
                  for side in (signature.inputs, signature.outputs)]  # fmt: skip
        print(f"  {name}: {shapes[0]} -> {shapes[1]}")
        body = example_body(signature)
        if signature.streams:
            row = _curl(f"{url}/v2/models/{name}/generate_stream", signature.example_row())
            print(f"    {row.replace('curl -s', 'curl -sN', 1)}")
        elif body is not None:
            print(f"    {_curl(f'{url}/v2/models/{name}/infer', body)}")
        if signature.embedding is not None:
            print(f"    {_curl(f'{url}/v1/embeddings', {'model': name, 'input': 'Rivers begin here.'})}")
        print()
    sys.stdout.flush()


def _log_what_is_served(url: str, served: list[tuple[str, Signature | None, str]]) -> None:
    """The same where every line is to be JSON, with nothing to paste."""
    logger = logging.getLogger("headwater")
    for name, signature, reason in served:
        if signature is None:
            logger.error("%s: not served: %s", name, reason, extra={"model": name})
    names = [name for name, signature, _ in served if signature is not None]
    logger.info("serving at %s: %s", url, ", ".join(names) or "nothing yet", extra={"url": url, "models": names})


def _announce_language_model(url: str, signature: Signature) -> None:
    assert signature.language_model is not None
    limits = signature.language_model.limits
    sizes = f"{limits.context_length} tokens, {limits.max_sequences} sequences at once"
    print(f"  {signature.name}: language model, {sizes}")
    question = {"role": "user", "content": "def fibonacci(n):"}
    for path, asked in (
        ("chat/completions", {"messages": [question]}),
        ("completions", {"prompt": "import os\n", "max_tokens": 64}),
    ):
        row = _curl(f"{url}/v1/{path}", {"model": signature.name, "stream": True, **asked})
        print(f"    {row.replace('curl -s', 'curl -sN', 1)}")
    print()


def _dims(shape: tuple[int, ...]) -> str:
    return "[rows, " + ", ".join("any" if dim < 0 else str(dim) for dim in shape) + "]"


def _curl(url: str, body: dict[str, Any]) -> str:
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    return f"curl -s {url} -H 'Content-Type: application/json' -d {shlex.quote(text)}"
