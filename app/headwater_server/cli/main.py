"""The command line ``headwater``: parses its arguments, and runs a command.

Each command imports its modules when it runs: all imports together take several times as long as most commands.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater_server import version_text
from headwater_server.cli.bench.bench_options import add_bench_command
from headwater_server.cli.init import KINDS, write_template
from headwater_server.cli.keys_command import add_key_commands
from headwater_server.cli.option_values import add_python_option, add_set_option, config_flags
from headwater_server.cli.plan.plan_options import add_plan_command
from headwater_server.cli.surroundings import complete, require_folders
from headwater_server.errors import CommandError, ConfigError, StartError

if TYPE_CHECKING:
    from headwater.signature import Signature
    from headwater_server.config.schema import Config

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its status: 1 if the command raised one of Headwater's errors, which is printed to
    standard error; 2 for wrong arguments.

    Args:
        arguments: the words after ``headwater``; None: the arguments of this process.
    """
    complete()
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
    parser.add_argument("--version", action="version", version=version_text())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve the models of a configuration, or one model")
    serve.add_argument(
        "what",
        metavar="CONFIG | MODULE:CLASS | KIND:PATH",
        help="a YAML file, or a model such as my.models:Scale, onnx:head.onnx, torch:head.pt2, hf:FOLDER or "
        "pytriton:server.py",
    )
    _add_gateway_options(serve)
    serve.add_argument(
        "--reload", action="store_true",
        help="for development: reload a model when its code, its file or its configuration changes",
    )  # fmt: skip
    add_python_option(serve)
    add_set_option(serve)
    serve.set_defaults(run=_serve)

    join = commands.add_parser("join", help="add a gateway to what `headwater serve` serves on a cluster")
    _add_address(join)
    _add_gateway_options(join)
    join.set_defaults(run=_join)
    stop = commands.add_parser("stop", help="end what is served on a cluster: gateways, replicas and supervisor")
    _add_address(stop)
    stop.set_defaults(run=_stop)

    check = commands.add_parser("check", help="check the environment and, if given, a configuration or model")
    check.add_argument("what", nargs="?", metavar="CONFIG | MODULE:CLASS | KIND:PATH", help="as for `headwater serve`")
    check.add_argument("--families", action="store_true", help="print the architectures of language models")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.add_argument("--load", action="store_true", help="also load all models, and call all but language models")
    check.add_argument("--host")
    check.add_argument("--port", type=int)
    check.add_argument("--grpc-port", type=int)
    add_python_option(check)
    add_set_option(check)
    check.set_defaults(run=_check)
    for command in (serve, check):
        help_text = "download models named as at the Hugging Face hub (hf:ORGANIZATION/NAME) into its local cache"
        command.add_argument("--download", action="store_true", help=help_text)

    init = commands.add_parser("init", help="write a folder to begin with: a model, a configuration, a test")
    init.add_argument("kind", metavar="KIND", choices=KINDS, help=f"one of {', '.join(KINDS)}")
    init.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="default: the name of the kind")
    init.set_defaults(run=_init)

    importing = commands.add_parser("import", help="write a Triton model repository as a configuration, and check it")
    importing.add_argument("source", metavar="triton:PATH", help="the folder of the models")
    importing.add_argument(
        "--output", type=Path, metavar="FOLDER", default=Path("imported"), help="folder to write; default: %(default)s"
    )
    importing.add_argument("--overwrite", action="store_true", help="overwrite files of the folder")
    importing.set_defaults(run=_import)

    status = commands.add_parser("status", help="show the models of a running server, and their states")
    _add_url(status)
    status.set_defaults(run=_status)
    health = commands.add_parser("health", help="exit with 0 if a running server is ready, else with 1 and the reason")
    health.add_argument("--url", help="the server's URL; default: this machine, on the port that the environment sets")
    health.set_defaults(run=_health)
    _add_model_commands(commands)
    add_bench_command(commands)
    add_plan_command(commands)
    add_key_commands(commands)
    return parser


def _add_model_commands(commands: Any) -> None:
    """Add the commands that change the models of a running server."""
    for action, about in (
        ("load", "load a model that is not loaded"),
        ("unload", "unload a model, and verify that nothing of it remains"),
        ("reload", "replace a model's replicas without downtime"),
    ):
        command = commands.add_parser(action, help=f"{about}, on a running server on this machine")
        command.add_argument("name", metavar="NAME", help="the deployment")
        if action != "unload":
            command.add_argument(
                "--config", metavar="FILE | JSON",
                help="a deployment's section, merged into the section that the server was started with: a YAML or JSON "
                "file, or JSON such as '{\"timeout_s\": 5}'",
            )  # fmt: skip
        _add_url(command)
        command.set_defaults(run=_command, action=action)
    scale = commands.add_parser("scale", help="change the number of a model's replicas, on a running server")
    scale.add_argument("name", metavar="NAME", help="the deployment, PIPELINE.STEP or DEPLOYMENT.VERSION")
    scale.add_argument("replicas", metavar="N | MIN-MAX", type=_bounds, help="their number, or bounds to scale between")
    _add_url(scale)
    scale.set_defaults(run=_command, action="scale")
    promote = commands.add_parser("promote", help="give a version of a model all requests, on a running server")
    rollback = commands.add_parser("rollback", help="undo the last change of how a model's versions share requests")
    for command, action in ((promote, "promote"), (rollback, "rollback")):
        command.add_argument("name", metavar="NAME", help="the deployment")
        if action == "promote":
            command.add_argument("version", metavar="VERSION", help="the version, which becomes the default, too")
        else:
            command.add_argument("--undo", action="store_true", help="take back the last rollback")
        _add_url(command)
        command.set_defaults(run=_command, action=action)


def _add_gateway_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", help="address to listen on")
    parser.add_argument("--port", type=int, help="port to listen on; 0: any free port")
    parser.add_argument("--grpc-port", type=int, help="port of gRPC; 0: any free port; default: no gRPC")
    parser.add_argument("--workers", type=int, help="number of gateway processes")


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address", default="auto", help="of Ray's head, HOST:PORT; auto: the Ray that this machine belongs to"
    )


def _bounds(text: str) -> dict[str, int]:
    minimum, separator, maximum = text.partition("-")
    try:
        return {"min": int(minimum), "max": int(maximum)} if separator else {"replicas": int(text)}
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number such as 3, or 1-3, got {text!r}") from None


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000",
        help="the server's URL; default: %(default)s; an API key is read from the environment variable HEADWATER_KEY",
    )  # fmt: skip


def _health(options: argparse.Namespace) -> int:
    from headwater_server.cli.health import default_url, health_status

    return health_status(options.url or default_url())


def _serve(options: argparse.Namespace) -> int:
    if os.getpid() == 1:
        # The kernel drops signals that process 1 has no handler for; the supervisor installs its handlers a second
        # later.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    require_folders()
    import asyncio

    from headwater_server.cli.script_config import load_with_scripts
    from headwater_server.config.reader import is_model_reference
    from headwater_server.supervisor.supervisor import Supervisor
    from headwater_server.telemetry.log_output import never_blocking
    from headwater_server.telemetry.logs import set_up_logging

    flags = config_flags(options)
    config, user_paths, warnings, python = load_with_scripts(options.what, flags=flags, python=options.python)
    if options.download:
        from headwater_server.cli.download import download_models

        download_models(config, user_paths)
    sys.stdout = never_blocking(sys.stdout)
    set_up_logging(config.server.log_format)
    logging.getLogger("headwater").info("%s", python)
    for warning in warnings:
        logging.getLogger("headwater").warning("%s", warning)
    announce = _announcer(config)
    if options.reload:
        if config.cluster is not None:
            raise CommandError("--reload: expected replicas on this machine, got the section `cluster`; remove either")
        # Cached bytecode is matched by the source's size and its time in seconds, so it could be stale after an edit
        # within the same second.
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

        def reread() -> Config:
            return load_with_scripts(options.what, flags=flags, python=options.python).config

        file = None if is_model_reference(options.what) else Path(options.what)
        supervisor = Supervisor(config, user_paths, announce, reread, file)
        return asyncio.run(supervisor.run())
    if config.cluster is None:
        return asyncio.run(Supervisor(config, user_paths, announce).run())
    from headwater_server.cluster.gateway import serve_gateway

    return asyncio.run(serve_gateway(config, user_paths, config.cluster.address, {}, announce))


def _announcer(config: Config) -> Callable[[str, list[tuple[str, Signature | None, str]]], None]:
    """The function that announces the served models once, when the server is ready."""
    import functools

    from headwater_server.cli.announce import log_what_is_served, print_what_is_served
    from headwater_server.security.keys_file import keys_are_wanted

    if config.server.log_format == "json":
        return log_what_is_served
    return functools.partial(print_what_is_served, asks_for_keys=keys_are_wanted(config.security.keys_file))


def _join(options: argparse.Namespace) -> int:
    import asyncio

    from headwater_server.cli.announce import log_what_is_served
    from headwater_server.cluster.gateway import serve_gateway
    from headwater_server.telemetry.logs import set_up_logging

    set_up_logging("auto")
    flags = {
        name: value
        for name in ("host", "port", "grpc_port", "workers")
        if (value := getattr(options, name)) is not None
    }
    return asyncio.run(serve_gateway(None, (), options.address, flags, log_what_is_served))


def _stop(options: argparse.Namespace) -> int:
    from headwater_server.cluster.discovery import stop_cluster

    stop_cluster(options.address)
    print("stopped")
    return 0


def _check(options: argparse.Namespace) -> int:
    if options.families:
        from headwater_server.cli.families import print_families

        print_families(as_json=options.json)
        return 0
    require_folders()
    from headwater_server.cli.check import check

    for name, value in (("--load", options.load), ("--download", options.download), ("--python", options.python)):
        if options.what is None and value:
            raise CommandError(f"{name}: expected a CONFIG or a model as well, got neither")
    flags = config_flags(options)
    choices = {"loads": options.load, "downloads": options.download, "python": options.python}
    return check(options.what, as_json=options.json, flags=flags, **choices)


def _init(options: argparse.Namespace) -> int:
    folder = options.folder or Path(options.kind)
    for path in write_template(options.kind, folder):
        print(path)
    print(f"next: cd {folder}, and see README.md")
    return 0


def _import(options: argparse.Namespace) -> int:
    require_folders()
    from headwater_server.cli.import_triton import import_repository

    return import_repository(options.source, options.output, overwrites=options.overwrite)


def _status(options: argparse.Namespace) -> int:
    from headwater_server.cli.server_client import ServerClient, status_table

    print(status_table(ServerClient(options.url).index()))
    return 0


def _command(options: argparse.Namespace) -> int:
    from headwater_server.cli.server_client import ServerClient, command_line

    client, file_or_json = ServerClient(options.url), getattr(options, "config", None)
    if options.action == "scale":
        answer = client.scale(options.name, options.replicas)
    elif options.action == "promote":
        answer = client.promote(options.name, options.version)
    elif options.action == "rollback":
        answer = client.roll_back(options.name, is_undo=options.undo)
    else:
        answer = client.command(options.action, options.name, None if file_or_json is None else _section(file_or_json))
    print(command_line(options.action, answer))
    return 0


def _section(file_or_json: str) -> str:
    """A deployment's section as JSON text, from JSON (taken as it is) or from a YAML or JSON file.

    Raises:
        ConfigError: the file can't be read, or has values that JSON can't represent.
    """
    if file_or_json.lstrip().startswith("{"):
        return file_or_json
    from headwater_server.config.reader import read_yaml

    try:
        return json.dumps(read_yaml(Path(file_or_json)))
    except (TypeError, ValueError) as error:  # YAML has dates, and keys that are not strings
        raise ConfigError(f"{file_or_json}: expected values that JSON can represent: {error}") from error
