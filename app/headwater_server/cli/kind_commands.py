"""What ``check`` and ``plan`` do with kinds of deployments that they don't construct and measure in the usual way."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from headwater.errors import Problem
from headwater.signature import Signature
from headwater_server.cli.check_vllm import look_at_vllm
from headwater_server.config.deployment_kinds import VLLM, DeploymentKind
from headwater_server.config.schema import Config, Deployment

__all__ = ["COMMANDS", "KindCommands"]


class KindCommands(NamedTuple):
    """The parts of ``check`` and ``plan`` for a kind."""

    look_at: Callable[[str, Deployment, tuple[str, ...]], tuple[dict[str, Any], Signature | Problem]]
    """See `headwater_server.cli.check_vllm.look_at_vllm`."""
    plan: Callable[[argparse.Namespace, Config, str, Callable[[str], None]], int]
    """See `headwater_server.cli.plan.vllm_plan.plan_vllm`."""


def _plan_vllm(options: argparse.Namespace, config: Config, name: str, progress: Callable[[str], None]) -> int:
    from headwater_server.cli.plan.vllm_plan import plan_vllm  # ``check`` does without the packages of ``plan``

    return plan_vllm(options, config, name, progress)


COMMANDS: Final[Mapping[DeploymentKind, KindCommands]] = {VLLM: KindCommands(look_at_vllm, _plan_vllm)}
"""By kind; a kind that isn't here is constructed by ``check``, and measured under load by ``plan``."""
