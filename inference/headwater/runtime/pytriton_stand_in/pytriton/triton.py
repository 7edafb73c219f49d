"""``Triton`` and its configuration.

While a script runs up to ``serve()``, `headwater.runtime.pytriton_script` replaces the ``Triton`` class of this module
with a class that records the models that the script binds.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .decorators import TritonContext
from .exceptions import PyTritonInvalidOperationError, PyTritonValidationError
from .model_config import ModelConfig, Tensor

__all__ = [
    "DefaultTritonLifecyclePolicy",
    "ModelConfig",
    "RemoteTriton",
    "Tensor",
    "Triton",
    "TritonConfig",
    "TritonContext",
    "TritonLifecyclePolicy",
    "TritonSecurityConfig",
    "VertextAILifecyclePolicy",
]

logger = logging.getLogger(__name__)

_TYPES: Final[dict[str, Any]] = {
    name: type_
    for type_, names in (
        (Path, "model_repository log_file grpc_server_cert grpc_server_key grpc_root_cert"),
        (
            int,
            "log_verbose exit_timeout_secs http_port http_thread_count grpc_port grpc_infer_allocation_pool_size "
            "grpc_keepalive_time grpc_keepalive_timeout grpc_http2_max_pings_without_data "
            "grpc_http2_min_recv_ping_interval_without_data grpc_http2_max_ping_strikes metrics_interval_ms "
            "metrics_port sagemaker_port sagemaker_thread_count vertex_ai_port vertex_ai_thread_count "
            "buffer_manager_thread_count",
        ),
        (
            bool,
            "exit_on_error strict_readiness allow_http allow_grpc grpc_use_ssl grpc_use_ssl_mutual "
            "grpc_keepalive_permit_without_calls allow_metrics allow_gpu_metrics allow_cpu_metrics allow_sagemaker "
            "allow_vertex_ai",
        ),
        (
            str,
            "id http_address http_header_forward_pattern http_restricted_api grpc_address grpc_header_forward_pattern "
            "grpc_infer_response_compression_level grpc_restricted_protocol metrics_address sagemaker_safe_port_range "
            "vertex_ai_default_model cache_directory",
        ),
        (list, "metrics_config trace_config cache_config"),
    )
    for name in names.split()
}
"""The types of the fields of ``TritonConfig``; each field may also be None."""
_VARIABLES: Final = "PYTRITON_TRITON_CONFIG_"
"""Prefix of the names of the environment variables that set a field."""
_PROTECTED: Final = ["shared-memory", "model-repository", "statistics", "trace", "logging"]
_ENDPOINTS: Final = {*_PROTECTED, "health", "metadata", "inference", "model-config"}


class _Config:
    """The methods of ``TritonConfig``.

    Raises:
        PyTritonValidationError: neither HTTP nor gRPC is allowed.
    """

    def __post_init__(self) -> None:
        settings = vars(self)
        if all(settings[name] not in (True, None) for name in ("allow_http", "allow_grpc")):
            raise PyTritonValidationError("The `http` or `grpc` endpoint has to be allowed: expected allow_http or "
                                          "allow_grpc, got False for both")  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Any:
        """Make a configuration of fields by name, each converted to its type. Unknown names are logged.

        Raises:
            ValueError, TypeError: a value can't be converted.
        """
        values = {name: value for name, value in config.items() if name in _TYPES}
        for name in config.keys() - values.keys():
            logger.warning("TritonConfig has no field %s: %r is ignored", name, config[name])
        return cls(**{name: value if value is None else _TYPES[name](value) for name, value in values.items()})

    @classmethod
    def from_env(cls) -> Any:
        """Make a configuration of the environment variables ``PYTRITON_TRITON_CONFIG_FIELD``.

        The elements of a list are in ``PYTRITON_TRITON_CONFIG_FIELD_0`` and so on.

        Raises:
            ValueError: a value can't be converted.
        """
        fields: dict[str, Any] = {}
        lists: dict[str, dict[int, str]] = {}
        for variable, value in os.environ.items():
            if variable.startswith(_VARIABLES):
                name = variable[len(_VARIABLES) :].lower()
                place = re.fullmatch(r"(.+)_(\d+)", name)
                if place:
                    lists.setdefault(place[1], {})[int(place[2])] = value
                else:
                    fields[name] = value
        fields |= {name: [places[place] for place in sorted(places)] for name, places in lists.items()}
        return cls.from_dict(fields)


TritonConfig = dataclasses.make_dataclass(
    "TritonConfig",
    [(name, type_ | None, None) for name, type_ in _TYPES.items()],
    bases=(_Config,),
    namespace={"__module__": __name__, "__doc__": "Settings of Triton, all by name; None: Triton's default."},
    kw_only=True,
)


@dataclasses.dataclass
class TritonLifecyclePolicy:
    """When Triton is started, and where its models are stored; without effect here."""

    launch_triton_on_startup: bool = True
    local_model_store: bool = False


DefaultTritonLifecyclePolicy = TritonLifecyclePolicy()
VertextAILifecyclePolicy = TritonLifecyclePolicy(launch_triton_on_startup=False, local_model_store=True)


@dataclasses.dataclass
class TritonSecurityConfig:
    """A token for some of Triton's endpoints; without effect here.

    Raises:
        PyTritonValidationError: an endpoint doesn't exist.
    """

    access_token: str | None = None
    """The token; None: a random token, if endpoints are restricted."""
    restricted_endpoints: list[str] | None = None
    """Endpoints that need the token; None: the administrative endpoints in `_PROTECTED`."""

    def __post_init__(self) -> None:
        if self.restricted_endpoints is None:
            self.restricted_endpoints = list(_PROTECTED)
        unknown = sorted(set(self.restricted_endpoints) - _ENDPOINTS)
        if unknown:
            endpoints = ", ".join(sorted(_ENDPOINTS))
            raise PyTritonValidationError(
                f"Invalid endpoint names: expected any of {endpoints}, got {', '.join(unknown)}"
            )
        if self.access_token is None and self.restricted_endpoints:
            self.access_token = secrets.token_urlsafe(32)


class Triton:
    """Binds and serves models; may be used only while the script runs up to ``serve()``."""

    def __init__(self, *_: object, **__: object) -> None:
        raise PyTritonInvalidOperationError(
            "make each Triton before serve() or run(): Headwater serves the models that are bound until then"
        )


class RemoteTriton(Triton):
    """A Triton on another machine; Headwater doesn't serve through it."""
