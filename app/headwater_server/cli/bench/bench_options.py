"""The options of ``headwater bench``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from headwater_server.cli.bench.slo import OF_REQUESTS, OF_RUNS, read_limits
from headwater_server.cli.option_values import add_report_options, listed, number, whole

__all__ = ["add_bench_command"]

MOST_CONNECTIONS: Final = 20_000
"""Maximum value of ``--connections`` and ``--max-connections``."""
MOST_PROCESSES: Final = 64
"""Maximum value of ``--processes``."""
POSITIVE: Final = number(lambda value: value > 0, "a number above 0")
NOT_NEGATIVE: Final = number(lambda value: value >= 0, "a number 0 or more")


def add_bench_command(commands: Any) -> None:
    """Add the command ``bench`` to a parser's commands."""
    bench = commands.add_parser(
        "bench",
        help="put load on a running server, and measure",
        description="Put load on a running server, and measure. Exit status: 0; 1 if requests failed, the run ended "
        "early or nothing could be measured; 2 for invalid options. docs/bench.md explains the figures.",
    )
    bench.add_argument("url", metavar="URL", help="the server, such as http://127.0.0.1:8000")
    bench.add_argument("--model", metavar="NAME", help="the model; default: the server's only model")
    bench.add_argument(
        "--mode", choices=("infer", "stream", "chat", "completions"), default="infer",
        help="infer: whole answers; stream: /v2/.../generate_stream; chat, completions: OpenAI's streams; "
        "default: %(default)s",
    )  # fmt: skip
    _add_load_options(bench)
    _add_body_options(bench)
    bench.add_argument(
        "--slo", type=read_limits, default={}, metavar="LIMIT=MS[,LIMIT=MS]",
        help=f"limits: {', '.join(OF_REQUESTS)} for each request, which goodput counts; {', '.join(OF_RUNS)} for a "
        "whole run",
    )  # fmt: skip
    bench.add_argument(
        "--api-key-file", type=Path, metavar="FILE",
        help="file with the API key; default: the environment variable HEADWATER_KEY",
    )  # fmt: skip
    add_report_options(bench, "a page with plots")
    bench.set_defaults(run=_run)


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for how many requests are sent, and when."""
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument(
        "--connections", type=listed(whole(1, MOST_CONNECTIONS)), metavar="N[,N]",
        help="closed loop: connections, each of which waits for its answer; default: 1,16",
    )  # fmt: skip
    loop.add_argument(
        "--rate", type=listed(POSITIVE), metavar="R[,R]",
        help="open loop: requests/s, sent on schedule whether or not the server keeps up",
    )  # fmt: skip
    parser.add_argument(
        "--arrivals", choices=("poisson", "constant"),
        help="schedule for --rate: at random or at equal intervals; default: poisson",
    )  # fmt: skip
    parser.add_argument(
        "--max-connections", type=whole(1, MOST_CONNECTIONS), metavar="N",
        help="connections for --rate, at most; default: 1024",
    )  # fmt: skip
    parser.add_argument("--seconds", type=POSITIVE, default=5.0, metavar="S", help="duration of each run; default: 5")
    parser.add_argument(
        "--warmup", type=NOT_NEGATIVE, default=1.0, metavar="S",
        help="load before each run, not measured; default: 1",
    )  # fmt: skip
    parser.add_argument("--repeats", type=whole(1, 1000), default=3, metavar="N", help="runs of each load; default: 3")
    parser.add_argument(
        "--timeout", type=POSITIVE, default=30.0, metavar="S",
        help="time after which an incomplete answer counts as failed; default: 30",
    )  # fmt: skip
    parser.add_argument(
        "--processes", type=whole(1, MOST_PROCESSES), default=1, metavar="N",
        help="generator processes that share the load; default: 1",
    )  # fmt: skip


def _add_body_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for what the requests ask."""
    parser.add_argument(
        "--input", type=Path, metavar="FILE.json",
        help="a request's body, or a list of bodies sent in turn; default: made from the model's metadata",
    )  # fmt: skip
    parser.add_argument("--rows", type=whole(1, 100_000), metavar="N", help="rows per request; default: 1")
    parser.add_argument(
        "--shape", type=_shape, action="append", default=[], metavar="INPUT=D[,D]",
        help="row shape of an input with varying dimensions; default: 16 for each of these; may be repeated",
    )  # fmt: skip
    parser.add_argument("--binary", action="store_true", help="send and receive tensors as bytes, not JSON")
    parser.add_argument(
        "--seed", type=whole(0, 2**31), default=0, metavar="N", help="seed of inputs and schedule; default: 0"
    )
    parser.add_argument(
        "--heads", type=_heads, action="append", metavar="A[,B]",
        help="a pipeline's heads to ask for, or all; may be repeated, for one measurement each",
    )  # fmt: skip
    parser.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT",
        help="prompt for text streams; may be repeated, sent in turn; default: a few sentences",
    )  # fmt: skip
    parser.add_argument(
        "--max-tokens", type=whole(1, 1_000_000), metavar="N", help="tokens per answer of text streams; default: 64"
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="generate --max-tokens in any case; not every server supports this"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--schema", type=Path, metavar="FILE.json", help="a JSON schema that chat answers must follow (response_format)"
    )
    form.add_argument("--tools", type=Path, metavar="FILE.json", help="a JSON array of tools that chat answers call")
    parser.add_argument(
        "--tool-choice", metavar="CHOICE",
        help="for --tools: required, auto, or the name of a function; default: required",
    )  # fmt: skip
    parser.add_argument(
        "--unconstrained", action="store_true", help="measure each load without --schema or --tools, too"
    )


def _run(options: argparse.Namespace) -> int:
    # Imported late: the imports of the command are slow, and other commands don't need them.
    from headwater_server.cli.bench.bench_command import run

    return run(options)


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, dims = text.rpartition("=")
    try:
        shape = tuple(int(dim) for dim in dims.split(",") if dim)
    except ValueError:
        shape = (-1,)
    if not name or any(dim < 0 for dim in shape):
        raise argparse.ArgumentTypeError(f"expected an input and a row's dimensions, such as x=3,224,224, got {text!r}")
    return name, shape


def _heads(text: str) -> tuple[str, ...] | None:
    if text == "all":
        return None
    heads = tuple(text.split(","))
    if not all(heads):
        raise argparse.ArgumentTypeError(f"expected heads separated by commas, or all, got {text!r}")
    return heads
