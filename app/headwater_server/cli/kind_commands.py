"""What ``check`` and ``plan`` do with kinds of deployments that they don't construct and measure in the usual way."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from headwater_server.cli.check_triton import look_at_repository
from headwater_server.cli.check_vllm import look_at_vllm
from headwater_server.cli.look import Look
from headwater_server.config.deployment_kinds import TRITON, VLLM, DeploymentKind
from headwater_server.config.schema import Config, Deployment
from headwater_server.errors import CommandError

__all__ = ["COMMANDS", "KindCommands"]


class KindCommands(NamedTuple):
    """The parts of ``check`` and ``plan`` for a kind."""

    look_at: Callable[[str, Deployment, tuple[str, ...]], Look]
    """Looks at a deployment, given its name and the folders in which relative paths are searched."""
    plan: Callable[[argparse.Namespace, Config, str, Callable[[str], None]], int]
    """See `headwater_server.cli.plan.vllm_plan.plan_vllm`."""


def _plan_vllm(options: argparse.Namespace, config: Config, name: str, progress: Callable[[str], None]) -> int:
    from headwater_server.cli.plan.vllm_plan import plan_vllm  # ``check`` does without the packages of ``plan``

    return plan_vllm(options, config, name, progress)


def _plan_repository(options: argparse.Namespace, config: Config, name: str, progress: Callable[[str], None]) -> int:
    raise CommandError(
        f"{name}: `plan` measures models, not a Triton model repository; `bench` measures a served model"
    )


COMMANDS: Final[Mapping[DeploymentKind, KindCommands]] = {
    VLLM: KindCommands(look_at_vllm, _plan_vllm),
    TRITON: KindCommands(look_at_repository, _plan_repository),
}
"""By kind; a kind that isn't here is constructed by ``check``, and measured under load by ``plan``."""
