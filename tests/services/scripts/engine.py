"""An engine that generates text: a coroutine without batching, with many optional inputs, streamed or whole."""

# mypy: ignore-errors

import argparse
import asyncio

import numpy as np
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

engine = None


class Engine:
    """Repeats the prompt's last letter."""

    async def generate(self, prompt, n=1, max_tokens=3, temperature=1.0):
        """Yield `n` texts of growing length."""
        for length in range(1, max_tokens + 1):
            await asyncio.sleep(0)
            yield [f"{prompt}{prompt[-1] * length}-{choice}-{temperature:g}" for choice in range(n)]


async def generate(requests):
    """One request a call."""
    (request,) = requests
    prompt = request.data["prompt"].tolist()[0].decode("utf-8")
    stream = request.data.get("stream", False)
    options = {name: value.item() for name, value in request.data.items() if name not in ("prompt", "stream")}
    texts = None
    async for texts in engine.generate(prompt, **options):
        if stream:
            yield [{"text": np.char.encode(np.array(texts)[..., None], "utf-8")}]
    if texts is None:
        raise ValueError("no text was generated")
    if not stream:
        yield [{"text": np.char.encode(np.array(texts)[..., None], "utf-8")}]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default=None)
    parser.add_argument("--port", type=int, default=None)
    parser.add_argument("--model", default="facebook/opt-125m")
    args = parser.parse_args()
    engine = Engine()

    def optional(name, dtype):
        """An input that may be left out."""
        return Tensor(name=name, dtype=dtype, shape=(1,), optional=True)

    with Triton(config=TritonConfig(http_address=args.host, http_port=args.port)) as triton:
        triton.bind(
            model_name=args.model.replace("-", "_").replace("/", "_"),
            infer_func=generate,
            inputs=[
                Tensor(name="prompt", dtype=bytes, shape=(1,)),
                optional("n", np.int32),
                optional("max_tokens", np.int32),
                optional("temperature", np.float32),
                optional("stream", np.bool_),
            ],
            outputs=[Tensor(name="text", dtype=bytes, shape=(-1, 1))],
            config=ModelConfig(batching=False, max_batch_size=128, decoupled=True),
            strict=True,
        )
        triton.serve()
