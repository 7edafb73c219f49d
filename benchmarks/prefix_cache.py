"""The slot engine's prefix cache: chats with a common beginning, with and without it, what it costs prompts that have
nothing in common, and memory over many requests.

    python -m benchmarks.prefix_cache [--chats 32] [--common 400] [--own 20] [--rounds 9] [--requests 5000] [--smoke]

All chats of a round arrive at once at an engine that has seen none of them; rounds with and without the cache take
turns. Prompts that have nothing in common come to engines that go on from round to round. Ends with status 1 if the
ratio of the times to first token is above `MOST_RATIO`, a token differs where the best logit leads by more than a tie,
or the engine's memory exceeds its budget.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.lm_engine import GREEDY, TIES, VOCAB_SIZE, machine, model_of, quiet, title_of
from benchmarks.smoke import parse_with_smoke
from headwater.engine import SequenceRequest
from headwater.lm.slot_engine import SlotEngine

__all__ = ["MOST_RATIO"]

MOST_RATIO: Final = 0.35
BUDGET: Final = 16_384


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="5")
    parser.add_argument("--chats", type=int, default=32)
    parser.add_argument("--common", type=int, default=400, help="tokens that all prompts begin with")
    parser.add_argument("--own", type=int, default=20, help="tokens of each prompt after these")
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=9, help="of prompts that have nothing in common")
    parser.add_argument("--requests", type=int, default=5000, help="of the run that watches memory")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    options = parse_with_smoke(parser, chats=4, common=40, tokens=4, repeats=1, rounds=1, requests=20)
    quiet()
    model = model_of(options.size, options.device, options.dtype)
    print(f"{machine()}; {title_of(model)}")
    ratio, ties = chats(model, options)
    churn(model, options.chats, options.rounds)
    is_bounded = memory(model_of("0", options.device, options.dtype), options.requests)
    if not options.smoke and not (ratio <= MOST_RATIO and is_bounded):
        raise SystemExit(1)
    print(f"{ties} of the answers differ, each from a tie on")


def chats(model: Any, options: argparse.Namespace) -> tuple[float, int]:
    """The ratio of the mean times to first token, and how many answers differ at a tie."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    ties = 0
    for repeat in range(options.repeats + 1):  # the first warms up
        rng = random.Random(repeat)
        common = [rng.randrange(VOCAB_SIZE) for _ in range(options.common)]
        prompts = [[*common, *(rng.randrange(VOCAB_SIZE) for _ in range(options.own))] for _ in range(options.chats)]
        answers = {}
        for prefix_cache in True, False:
            engine = SlotEngine(model, max_sequences=options.chats, prefix_cache=prefix_cache)
            first_s, answers[prefix_cache], reused = _run(engine, prompts, options.tokens)
            engine.close()
            if repeat:
                seconds[prefix_cache].append(first_s)
            if prefix_cache and repeat == 1:
                print(f"{reused} of {sum(map(len, prompts))} prompt tokens reused")
        ties += sum(_differs(model, *one) for one in zip(prompts, answers[True], answers[False], strict=True))
    ratios = sorted(one / other for one, other in zip(seconds[True], seconds[False], strict=True))
    ratio = statistics.median(ratios)
    for prefix_cache, found in seconds.items():
        print(f"  {'with' if prefix_cache else 'without':<8} {statistics.median(found) * 1000:>9.1f} ms to first token")
    print(f"  ratio {ratio:.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f}), expected at most {MOST_RATIO}")
    return ratio, ties


def churn(model: Any, sequences: int, rounds: int) -> None:
    """Tokens per second of CPU time on one thread, which neighbours disturb less than the clock, with and without the
    cache: of prompts that have nothing in common, three times as many as there are sequences, of 16 to 128 tokens, with
    answers of 8 to 48."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engines = {one: SlotEngine(model, max_sequences=sequences, prefix_cache=one) for one in (True, False)}
    rates: dict[bool, list[float]] = {True: [], False: []}
    rng = random.Random(2)
    for number in range(rounds + 1):  # the first warms up
        asked = [
            SequenceRequest(
                str(place), [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(16, 128))], rng.randint(8, 48), GREEDY
            )
            for place in range(3 * sequences)
        ]
        for prefix_cache in (True, False) if number % 2 else (False, True):
            engine = engines[prefix_cache]
            started = time.process_time()
            for one in asked:
                engine.submit(one)
            tokens = 0
            while engine.has_work:
                events = engine.step()
                assert not any(event.cached for event in events)
                tokens += len(events)
            if number:
                rates[prefix_cache].append(tokens / (time.process_time() - started))
    torch.set_num_threads(threads)
    ratios = sorted(one / other for one, other in zip(rates[True], rates[False], strict=True))
    on, off = (statistics.median(rates[prefix_cache]) for prefix_cache in (True, False))
    spread = f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})"
    print(f"nothing in common: {on:,.0f} tokens per CPU second with, {off:,.0f} without; {spread}")


def _run(engine: SlotEngine, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]], int]:
    """The mean time to first token in seconds, the answers, and the prompts' tokens that were reused."""
    answers: list[list[int]] = [[] for _ in prompts]
    firsts, reused = [], 0
    started = time.perf_counter()
    for row, prompt in enumerate(prompts):
        engine.submit(SequenceRequest(str(row), prompt, tokens, GREEDY))
    while engine.has_work:
        for event in engine.step():
            assert event.token is not None
            if event.index == 0:
                firsts.append(time.perf_counter() - started)
                reused += event.cached
            answers[int(event.id)].append(event.token)
    return statistics.mean(firsts), answers, reused


@torch.inference_mode()
def _differs(model: Any, prompt: list[int], got: list[int], expected: list[int]) -> bool:
    """Whether two answers differ, where that is allowed.

    Raises:
        RuntimeError: they differ where the best logit leads by more than a tie.
    """
    if got == expected:
        return False
    place = next(place for place, (one, other) in enumerate(zip(got, expected, strict=True)) if one != other)
    ids = torch.tensor([[*prompt, *expected[:place]]], device=model.device)
    best, second = model(ids, logits_to_keep=1).logits[0, -1].float().topk(2).values.tolist()
    if best - second >= TIES[model.dtype]:
        raise RuntimeError(
            f"token {place}: expected {expected[place]}, which leads by {best - second:g}, got {got[place]}"
        )
    return True


def memory(model: Any, requests: int) -> bool:
    """Whether an engine's memory stays bounded while chats of four turns come one after the other, four at a time."""
    engine = SlotEngine(model, max_sequences=8, cache_tokens=BUDGET)
    rng = random.Random(1)
    systems = [[rng.randrange(VOCAB_SIZE) for _ in range(64)] for _ in range(8)]
    histories: dict[str, list[int]] = {}
    most = begun = prompt_tokens = reused = 0
    resident = []
    while engine.has_work or begun < requests:
        while engine.active < 4 and begun < requests:
            turn = rng.choice(list(histories)) if len(histories) > 12 else ""
            history = histories.pop(turn, None) or rng.choice(systems)
            prompt = [*history, *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(3, 30)))]
            id = str(begun)
            engine.submit(SequenceRequest(id, prompt, rng.randint(1, 8), GREEDY))
            prompt_tokens += len(prompt)
            if len(prompt) < 200:
                histories[id] = prompt
            begun += 1
            if begun % max(requests // 10, 1) == 0:
                resident.append(_resident_mib())
        for event in engine.step():
            reused += event.cached
            if event.token is not None and event.id in histories:
                histories[event.id].append(event.token)
        rows, length = engine._rows.cache.shape
        most = max(most, rows * length)
    print(
        f"{requests} requests: at most {most} tokens in the cache of {BUDGET}; {reused / prompt_tokens:.0%} of the "
        f"prompts reused; resident MiB from tenth to tenth: {' '.join(f'{one:.0f}' for one in resident)}"
    )
    return most <= BUDGET


def _resident_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


if __name__ == "__main__":
    main()
