"""Makes a model from a configuration's reference: imports, checks and constructs it, and explains every failure."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import sysconfig
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, Final

from headwater.environment import install_command, line_of, problem_of
from headwater.errors import LoadError, Problem, did_you_mean
from headwater.model import Model
from headwater.reference import kind_and_path
from headwater.runtime.compiled import COMPILE
from headwater.runtime.request_log import HEADERS, RESPONSE_HEADERS, checked_headers, checked_response_headers
from headwater.user_folders import user_folders

__all__ = ["asks_compile", "construct", "import_for", "load_model", "wrong_options"]

_EXTRAS: Final = {"torch": "torch", "transformers": "lm", "safetensors": "lm", "onnxruntime": "onnx", "scipy": "hf"}
"""For packages that models often import: the server's extra that contains the package."""


def _find(reference: str) -> object:
    """The object that ``module:Class`` names; raises `LoadError` like `load_model`."""
    title = f"model {reference}"
    module_name, separator, class_name = reference.partition(":")
    if not separator or not module_name or not class_name:
        raise LoadError(Problem(title, "expected module:Class", "write it such as my_package.models:Scale"))
    module = import_for(title, module_name)
    target = getattr(module, class_name, None)
    if target is None:
        file = getattr(module, "__file__", None) or module.__name__
        is_builtin = file == module_name
        if module_name in sys.stdlib_module_names and (is_builtin or file.startswith(sysconfig.get_path("stdlib"))):
            reason = f"{module_name} is a module of Python's standard library, which hides a file of the same name"
            raise LoadError(Problem(title, reason, "give the file another name, or put it into a package"))
        models = _models_of(module)
        names = f"its models are {', '.join(models)}" if models else "it has no models"
        fix = f"name one of these, or add {class_name}" if models else "a model is a class derived from headwater.Model"
        reason = f"{file} has no {class_name}; {names}{did_you_mean(class_name, models)}"
        raise LoadError(Problem(title, reason, fix))
    return target


def _checked_class(reference: str, target: object) -> type[Model]:
    """The object that a reference names, checked to be a model's class."""
    title, class_name = f"model {reference}", reference.rpartition(":")[2]
    if not inspect.isclass(target) or not issubclass(target, Model):
        if hasattr(target, "__wrapped__") and not inspect.isclass(target):
            reason = f"expected a class derived from headwater.Model, got the decorated function {class_name}"
            fix = "name the script that binds it, pytriton:SCRIPT.py (docs/from-pytriton.md), or write such a class"
            raise LoadError(Problem(title, reason, fix))
        got = f"a class derived from {target.__bases__[0].__name__}" if inspect.isclass(target) else repr(target)
        raise LoadError(
            Problem(
                title,
                f"expected a class derived from headwater.Model, got {got[:200]}",
                f"write `from headwater import Model` and `class {class_name}(Model): ...`",
            )
        )
    return target


def import_for(title: str, module_name: str) -> ModuleType:
    """Import a user's module; `title` begins the message of an error.

    Raises:
        LoadError: the module can't be imported.
    """
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise LoadError(_missing_module(title, module_name, error)) from error
    except (Exception, SystemExit) as error:
        raise LoadError(problem_of(error, title, f"importing {module_name}")) from error


def asks_compile(cls: type[Model], options: Mapping[str, Any]) -> bool:
    """Whether a deployment's options ask to compile the model's torch modules; False if the option belongs to the
    model's constructor.

    Raises:
        LoadError: the option is neither true nor false.
    """
    if COMPILE not in options or _takes(cls, COMPILE):
        return False
    setting = options[COMPILE]
    if not isinstance(setting, bool):
        title = f"model {cls.__module__}:{cls.__qualname__}"
        reason = f"options.{COMPILE}: expected true or false, got {setting!r:.80}"
        raise LoadError(Problem(title, reason, f"correct or remove `options.{COMPILE}`"))
    return setting


def _takes(cls: type[Model], option: str) -> bool:
    """Whether the constructor has a parameter with this name. The option then belongs to the user's model."""
    try:
        return option in inspect.signature(cls).parameters
    except (TypeError, ValueError):  # a constructor not written in Python
        return False


def construct(cls: type[Model], options: Mapping[str, Any]) -> Model:
    """Construct a model with a deployment's options, except `COMPILE` and, if it takes requests, `HEADERS` and
    `RESPONSE_HEADERS`, unless the constructor has such a parameter.

    Raises:
        LoadError: an option is unknown or missing, or the constructor raised; the message names it.
    """
    title = f"model {cls.__module__}:{cls.__qualname__}"
    asks_compile(cls, options)
    server_options = (COMPILE, HEADERS, RESPONSE_HEADERS) if cls.takes_requests else (COMPILE,)
    taken = {name: options[name] for name in server_options if name in options and not _takes(cls, name)}
    headers = checked_headers(title, taken.get(HEADERS, []))
    response_headers = checked_response_headers(title, taken.get(RESPONSE_HEADERS, []))
    options = {name: value for name, value in options.items() if name not in taken}
    try:
        signature: inspect.Signature | None = inspect.signature(cls)
    except (TypeError, ValueError):  # a constructor not written in Python
        signature = None
    if signature is not None:
        problem = wrong_options(title, signature.parameters.values(), options)
        if problem is not None:
            raise LoadError(problem)
    try:
        model = cls(**options)
    except (Exception, SystemExit) as error:
        raise LoadError(problem_of(error, title, "its constructor")) from error
    if headers:
        model.request_headers = headers
    if response_headers:
        model.response_headers = response_headers
    return model


def load_model(reference: str, options: Mapping[str, Any], search: Sequence[str] = ()) -> Model:
    """Make the model that a configuration names, not yet loaded.

    Args:
        reference: ``module:Class``, ``module:function``, or one of `PATH_KINDS` with its path.
        options: keyword arguments of the constructor; for a function or a path, the options of its kind.
        search: folders in which a relative path is searched, besides the working folder.

    Raises:
        LoadError: the model can't be made; the message says why and how to fix it.
    """
    kind, path = kind_and_path(reference)
    if kind == "onnx":
        from headwater.runtime.onnx_model import open_model

        return open_model(path, options, search)
    if kind == "pytriton":
        from headwater.runtime import pytriton_model

        return pytriton_model.open_model(path, options, search)
    if kind == "hf":
        from headwater.runtime import hf_model

        return hf_model.open_model(path, options, search)
    if kind == "torch":
        from headwater.runtime.torch_model import open_model as open_torch

        return open_torch(path, options, search)
    target = _find(reference)
    if type(target) is FunctionType:  # by `type`, because decorators' objects only claim to be functions
        from headwater.runtime.function_model import open_function

        return open_function(reference, target, options, search)
    return construct(_checked_class(reference, target), options)


def _missing_module(title: str, wanted: str, error: ModuleNotFoundError) -> Problem:
    missing = error.name or ""
    if wanted == missing or wanted.startswith(f"{missing}."):
        parent, _, last = missing.rpartition(".")
        if parent:
            beside = _modules_in(getattr(sys.modules.get(parent), "__path__", ()))
            reason = f"there is no module {last!r} in {parent!r}{did_you_mean(last, beside)}"
            return Problem(title, reason, "correct the name, or add the module")
        folders = user_folders()
        return Problem(
            title,
            f"there is no module {missing!r}; looked in {', '.join(folders)} and in the installed packages"
            f"{did_you_mean(missing, _modules_in(folders))}",
            f"start Headwater in the folder that holds {missing!r}, install it, or correct the name",
        )
    where = line_of(error)
    package = missing.partition(".")[0]
    extra = "demo" if wanted.startswith("headwater.zoo.") else _EXTRAS.get(package, "")
    return Problem(
        title,
        f"{wanted} imports {missing!r}, which is not installed{f' ({where})' if where else ''}",
        install_command(extra, package)
        if extra
        else f"{sys.executable} -m pip install the distribution that has {package}",
    )


def wrong_options(
    title: str, takes: Collection[inspect.Parameter], options: Mapping[str, Any]
) -> Problem | None:  # fmt: skip
    """All faults of options that are passed as keyword arguments, or None if all options are correct."""
    reasons: list[str] = []
    fixes: list[str] = []
    named = [
        parameter.name
        for parameter in takes
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    options_text = f"its options are {', '.join(named)}" if named else "it takes no options"
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes):
        for name in options:
            if name not in named:
                reasons.append(f"unknown option {name!r}; {options_text}{did_you_mean(name, named)}")
                fixes.append(f"correct or remove `options.{name}`")
    for parameter in takes:
        if parameter.name in named and parameter.default is parameter.empty and parameter.name not in options:
            reasons.append(f"option {parameter.name!r} is required, but missing")
            fixes.append(f"set `options.{parameter.name}`")
    return Problem(title, "; ".join(reasons), "; ".join(fixes)) if reasons else None


def _modules_in(folders: Iterable[str]) -> list[str]:
    return [module.name for module in pkgutil.iter_modules(list(folders))]


def _models_of(module: ModuleType) -> list[str]:
    classes = inspect.getmembers(module, inspect.isclass)
    return [name for name, value in classes if issubclass(value, Model) and value is not Model]
