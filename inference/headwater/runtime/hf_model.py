"""A model that is a Hugging Face folder: ``hf:PATH`` in a configuration."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final

from headwater.environment import check_installed
from headwater.errors import did_you_mean
from headwater.hf.folder import TASKS, HfFolder, Task
from headwater.model import Model
from headwater.reference import find_path

__all__ = ["open_model"]

_CLASSES: Final[Mapping[Task, tuple[str, str]]] = {
    "sentence-similarity": ("sentences", "SentenceSimilarity"),
    "text-ranking": ("classes", "TextRanking"),
    "text-classification": ("classes", "TextClassification"),
    "token-classification": ("tokens", "TokenClassification"),
    "image-classification": ("images", "ImageClassification"),
    "feature-extraction": ("tokens", "FeatureExtraction"),
    "automatic-speech-recognition": ("speech", "SpeechRecognition"),
}
"""The module in `headwater.hf` for a task, and the task's class."""

_ALSO_NEEDED: Final[Mapping[Task, Sequence[str]]] = {
    "sentence-similarity": ["sentence_transformers"],
    "automatic-speech-recognition": ["scipy"],
}


def open_model(path: str, options: Mapping[str, Any], search: Sequence[str] = ()) -> Model:
    """Find a Hugging Face folder, as `find_path` does, and make a model of it, not yet loaded.

    The task is the option ``task``, or the task in the folder's configuration; the other options are the task's.

    Raises:
        LoadError: there is no such folder, its task is not served, a package is missing, or there is no such option.
    """
    title = f"model hf:{path}"
    folder = HfFolder(find_path(title, path, search, "folder"), title)
    task_options = dict(options)
    task_option = task_options.pop("task", None)
    if task_option is not None and task_option not in TASKS:
        reason = (
            f"options.task: expected one of {', '.join(TASKS)}, "
            f"got {task_option!r:.80}{did_you_mean(task_option, TASKS)}"
        )
        raise folder.error(reason, "correct `options.task`")
    task: Task = task_option or folder.task()
    check_installed(title, "hf", "torch", "transformers", *_ALSO_NEEDED.get(task, ()))
    folder.check_weights()
    cls = _model_of(task)
    option_names = ["task", *list(inspect.signature(cls).parameters)[1:]]  # the first is the folder
    for name in task_options:
        if name not in option_names:
            reason = (
                f"unknown option {name!r}; its options are {', '.join(option_names)}{did_you_mean(name, option_names)}"
            )
            raise folder.error(reason, f"correct or remove `options.{name}`")
    model: Model = cls(folder, **task_options)
    return model


def _model_of(task: Task) -> Any:
    """The class for a task, imported when it is needed."""
    module, name = _CLASSES[task]
    return getattr(importlib.import_module(f"headwater.hf.{module}"), name)
