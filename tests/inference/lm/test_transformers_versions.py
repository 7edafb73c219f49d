"""Whether a transformers has the parts that the built-in engine relies on."""

from __future__ import annotations

import ast
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import cache_utils
from transformers.models.auto import auto_factory

import headwater.lm
from headwater.errors import LoadError
from headwater.lm.transformers_versions import OVERRIDDEN, PARTS, TESTED, check_transformers

pytestmark = pytest.mark.heavy
TITLE = "model lm:folder"


def problem() -> str:
    with pytest.raises(LoadError) as caught:
        check_transformers(TITLE)
    return str(caught.value)


def test_the_tested_versions_are_pinned_and_this_one_has_all_parts() -> None:
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert all(f'"transformers=={one};' in project for one in TESTED)
    assert version("transformers") == (TESTED[0] if sys.version_info < (3, 11) else TESTED[-1])
    check_transformers(TITLE)


def test_everything_that_the_engine_imports_of_transformers_is_in_the_list() -> None:
    imported: set[tuple[str, str]] = set()
    for path in Path(headwater.lm.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "transformers":
                imported |= {(node.module, alias.name) for alias in node.names}
    assert ("transformers.cache_utils", "CacheLayerMixin") in imported
    assert imported <= {(module, name) for module, names in PARTS.items() for name in names}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_method_of_a_cache_s_layer_that_takes_something_else_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(self: Any, something: int) -> None: ...

    monkeypatch.setattr(cache_utils.CacheLayerMixin, name, other)
    assert f"lacks what the engine relies on: transformers.cache_utils.CacheLayerMixin.{name}(self" in problem()


def test_a_missing_name_is_refused_with_the_versions_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(auto_factory, "_get_model_class")
    said = problem()
    assert said.startswith(f"{TITLE}: transformers {version('transformers')} of {sys.prefix} lacks what the engine")
    assert "transformers.models.auto.auto_factory._get_model_class; tested are 5.20.2 and 5.23.0" in said
    assert f"{sys.executable} -m pip install transformers==5." in said


def test_a_module_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.core_model_loading", None)
    assert "lacks what the engine relies on: transformers.core_model_loading (" in problem()


@pytest.mark.parametrize("name", ["tie_weights", "_adjust_missing_and_unexpected_keys"])
def test_a_method_that_can_not_be_called_as_the_engine_does_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(self: Any) -> None: ...

    monkeypatch.setattr(transformers.PreTrainedModel, name, other)
    assert f"transformers.PreTrainedModel.{name}(_" in problem()
    monkeypatch.delattr(transformers.PreTrainedModel, name)
    assert f"transformers.PreTrainedModel.{name};" in problem()
