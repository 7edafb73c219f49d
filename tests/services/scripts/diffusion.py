"""Images for prompts, as text in base64; rows of one size share a call."""

# mypy: ignore-errors

import argparse
import base64
import hashlib
import logging

import numpy as np
from pytriton.decorators import batch, first_value, group_by_values
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

LOGGER = logging.getLogger("diffusion")


def draw(prompts, size):
    """An image of `size` bytes for each prompt."""
    for prompt in prompts:
        yield hashlib.shake_128(prompt.encode()).digest(size)


@batch
@group_by_values("img_size")
@first_value("img_size")
def infer(prompt: np.ndarray, img_size: np.int64):
    """`img_size` is one number here."""
    prompts = [np.char.decode(one.astype("bytes"), "utf-8").item() for one in prompt]
    LOGGER.debug("%d prompts of size %d", len(prompts), img_size)
    return {"image": np.array([[base64.b64encode(image)] for image in draw(prompts, int(img_size))])}


def main():
    """Bind and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--verbose", "-v", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.DEBUG if args.verbose else logging.INFO)

    with Triton(config=TritonConfig(exit_on_error=True, log_verbose=int(args.verbose))) as triton:
        triton.bind(
            model_name="Diffusion_1_5",
            infer_func=infer,
            inputs=[
                Tensor(name="prompt", dtype=np.bytes_, shape=(1,)),
                Tensor(name="img_size", dtype=np.int64, shape=(1,)),
            ],
            outputs=[Tensor(name="image", dtype=np.bytes_, shape=(1,))],
            config=ModelConfig(max_batch_size=4, batcher=DynamicBatcher(max_queue_delay_microseconds=100)),
            strict=True,
        )
        triton.serve()


if __name__ == "__main__":
    main()
