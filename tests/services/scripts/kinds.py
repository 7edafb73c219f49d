"""A PyTriton script as people write them, with bindings of several kinds: nothing here knows of Headwater."""

# mypy: ignore-errors

import argparse
import logging

import numpy as np
from arithmetic import add_and_subtract
from pytriton.decorators import batch, fill_optionals, sample
from pytriton.exceptions import PyTritonInvalidOperationError
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

logger = logging.getLogger("server")


def requests_of_a_call(requests):
    """The rows of each request that shares the call, and one of its parameters."""
    answers = []
    for request in requests:
        rows = len(request["x"])
        factor = int((request.parameters or {}).get("factor", 1))
        answers.append({"y": request["x"] * factor, "rows": np.full((rows, 1), rows, np.int32)})
    return answers


@batch
def countdown(start):
    """One response for each number down to zero."""
    for step in range(int(start.max()) + 1):
        yield {"left": np.maximum(start - step, 0)}


class Scaled:
    """One of several instances."""

    def __init__(self, factor):
        self.factor = factor

    @batch
    def infer(self, x):
        """Its own method is bound."""
        return {"y": x * self.factor}


class Upper:
    """An instance whose ``__call__`` is bound."""

    def __call__(self, requests):
        """Strings arrive as bytes."""
        return [
            {"upper": np.char.upper(np.char.decode(request["text"].astype(np.bytes_), "utf-8"))} for request in requests
        ]


@fill_optionals(bias=np.array([10.0], np.float32))
@batch
def with_optional(x, bias):
    """An input that may be left out."""
    return {"y": x + bias}


@batch
def faulty(x):
    """Raises what the first number says."""
    if (x == -1).any():
        raise ValueError("a negative number")
    if (x == -2).any():
        raise PyTritonInvalidOperationError("an invalid operation")
    if (x == -3).any():
        return {"y": x.reshape(-1)}
    if (x == -4).any():
        return {"y": x[:0]}
    return {"y": x}


@sample
def unbatched(matrix, scale):
    """Without a batch axis."""
    return {"sums": matrix.sum(axis=1) * scale[0]}


def tensor(name, dtype=np.float32, shape=(-1,), **more):
    """A tensor of one dimension."""
    return Tensor(name=name, dtype=dtype, shape=shape, **more)


def main():
    """Bind and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--verbose", action="store_true")
    logging.basicConfig(level=logging.DEBUG if parser.parse_args().verbose else logging.INFO)
    wide = ModelConfig(max_batch_size=16, batcher=DynamicBatcher(max_queue_delay_microseconds=200_000))
    x, y = [tensor("x")], [tensor("y")]
    with Triton(config=TritonConfig(log_verbose=0)) as triton:
        triton.bind("AddSub", add_and_subtract, [tensor("a"), tensor("b")], [tensor("sum"), tensor("difference")])
        triton.bind("Requests", requests_of_a_call, x, [*y, tensor("rows", np.int32, (1,))], config=wide)
        triton.bind(
            "Countdown", countdown, [tensor("start", np.int64, (1,))], [tensor("left", np.int64, (1,))],
            config=ModelConfig(decoupled=True),
        )  # fmt: skip
        triton.bind("Scaled", [Scaled(3).infer, Scaled(3).infer], x, y, config=ModelConfig(max_batch_size=2))
        triton.bind("Upper", Upper(), [tensor("text", np.bytes_)], [tensor("upper", np.bytes_)])
        triton.bind("Optional", with_optional, [*x, tensor("bias", shape=(1,), optional=True)], y)
        triton.bind("Faulty", faulty, x, [tensor("y")], config=ModelConfig(max_batch_size=4), strict=True)
        triton.bind(
            "Unbatched", unbatched, [tensor("matrix", shape=(-1, 2)), tensor("scale", shape=(1,))], [tensor("sums")],
            config=ModelConfig(batching=False),
        )  # fmt: skip
        logger.info("serving")
        triton.serve()


if __name__ == "__main__":
    main()
