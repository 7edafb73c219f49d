"""A bot that streams its answer word by word, which a thread of its own computes."""

# mypy: ignore-errors

import argparse
import concurrent.futures
import queue

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


class Bot:
    """Answers with what was said, backwards."""

    def __init__(self, timeout_s):
        self.timeout_s = timeout_s
        self.words = queue.Queue()
        self.pool = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="bot")

    @batch
    def __call__(self, new_inputs, chat_history=None):
        """Yield one word at a time, for a single row."""
        said = np.char.decode(new_inputs.astype("bytes"), "utf-8")
        if chat_history is not None:
            said = np.char.add(np.char.decode(chat_history.astype("bytes"), "utf-8"), said)
        done = self.pool.submit(self._generate, said[..., 0].tolist()[0])
        while (word := self.words.get(timeout=self.timeout_s)) is not None:
            yield {"response": np.char.encode([word], "utf-8")[np.newaxis, ...]}
        done.result()

    def _generate(self, text):
        try:
            for word in reversed(text.split()):
                if word == "stop":
                    raise RuntimeError("told to stop")
                self.words.put(word)
        finally:
            self.words.put(None)


def main():
    """Bind and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-name", default="Dialogue-small", required=False)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()

    bot = Bot(timeout_s=10.0)
    with Triton(config=TritonConfig(log_verbose=int(args.verbose) * 3)) as triton:
        triton.bind(
            model_name=args.model_name,
            infer_func=bot,
            inputs=[
                Tensor(name="new_inputs", dtype=bytes, shape=(1,)),
                Tensor(name="chat_history", optional=True, dtype=bytes, shape=(1,)),
            ],
            outputs=[Tensor(name="response", dtype=bytes, shape=(1,))],
            config=ModelConfig(decoupled=True),
            strict=True,
        )
        triton.serve()


if __name__ == "__main__":
    main()
