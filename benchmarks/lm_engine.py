"""The slot engine against the bare batched forward of the same model, and against transformers' ways to generate.

``python -m benchmarks.lm_engine [--sizes 12,5] [--sequences 1,8,32] [--tokens N] [--prompt N] [--repeats N]
[--device D] [--dtype D] [--smoke]``: prints milliseconds a step and tokens/s of decoding, medians over repeats with
their spread, contenders interleaved. Prefill is left out: each contender is timed from the first token of all sequences
on, or, where it doesn't say when that is, for many tokens minus for one. Set OMP_NUM_THREADS for figures to compare.
The models are Llamas with random weights; all contenders compute `--tokens` tokens a sequence, greedily unless they say
otherwise. Writes the raw figures to benchmarks/results/lm_engine.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.smoke import parse_with_smoke
from headwater.engine import Sampling, SequenceRequest
from headwater.lm.slot_engine import SlotEngine
from headwater.tuning import turn_cudnn_attention_off

__all__ = [
    "BARE",
    "BY_KERNEL",
    "CONTENDERS",
    "ENGINE",
    "GREEDY",
    "TIES",
    "VOCAB_SIZE",
    "contenders_on",
    "machine",
    "measure",
    "model_of",
    "print_table",
    "quiet",
    "title_of",
]

RESULTS = Path(__file__).parent / "results" / "lm_engine.json"
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "0": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_key_value_heads": 1},
    "5": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 5, "num_key_value_heads": 4},
    "12": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_key_value_heads": 6},
    "1100": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_key_value_heads": 4,
        "initializer_range": 0.02,
    },
}
"""By millions of parameters, about; the first where size does not matter, the last of TinyLlama's shape, for a GPU. Its
weights are smaller than the others': with as large ones it amplifies the rounding of 16 bits until others lead."""
HEAD_DIM: Final = 64
VOCAB_SIZE: Final = 4096
GENERATION: Final[Any] = GenerationConfig
TIES: Final = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""By how much a logit may lead, and another token be chosen: rounding depends on the shape of what is computed."""
GREEDY: Final = Sampling(temperature=0)
SAMPLED: Final = Sampling(temperature=0.8, top_p=0.95, seed=1)

Contender: TypeAlias = Callable[[Any, int, int, int], float]
"""Called with model, sequences, tokens of a prompt, tokens to generate; seconds a step of decoding."""


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="12,5")
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--without", default="", help="contenders to leave out, by the start of their names")
    options = parse_with_smoke(parser, sizes="5", sequences="2", prompt=8, tokens=4, repeats=1)
    quiet()
    left_out = tuple(name for name in options.without.split(",") if name)
    named = contenders_on(options.device)
    contenders = {name: run for name, run in named.items() if not (left_out and name.startswith(left_out))}
    found: dict[str, dict[str, list[float]]] = {}
    print(machine())
    for size in options.sizes.split(","):
        model = model_of(size, options.device, options.dtype)
        title = title_of(model)
        for count in map(int, options.sequences.split(",")):
            seconds = measure(model, count, options.prompt, options.tokens, options.repeats, contenders)
            print_table(f"{title}, {count} sequences", seconds, count)
            found[f"{title}, {count} sequences"] = seconds
    if options.smoke:
        return
    RESULTS.parent.mkdir(exist_ok=True)
    raw = {"machine": machine(), "options": vars(options), "seconds_a_step": found}
    RESULTS.write_text(json.dumps(raw, indent=1))
    print(f"raw figures: {RESULTS}")


def measure(
    model: Any, count: int, prompt: int, tokens: int, repeats: int, contenders: Mapping[str, Contender]
) -> dict[str, list[float]]:
    """Seconds a step of decoding, by contender, a list entry a repeat; contenders take turns.

    Raises:
        RuntimeError: the engine's tokens aren't those of the bare forward.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    _verify(model, count, prompt, tokens)
    for run in contenders.values():  # warm
        run(model, count, prompt, 4)
    for _ in range(repeats):
        for name, run in contenders.items():
            seconds[name].append(run(model, count, prompt, tokens))
    return seconds


@torch.inference_mode()
def _verify(model: Any, count: int, prompt: int, tokens: int) -> None:
    """See that the engine's tokens are those of the bare forward, up to where its best two logits are nearly equal.

    Raises:
        RuntimeError: they are not.
    """
    prompts = _prompts(count, prompt)
    engine = SlotEngine(model, max_sequences=count)
    for row, one in enumerate(prompts):
        engine.submit(SequenceRequest(str(row), one, tokens, GREEDY))
    got: list[list[int]] = [[] for _ in prompts]
    while any(len(row) < tokens for row in got):
        for event in engine.step():
            if event.token is not None:
                got[int(event.id)].append(event.token)
    engine.close()
    cache = DynamicCache(config=model.config)
    ids = torch.tensor(prompts, device=model.device)
    open_rows = set(range(count))
    for place in range(tokens):
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        best, chosen = logits.topk(2)
        for row in list(open_rows):
            if got[row][place] == chosen[row, 0]:
                continue
            lead = float(best[row, 0] - best[row, 1])
            if lead >= TIES[model.dtype]:
                raise RuntimeError(
                    f"slot engine, sequence {row}, token {place}: expected {int(chosen[row, 0])}, which leads by "
                    f"{lead:g}, got {got[row][place]}"
                )
            open_rows.remove(row)  # from here on it is another text
        ids = chosen[:, :1]


def quiet() -> None:
    """No messages and progress bars from transformers."""
    logging.disable(logging.ERROR)  # continuous batching says at each start that psutil is missing
    log: Any = transformers_logging
    log.set_verbosity_error()
    log.disable_progress_bar()
    warnings.filterwarnings("ignore")


def _engine(model: Any, prompts: list[list[int]], tokens: int, sampling: Sampling, **options: Any) -> float:
    engine = SlotEngine(model, max_sequences=len(prompts), **options)
    for row, prompt in enumerate(prompts):
        # More than are timed: while the others' prompts are computed, a step or more for each, those before generate.
        engine.submit(SequenceRequest(str(row), prompt, tokens + len(prompts) + 1, sampling))
    begun: set[str] = set()
    while len(begun) < len(prompts):
        begun.update(event.id for event in engine.step())
    started = time.perf_counter()
    for _ in range(tokens):
        engine.step()
    seconds = time.perf_counter() - started
    assert engine.active == len(prompts)
    engine.close()
    return seconds / tokens


def _slot_engine(model: Any, count: int, prompt: int, tokens: int) -> float:
    return _engine(model, _prompts(count, prompt), tokens, GREEDY)


def _slot_engine_by_kernel(model: Any, count: int, prompt: int, tokens: int) -> float:
    return _engine(model, _prompts(count, prompt), tokens, GREEDY, cuda_graphs=False)


def _slot_engine_mixed(model: Any, count: int, prompt: int, tokens: int) -> float:
    return _engine(model, _mixed(count, prompt), tokens, GREEDY)


def _slot_engine_sampled(model: Any, count: int, prompt: int, tokens: int) -> float:
    return _engine(model, _mixed(count, prompt), tokens, SAMPLED)


def _slot_engine_invariant(model: Any, count: int, prompt: int, tokens: int) -> float:
    """With `batch_invariant`, which replaces layers, so of a copy."""
    return _engine(copy.deepcopy(model), _prompts(count, prompt), tokens, GREEDY, batch_invariant=True)


@torch.inference_mode()
def _bare(model: Any, count: int, prompt: int, tokens: int) -> float:
    """A static batch: the model's forward with transformers' default cache, then argmax."""
    cache = DynamicCache(config=model.config)
    ids = torch.tensor(_prompts(count, prompt), device=model.device)
    ids = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    ids.tolist()
    started = time.perf_counter()
    for _ in range(tokens):
        ids = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
        ids.tolist()
    return (time.perf_counter() - started) / tokens


def _generate(model: Any, count: int, prompt: int, tokens: int) -> float:
    """`generate` on a static batch."""
    ids = torch.tensor(_prompts(count, prompt), device=model.device)

    def run(new: int) -> float:
        started = time.perf_counter()
        config = GENERATION(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return time.perf_counter() - started

    first = run(1)
    return (run(tokens + 1) - first) / tokens


def _continuous(model: Any, count: int, prompt: int, tokens: int) -> float:
    """transformers' continuous batching."""
    prompts = _prompts(count, prompt)
    before = model.config._attn_implementation

    def run(new: int) -> float:
        started = time.perf_counter()
        outputs = model.generate_batch(
            prompts,
            generation_config=GENERATION(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512),
        )
        if [len(one.generated_tokens) for one in outputs.values()] != [new] * count:
            raise SystemExit("transformers' continuous batching did not generate what it was asked for")
        return time.perf_counter() - started

    try:
        first = run(1)
        return (run(tokens + 1) - first) / tokens
    finally:
        model.set_attn_implementation(before)


BARE: Final = "bare batched forward"
ENGINE: Final = "slot engine"
BY_KERNEL: Final = "slot engine, kernel by kernel"
"""Without CUDA graphs; on a GPU only."""
INVARIANT: Final = "slot engine, batch invariant"
"""On a CPU only."""
CONTENDERS: Final[dict[str, Contender]] = {
    BARE: _bare,
    ENGINE: _slot_engine,
    "slot engine, mixed lengths": _slot_engine_mixed,
    "slot engine, mixed, sampled": _slot_engine_sampled,
    "transformers generate": _generate,
    "transformers continuous batching": _continuous,
}


def contenders_on(device: str) -> dict[str, Contender]:
    """The contenders of a device, by name."""
    own = {INVARIANT: _slot_engine_invariant} if device == "cpu" else {BY_KERNEL: _slot_engine_by_kernel}
    return {**CONTENDERS, **own}


def print_table(title: str, seconds: dict[str, list[float]], count: int) -> None:
    """Each contender's time a step, and how it compares with the bare forward."""
    print(f"\n{title:<40} {'ms a step':>9} {'(spread)':>14} {'tokens/s':>10} {'of the bare':>12}")
    for name, all_seconds in seconds.items():
        steps = sorted(one * 1000 for one in all_seconds)
        median = statistics.median(steps)
        ratio = statistics.median(bare / one for bare, one in zip(seconds[BARE], all_seconds, strict=True))
        spread = f"({steps[0]:.1f}-{steps[-1]:.1f})"
        print(f"  {name:<38} {median:>9.2f} {spread:>14} {count * 1000 / median:>10,.0f} {ratio:>12.2f}")


def _prompts(count: int, length: int) -> list[list[int]]:
    return [[(7 * row + 11 * place) % VOCAB_SIZE for place in range(length)] for row in range(count)]


def _mixed(count: int, length: int) -> list[list[int]]:
    """Lengths from half to one and a half times as many, the mean as given."""
    if count == 1:
        return _prompts(1, length)
    return [ids[: length // 2 + row * length // (count - 1)] for row, ids in enumerate(_prompts(count, 2 * length))]


def title_of(model: Any) -> str:
    """How large it is."""
    return f"{sum(one.numel() for one in model.parameters()) / 1e6:.1f}M parameters"


def model_of(size: str, device: str, dtype: str) -> Any:
    """A Llama with random weights, of a size in `SHAPES`."""
    torch.manual_seed(0)
    shape = SHAPES[size]
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        num_attention_heads=shape["hidden_size"] // HEAD_DIM,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        **{"initializer_range": 0.05, **shape},
    )
    turn_cudnn_attention_off(device)  # as the product does
    with torch.device(device):  # a GPU draws a billion weights at once, a CPU in most of a minute
        model: Any = LlamaForCausalLM(config)
    return model.to(getattr(torch, dtype)).eval()


def machine() -> str:
    """What it is measured on."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores"
    return f"{device}, {torch.get_num_threads()} threads, Python {platform.python_version()}, {packages}"


if __name__ == "__main__":
    main()
