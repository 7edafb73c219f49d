"""One model is trained by requests while the other answers with its weights, both in one object."""

# mypy: ignore-errors

import argparse
import queue
import threading

import numpy as np
import torch
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


class OnlineLearning(threading.Thread):
    """Trains in a thread of its own."""

    def __init__(self, learning_rate):
        super().__init__()
        torch.manual_seed(1)
        self.network = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=learning_rate)
        self.examples = queue.Queue(maxsize=100)
        self.lock = threading.Lock()
        self.last_loss = 0.0

    def run(self):
        """Train until told to stop."""
        while (example := self.examples.get()) is not None:
            values, target = map(torch.from_numpy, example)
            self.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(self.network(values), target.ravel())
            loss.backward()
            with self.lock:
                self.optimizer.step()
            self.last_loss = loss.item()

    def stop(self):
        """End the thread."""
        self.examples.put(None)
        self.join()

    def train(self, requests):
        """Take the rows of all requests as one example."""
        values, targets = (np.concatenate([request[name] for request in requests]) for name in ("values", "target"))
        self.examples.put((values, targets))
        return [{"last_loss": np.full((len(request["values"]), 1), self.last_loss, np.float32)} for request in requests]

    @batch
    def infer(self, values):
        """Answer with the present weights."""
        with self.lock:
            predictions = self.network(torch.from_numpy(values))
        return {"predictions": predictions.numpy(force=True)}


def main():
    """Bind and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--verbose", "-v", action="store_true")
    args = parser.parse_args()
    learner = OnlineLearning(learning_rate=0.5)
    learner.start()
    try:
        with Triton(config=TritonConfig(log_verbose=int(args.verbose))) as triton:
            values = Tensor(name="values", dtype=np.float32, shape=(4,))
            config = ModelConfig(max_batch_size=64)
            triton.bind(
                model_name="Train",
                infer_func=learner.train,
                inputs=[values, Tensor(name="target", dtype=np.int64, shape=(1,))],
                outputs=[Tensor(name="last_loss", dtype=np.float32, shape=(1,))],
                config=config,
                strict=True,
            )
            triton.bind(
                model_name="Predict",
                infer_func=learner.infer,
                inputs=[values],
                outputs=[Tensor(name="predictions", dtype=np.float32, shape=(-1,))],
                config=config,
                strict=True,
            )
            triton.serve()
    finally:
        learner.stop()


if __name__ == "__main__":
    main()
