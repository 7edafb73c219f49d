"""The ``options`` of a deployment that serves a Triton model repository."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from headwater_server.config.sections import Section
from headwater_server.config.validation import describe

__all__ = ["TritonOptions", "triton_option_faults"]


class TritonOptions(Section):
    """Options of the Triton that serves the repository; most have a flag of ``tritonserver``."""

    models: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """The models of the repository that are served; empty: all. The others are hidden from Triton."""
    model_control: Literal["none", "explicit"] = "none"
    """``none``: all models are loaded at the start; ``explicit``: the models of ``load_models`` are, and clients load
    and unload others (``--model-control-mode``)."""
    load_models: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Models that are loaded at the start, for ``explicit``; ``*``: all (``--load-model``)."""
    header_pattern: str = ""
    """A regular expression: matching headers of a request become its parameters (``--http-header-forward-pattern``);
    empty: none."""
    cache_bytes: Annotated[int, Field(ge=0, le=2**40)] = 0
    """Bytes of Triton's cache of responses, for models with ``response_cache`` (``--cache-config``); 0: no cache."""
    http_threads: Annotated[int, Field(ge=1, le=1024)] = 8
    """Threads of Triton's HTTP server (``--http-thread-count``)."""
    strict_outputs: bool = False
    """Whether a response with an output that contradicts ``config.pbtxt`` becomes an error; else it is logged once for
    each output, and goes out as it is."""
    max_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Requests that each gateway worker may have in flight; further requests are refused with 429."""

    @field_validator("header_pattern")
    @classmethod
    def _check_pattern(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"expected a regular expression: {error}, got {value!r}") from None
        return value

    def _faults(self) -> Iterator[str]:
        if self.load_models and self.model_control != "explicit":
            yield f"load_models: expected model_control: explicit, got {self.model_control}, which loads all models"
        for name in self.load_models:
            if self.models and name not in (*self.models, "*"):
                yield f"load_models: expected names that `models` has, got {name!r}"


def triton_option_faults(options: Mapping[str, Any]) -> Iterator[str]:
    """Messages about faults in a deployment's ``options``; each message names the field."""
    try:
        TritonOptions.model_validate(dict(options))
    except ValidationError as error:
        yield from describe(error, TritonOptions, ("options",))
