"""How often the zero-shot heads are right: ``python -m benchmarks.zero_shot``. Runs on the CPU, in seconds.

Reads benchmarks/zero_shot.yaml: the labels with their descriptions, and sentences that were written for it, whose
labels are known. Prints for each head its accuracy, the recall of each label, and which label was taken for which.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.smoke import parse_with_smoke
from headwater.zoo.text import Encoder, ZeroShot

__all__ = ["DATA", "Confusion", "evaluate", "read_data"]

DATA = Path(__file__).with_name("zero_shot.yaml")


@dataclass(frozen=True)
class Confusion:
    """What a head made of sentences whose labels are known."""

    labels: tuple[str, ...]
    counts: np.ndarray[Any, np.dtype[np.int64]]
    """INT64 [labels, labels]: rows are the true label, columns the one chosen."""

    @property
    def accuracy(self) -> float:
        """The fraction of all sentences with the right label."""
        return float(np.trace(self.counts) / self.counts.sum())

    @property
    def recall(self) -> dict[str, float]:
        """By label, the fraction of its sentences that got it."""
        right = self.counts.diagonal() / self.counts.sum(axis=1)
        return dict(zip(self.labels, right.tolist(), strict=True))


def read_data(path: Path = DATA) -> dict[str, Any]:
    """``labels``: by head and label, the descriptions; ``sentences``: by head and label, a list."""
    data: dict[str, Any] = yaml.safe_load(path.read_text())
    return data


def evaluate(
    encoder: Encoder, head: str, labels: Mapping[str, str | Sequence[str]], sentences: Mapping[str, Sequence[str]]
) -> Confusion:
    """Ask a head for the label of each sentence.

    Args:
        encoder: loaded, on the CPU.
        head: name of its output.
        labels: descriptions by label.
        sentences: by their true label.
    """
    model = ZeroShot(labels=labels, output=head)
    model.load("cpu")
    order = tuple(labels)
    counts = np.zeros((len(order), len(order)), np.int64)
    for label, texts in sentences.items():
        rows = np.array([[text.encode()] for text in texts], object)
        for (chosen,) in model(features=encoder(text=rows)["features"])[head]:
            counts[order.index(label), order.index(chosen.decode())] += 1
    return Confusion(order, counts)


def main() -> None:
    """Run it."""
    # It takes seconds as it is, and whether the answers are right is what it counts.
    parse_with_smoke(argparse.ArgumentParser(description="How often the zero-shot heads are right."))
    data = read_data()
    encoder = Encoder()
    encoder.load("cpu")
    for head, labels in data["labels"].items():
        _show(head, evaluate(encoder, head, labels, data["sentences"][head]))


def _show(head: str, confusion: Confusion) -> None:
    total = int(confusion.counts.sum())
    print(f"{head}: {np.trace(confusion.counts)} of {total} sentences right, accuracy {confusion.accuracy:.3f}")
    width = max(map(len, confusion.labels)) + 2
    print(f"  {'true, chosen':<14}{''.join(f'{label:>{width}}' for label in confusion.labels)}{'recall':>{width}}")
    for label, counts in zip(confusion.labels, confusion.counts, strict=True):
        print(f"  {label:<14}{''.join(f'{count:>{width}}' for count in counts)}{confusion.recall[label]:>{width}.2f}")
    print()


if __name__ == "__main__":
    main()
