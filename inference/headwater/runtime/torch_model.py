"""A model in a file of torch, ``torch:PATH`` in a configuration: a file of torch.export, or TorchScript."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from headwater.environment import check_installed
from headwater.errors import BadOutput, DeclarationError, LoadError, Problem
from headwater.model import Model, Parameter, Tensor
from headwater.reference import find_path
from headwater.runtime.compiled import COMPILE
from headwater.runtime.exported_model import ExportedModel
from headwater.runtime.module_state import STATEFUL, asks_stateful, changed, copies, script_writes, state_problem
from headwater.runtime.tensor_options import (
    BATCH,
    EXAMPLES,
    STATES,
    check_names,
    declared_batch,
    declared_tensors,
    set_example,
    set_states,
)

if TYPE_CHECKING:
    import torch

__all__ = ["ScriptModel", "open_model"]

_KINDS: Final[tuple[Literal["str", "int", "float", "bool"], ...]] = ("str", "int", "float", "bool")
_SCALARS: Final = {script_type: kind for kind in _KINDS for script_type in (kind, f"Optional[{kind}]")}
"""Types of parameters by TorchScript's types."""
_POSITION: Final = re.compile(r".*__(\d+)\Z")
"""Names of inputs that end in the position of an argument, as in Triton: ``INPUT__0``."""
_TRY_EXPORT = "export the model with torch.export.export and torch.export.save, and name that file"


class ScriptModel(Model):
    """A TorchScript file as a model, with tensors that the configuration declares.

    Args:
        path: the file.
        inputs: arguments of the file's ``forward``, by name, or by a name that ends in ``__`` and the position.
        outputs: the results of ``forward``: a tensor, several tensors in this order, or a dict with these keys.
        values: values of arguments that are numbers, texts or truth values, by name: the defaults of request parameters
            with these names. Other arguments that are no inputs have the defaults of ``forward``.
        batch: see `Model.batch`.
        is_stateful: whether calls may change the file's tensors.

    Raises:
        LoadError: torch can't read the file, its ``forward`` takes other arguments or values, or it has state although
            ``is_stateful`` is false; the message names the arguments or tensors.
    """

    arrays = "torch"
    _net: torch.nn.Module

    def __init__(
        self,
        path: Path,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        values: Mapping[str, Any] = {},
        *,
        batch: Literal["rows"] | None = "rows",
        is_stateful: bool = False,
    ) -> None:
        self.batch = batch  # type: ignore[misc]
        self._path = path
        self._title = f"model torch:{path}"
        module = self._open("cpu")
        self._arguments = {tensor.name: _argument(module, tensor.name) for tensor in inputs}
        self.parameters = self._parameters(module, list(self._arguments.values()), values)  # type: ignore[misc]
        self.is_stateful = is_stateful
        self.idempotent = not is_stateful  # type: ignore[misc]
        if not is_stateful and (names := script_writes(module)):
            raise LoadError(state_problem(self._title, names))
        # The configuration declares them, not the class.
        self.inputs = tuple(inputs)  # type: ignore[misc]
        self.outputs = tuple(outputs)  # type: ignore[misc]
        self.__doc__ = f"The TorchScript file {path.name}."

    def load(self, device: str) -> None:
        """Open the file on a device."""
        self._device = device
        self._net = self._open(device)
        self._before = {} if self.is_stateful else copies(dict(self._net.named_buffers()))

    def end_warm_up(self) -> None:
        """Check that no call changed the file's state or, for a stateful model, restore the file's state.

        Raises:
            LoadError: a call has changed a buffer although the model isn't stateful; the message names the buffer.
        """
        if self.is_stateful:
            self._net = self._open(self._device)
        elif names := changed(dict(self._net.named_buffers()), self._before):
            raise LoadError(state_problem(self._title, names))
        self._before = {}

    def __call__(self, /, **inputs: Any) -> dict[str, torch.Tensor]:
        """Compute all outputs.

        Raises:
            BadOutput: a tensor or a tuple was returned, with more or fewer outputs than the configuration declares.
        """
        parameters = inputs.pop("parameters") if self.parameters else {}
        tensors = {self._arguments[name]: value for name, value in inputs.items() if value is not None}
        names = [tensor.name for tensor in self.outputs]
        result = self._net(**tensors, **parameters)
        if isinstance(result, dict):
            return result
        values = list(result) if isinstance(result, (tuple, list)) else [result]
        if len(values) != len(names):
            raise BadOutput(f"expected as many outputs as options.outputs declares, {len(names)}, got {len(values)}")
        return dict(zip(names, values, strict=True))

    def unload(self) -> None:
        """Free the file's modules."""
        del self._net

    def _open(self, device: str) -> Any:
        import torch

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # torch recommends torch.export, as our guide does
                load: Any = torch.jit.load  # it has no types
                return load(self._path, map_location=device).eval()
        except Exception as error:  # torch's errors have no common base class
            text = " ".join(str(error).split())[:300]
            reason = f"torch {torch.__version__} can't read it: {type(error).__name__}: {text}"
            raise LoadError(Problem(self._title, reason, "save or copy it again")) from error

    def _parameters(self, module: Any, declared: Sequence[str], values: Mapping[str, Any]) -> tuple[Parameter, ...]:
        """The request parameters of these values.

        Raises:
            LoadError: ``forward`` doesn't take these inputs or values, or needs others; the message names them.
        """
        if not hasattr(module, "forward"):
            reason = "it has no `forward`; expected a module with `forward`"
            raise LoadError(Problem(self._title, reason, "save a module that has it"))
        arguments = module.forward.schema.arguments[1:]
        names = [argument.name for argument in arguments]
        for name in declared:
            if name not in names:
                reason = f"options.inputs: its forward has no argument {name!r}; its arguments are {', '.join(names)}"
                raise LoadError(Problem(self._title, reason, "name the inputs as the arguments"))
        types = {argument.name: _SCALARS.get(str(argument.real_type)) for argument in arguments}
        for argument in arguments:
            name, kind = argument.name, types[argument.name]
            if name in declared or name in values or argument.has_default_value():
                continue
            option, given = "inputs" if kind is None else "parameters", f"{name!r} ({argument.real_type})"
            reason = f"options.{option}: its forward needs the argument {given}, which is missing"
            fix = f"declare {name!r}" if kind is None else f"give a value, such as `parameters: {{{name}: ...}}`"
            raise LoadError(Problem(self._title, reason, fix))
        parameters = []
        for name, value in values.items():
            kind = types.get(name)
            if kind is None or name in declared:
                scalars = ", ".join(name for name, kind in types.items() if kind is not None and name not in declared)
                reason = f"options.parameters: its forward has no argument {name!r} that is a number or text"
                fix = f"its arguments of this kind are {scalars}" if scalars else "remove it"
                raise LoadError(Problem(self._title, reason, fix))
            try:
                parameters.append(Parameter(name, kind, value))
            except DeclarationError as error:
                reason = f"options.parameters: {error}"
                raise LoadError(Problem(self._title, reason, f"correct `options.parameters.{name}`")) from error
        return tuple(parameters)


def open_model(path: str, options: Mapping[str, Any], search: Sequence[str] = ()) -> Model:
    """Find a file of torch, as `find_path` does, and make a model of it, not yet loaded.

    The options of a file of torch.export are ``rename`` (see `ExportedModel`) and ``compile``; the options of a
    TorchScript file are ``inputs``, ``outputs`` and ``parameters`` (see `ScriptModel`). Both have ``stateful``,
    ``batch: none`` for a file without a batch axis, ``states`` (see `set_states`), and ``example`` and ``sizes`` (see
    `set_example`).

    Raises:
        LoadError: there is no such file, or no such option, or the file can't be served.
    """
    title = f"model torch:{path}"
    file = find_path(title, path, search, "file")
    kind = _kind(title, file)
    check_installed(title, "torch", "torch")
    if kind == "exported":
        check_names(title, options, ["rename", BATCH, STATEFUL, COMPILE, STATES, *EXAMPLES])
        model: Model = ExportedModel(
            file,
            rename=options.get("rename"),
            batch=declared_batch(title, options),
            is_stateful=asks_stateful(title, options),
        )
        set_states(title, model, options)
        set_example(title, model, options, search)
        return model
    if COMPILE in options:
        reason = f"options.{COMPILE}: torch.compile doesn't take TorchScript"
        raise LoadError(Problem(title, reason, f"remove `options.{COMPILE}`, or {_TRY_EXPORT}"))
    check_names(title, options, ["inputs", "outputs", "parameters", BATCH, STATEFUL, STATES, *EXAMPLES])
    inputs, outputs = (declared_tensors(title, options, where) for where in ("inputs", "outputs"))
    values = options.get("parameters", {})
    if not isinstance(values, Mapping):
        reason = f"options.parameters: expected values by the names of forward's arguments, got {values!r:.80}"
        raise LoadError(Problem(title, reason, "write it such as `parameters: {sr: 16000}`"))
    model = ScriptModel(
        file,
        inputs,
        outputs,
        values,
        batch=declared_batch(title, options),
        is_stateful=asks_stateful(title, options),
    )
    set_states(title, model, options)
    set_example(title, model, options, search)
    return model


def _argument(module: Any, name: str) -> str:
    """The argument of ``forward`` that an input of this name is; the name itself if there is no such argument."""
    names = [argument.name for argument in module.forward.schema.arguments[1:]] if hasattr(module, "forward") else []
    match = _POSITION.match(name) if name not in names else None
    return names[int(match[1])] if match is not None and int(match[1]) < len(names) else name


def _kind(title: str, file: Path) -> Literal["exported", "script"]:
    """The kind of a file, from the names of its archive members; no code of the file is run.

    Raises:
        LoadError: the file is of neither kind.
    """
    import zipfile  # hosts of other models don't need it

    try:
        with zipfile.ZipFile(file) as packed:
            names = packed.namelist()
    except zipfile.BadZipFile:
        raise LoadError(
            Problem(
                title,
                "it is not a file of torch.export or TorchScript, or is incomplete",
                f"if torch.save wrote it, {_TRY_EXPORT}; otherwise save or copy it again",
            )
        ) from None
    inner = {name.partition("/")[2] for name in names}
    if any(name.startswith("data/aotinductor/") for name in inner):
        reason = "it is an AOTInductor package, whose machine code fits one kind of machine"
        raise LoadError(Problem(title, reason, f"{_TRY_EXPORT}; `options: {{compile: true}}` compiles it"))
    if {"archive_format", "models/model.json"} <= inner or "serialized_exported_program.json" in {*inner, *names}:
        return "exported"
    if "constants.pkl" in inner:
        return "script"
    if "data.pkl" in inner:
        raise LoadError(
            Problem(
                title,
                "torch.save wrote it: it has weights, or a pickled module, whose code is elsewhere",
                f"{_TRY_EXPORT}; or write a Model that loads the weights with torch.load(..., weights_only=True)",
            )
        )
    reason = "expected a file of torch.export or TorchScript, got another zip archive"
    raise LoadError(Problem(title, reason, f"correct the path, or {_TRY_EXPORT}"))
