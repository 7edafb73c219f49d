"""Labels for texts, in one script with scores for labels that clients send."""

# mypy: ignore-errors

import argparse
import logging

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton

logger = logging.getLogger("text_labels")
WORDS = {"travel": {"train", "journey"}, "cooking": {"soup", "salt"}, "music": {"song", "über"}}


def classify(texts, labels):
    """The share of each label's words among those of each text."""
    for text in texts:
        words = text.split()
        if not words:
            raise ValueError("a text without words can't be classified")
        hits = np.array([sum(word in WORDS.get(label, ()) for word in words) for label in labels], np.float32)
        yield hits / len(words)


@batch
def label(sequence: np.ndarray):
    """The best of the known labels."""
    texts = np.char.decode(sequence.astype("bytes"), "utf-8").ravel().tolist()
    best = [[list(WORDS)[scores.argmax()]] for scores in classify(texts, list(WORDS))]
    logger.debug("%s", best)
    return {"label": np.char.encode(best, "utf-8")}


@batch
def score(**inputs: np.ndarray):
    """The scores of a request's own labels."""
    texts, labels = (np.char.decode(given.astype("bytes"), "utf-8") for given in inputs.values())
    rows = [next(classify([text.item()], own.tolist())) for text, own in zip(texts, labels)]  # noqa: B905
    return {"scores": np.array(rows, dtype=np.float32)}


def main():
    """Bind and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-batch-size", type=int, default=8, help="rows of a call")
    parser.add_argument("--verbose", action="store_true", default=False)
    args = parser.parse_args()
    level = logging.DEBUG if args.verbose else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s - %(levelname)s - %(name)s: %(message)s")

    text = Tensor(name="sequence", dtype=np.bytes_, shape=(1,))
    config = ModelConfig(
        max_batch_size=args.max_batch_size, batcher=DynamicBatcher(max_queue_delay_microseconds=5000)
    )  # fmt: skip
    with Triton() as triton:
        triton.bind("TextLabel", label, [text], [Tensor(name="label", dtype=bytes, shape=(1,))], config=config)
        triton.bind(
            "TextScores",
            score,
            inputs=[text, Tensor(name="labels", dtype=np.bytes_, shape=(-1,))],
            outputs=[Tensor(name="scores", dtype=np.float32, shape=(-1,))],
            config=config,
            strict=True,
        )
        triton.serve()


if __name__ == "__main__":
    main()
