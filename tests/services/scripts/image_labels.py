"""A classifier of images with an instance for each device, each of which has its own weights."""

# mypy: ignore-errors

import argparse
import logging

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton

logger = logging.getLogger("image_labels")
NAMES = ["dark", "red", "green", "blue"]


class Classifier:
    """One instance."""

    def __init__(self, device):
        self.device = device
        self.weights = np.vstack([np.zeros((1, 3)), np.eye(3)]).astype(np.float16)

    @batch
    def __call__(self, image: np.ndarray):
        """The name of the strongest colour; images are [3, 8, 8]."""
        logger.debug("images %s on %s", image.shape, self.device)
        means = image.mean(axis=(2, 3))
        scores = means @ self.weights.T
        labels = [[np.char.encode(NAMES[row.argmax()], "utf-8")] for row in scores]
        return {"label": np.array(labels)}


def main():
    """Bind and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-batch-size", type=int, default=32, required=False)
    parser.add_argument("--number-of-instances", type=int, default=2, required=False)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.DEBUG if args.verbose else logging.INFO)

    with Triton() as triton:
        triton.bind(
            model_name="ImageLabels",
            infer_func=[Classifier(f"device {number}") for number in range(args.number_of_instances)],
            inputs=[Tensor(name="image", dtype=np.float16, shape=(3, 8, 8))],
            outputs=[Tensor(name="label", dtype=bytes, shape=(1,))],
            config=ModelConfig(max_batch_size=args.max_batch_size),
            strict=True,
        )
        triton.serve()


if __name__ == "__main__":
    main()
