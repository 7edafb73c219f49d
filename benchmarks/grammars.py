"""What it costs to hold answers to JSON schemas, and whether they follow them.

``python -m benchmarks.grammars [--schemas N] [--sequences N] [--tokens N] [--rounds N] [--smoke]``: random schemas
(`benchmarks.json_schemas`), one request each, `--sequences` at a time, on `tiny-lm` and on a model of random weights
with its tokenizer. Every answer that ends by itself must follow its schema; otherwise the status is 1. The same
requests then run without grammars, each for as many tokens as it had; rounds alternate, and no grammar is compiled
beforehand. Also prints the time from a schema to its first mask. Writes the raw figures to
benchmarks/results/grammars.json. Set OMP_NUM_THREADS for figures to compare.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.json_schemas import is_valid, random_schemas
from benchmarks.lm_engine import machine, quiet
from benchmarks.smoke import parse_with_smoke
from headwater.engine import Grammar, Sampling, SequenceRequest
from headwater.lm.causal_lm import load_causal_lm
from headwater.lm.grammars import Grammars
from headwater.lm.slot_engine import SlotEngine

RESULTS = Path(__file__).parent / "results" / "grammars.json"
FOLDER: Final = Path(__file__).parents[1] / "inference" / "headwater" / "zoo" / "weights" / "tiny_lm"
EOS_IDS: Final = frozenset({0, 2})
ENDS: Final = '"}],0'
"""Characters that the random weights are biased to, because they alone would hardly end an answer."""


class Round(NamedTuple):
    """What came of all requests."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    """By the processor time of all threads, which other programs on the machine hardly change."""
    answers: list[tuple[str, list[int], str]]
    """How each ended, its tokens, and the error."""


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    options = parse_with_smoke(parser, schemas=12, sequences=4, tokens=60, rounds=1)
    quiet()
    print(machine())
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    texts = random_schemas(options.schemas)
    found: dict[str, Any] = {"first_mask_ms": first_masks_ms(texts)}
    print("schema to first mask, ms: " + shown_quantiles(found["first_mask_ms"]))
    wrong = 0
    for name, model in {"tiny-lm": load_causal_lm(FOLDER).model, "random": random_model()}.items():
        requests = requests_of(texts, tokenizer, options.tokens, is_biased=name == "random")
        held, free = [], []
        for _ in range(options.rounds):
            held.append(run(model, requests, options.sequences))
            free.append(run(model, unheld(requests, held[-1]), options.sequences))
        wrong += report(name, texts, held, free, tokenizer)
        found[name] = {
            "held_tokens_per_s": [one.tokens_per_s for one in held],
            "free_tokens_per_s": [one.tokens_per_s for one in free],
            "held_tokens_per_cpu_s": [one.tokens_per_cpu_s for one in held],
            "free_tokens_per_cpu_s": [one.tokens_per_cpu_s for one in free],
            "ends": Counter(finish for finish, _, _ in held[0].answers),
            "tokens": sum(len(ids) for _, ids, _ in held[0].answers),
        }
    if not options.smoke:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"machine": machine(), "options": vars(options), **found}, indent=1))
        print(f"raw figures: {RESULTS}")
    sys.exit(1 if wrong else 0)


def random_model() -> Any:
    """A model of the tiny one's shape with random weights."""
    torch.manual_seed(1)
    config: Any = LlamaConfig.from_pretrained(FOLDER)
    model: Any = LlamaForCausalLM(config)
    return model.eval()


def requests_of(texts: list[str], tokenizer: Tokenizer, tokens: int, *, is_biased: bool) -> list[SequenceRequest]:
    """One request a schema; every other one is greedy."""
    prompt = tokenizer.encode("# An example as JSON:\n").ids
    biases = {tokenizer.get_vocab()[one]: 6.0 for one in ENDS} if is_biased else {}
    return [
        SequenceRequest(
            str(place),
            prompt,
            tokens,
            Sampling(temperature=place % 2, seed=place, logit_bias=biases),
            grammar=Grammar("json_schema", text, "response_format.json_schema"),
        )
        for place, text in enumerate(texts)
    ]


def unheld(requests: list[SequenceRequest], held: Round) -> list[SequenceRequest]:
    """The same requests without grammars, of as many tokens as they came to."""
    return [
        msgspec.structs.replace(one, grammar=None, ignore_eos=True, max_tokens=len(ids))
        for one, (_, ids, _) in zip(requests, held.answers, strict=True)
    ]


def run(model: Any, requests: list[SequenceRequest], sequences: int) -> Round:
    """Answer all requests in a new engine."""
    grammars = Grammars(FOLDER / "tokenizer.json", model.config.vocab_size, EOS_IDS)
    engine = SlotEngine(model, eos_ids=EOS_IDS, grammars=grammars, max_sequences=sequences, max_waiting=len(requests))
    ids: dict[str, list[int]] = {one.id: [] for one in requests}
    ends: dict[str, tuple[str, str]] = {}
    waiting = iter(requests)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    while len(ends) < len(requests):
        while engine.waiting < sequences and (request := next(waiting, None)) is not None:
            engine.submit(request)
        for event in engine.step():
            if event.token is not None:
                ids[event.id].append(event.token)
            if event.finish is not None:
                ends[event.id] = event.finish, event.error
    took_s, took_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    tokens = sum(map(len, ids.values()))
    answers = [(ends[one.id][0], ids[one.id], ends[one.id][1]) for one in requests]
    return Round(tokens / took_s, tokens / took_cpu_s, answers)


def report(name: str, texts: list[str], held: list[Round], free: list[Round], tokenizer: Tokenizer) -> int:
    """Print what came of it; returns how many answers are wrong."""
    wrong = 0
    for one in held:
        for text, (finish, ids, error) in zip(texts, one.answers, strict=True):
            answer = tokenizer.decode(ids[:-1], skip_special_tokens=False)
            if finish not in ("stop", "length") or (finish == "stop" and not is_valid(text, answer)):
                wrong += 1
                print(f"WRONG {finish} {error}\n  schema {text}\n  answer {answer}")
    ends = Counter(finish for finish, _, _ in held[0].answers)
    pairs = list(zip(held, free, strict=True))
    ratios = [one.tokens_per_s / other.tokens_per_s for one, other in pairs]
    cpu_ratios = [one.tokens_per_cpu_s / other.tokens_per_cpu_s for one, other in pairs]
    print(
        f"{name}: {ends['stop']} answers ended by themselves, {ends['length']} were cut, {wrong} are wrong in all "
        f"rounds; tokens/s {statistics.median(one.tokens_per_s for one in held):.0f}, without grammars "
        f"{statistics.median(one.tokens_per_s for one in free):.0f}; ratio {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}), by processor time {statistics.median(cpu_ratios):.3f} "
        f"({min(cpu_ratios):.3f} to {max(cpu_ratios):.3f})"
    )
    return wrong


def first_masks_ms(texts: list[str]) -> list[float]:
    """For each schema, the time to compile it and to compute the first mask, nothing else running."""
    grammars = Grammars(FOLDER / "tokenizer.json", 4096, EOS_IDS)
    times = []
    for text in texts:
        grammar = Grammar("json_schema", text, "response_format.json_schema")
        began_s = time.perf_counter()
        compilation = grammars.compile(grammar, "")
        while not compilation.is_done:
            grammars.poll(1)
        constraint = grammars.follow(SequenceRequest("", [0], 1, grammar=grammar), compilation)
        grammars.allowed([0], [constraint], torch.device("cpu"))
        times.append((time.perf_counter() - began_s) * 1e3)
        grammars.close(constraint)
    return times


def shown_quantiles(values: list[float]) -> str:
    """The median, some quantiles, and the maximum."""
    ordered = sorted(values)
    at = {"median": 0.5, "90 %": 0.9, "99 %": 0.99, "most": 1.0}
    return ", ".join(f"{name} {ordered[round(share * (len(ordered) - 1))]:.2f}" for name, share in at.items())


if __name__ == "__main__":
    main()
