"""A cross-encoder with the weights of MiniLM and a random head, seeded: ``python -m benchmarks.peers.cross_encoder
FOLDER`` writes it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from benchmarks.peers.work import CROSS_ENCODER

__all__ = ["cross_encoder"]

HEAD_DEVIATION = 0.2
"""Of the head's weights: scores then differ from document to document, and aren't all close to 0 or 1."""


@contextlib.contextmanager
def cross_encoder() -> Iterator[None]:
    """Have the folder, and its name in the environment, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        command = [sys.executable, "-m", "benchmarks.peers.cross_encoder", folder]
        subprocess.run(command, check=True, capture_output=True)
        os.environ[CROSS_ENCODER] = folder
        try:
            yield
        finally:
            del os.environ[CROSS_ENCODER]


def main() -> None:
    """Write the folder."""
    import torch
    from transformers.models.auto.tokenization_auto import AutoTokenizer
    from transformers.models.bert.modeling_bert import BertForSequenceClassification

    from headwater.zoo.text import weights_folder

    weights, folder = str(weights_folder()), sys.argv[1]
    torch.manual_seed(7)
    network = BertForSequenceClassification.from_pretrained(weights, num_labels=1)
    torch.nn.init.normal_(network.classifier.weight, std=HEAD_DEVIATION)
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(weights).save_pretrained(folder)


if __name__ == "__main__":
    main()
