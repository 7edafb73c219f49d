"""The forms of a deployment's ``model``, and how the named file or folder is found.

A reference is ``module:Class`` or ``module:function``; or a kind and a path (see `PATH_KINDS`); or ``lm:PATH`` for the
folder of a language model, or ``lm:PACKAGE:PATH`` for a folder within an installed package. The server knows further
prefixes of folders for other engines. The path of a folder may be a model's name at the Hugging Face hub instead.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from headwater.environment import problem_of
from headwater.errors import LoadError, Problem
from headwater.hub_cache import HubModel, hub_model

__all__ = [
    "GGUF_FIX",
    "PATH_KINDS",
    "LmReference",
    "find_folder",
    "find_path",
    "is_language_model",
    "kind_and_path",
    "named_at_hub",
    "parse_reference",
    "script_and_name",
]

PATH_KINDS: Final = {
    "hf": "hf:models/bge-small",
    "onnx": "onnx:models/head.onnx",
    "pytriton": "pytriton:server.py",
    "torch": "torch:models/head.pt2",
}
"""An example for each kind of reference that is made into a `Model` from a path."""

GGUF_FIX: Final = "GGUF is not read, nor by vLLM 0.32: name the folder of the same model in safetensors"

_LFS: Final = b"version https://git-lfs.github.com/spec/"
"""How a pointer of Git LFS begins."""
_PACKAGE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\Z")


class LmReference(NamedTuple):
    """The parts of a reference to a language model's folder."""

    package: str
    """The package in whose folder the path starts; empty for a path of the file system."""
    path: str


def is_language_model(reference: str) -> bool:
    """Whether a deployment's ``model`` is a folder for Headwater's engine."""
    return reference.startswith("lm:")


def kind_and_path(reference: str) -> tuple[str, str]:
    """A kind of `PATH_KINDS` and the path; both empty for other references."""
    kind, _, path = reference.partition(":")
    return (kind, path) if kind in PATH_KINDS else ("", "")


def script_and_name(path: str) -> tuple[str, str]:
    """The script of ``pytriton:SCRIPT:NAME``, and the name of its model; the name is empty if it isn't given."""
    script, _, name = path.partition(":")
    return script, name


def parse_reference(reference: str) -> LmReference:
    """Parse ``lm:PATH``, ``lm:PACKAGE:PATH``, or these with another prefix than ``lm:``. If PATH contains a colon, the
    part before the colon is read as the package.

    Raises:
        ValueError: the reference has no such form, or its path within a package is absolute.
    """
    kind, _, rest = reference.partition(":")
    package, colon, path = rest.partition(":")
    if not colon:
        package, path = "", package
    if not path.strip() or (colon and (not _PACKAGE.match(package) or Path(path).is_absolute())):
        raise ValueError(
            f"expected {kind}:PATH such as {kind}:models/llama, or {kind}:PACKAGE:PATH such as "
            f"{kind}:headwater.zoo:weights/tiny_lm"
        )
    return LmReference(package, path)


def find_folder(reference: str, search: Sequence[str] = ()) -> Path:
    """The folder that a reference names, as an absolute path.

    Args:
        reference: as for `parse_reference`.
        search: folders in which a relative path outside of a package is searched, after the working folder.

    Raises:
        LoadError: the reference is malformed, or there is no such folder or package.
    """
    title = f"model {reference}"
    try:
        package, path = parse_reference(reference)
    except ValueError as error:
        raise LoadError(Problem(title, str(error), "correct `model`")) from error
    if not package:
        return find_path(title, path, search, "folder")
    fix = f"correct the path, which starts in the package's folder, or install a version of {package} that has it"
    return _existing(title, [folder / path for folder in _folders_of(title, package)], "folder", fix)


def find_path(title: str, path: str, search: Sequence[str], kind: Literal["file", "folder"]) -> Path:
    """The absolute path of a file or folder. A relative path is searched in the working folder, then in ``search``. A
    folder that isn't there may be a model in the cache of the Hugging Face hub (see `HubModel`). ``title`` begins the
    message of an error.

    Raises:
        LoadError: there is no such file or folder, or the file is a pointer of Git LFS.
    """
    model = named_at_hub(path, search) if kind == "folder" else None
    if model is not None and (snapshot := model.snapshot) is not None:
        return snapshot
    fix = "correct the path; a relative one starts in the working folder or in that of the configuration"
    if model is not None:
        command = f"hf download {model.name}" + ("" if model.revision == "main" else f" --revision {model.revision}")
        hint = f"which is not in {model.folder}, download it: `{command}`, or `headwater serve --download`"
        fix = f"correct the path; or, if it names a model of the Hugging Face hub, {hint}"
    return _existing(title, _places(path, search), kind, fix)


def named_at_hub(path: str, search: Sequence[str]) -> HubModel | None:
    """The model that a path names as the Hugging Face hub does; None if it has another form, or if it exists."""
    return None if any(place.exists() for place in _places(path, search)) else hub_model(path)


def _places(path: str, search: Sequence[str]) -> list[Path]:
    wanted = Path(path).expanduser()
    starts = dict.fromkeys(Path(folder).absolute() for folder in (".", *search))
    return [wanted] if wanted.is_absolute() else [start / wanted for start in starts]


def _existing(title: str, places: Sequence[Path], kind: Literal["file", "folder"], fix: str) -> Path:
    is_wanted, other_kind = (Path.is_dir, "file") if kind == "folder" else (Path.is_file, "folder")
    for place in places:
        if is_wanted(place):
            if kind == "file" and _is_lfs_pointer(place):
                reason = f"{place} is a pointer of Git LFS in place of the file"
                raise LoadError(Problem(title, reason, f"run `git lfs pull` in {place.absolute().parent}"))
            return place.absolute()
    tried = " or ".join(str(place) for place in places)
    mismatch = next((place for place in places if place.exists()), None)
    reason = (
        f"there is no {kind} {tried}" if mismatch is None else f"expected a {kind}, got the {other_kind} {mismatch}"
    )
    raise LoadError(Problem(title, reason, GGUF_FIX if mismatch is not None and mismatch.suffix == ".gguf" else fix))


def _is_lfs_pointer(path: Path) -> bool:
    """Whether a file is what Git LFS leaves in place of a file that was not downloaded."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(_LFS)) == _LFS
    return False


def _folders_of(title: str, package: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:
        spec = None  # a parent package is missing
    except Exception as error:  # raised by a parent package, which find_spec imports
        raise LoadError(problem_of(error, title, f"importing the parent package of {package}")) from error
    if spec is None:
        fix = "install it, correct the name, or write lm:PATH"
        raise LoadError(Problem(title, f"there is no package {package!r}", fix))
    if not spec.submodule_search_locations:
        fix = "name its package"
        raise LoadError(Problem(title, f"expected a package, which is a folder, got the module {package!r}", fix))
    return [Path(location) for location in spec.submodule_search_locations]
