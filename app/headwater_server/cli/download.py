"""``--download``: downloads models that a configuration names as the Hugging Face hub does, into the local cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from headwater.reference import named_at_hub
from headwater_server.config.deployment_kinds import kind_of
from headwater_server.config.schema import Config
from headwater_server.errors import ConfigError

__all__ = ["download_models"]

LEFT_OUT: Final = [
    "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.tflite", "coreml/*", "openvino/*", "original/*",
]  # fmt: skip
"""Files of other formats, which no deployment of a folder reads."""


def download_models(config: Config, search: Sequence[str]) -> None:
    """Download what the cache lacks of the models that are named as the hub does, unless there is a folder of that path
    in the working folder or in ``search``.

    Raises:
        ConfigError: a model can't be downloaded.
    """
    from huggingface_hub import snapshot_download

    for deployment in config.all_deployments().values():
        for reference in (deployment.model or "", *(step.model or "" for step in deployment.steps.values())):
            kind, _, path = reference.partition(":")
            is_folder = kind == "hf" or kind_of(reference).names_folder
            if not is_folder or (model := named_at_hub(path, search)) is None:
                continue
            print(f"headwater: downloading {model.name} at {model.revision}", file=sys.stderr)
            try:
                snapshot_download(model.name, revision=model.revision, ignore_patterns=LEFT_OUT)
            except (OSError, ValueError) as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                raise ConfigError(f"--download: {reference} can't be downloaded: {reason}") from error
