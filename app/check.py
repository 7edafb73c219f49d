"""``headwater check``: everything that can be known to go wrong before serving, found in a few seconds."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import msgspec

from app.config import (
    PLACEHOLDER,
    Config,
    Deployment,
    InvalidConfig,
    Server,
    is_model_reference,
    load_what,
    read_config,
)
from app.errors import ConfigError
from app.interpreter import InterpreterError
from app.model_side import PROCESS_TIMEOUT_S, ModelSide, last_line
from app.pipeline_config import Pipeline
from app.security.keys_file import known_keys
from app.security.tls import Certificate
from app.sweep import SHARED_MEMORY
from inference.environment import Problem
from inference.errors import DeclarationError
from inference.pipeline import make_plan
from inference.signature import Signature
from inference.tensor_store import ASSUMED_DIMENSION, batch_bytes, uses_store

__all__ = [
    "address_problems",
    "check",
    "region_problems",
    "runtime_dir_problems",
    "security_problems",
    "shared_memory_bytes",
    "shared_memory_problems",
    "shared_memory_warnings",
    "tracing_problems",
]

MIB = 1024 * 1024
TRITON_REGION_BYTES = 4 * MIB
"""What the Python backend's region has at start; PyTriton sets it, and it grows by what is in flight."""
UNIX_PATH_BYTES = 107
"""Of a socket's path on Linux: ``sun_path`` less its closing zero."""
INSTANCE_NAME_BYTES = len("/headwater--xxxxxxxx")
REPLICA_SOCKET_BYTES = len("/r99999/w/_0_99-server.sock")
"""Of the path of a replica's longest socket, which is PyTriton's, without the deployment's name."""


def check(what: str | Path | None, *, as_json: bool, flags: Mapping[str, Any] | None = None) -> int:
    """Check the environment, and a configuration or model if one is given, and print what was found.

    What is right of a configuration is tried although something else of it is wrong, so that all problems are found.

    Args:
        what: the YAML file, or a model, as of `load_what`; without one only the server's settings are taken, from
            environment and flags.
        as_json: print ``{"ok", "versions", "deployments", "problems"}`` rather than text.
        flags: laid over the file, as in `load_config`.

    Returns:
        The exit status: 0 if ready to serve, 1 if there is a problem.
    """
    problems: list[Problem] = []
    config = None
    paths: tuple[str, ...] = (os.getcwd(),)
    if what is not None and not is_model_reference(str(what)):
        paths = tuple(dict.fromkeys((*paths, str(Path(what).resolve().parent))))
    try:
        config = load_what(str(what), flags=flags or {})[0] if what is not None else _bare_config(flags or {})
    except InvalidConfig as error:
        config = error.rest
        for problem in error.problems:
            problems.append(Problem("configuration", f"{error.source}: {problem}", "correct what the message names"))
    except ConfigError as error:
        problems.append(Problem("configuration", str(error), "correct what the message names"))
    with ModelSide({}) as side:
        versions, found = side.report()
    problems += found
    deployments: list[dict[str, Any]] = []
    if config is not None:
        served, computed = (
            {name: one for name, one in some.items() if one.model != PLACEHOLDER}
            for some in (config.deployments, config.all_deployments())
        )
        signatures, pythons, found = _signatures(computed, paths)
        problems += found
        joined, found = _joined(served, signatures)
        problems += found
        deployments = [_summary(name, one, (signatures | joined).get(name), pythons) for name, one in served.items()]
        problems += _shared_memory(_needed(computed, signatures))
        problems += address_problems(config.server.host, config.server.port)
        problems += runtime_dir_problems(config.server, computed)
        problems += tracing_problems(config.server)
        problems += security_problems(config)
    if as_json:
        report = {"ok": not problems, "versions": versions, "deployments": deployments}
        print(json.dumps({**report, "problems": [asdict(problem) for problem in problems]}, indent=2))
    else:
        _print(sys.stdout, versions, deployments, problems)
    return 1 if problems else 0


def _bare_config(flags: Mapping[str, Any]) -> Config:
    """The server's settings where there is no file; a placeholder stands for the deployments that must be there."""
    content = {"deployments": {"none": {"model": PLACEHOLDER}}}
    return read_config(content, source="command line", flags=flags)


def address_problems(host: str, port: int) -> list[Problem]:
    """Whether the gateway can listen there."""
    where = f"{host}:{port}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        return [Problem("server.host", f"{host!r} is no address of this machine: {error}", "choose another: --host")]
    family, kind, protocol, _, address = found[0]
    try:
        with socket.socket(family, kind, protocol) as listener:
            # As the supervisor does: connections of an earlier server that are winding down don't count.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            holder = _holder(port)
            return [
                Problem(
                    "server.port",
                    f"{where} is taken{f' by {holder}' if holder else ''}",
                    "end that process, or choose another port: --port (0 takes a free one)",
                )
            ]
        if error.errno == errno.EACCES:
            return [Problem("server.port", f"{where} is not allowed to this user", "choose a port from 1024: --port")]
        mend = "choose another: --host 127.0.0.1, or 0.0.0.0 for all"
        return [Problem("server.host", f"can't listen on {where}: {error.strerror}", mend)]
    return []


def runtime_dir_problems(server: Server, deployments: Iterable[str]) -> list[Problem]:
    """Whether sockets, workspaces and temporary files can go where they are meant to go."""
    title = "server.runtime_dir"
    wanted = Path(tempfile.gettempdir()) if server.runtime_dir is None else server.runtime_dir
    # As the supervisor's: made if missing, and relative to the folder in which Headwater is started.
    root = Path(os.path.abspath(wanted))
    another = "set `server.runtime_dir` to another folder, or TMPDIR"
    problems = []
    there = next(folder for folder in (root, *root.parents) if folder.exists())
    try:
        with tempfile.TemporaryDirectory(prefix="headwater-check-", dir=there):
            pass
    except OSError as error:
        problems.append(Problem(title, f"can't write in {there}: {error.strerror}", another))
    else:
        if os.statvfs(there).f_flag & os.ST_NOEXEC:
            reason = f"{there} is mounted noexec, and PyTriton executes Triton from its workspace there"
            problems.append(Problem(title, reason, f"mount it with exec, or {another}"))
    if any(character.isspace() for character in str(root)):
        reason = f"{str(root)!r} has white space, at which PyTriton splits Triton's arguments"
        problems.append(Problem(title, reason, another))
    name = max((len(name) for name in deployments), default=0)
    length = len(os.fsencode(root)) + INSTANCE_NAME_BYTES + len(str(os.getuid())) + name + REPLICA_SOCKET_BYTES
    if length > UNIX_PATH_BYTES:
        reason = f"the path of a replica's socket would have {length} bytes; a unix socket's has {UNIX_PATH_BYTES}"
        mend = f"{another}, {length - UNIX_PATH_BYTES} bytes shorter than {root}; or shorten the deployment's name"
        problems.append(Problem(title, reason, mend))
    return problems


def security_problems(config: Config) -> list[Problem]:
    """Whether the API keys and the certificate can be used, if there are any."""
    problems = []
    tls = config.server.tls
    for attempt in (
        lambda: known_keys(config.security.keys_file),
        lambda: None if tls is None else Certificate(tls),
    ):
        try:
            attempt()
        except ConfigError as error:
            title, _, text = str(error).partition(": ")
            reason, _, mend = text.rpartition("; ")
            problems.append(Problem(title, reason or mend, mend if reason else "correct it"))
    return problems


def tracing_problems(server: Server) -> list[Problem]:
    """Whether what sends traces is installed, if they are wanted."""
    if server.tracing is None:
        return []
    with contextlib.suppress(ModuleNotFoundError):  # of the package itself
        if importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None:
            return []
    reason = "it needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http, which are not installed"
    return [Problem("server.tracing", reason, "install the extra: pip install 'headwater[otel]'")]


def shared_memory_bytes(deployment: Deployment, signature: Signature | None) -> int:
    """What a deployment's replicas need in /dev/shm, with `ASSUMED_DIMENSION` for each dimension that varies.

    Each replica has the Python backend's regions: 4 MiB for each of its instances, and as much as its calls in flight
    carry. If PyTriton's store is used, its segments are powers of two and are never freed, so those of the smaller
    batches of the warm-up stay beside the largest: twice the largest, for inputs and outputs each.
    """
    region = TRITON_REGION_BYTES * deployment.instances
    if signature is not None:
        rows = deployment.batching.max_batch_size
        taken, given = (batch_bytes(side, rows) for side in (signature.inputs, signature.outputs))
        region += deployment.max_in_flight * (taken + given)
        if uses_store(signature):
            region += 2 * (_power_of_two(taken) + _power_of_two(given))
    return region * deployment.replicas.max


def shared_memory_problems(needed_bytes: int, free_bytes: int, total_bytes: int) -> list[Problem]:
    """Whether so much fits into /dev/shm."""
    if needed_bytes <= free_bytes:
        return []
    used = max(total_bytes - free_bytes, 0)
    # A quarter more, since inputs may be larger than assumed; in steps of 64 MiB.
    size_mib = -(-(used + needed_bytes * 5 // 4) // (64 * MIB)) * 64
    return [
        Problem(
            "shared memory",
            f"the replicas need about {_mib(needed_bytes)} in {SHARED_MEMORY}, {_mib(free_bytes)} of "
            f"{_mib(total_bytes)} are free (counted with {ASSUMED_DIMENSION} for a dimension that varies)",
            f"docker run --shm-size={size_mib}m (containers have 64 MB by default; in Kubernetes mount an emptyDir "
            f"with `medium: Memory` at {SHARED_MEMORY}), or lower max_batch_size, max_in_flight or replicas",
        )
    ]


def region_problems(deployments: Iterable[Deployment]) -> list[Problem]:
    """Whether what every replica takes of /dev/shm when it starts fits, with the fewest replicas that there may be."""
    needed = sum(TRITON_REGION_BYTES * one.instances * one.replicas.min for one in deployments)
    return _shared_memory(needed)


def shared_memory_warnings(deployments: Mapping[str, Deployment], signatures: Mapping[str, Signature]) -> list[Problem]:
    """Whether /dev/shm is as large as the replicas may come to need, whoever has how much of it now."""
    space = os.statvfs(SHARED_MEMORY)
    total = space.f_blocks * space.f_frsize
    return shared_memory_problems(_needed(deployments, signatures), total, total)


def _shared_memory(needed_bytes: int) -> list[Problem]:
    if not SHARED_MEMORY.is_dir():
        return [Problem("shared memory", f"there is no {SHARED_MEMORY}", f"mount a tmpfs at {SHARED_MEMORY}")]
    space = os.statvfs(SHARED_MEMORY)
    return shared_memory_problems(needed_bytes, space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize)


def _needed(deployments: Mapping[str, Deployment], signatures: Mapping[str, Signature]) -> int:
    return sum(shared_memory_bytes(one, signatures.get(name)) for name, one in deployments.items())


def _power_of_two(size_bytes: int) -> int:
    return 1 << max(size_bytes - 1, 0).bit_length()


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.0f} MiB" if size_bytes >= MIB else f"{size_bytes / 1024:,.0f} KiB"


def _signatures(
    deployments: Mapping[str, Deployment], path: tuple[str, ...]
) -> tuple[dict[str, Signature], dict[str, dict[str, Any]], list[Problem]]:
    """Signatures of those models that can be made, the Pythons of deployments that name one, and what is wrong."""
    signatures: dict[str, Signature] = {}
    problems: dict[str, list[Problem]] = {}
    pythons: dict[str, dict[str, Any]] = {}
    groups: dict[tuple[Path | None, frozenset[tuple[str, str]]], list[str]] = {}
    for name, one in deployments.items():
        groups.setdefault((one.python, frozenset(one.environment.items())), []).append(name)
    for (python, environment), names in groups.items():
        try:
            side = ModelSide(dict(environment), python)
        except InterpreterError as error:
            reason = f"python {error.path}: {error.reason}"
            problems.update({name: [Problem(f"deployment {name}", reason, error.mend)] for name in names})
            pythons.update({name: {"path": error.path, "versions": {}} for name in names})
            continue
        with side:
            if python is not None:
                versions, found = side.report()
                for name in names:
                    pythons[name] = {"path": side.python, "versions": versions}
                    problems[name] = [_of_python(name, side.python, problem) for problem in found]
            _probe(side, {name: deployments[name] for name in names}, path, signatures, problems)
    return signatures, pythons, [problem for name in deployments for problem in problems[name]]


def _of_python(name: str, python: str, problem: Problem) -> Problem:
    return Problem(f"deployment {name}", f"python {python}: {problem.title}: {problem.reason}", problem.mend)


def _probe(
    side: ModelSide,
    deployments: Mapping[str, Deployment],
    path: tuple[str, ...],
    signatures: dict[str, Signature],
    problems: dict[str, list[Problem]],
) -> None:
    """Try the models of these deployments, and add what is found to signatures and problems."""
    pending = list(deployments)
    while pending:
        requests = [_request(name, deployments[name], path) for name in pending]
        status, output, errors = side.run("inference.probe", msgspec.json.encode(requests))
        tried: list[str] = []  # steps of the next one
        for line in output.splitlines():
            finding = msgspec.json.decode(line)
            name = finding["name"]
            problems.setdefault(name, []).extend(Problem(**problem) for problem in finding["problems"])
            if finding["step"]:
                tried.append(finding["step"])
                continue
            pending.remove(name)
            tried.clear()
            if finding["signature"] is not None:
                signatures[name] = msgspec.convert(finding["signature"], Signature)
        if pending:  # the process ended at the next one; those after it get another
            name = pending.pop(0)
            problems.setdefault(name, []).append(_ended(name, deployments[name], tried, status, errors))


def _joined(
    deployments: Mapping[str, Deployment], signatures: Mapping[str, Signature]
) -> tuple[dict[str, Signature], list[Problem]]:
    """Signatures of the pipelines whose steps are deployments of their own, and why others don't fit together."""
    joined: dict[str, Signature] = {}
    problems: list[Problem] = []
    for name, one in deployments.items():
        if one.pipeline is None or one.pipeline.placement == "fused":
            continue
        steps = {step: signatures.get(where) for step, where in _places(name, one.pipeline).items()}
        known = {step: signature for step, signature in steps.items() if signature is not None}
        if len(known) < len(steps):
            continue  # what is wrong with the others was told
        try:
            plan = make_plan(one.pipeline.spec(), known, name=name, max_batch_size=one.batching.max_batch_size)
            joined[name] = plan.signature
        except DeclarationError as error:
            mend = "correct the pipeline, or the model's declaration"
            problems.append(Problem(f"deployment {name}", str(error), mend))
    return joined, problems


def _places(name: str, pipeline: Pipeline) -> dict[str, str]:
    """The deployment that computes each step of a pipeline in placement ``graph``."""
    return {step: one.deployment or f"{name}.{step}" for step, one in pipeline.all_steps().items()}


def _request(name: str, deployment: Deployment, path: tuple[str, ...]) -> dict[str, Any]:
    return {
        "name": name,
        "model": deployment.model or "",
        "options": deployment.options,
        "pipeline": deployment.pipeline.spec() if deployment.pipeline is not None else None,
        "max_batch_size": deployment.batching.max_batch_size,
        "device": deployment.placements[0],
        "path": path,
        "working_dir": path[0],
    }


def _ended(name: str, deployment: Deployment, tried: Sequence[str], status: int | None, errors: str) -> Problem:
    title, model = f"deployment {name}", deployment.model or "its steps"
    if deployment.pipeline is not None:
        for step, one in deployment.pipeline.all_steps().items():
            if step not in tried:
                title, model = f"{title}, step {step}", one.model or ""
                break
    how = f"did not end in {PROCESS_TIMEOUT_S:g} s" if status is None else f"ended the process with status {status}"
    said = f": {last_line(errors)}" if errors.strip() else ""
    return Problem(
        title,
        f"{model}: importing or constructing it {how}{said}",
        "do long or dangerous work in load(), not on import or in the constructor",
    )


def _holder(port: int) -> str | None:
    """The process that listens on a TCP port, if this user may see it."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if any(os.readlink(link) in sockets for link in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"process {process.name} ({command[:100]})"
    return None


def _summary(
    name: str, deployment: Deployment, signature: Signature | None, pythons: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    summary: dict[str, Any] = {"name": name, "model": deployment.model, "ok": signature is not None}
    if name in pythons:
        summary["python"] = pythons[name]
    pipeline = deployment.pipeline
    if pipeline is not None:
        steps = {step: one.model or f"deployment {one.deployment}" for step, one in pipeline.all_steps().items()}
        summary["pipeline"] = {"placement": pipeline.placement, "steps": steps, "heads": list(pipeline.heads)}
        if pipeline.placement == "graph":
            own = {step: pythons[at] for step, at in _places(name, pipeline).items() if at in pythons}
            summary["pipeline"].update({"pythons": own} if own else {})
    if signature is not None:
        summary["inputs"] = msgspec.to_builtins(signature.inputs)
        summary["outputs"] = msgspec.to_builtins(signature.outputs)
        summary["parameters"] = [parameter.name for parameter in signature.parameters]
    return summary


def _print(
    out: TextIO,
    versions: Mapping[str, str | None],
    deployments: Sequence[Mapping[str, Any]],
    problems: Sequence[Problem],
) -> None:
    colours = out.isatty() and "NO_COLOR" not in os.environ
    bold, red, green, plain = ("\033[1m", "\033[31m", "\033[32m", "\033[0m") if colours else ("", "", "", "")
    for name, version in versions.items():
        print(f"{name:<10} {version or 'unknown'}", file=out)
    if deployments:
        print(file=out)
    width = max((len(one["name"]) for one in deployments), default=0)
    for one in deployments:
        tensors = f"  {_tensors(one['inputs'])} -> {_tensors(one['outputs'])}" if one["ok"] else ""
        pipeline = one.get("pipeline")
        what = one["model"] if pipeline is None else f"{pipeline['placement']} pipeline"
        print(f"{bold}{one['name']:<{width}}{plain}  {what}{tensors}", file=out)
        if "python" in one:
            print(f"{'':<{width}}    {_python(one['python'])}", file=out)
        if pipeline is not None:
            for step, model in pipeline["steps"].items():
                print(f"{'':<{width}}    {'head' if step in pipeline['heads'] else 'step'} {step}  {model}", file=out)
                if step in pipeline.get("pythons", {}):
                    print(f"{'':<{width}}      {_python(pipeline['pythons'][step])}", file=out)
    print(file=out)
    if not problems:
        print(f"{green}ready to serve{plain}", file=out)
        return
    print(f"{red}{len(problems)} problem{'' if len(problems) == 1 else 's'}{plain}", file=out)
    for problem in problems:
        print(f"\n{bold}{problem.title}{plain}\n  why   {problem.reason}\n  mend  {problem.mend}", file=out)


def _python(python: Mapping[str, Any]) -> str:
    versions = python["versions"]
    names = [name for name in ("numpy", "pytriton", "torch") if versions.get(name)]
    said = [
        str(versions.get("python") or "can't be used").partition(" (")[0],
        *(f"{one} {versions[one]}" for one in names),
    ]
    return f"python {python['path']}: {', '.join(said)}"


def _tensors(specs: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(
        f"{spec['name']} {spec['datatype']} [{', '.join(map(str, spec['shape']))}]{'?' if spec['optional'] else ''}"
        for spec in specs
    )
