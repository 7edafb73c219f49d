"""The models of a Triton model repository, and their configurations.

Source: Triton's model_config.proto, whose messages tritonclient brings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from headwater.errors import LoadError, Problem

__all__ = ["CONFIG_FILE", "ENVIRONMENT", "FILES", "SCRIPT", "RepositoryModel", "models_of", "write_config"]

CONFIG_FILE: Final = "config.pbtxt"
ENVIRONMENT: Final = "EXECUTION_ENV_PATH"
"""The parameter of a model that names the model's Python environment."""
MAX_CONFIG_BYTES: Final = 4 * 1024 * 1024
SCRIPT: Final = "model.py"
FILES: Final = {"python": SCRIPT, "onnxruntime": "model.onnx", "pytorch": "model.pt"}
"""The file of a model by its backend, where ``default_model_filename`` names no other."""


class RepositoryModel(NamedTuple):
    """A model of a repository."""

    folder: Path
    config: Any
    """The `ModelConfig`; without fields if there is no configuration, or if it can't be read."""
    problem: str
    """Why the model can't be prepared; empty without a problem."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.folder.name

    @property
    def file(self) -> str:
        """The name of the model's file in the folder of a version."""
        return self.config.default_model_filename or FILES.get(self.backend, SCRIPT)

    @property
    def versions(self) -> list[Path]:
        """The folders of its versions: folders whose name is a number without a leading zero, or 0."""
        return sorted((path for path in self.folder.iterdir() if _is_version(path)), key=lambda path: int(path.name))

    @property
    def backend(self) -> str:
        """The backend that Triton would choose; empty if that can't be told."""
        config = self.config
        if config.backend:
            return str(config.backend)
        if config.HasField("ensemble_scheduling") or config.platform == "ensemble":
            return "ensemble"
        if config.platform:
            return _BACKENDS.get(config.platform, str(config.platform))
        for backend, name in FILES.items():
            if any((version / (config.default_model_filename or name)).exists() for version in self.versions):
                return backend
        return ""


_BACKENDS: Final = {
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorrt_plan": "tensorrt",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
}
"""The backends of platforms."""


def _is_version(path: Path) -> bool:
    return path.name.isascii() and path.name.isdigit() and str(int(path.name)) == path.name and path.is_dir()


def models_of(repository: Path, names: Collection[str] = ()) -> Iterator[RepositoryModel]:
    """The models of a repository, by name. Every folder in it is a model.

    Args:
        repository: the repository.
        names: the models to take, as in ``options.models``; empty: all.

    Raises:
        OSError: the repository can't be read.
        LoadError: it has no model of one of the names.
    """
    folders = [path for path in sorted(repository.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    there = [folder.name for folder in folders]
    for name in names:
        if name not in there:
            reason = f"expected models of {repository}, which are {', '.join(there) or 'none'}, got {name!r}"
            raise LoadError(Problem("options.models", reason, "correct the name, or add the model's folder"))
    for folder in folders:
        if not names or folder.name in names:
            yield _model(folder)


def _model(folder: Path) -> RepositoryModel:
    config = ModelConfig()
    path = folder / CONFIG_FILE
    problem = ""
    if path.exists():
        try:
            if path.stat().st_size > MAX_CONFIG_BYTES:
                raise ValueError(f"expected at most {MAX_CONFIG_BYTES} bytes, got {path.stat().st_size}")
            text_format.Parse(path.read_text(encoding="utf-8"), config)
        except (text_format.ParseError, ValueError, OSError, RecursionError) as error:
            problem = f"{CONFIG_FILE}: {error}"
            config = ModelConfig()
    if "/" in config.default_model_filename:
        problem = f"default_model_filename: expected the name of a file, got {config.default_model_filename!r}"
    return RepositoryModel(folder, config, problem)


def write_config(config: Any, path: Path) -> None:
    """Write a `ModelConfig` as a ``config.pbtxt``."""
    path.write_text(text_format.MessageToString(config), encoding="utf-8")
