"""What is planned for, and how it is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from app.cli.bench.bodies import Body, Wishes, infer_bodies, read_bodies, stream_bodies
from app.cli.bench.job import Target
from app.cli.client import ServerClient
from app.cli.plan.memory_model import CacheShape, cache_shape
from app.cli.plan.point import Point
from app.config.schema import Config, Deployment
from app.errors import CommandError
from inference.errors import LoadError
from inference.reference import is_language_model

__all__ = ["WARMUP_S", "Subject", "choose_deployment", "make_subject"]

MOST_CONNECTIONS: Final = 512
"""Beyond, the load itself would take a machine's time."""
WARMUP_S: Final = 1.0
"""Of load, before what counts."""
PROMPT_TOKENS: Final = 48
"""More than the prompts that are sent have."""


@dataclass(frozen=True)
class Subject:
    """One deployment."""

    what: str
    """As ``headwater serve`` takes it."""
    name: str
    deployment: Deployment
    server: Mapping[str, Any]
    """Fields of the server's section that are set, by dotted path."""
    cores: int
    seconds: float
    """Of load, at each size."""
    tokens: int
    """Of a language model's answers."""
    input: Path | None = None
    """Has the bodies of requests; None: they are made from the model's metadata."""
    cache: CacheShape | None = None

    @property
    def is_language_model(self) -> bool:
        """Whether its rows are sequences, and its rates tokens."""
        return is_language_model(self.deployment.model or "")

    @property
    def unit(self) -> str:
        """Of its rates."""
        return "tokens/s" if self.is_language_model else "rows/s"

    @property
    def length(self) -> int:
        """Tokens of a prompt and its answer, of a language model."""
        return self.tokens + PROMPT_TOKENS

    def filled_cache(self, rows: int) -> int:
        """Bytes of the key/value cache under the load that it gets here."""
        return 0 if self.cache is None else self.cache.size(rows, min(self.length, self.cache.context_length))

    def largest_cache(self, rows: int) -> int:
        """Likewise, under any load."""
        return 0 if self.cache is None else self.cache.size(rows)

    def connections(self, point: Point) -> int:
        """So many, each with a row under way, that every call is full when the one before it ends."""
        if self.is_language_model:
            return min(point.rows * point.replicas, MOST_CONNECTIONS)
        return min(2 * point.rows * point.calls, MOST_CONNECTIONS)

    def target(self, url: str) -> Target:
        """The requests that are sent to a server that serves it: one row each.

        Raises:
            CommandError: none can be made.
        """
        timeout_s = self.deployment.timeout_s
        if self.is_language_model:
            wishes = Wishes(max_tokens=self.tokens, ignores_eos=True)
            bodies = self._bodies("completions") or stream_bodies("completions", None, self.name, None, wishes)
            return Target(url, self.name, bodies, "completions", timeout_s=timeout_s)
        bodies = self._bodies("infer") or infer_bodies(ServerClient(url, key="").metadata(self.name), None, Wishes())
        return Target(url, self.name, bodies, timeout_s=timeout_s)

    def bench_arguments(self, url: str, point: Point) -> list[str]:
        """Of ``headwater bench``, with which it puts the same load on a server."""
        arguments = [url, "--model", self.name, "--connections", str(self.connections(point))]
        arguments += ["--seconds", f"{self.seconds:g}", "--warmup", f"{WARMUP_S:g}"]
        if self.is_language_model:
            arguments += ["--mode", "completions"]
        if self.input is not None:
            arguments += ["--input", str(self.input)]
        elif self.is_language_model:
            arguments += ["--max-tokens", str(self.tokens), "--ignore-eos"]
        return [*arguments, "--timeout", f"{self.deployment.timeout_s:g}"]

    def _bodies(self, kind: str) -> tuple[Body, ...]:
        return () if self.input is None else read_bodies(self.input, kind, self.name)


def choose_deployment(config: Config, wanted: str | None) -> str:
    """The name of the deployment that is planned for.

    Raises:
        CommandError: there are several and none is named, there is none of that name, or it can't be planned for.
    """
    known = ", ".join(config.deployments)
    if wanted is None and len(config.deployments) > 1:
        raise CommandError(f"--deployment: expected one of {known}, got none")
    name = wanted if wanted is not None else next(iter(config.deployments))
    if name not in config.deployments:
        raise CommandError(f"--deployment: expected one of {known}, got {name!r}")
    deployment = config.deployments[name]
    if deployment.pipeline is not None and deployment.pipeline.placement == "graph":
        raise CommandError(
            f"--deployment: expected a model, a language model or a fused pipeline, got {name!r}, a pipeline of "
            "placement graph, whose steps are deployments with sizes of their own: put one step's model into a "
            "configuration, and plan for that"
        )
    return name


def make_subject(
    what: str, config: Config, name: str, search: Sequence[str], *, cores: int, seconds: float, tokens: int,
    input: Path | None,
) -> Subject:  # fmt: skip
    """See `Subject`.

    Raises:
        CommandError: the language model isn't there, or its options leave no room for the answers.
    """
    deployment = config.deployments[name]
    server = {
        f"server.{field}": value for field, value in config.server.model_dump(mode="json", exclude_unset=True).items()
    }
    cache = None
    if is_language_model(deployment.model or ""):
        try:
            cache = cache_shape(deployment, search)
        except LoadError as error:
            raise CommandError(str(error)) from error
        if cache is not None and tokens + PROMPT_TOKENS > cache.context_length:
            raise CommandError(
                f"--tokens: expected at most {cache.context_length - PROMPT_TOKENS}, so that prompt and answer fit "
                f"into the {cache.context_length} tokens of the context, got {tokens}"
            )
    subject = Subject(what, name, deployment, server, cores, seconds, tokens, input, cache)
    if input is not None:
        subject.target("http://127.0.0.1:1")  # what is wrong with the file should not wait for a server
    return subject
