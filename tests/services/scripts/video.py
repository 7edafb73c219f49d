"""Encoded bytes in, and two outputs of four dimensions each, after a delay in which rows gather."""

# mypy: ignore-errors

import argparse

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def decode(video):
    """Frames [rows, frames, 4, 4, 3]."""
    return video.reshape(len(video), -1, 4, 4, 3)


@batch
def infer(**inputs):
    """The frames, and which parts of them are bright."""
    frames = decode(inputs["video"])
    bright = np.where(frames.mean(axis=-1, keepdims=True) > 127, frames, 0).astype(np.uint8)
    return {"original": frames, "segmented": bright}


def main():
    """Bind and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verbose", action="store_true", default=False)
    args = parser.parse_args()
    with Triton(config=TritonConfig(log_verbose=1 if args.verbose else 0)) as triton:
        triton.bind(
            model_name="Video",
            infer_func=infer,
            inputs=[Tensor(name="video", dtype=np.uint8, shape=(-1,))],
            outputs=[
                Tensor(name="original", dtype=np.uint8, shape=(-1, -1, -1, -1)),
                Tensor(name="segmented", dtype=np.uint8, shape=(-1, -1, -1, -1)),
            ],
            config=ModelConfig(max_batch_size=4, batcher=DynamicBatcher(max_queue_delay_microseconds=5000)),
            strict=True,
        )
        triton.serve()


if __name__ == "__main__":
    main()
