"""A Hugging Face folder: reads its configuration, and loads its model without network access or code from the
folder."""

from __future__ import annotations

import importlib
import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

from headwater.environment import install_command, problem_of
from headwater.errors import LoadError, Problem
from headwater.hf.weight_headers import (
    NOT_QUANTIZED,
    USUAL,
    WEIGHTS,
    check_kind,
    for_quantized,
    quantization_of,
    read_headers,
)
from headwater.tuning import turn_cudnn_attention_off

__all__ = ["LOCAL", "TASKS", "HfFolder", "Task"]

Task: TypeAlias = Literal[
    "sentence-similarity",
    "text-ranking",
    "text-classification",
    "token-classification",
    "image-classification",
    "feature-extraction",
    "automatic-speech-recognition",
]
"""Tasks, as the Hugging Face Hub names them."""
TASKS: Final[tuple[Task, ...]] = get_args(Task)

LOCAL: Final = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of every ``from_pretrained``: no network access, and no code from the folder."""

_SEQ2SEQ_SPEECH: Final = ("WhisperForConditionalGeneration",)
_UNKNOWN_LENGTH: Final = 1_000_000
"""Tokenizers without a limit report a much larger ``model_max_length``."""

_Loaded = TypeVar("_Loaded")

logger = logging.getLogger("headwater")


class HfFolder:
    """A Hugging Face folder.

    Args:
        path: the folder.
        title: begins the message of an error.

    Raises:
        LoadError: there is neither ``config.json`` nor ``modules.json``, or ``config.json`` can't be read.
    """

    def __init__(self, path: Path, title: str) -> None:
        self.path = path
        self.title = title
        self.has_modules = (path / "modules.json").is_file()
        """Whether the folder is for sentence-transformers."""
        check_kind(title, path)
        if not (path / "config.json").is_file() and not self.has_modules:
            raise self.error(
                f"expected {path / 'config.json'}, got no such file",
                "name the folder that save_pretrained wrote, or that has the files of a repository",
            )
        self.config = self.read("config.json")

    def error(self, reason: str, fix: str) -> LoadError:
        """The error to raise if the folder can't be loaded."""
        return LoadError(Problem(self.title, reason, fix))

    def read(self, name: str) -> dict[str, Any]:
        """The content of a JSON file of the folder; empty if the file does not exist.

        Raises:
            LoadError: the file can't be read, or has no JSON object.
        """
        content = self._json(name)
        if content is None:
            return {}
        if not isinstance(content, dict):
            raise self.error(f"{name}: expected an object, got {type(content).__name__}", f"correct {self.path / name}")
        return content

    def check_weights(self) -> None:
        """Check the headers of the weights in the folder, and in the folders of its modules.

        Raises:
            LoadError: a file is truncated, or is not a file of weights; the weights are quantized.
        """
        modules = [(path, config) for _, path, config in self.modules()] or [("", self.config)]
        for path, config in modules:
            if method := quantization_of(config):
                fix = for_quantized(method) if self.has_modules else NOT_QUANTIZED
                raise self.error(f"config.json: its weights are quantized ({method}), which is not supported here", fix)
            if any(file.name.startswith(USUAL) or file.suffix == ".gguf" for file in (self.path / path).glob("*")):
                read_headers(self.title, self.path / path, WEIGHTS)

    def modules(self) -> list[tuple[str, str, dict[str, Any]]]:
        """The modules of a sentence-transformers folder, each with the name of its class, the path of its folder, and
        its configuration. Empty if the folder has no ``modules.json``.

        Raises:
            LoadError: a file can't be read, or ``modules.json`` has another form.
        """
        content = self._json("modules.json") or []
        try:
            return [
                (
                    module["type"].rpartition(".")[2],
                    module["path"],
                    self.read(f"{module['path']}/config.json" if module["path"] else "config.json"),
                )
                for module in content
            ]
        except (TypeError, KeyError, AttributeError) as error:
            fix = f"correct {self.path / 'modules.json'}"
            raise self.error("modules.json: expected objects with type and path", fix) from error

    def _json(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self.error(
                f"{name}: can't be read: {error}", f"correct {self.path / name}, or copy it again"
            ) from error

    @property
    def architecture(self) -> str:
        """The name of the class that the weights were saved from; empty if the configuration doesn't name it."""
        names = self.config.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes, ordered by index; transformers' default names if the configuration lists no names.

        Raises:
            LoadError: an index is not a number.
        """
        names = self.config.get("id2label")
        if not isinstance(names, dict) or not names:
            count = self.config.get("num_labels", 2)
            return tuple(f"LABEL_{index}" for index in range(count if isinstance(count, int) and count > 0 else 2))
        try:
            return tuple(str(names[key]) for key in sorted(names, key=int))
        except ValueError as error:
            fix = f"correct {self.path / 'config.json'}"
            raise self.error(f"config.json: id2label: expected numbers as keys, got {list(names)[:3]}", fix) from error

    def task(self) -> Task:
        """The task that the folder's configuration implies.

        Raises:
            LoadError: no supported task matches the configuration.
        """
        if self.has_modules:
            kind = self.read("config_sentence_transformers.json").get("model_type", "SentenceTransformer")
            if kind in ("SentenceTransformer", "CrossEncoder"):
                return "sentence-similarity" if kind == "SentenceTransformer" else "text-ranking"
            raise self._unknown(f"the sentence-transformers model type {kind}")
        name = self.architecture
        if name.endswith("ForSequenceClassification"):
            return "text-ranking" if len(self.labels) == 1 else "text-classification"
        if name.endswith("ForTokenClassification"):
            return "token-classification"
        if name.endswith("ForImageClassification"):
            return "image-classification"
        if name.endswith("ForCTC") or name in _SEQ2SEQ_SPEECH:
            return "automatic-speech-recognition"
        if name.endswith("Model"):
            return "feature-extraction"
        if name.endswith("ForCausalLM"):
            raise self.error(f"{name} generates text", f"serve it as a language model: lm:{self.path}")
        raise self._unknown(f"the architecture {name}" if name else "no architecture")

    def _unknown(self, got: str) -> LoadError:
        return self.error(
            f"expected an architecture of one of the tasks {', '.join(TASKS)}, got {got}",
            "name the task in options, if the folder's model can do it: `task: feature-extraction`",
        )

    def load(self, auto_class: str, package: str = "transformers", **arguments: Any) -> Any:
        """Load the folder with a class of transformers or sentence-transformers.

        Raises:
            LoadError: the package is missing, or the class can't load the folder.
        """
        cls = getattr(self.need(package), auto_class)
        make = cls.from_pretrained if hasattr(cls, "from_pretrained") else cls
        return self.checked(lambda: make(str(self.path), **LOCAL, **arguments), auto_class)

    def network(self, auto_class: str, device: str, unused: str = "") -> Any:
        """A transformers network with the folder's weights, on a device and in evaluation mode.

        Weights are read from safetensors files. If the folder has only ``.bin`` files, torch reads them with
        ``weights_only``, which does not run code in a pickle.

        Args:
            auto_class: such as ``AutoModelForTokenClassification``.
            device: such as ``cpu``.
            unused: prefix of the names of weights that the task doesn't need; these weights may be missing.

        Raises:
            LoadError: weights are missing or can't be read; transformers itself would fill missing weights with random
                numbers.
        """
        self.need("transformers").logging.disable_progress_bar()
        model, facts = self.load(auto_class, output_loading_info=True)
        missing = sorted(name for name in facts["missing_keys"] if not unused or not name.startswith(unused))
        if missing:
            more = " and others" if len(missing) > 3 else ""
            raise self.error(
                f"its weights lack {', '.join(missing[:3])}{more}, which {auto_class} needs",
                "correct `options.task`, or save the trained model again",
            )
        turn_cudnn_attention_off(device)
        return model.train(False).to(device)

    def need(self, module: str) -> Any:
        """Import a module that this task needs.

        Raises:
            LoadError: the module's package is not installed.
        """
        try:
            return importlib.import_module(module)
        except ImportError as error:
            extra, distribution = {"PIL.Image": ("images", "pillow")}.get(module, ("hf", module.replace("_", "-")))
            raise self.error(f"it needs {distribution}: {error}", install_command(extra, distribution)) from error

    def checked(self, make: Callable[[], _Loaded], doing: str) -> _Loaded:
        """Call ``make`` and return its result; any failure is raised as a `LoadError`."""
        try:
            return make()
        except LoadError:
            raise
        except ImportError as error:
            package = next(iter(re.findall(r"`?pip install ([\w-]+)", str(error))), error.name or "what is missing")
            raise self.error(
                f"{doing} needs a package: {_first_line(error)}", f"{sys.executable} -m pip install {package}"
            ) from error
        except Exception as error:  # these libraries raise errors of many classes
            if "trust_remote_code" in str(error):
                reason = "its model is code in the folder, which is not run"
                raise self.error(reason, "write a Model that uses it, and serve that as module:Class") from error
            problem = problem_of(error, self.title, doing)
            reason = f"{doing} raised {type(error).__name__}: {_first_line(error)}"
            raise LoadError(
                Problem(problem.title, reason, f"correct or copy again the files in {self.path}")
            ) from error

    def max_length(self, tokenizer: Any) -> int | None:
        """The most tokens that the model reads of a text; None if no limit is known."""
        sizes = [self.config.get("max_position_embeddings"), getattr(tokenizer, "model_max_length", None)]
        return min((size for size in sizes if isinstance(size, int) and 0 < size < _UNKNOWN_LENGTH), default=None)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
