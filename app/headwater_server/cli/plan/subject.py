"""The deployment to plan for, and the load that measures it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headwater.errors import LoadError
from headwater_server.cli.bench.job import RequestSet
from headwater_server.cli.bench.request_bodies import Wishes, infer_bodies, read_bodies, stream_bodies
from headwater_server.cli.plan.cache_size import CacheShape, cache_shape
from headwater_server.cli.plan.point import Point
from headwater_server.cli.server_client import ServerClient
from headwater_server.config.schema import Config, Deployment
from headwater_server.errors import CommandError

__all__ = ["WARMUP_S", "Subject", "choose_deployment", "make_subject"]

MOST_CONNECTIONS: Final = 512
"""Maximum number of connections. With more, the load generator itself would slow the machine down."""
WARMUP_S: Final = 1.0
"""Duration of the load before the measurement, in seconds."""
PROMPT_TOKENS: Final = 48
"""Upper bound of the number of tokens of the prompts that are sent."""


@dataclass(frozen=True)
class Subject:
    """A deployment of a configuration, and how it is measured."""

    what: str
    """The argument of ``headwater serve``: a configuration's file or a model."""
    config: Config
    name: str
    """The deployment's name."""
    cores: int
    """Number of CPUs, which concurrent calls share."""
    seconds: float
    """Duration of the load at each size, in seconds."""
    tokens: int
    """Tokens per answer of a language model."""
    input: Path | None = None
    """A file with the bodies of requests; None: bodies are made from the model's metadata."""
    cache: CacheShape | None = None
    """The key/value cache of a language model; None for other models, or if the cache's size is unknown."""

    @property
    def deployment(self) -> Deployment:
        """The deployment."""
        return self.config.deployments[self.name]

    @property
    def takes_text(self) -> bool:
        """Whether it is a language model: its rows are sequences, and its rates are tokens per second."""
        return self.deployment.kind.takes_text

    @property
    def unit(self) -> str:
        """The unit of the deployment's rates."""
        return "tokens/s" if self.takes_text else "rows/s"

    def filled_cache(self, rows: int) -> int:
        """Bytes of the key/value cache that this load fills with ``rows`` concurrent sequences; 0 if the cache is
        None."""
        if self.cache is None:
            return 0
        return self.cache.size(rows, min(self.tokens + PROMPT_TOKENS, self.cache.context_length))

    def largest_cache(self, rows: int) -> int:
        """Bytes of a full key/value cache with ``rows`` concurrent sequences; 0 if the cache is None."""
        return 0 if self.cache is None else self.cache.most(rows)

    def connections(self, point: Point) -> int:
        """The number of connections, each with one row in flight, that keeps every call full; at most
        `MOST_CONNECTIONS`."""
        if self.takes_text:
            return min(point.rows * point.replicas, MOST_CONNECTIONS)
        return min(2 * point.rows * point.calls, MOST_CONNECTIONS)

    def target(self, url: str) -> RequestSet:
        """The requests to a server of the deployment. Each has a single row, unless the bodies of ``input`` have more.

        Raises:
            CommandError: the file with the bodies is wrong, or the server doesn't give the model's metadata.
        """
        kind = "completions" if self.takes_text else "infer"
        if self.input is not None:
            bodies = read_bodies(self.input, kind, self.name)
        elif self.takes_text:
            bodies = stream_bodies(kind, None, self.name, None, Wishes(max_tokens=self.tokens, ignores_eos=True))
        else:
            bodies = infer_bodies(ServerClient(url, key="").metadata(self.name), None, Wishes())
        return RequestSet(url, self.name, bodies, kind, timeout_s=self.deployment.timeout_s)

    def bench_arguments(self, url: str, point: Point) -> list[str]:
        """The arguments with which ``headwater bench`` puts the same load on a server."""
        arguments = [url, "--model", self.name, "--connections", str(self.connections(point))]
        arguments += ["--seconds", f"{self.seconds:g}", "--warmup", f"{WARMUP_S:g}"]
        if self.takes_text:
            arguments += ["--mode", "completions"]
        if self.input is not None:
            arguments += ["--input", str(self.input)]
        elif self.takes_text:
            arguments += ["--max-tokens", str(self.tokens), "--ignore-eos"]
        return [*arguments, "--timeout", f"{self.deployment.timeout_s:g}"]


def choose_deployment(config: Config, wanted: str | None) -> str:
    """The name of the deployment to plan for; ``wanted`` may be None if there is only one.

    Raises:
        CommandError: there are several deployments and none is named, the name is unknown, or the deployment has
            versions or is a pipeline in placement ``graph``.
    """
    name = next(iter(config.deployments)) if wanted is None and len(config.deployments) == 1 else wanted
    if name is None or name not in config.deployments:
        expected, got = ", ".join(config.deployments), "none" if name is None else repr(name)
        raise CommandError(f"--deployment: expected one of {expected}, got {got}")
    if config.deployments[name].versions:
        raise CommandError(
            f"--deployment: expected a deployment without versions, got {name!r}: put one version's fields into a "
            "configuration, and plan for that"
        )
    if config.deployments[name].kind.joins_deployments:
        raise CommandError(
            f"--deployment: expected a model, a language model or a fused pipeline, got {name!r}, a pipeline of "
            "placement graph, whose steps are deployments with sizes of their own: put one step's model into a "
            "configuration, and plan for that"
        )
    return name


def make_subject(
    source: str, config: Config, name: str, search: Sequence[str], *, cores: int, seconds: float, tokens: int,
    input: Path | None,
) -> Subject:  # fmt: skip
    """Make a `Subject`; for a language model, compute its cache. ``search`` lists the folders in which models are
    looked for.

    Raises:
        CommandError: the language model doesn't exist, its ``config.json`` can't be read, its context is too short for
            the answers, or the file with the bodies is wrong.
    """
    cache = None
    deployment = config.deployments[name]
    if deployment.kind.takes_text:
        try:
            cache = cache_shape(deployment, search)
        except LoadError as error:
            raise CommandError(str(error)) from error
        except (OSError, ValueError) as error:
            raise CommandError(f"{deployment.model}: config.json can't be read: {error}") from error
        if cache is not None and tokens + PROMPT_TOKENS > cache.context_length:
            raise CommandError(
                f"--tokens: expected at most {cache.context_length - PROMPT_TOKENS}, so that prompt and answer fit "
                f"into the {cache.context_length} tokens of the context, got {tokens}"
            )
    subject = Subject(source, config, name, cores, seconds, tokens, input, cache)
    if input is not None:
        subject.target("http://127.0.0.1:1")  # reads the file, so that its errors appear before a server starts
    return subject
