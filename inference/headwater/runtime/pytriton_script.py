"""Runs a PyTriton script with a `Triton` class that records the models that the script binds, and serves nothing.

Where PyTriton isn't installed, `headwater.runtime.pytriton_stand_in` provides PyTriton's other names.

The script runs as ``__main__`` in a separate thread, which stays in ``serve()`` until `Script.end`: objects that the
script holds in ``with`` blocks around ``serve()`` exist as long as its functions are called.
"""

from __future__ import annotations

import atexit
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from headwater.environment import line_of, problem_of
from headwater.errors import LoadError, Problem, did_you_mean
from headwater.runtime.pytriton_stand_in import missing_imports, missing_name, put_last_on_path

__all__ = ["Binding", "Script", "end_scripts", "run_script"]

END_TIMEOUT_S: Final = 10.0
"""Seconds that the script may take to end after ``serve()``."""

_NAME: Final = re.compile(r"[A-Za-z0-9._-]+\Z")
_BOUNDARY: Final = "Headwater serves by its own settings, such as `server.host` and `server.port`"
_LACKING: Final = (
    "which Headwater's stand-in for PyTriton lacks: uses of it fail; set `python: own`, or install PyTriton there"
)
_REFUSED: Final = {
    "model_repository": "serve each of these models by a separate deployment",
    "http_header_forward_pattern": "let clients send parameters in place of headers",
    "grpc_header_forward_pattern": "let clients send parameters in place of headers",
    "http_restricted_api": "set `security.keys_file`",
    "grpc_restricted_protocol": "set `security.keys_file`",
    "grpc_use_ssl": "set `server.tls`",
    "grpc_use_ssl_mutual": "set `server.tls`",
}
"""Fields of ``TritonConfig`` that Headwater doesn't support, so that the script would be served differently from its
request. Maps each name to its fix."""


class Binding(NamedTuple):
    """The arguments of a ``bind()``."""

    name: str
    functions: tuple[Callable[..., Any], ...]
    """The bound functions: one for each instance."""
    inputs: tuple[Any, ...]
    """Inputs, as ``pytriton.model_config.Tensor``."""
    outputs: tuple[Any, ...]
    """Outputs, as ``pytriton.model_config.Tensor``."""
    config: Any
    """``pytriton.model_config.ModelConfig``."""
    strict: bool
    context: Any
    """The ``pytriton.decorators.TritonContext`` that the bindings of a ``Triton`` share."""


class Script:
    """A script that was run up to ``serve()`` or ``run()``."""

    def __init__(self, path: Path, arguments: Sequence[str]) -> None:
        self.path = path
        self.bindings: dict[str, Binding] = {}
        self.refused: dict[str, str] = {}
        """Settings that the script asks for and Headwater doesn't support. Maps each name to its fix."""
        self.warnings: dict[str, None] = {}
        """Warnings about settings without effect, which don't change answers; in order, each once."""
        self.error: BaseException | None = None
        """The exception that ended the script, before or after it served."""
        self._arguments = [str(path), *arguments]
        self._is_served = False
        self._reached = threading.Event()
        self._ends = threading.Event()
        self._waits = False
        self._thread = threading.Thread(target=self._run, name=f"script {path.name}", daemon=True)
        self._former = sys.modules["__main__"]  # kept, because its functions may still run
        self._module = ModuleType("__main__")

    def start(self) -> None:
        """Run the script until it serves or ends."""
        import pytriton.triton

        theirs = pytriton.triton.Triton, pytriton.triton.RemoteTriton
        _Recorder.script = self
        atexit.register(self.end)
        pytriton.triton.Triton, pytriton.triton.RemoteTriton = _Recorder, _refuse_remote
        try:
            self._thread.start()
            self._reached.wait()
        finally:
            pytriton.triton.Triton, pytriton.triton.RemoteTriton = theirs

    def end(self) -> None:
        """Let ``serve()`` return. If the script is in it, wait until the script has ended, for at most
        `END_TIMEOUT_S`."""
        self._ends.set()
        if self._waits:
            self._thread.join(END_TIMEOUT_S)

    def note_served(self, *, wait: bool) -> None:
        """Note that the script serves. Called by the script's ``run()``, and by ``serve()``, which waits."""
        self._is_served = True
        self._waits |= wait
        self._reached.set()
        if wait:
            self._ends.wait()

    def note_config(self, config: Any, security: Any) -> None:
        """Note the configuration of the script's Triton."""
        from pytriton.triton import TritonConfig

        settings = {**_fields(TritonConfig.from_env()), **_fields(config)}
        self.refused.update({f"TritonConfig.{name}": _REFUSED[name] for name in settings if name in _REFUSED})
        ignored_settings = [f"{name}={value!r}" for name, value in settings.items() if name not in _REFUSED]
        if ignored_settings:
            self.warnings[f"TritonConfig: {', '.join(ignored_settings)} has no effect: {_BOUNDARY}"] = None
        if security is not None:
            self.warnings["security_config has no effect: set `security.keys_file`"] = None

    def _run(self) -> None:
        self._module.__file__ = str(self.path)
        sys.modules["__main__"] = self._module
        sys.argv[:] = self._arguments
        sys.path.insert(0, str(self.path.parent))
        try:
            source = self.path.read_bytes()
            code = compile(source, str(self.path), "exec", dont_inherit=True)
            for line, name in missing_imports(source):
                self.warnings[f"line {line} imports {name}, {_LACKING}"] = None
            exec(code, vars(self._module))
        except BaseException as error:  # including SystemExit
            if self._is_served and not isinstance(error, SystemExit):
                sys.excepthook(type(error), error, error.__traceback__)
            self.error = error
        finally:
            self._reached.set()

    def problem(self, title: str) -> Problem | None:
        """The reason why the script can't be served; None if it can."""
        if self._is_served and self.bindings:
            return None
        error = self.error
        if isinstance(error, LoadError):
            return Problem(title, error.problem.reason, error.problem.fix)
        if isinstance(error, SystemExit) and error.code not in (None, 0):
            reason = f"the script ended with status {error.code} before it served"
            return Problem(title, reason, "give the arguments that it needs as `options.arguments`, a list of texts")
        missing = missing_name(error)
        if error is not None and missing is not None:
            reason = (
                f"the script needs {missing} at {line_of(error)}, which PyTriton has and Headwater's stand-in for it "
                f"lacks: PyTriton is not installed under {sys.executable}"
            )
            fix = f"set `python: own` for this deployment, or {sys.executable} -m pip install nvidia-pytriton"
            return Problem(title, reason, fix)
        if error is not None and not isinstance(error, SystemExit):
            problem = problem_of(error, title, "the script")
            if "main thread" in problem.reason:
                fix = "remove signal handlers and other code that needs the main thread from the script"
                return Problem(title, problem.reason, fix)
            return problem
        if self.bindings:
            return Problem(title, "the script ended without serve() or run()", "call serve() after bind()")
        reason = "the script bound no model; Headwater sees only models bound in the script's process"
        return Problem(title, reason, "call bind() and serve() of pytriton.triton.Triton when it is run")

    def binding(self, title: str, name: str) -> Binding:
        """The binding of this name; with an empty name, the only binding.

        Raises:
            LoadError: there is no such binding, or more than one.
        """
        names = list(self.bindings)
        if name in self.bindings or (not name and len(names) == 1):
            return self.bindings[name or names[0]]
        if not name:
            reason = f"the script binds {len(names)} models: {', '.join(names)}"
            raise LoadError(Problem(title, reason, f"name one of them, such as pytriton:{self.path.name}:{names[0]}"))
        reason = f"the script binds no {name!r}; it binds {', '.join(names)}{did_you_mean(name, names)}"
        raise LoadError(Problem(title, reason, "correct the name"))


class _Recorder:
    """The class that a script gets as ``pytriton.triton.Triton``."""

    script: Script
    """The script that was started last."""

    def __init__(
        self, *, config: Any = None, workspace: Any = None, triton_lifecycle_policy: Any = None,
        security_config: Any = None,
    ) -> None:  # fmt: skip
        from pytriton.decorators import TritonContext

        self._script = _Recorder.script
        self._context = TritonContext()
        self._is_connected = False
        self._script.note_config(config, security_config)

    def __enter__(self) -> _Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def bind(
        self,
        model_name: str,
        infer_func: Callable[..., Any] | Sequence[Callable[..., Any]],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        model_version: int = 1,
        config: Any = None,
        strict: bool = False,
        trace_config: list[str] | None = None,
    ) -> None:
        """Record a model."""
        from pytriton.exceptions import PyTritonValidationError
        from pytriton.model_config import ModelConfig

        if not isinstance(model_name, str) or not _NAME.match(model_name):
            raise PyTritonValidationError(f"model_name: expected letters, digits, '.', '_' or '-', got {model_name!r}")
        functions = (infer_func,) if callable(infer_func) else tuple(infer_func)
        if not functions or not all(map(callable, functions)):
            raise PyTritonValidationError(f"infer_func of {model_name}: expected functions, got {infer_func!r:.200}")
        if model_version != 1:
            self._script.warnings[f"{model_name}: model_version={model_version} has no effect: it is version 1"] = None
        if trace_config is not None:
            self._script.warnings[f"{model_name}: trace_config has no effect: set `server.tracing`"] = None
        config = config or ModelConfig()
        if config.response_cache:
            self._script.warnings[f"{model_name}: response_cache has no effect: nothing is cached"] = None
        self._script.bindings[model_name] = Binding(
            model_name, functions, tuple(inputs), tuple(outputs), config, strict, self._context
        )

    def connect(self) -> None:
        """Do nothing but remember the call: there is no server to connect to."""
        self._is_connected = True

    def run(self) -> None:
        """Serve the bound models from now on; the script continues in parallel."""
        self.connect()
        self._script.note_served(wait=False)

    def serve(self, monitoring_period_s: float = 10.0) -> None:
        """Serve the bound models until the replica ends."""
        self.connect()
        self._script.note_served(wait=True)

    def stop(self) -> bool:
        """Only remember the call: only Headwater ends a served model."""
        self._is_connected = False
        return True

    def is_alive(self) -> bool:
        """Whether the script called `connect`, `run` or `serve`, and not `stop` afterwards."""
        return self._is_connected

    def is_connected(self) -> bool:
        """See `is_alive`."""
        return self._is_connected


def _fields(config: Any) -> dict[str, Any]:
    """The fields of a ``TritonConfig`` that are set."""
    return {} if config is None else {name: value for name, value in vars(config).items() if value is not None}


def _refuse_remote(*_: object, **__: object) -> None:
    reason = "RemoteTriton serves through a Triton elsewhere, which Headwater has no part in"
    raise LoadError(Problem("RemoteTriton", reason, "use pytriton.triton.Triton in the script"))


_SCRIPTS: Final[dict[tuple[Path, tuple[str, ...]], Script]] = {}


def end_scripts() -> None:
    """Let all scripts continue after ``serve()``, where they may end threads that would keep the process alive."""
    for script in _SCRIPTS.values():
        script.end()


def run_script(title: str, path: Path, arguments: Sequence[str] = ()) -> Script:
    """Run a script, once per process with the same arguments; `title` begins the message of an error.

    Raises:
        LoadError: an installed PyTriton can't be imported, or the script is a notebook, fails, ends without serving, or
            binds nothing.
    """
    put_last_on_path()
    try:
        import pytriton.triton  # noqa: F401
    except Exception as error:  # from an installed PyTriton, next to incompatible packages
        reason = f"importing pytriton raised {type(error).__name__}: {error} ({line_of(error)})"
        fix = "correct the installation of PyTriton there, or remove it: Headwater stands in for it"
        raise LoadError(Problem(title, reason, fix)) from error
    if path.suffix == ".ipynb":
        fix = "make a script of it: jupyter nbconvert --to script NOTEBOOK"
        raise LoadError(Problem(title, "expected a Python script, got a notebook", fix))
    key = path, tuple(arguments)
    if key not in _SCRIPTS:
        _SCRIPTS[key] = Script(path, arguments)
        _SCRIPTS[key].start()
    script = _SCRIPTS[key]
    problem = script.problem(title)
    if problem is not None:
        raise LoadError(problem) from script.error
    return script
