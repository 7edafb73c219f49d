"""Checks that the transformers in a model's Python has the parts that the built-in engine relies on.

The engine uses undocumented parts of transformers (see `headwater.lm.transformers_parts`). A version of transformers
that lacks a part, or in which a function takes other arguments, is refused before it is used.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from headwater.environment import installed_version
from headwater.errors import LoadError, Problem

__all__ = ["CALLS", "OVERRIDDEN", "PARTS", "TESTED", "check_transformers"]

TESTED: Final = ("5.20.2", "5.23.0")
"""The versions that the tests run with: the first with Python 3.10, for which there is no newer version, and the last
with newer Pythons."""

PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "transformers": (
        "AttentionInterface", "AttentionMaskInterface", "AutoConfig", "AutoModelForCausalLM",
        "AutoModelForImageTextToText", "GenerationConfig", "PreTrainedConfig", "PreTrainedModel",
    ),
    "transformers.activations": ("ACT2CLS",),
    "transformers.cache_utils": ("Cache", "CacheLayerMixin", "get_layer_types_and_kwargs"),
    "transformers.conversion_mapping": ("get_model_conversion_mapping",),
    "transformers.core_model_loading": ("convert_and_load_state_dict_in_model",),
    "transformers.masking_utils": ("sdpa_mask",),
    "transformers.modeling_rope_utils": ("ROPE_INIT_FUNCTIONS",),
    "transformers.modeling_utils": ("LoadStateDictConfig",),
    "transformers.models.auto.auto_factory": ("_get_model_class",),
    "transformers.models.auto.modeling_auto": (
        "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    ),
    "transformers.pytorch_utils": ("Conv1D",),
    "transformers.quantizers.auto": ("get_hf_quantizer",),
    "transformers.utils": ("logging",),
    "transformers.utils.generic": ("ContextManagers",),
}  # fmt: skip
"""The names that `headwater.lm` relies on, by module."""


class Call(NamedTuple):
    """Arguments that a function must accept: a number of positional arguments, and keyword arguments with these
    names."""

    unnamed: int
    names: tuple[str, ...] = ()


CALLS: Final[Mapping[str, Call]] = {
    "transformers.cache_utils:get_layer_types_and_kwargs": Call(1),
    "transformers.conversion_mapping:get_model_conversion_mapping": Call(3),
    "transformers.core_model_loading:convert_and_load_state_dict_in_model": Call(3),
    "transformers.modeling_utils:LoadStateDictConfig": Call(0, ("device_map", "dtype", "weight_mapping")),
    "transformers.models.auto.auto_factory:_get_model_class": Call(2),
    "transformers.quantizers.auto:get_hf_quantizer": Call(5),
    "transformers:PreTrainedModel.get_init_context": Call(4),
    "transformers:PreTrainedModel.mark_tied_weights_as_initialized": Call(2),
    "transformers:PreTrainedModel.tie_weights": Call(1, ("missing_keys", "recompute_mapping")),
    "transformers:PreTrainedModel._adjust_missing_and_unexpected_keys": Call(2),
}
"""The functions that are called, with their arguments; ``self`` counts as an argument of a method."""

OVERRIDDEN: Final[Mapping[str, tuple[str, ...]]] = {
    "lazy_initialization": ("key_states", "value_states"),
    "update": ("key_states", "value_states", "args", "kwargs"),
    "get_mask_sizes": ("query_length",),
    "get_seq_length": (),
    "get_max_length": (),
}
"""Methods of a cache's layer that models call, and their parameters."""


def check_transformers(title: str) -> None:
    """Check that the installed transformers has all parts that the built-in engine relies on. Imports transformers.

    Args:
        title: title of the problem.

    Raises:
        LoadError: a part is missing; the message names the part, and the tested versions.
    """
    tested = " and ".join(TESTED)
    best = TESTED[0] if sys.version_info < (3, 11) else TESTED[-1]
    install = f"{sys.executable} -m pip install transformers=={best}"
    for part in _missing():
        lacks = f"transformers {installed_version('transformers')} of {sys.prefix} lacks what the engine relies on"
        fix = f"{install}, or name another `python`"
        raise LoadError(Problem(title, f"{lacks}: {part}; tested are {tested}", fix))


def _missing() -> Iterator[str]:
    for module, names in PARTS.items():
        try:
            imported_module = importlib.import_module(module)
        except ImportError as error:
            yield f"{module} ({error})"
            continue
        yield from (f"{module}.{name}" for name in names if not hasattr(imported_module, name))
    for path, call in CALLS.items():
        module, _, names_in_it = path.partition(":")
        part: Any = sys.modules[module]
        for name in names_in_it.split("."):
            part = getattr(part, name, None)
        if part is None:
            yield path.replace(":", ".")
        elif not _takes(part, call):
            wanted = ", ".join((*("_" * call.unnamed), *(f"{name}=" for name in call.names)))
            yield f"{path.replace(':', '.')}({wanted})"
    layer = sys.modules["transformers.cache_utils"].CacheLayerMixin
    for name, parameters in OVERRIDDEN.items():
        method = getattr(layer, name, None)
        if method is None or tuple(inspect.signature(method).parameters)[1:] != parameters:
            yield f"transformers.cache_utils.CacheLayerMixin.{name}({', '.join(('self', *parameters))})"


def _takes(function: Any, call: Call) -> bool:
    try:
        inspect.signature(function).bind(*range(call.unnamed), **dict.fromkeys(call.names))
    except TypeError:
        return False
    return True
