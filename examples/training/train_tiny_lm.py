"""Trains tiny-lm and writes it in Hugging Face's format: ``python -m examples.training.train_tiny_lm``.

A Llama of 4 million parameters and its tokenizer, both trained on the standard library of the running interpreter, so
that token streams can be served, tested and measured without a download. It writes text that looks like Python.

Training takes about a quarter of an hour on a core with bfloat16 instructions (AMX). The rows of a step depend only on
the step's number, so an interrupted run that continues from its last checkpoint ends with the same weights. The
held-out files only serve for the figures at the end: they choose no step, seed or setting. The weights depend on the
text, and so on the version of Python: the shipped weights come from Python 3.11.7.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.training.tiny_lm_data import chats, collect
from headwater.zoo.digits import WEIGHTS

__all__ = ["FOLDER", "HeldOut", "held_out_loss", "main"]

FOLDER: Final = WEIGHTS.with_name("tiny_lm")
CHECKPOINT: Final = Path("build/tiny_lm.checkpoint.pt")
SEED: Final = 0
VOCABULARY: Final = 4096
CONTEXT: Final = 512
END_OF_TEXT, CHAT_START, CHAT_END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

STEPS: Final = 2400
ROWS: Final = 4
CHAT_ROWS_ONE_IN: Final = 16
MAX_LEARNING_RATE: Final = 2e-3
LAST_LEARNING_RATE: Final = 0.05
"""The last learning rate as a fraction of the highest."""
WARM_UP_STEPS: Final = 100
STEPS_PER_CHECKPOINT: Final = 100
STEPS_PER_LINE: Final = 50


class HeldOut(NamedTuple):
    """The loss on held-out texts."""

    nats_per_token: float
    bits_per_byte: float
    tokens: int


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE tokenizer: each of the 256 bytes is a token, so any text survives encoding and decoding."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def with_template(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as a transformers tokenizer, which renders chats."""
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[CHAT_START, CHAT_END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def new_config(tokenizer: Tokenizer) -> LlamaConfig:
    """The configuration of the model: 4 query heads on 2 key/value heads of size 64, tied embeddings."""
    ids = tokenizer.get_vocab()
    end_of_text, chat_end = ids[END_OF_TEXT], ids[CHAT_END]
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=[end_of_text, chat_end],
        pad_token_id=end_of_text,
    )


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    """The ids of each text, each preceded by the id that begins a text."""
    first = tokenizer.get_vocab()[END_OF_TEXT]
    return [[first, *encoding.ids] for encoding in tokenizer.encode_batch(list(texts))]


class Corpus:
    """Rows to train on: windows of the code, and some windows that begin at the start of a chat."""

    def __init__(self, tokenizer: Tokenizer, files: Mapping[str, str]) -> None:
        template = with_template(tokenizer)
        rendered = (str(template.apply_chat_template(chat, tokenize=False)) for chat in chats(files, SEED))
        # As in serving, a chat does not begin with the token that begins a text.
        talks = [ids[1:] for ids in encode(tokenizer, rendered)]
        self.code = torch.tensor([id_ for ids in encode(tokenizer, files.values()) for id_ in ids])
        self.chat = torch.tensor([id_ for ids in talks for id_ in ids])
        starts = torch.tensor([0] + [len(ids) for ids in talks]).cumsum(0)
        self.chat_starts = starts[starts <= len(self.chat) - CONTEXT - 1]

    def rows(self, step: int) -> Tensor:
        """The rows of this step: INT64 [ROWS, CONTEXT + 1]."""
        generator = torch.Generator().manual_seed(SEED + step)
        rows = []
        for row in range(step * ROWS, (step + 1) * ROWS):
            if row % CHAT_ROWS_ONE_IN:
                stream = self.code
                start = int(torch.randint(len(stream) - CONTEXT, (), generator=generator))
            else:
                stream = self.chat
                start = int(self.chat_starts[torch.randint(len(self.chat_starts), (), generator=generator)])
            rows.append(stream[start : start + CONTEXT + 1])
        return torch.stack(rows)


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then cosine decay."""
    warm_up = min(WARM_UP_STEPS, steps // 10 + 1)
    if step < warm_up:
        return MAX_LEARNING_RATE * (step + 1) / warm_up
    falling = (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up))) / 2
    return MAX_LEARNING_RATE * (LAST_LEARNING_RATE + (1 - LAST_LEARNING_RATE) * falling)


def loss_of(net: nn.Module, rows: Tensor, reduction: str = "mean") -> Tensor:
    """The cross-entropy of each token after the first, in nats."""
    logits: Tensor = net(input_ids=rows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction=reduction)


@torch.enable_grad()  # even if the calling thread has turned gradients off
def train(config: LlamaConfig, corpus: Corpus, steps: int, checkpoint: Path) -> LlamaForCausalLM:
    """Train from scratch, or from the checkpoint if it is of a run with the same number of steps. FP32, on the CPU."""
    torch.manual_seed(SEED)
    net = LlamaForCausalLM(config)
    # Gradients are computed on a copy in bfloat16, which is several times as fast; weights and moments stay in FP32.
    # Only parameters are rounded: rounded rotary frequencies would be off by a radian at the end of the context.
    fast = copy.deepcopy(net)
    for weight in fast.parameters():
        weight.data = weight.data.bfloat16()
    vectors = [weight for weight in net.parameters() if weight.ndim < 2]
    matrices = [weight for weight in net.parameters() if weight.ndim >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=True,
    )
    done = 0
    if checkpoint.exists():
        state: dict[str, Any] = torch.load(checkpoint, weights_only=True)
        if state["steps"] == steps:
            done = state["done"]
            net.load_state_dict(state["net"])
            optimizer.load_state_dict(state["optimizer"])
            print(f"continuing from step {done} of {checkpoint}", flush=True)
    pairs = list(zip(net.parameters(), fast.parameters(), strict=True))
    losses, noted = [], time.perf_counter()
    for step in range(done, steps):
        with torch.no_grad():
            for weight, rounded in pairs:
                rounded.copy_(weight)
                rounded.grad = None
        loss = loss_of(fast, corpus.rows(step))
        torch.autograd.backward(loss)
        losses.append(loss.item())
        for weight, rounded in pairs:
            weight.grad = None if rounded.grad is None else rounded.grad.float()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        optimizer.step()
        if (step + 1) % STEPS_PER_LINE == 0:
            now = time.perf_counter()
            speed = len(losses) * ROWS * CONTEXT / (now - noted)
            mean = sum(losses) / len(losses)
            print(f"step {step + 1} of {steps}: training loss {mean:.3f}, {speed:,.0f} tokens/s", flush=True)
            losses, noted = [], now
        if (step + 1) % STEPS_PER_CHECKPOINT == 0:
            save(checkpoint, steps=steps, done=step + 1, net=net.state_dict(), optimizer=optimizer.state_dict())
    net.train(False)
    return net


def save(checkpoint: Path, **state: object) -> None:
    """Write the checkpoint as a whole or not at all."""
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    unfinished = checkpoint.with_suffix(".part")
    torch.save(state, unfinished)
    os.replace(unfinished, checkpoint)


@torch.inference_mode()
def held_out_loss(net: nn.Module, tokenizer: Tokenizer, texts: Iterable[str]) -> HeldOut:
    """The loss on texts in windows of the context's length; each window's last token predicts the first of the next."""
    texts = list(texts)
    nats, tokens = 0.0, 0
    for ids in encode(tokenizer, texts):
        for start in range(0, len(ids) - 1, CONTEXT):
            window = torch.tensor(ids[start : start + CONTEXT + 1])[None]
            nats += loss_of(net, window, reduction="sum").item()
            tokens += window.shape[1] - 1
    size_bytes = sum(len(text.encode()) for text in texts)
    return HeldOut(nats / tokens, nats / math.log(2) / size_bytes, tokens)


def write(net: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Write `FOLDER`. The weights are float16 on disk; the configuration says to load them as float32."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with_template(tokenizer).save_pretrained(FOLDER)
    net.config.dtype = torch.float32
    net.config.architectures = ["LlamaForCausalLM"]
    net.config.save_pretrained(FOLDER)
    ids = {name: getattr(net.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    GenerationConfig(**ids).save_pretrained(FOLDER)  # type: ignore[no-untyped-call]
    weights = {name: weight.half() for name, weight in net.state_dict().items() if name != "lm_head.weight"}  # tied
    save_file(weights, FOLDER / "model.safetensors", metadata={"format": "pt"})
    # safetensors lets only the owner read the file, but another user may serve a copied tree.
    (FOLDER / "model.safetensors").chmod(0o644)


def main() -> None:
    """Train, write `FOLDER`, and print the loss of the written model on the held-out files."""
    parser = argparse.ArgumentParser(description="Trains tiny-lm.")
    parser.add_argument("--steps", type=int, default=STEPS, help="of 2,048 tokens each (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="to continue from (default: %(default)s)")
    options = parser.parse_args()
    # The order of floating-point sums depends on the number of threads; a second thread gains little.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    started = time.perf_counter()
    files, unseen = collect()
    tokenizer = train_tokenizer(files.values())
    corpus = Corpus(tokenizer, files)
    print(f"{len(files)} files, {sum(map(len, files.values())):,} characters, {len(corpus.code):,} tokens", flush=True)
    print(f"{len(corpus.chat):,} tokens of chats; {len(unseen)} files held out", flush=True)
    net = train(new_config(tokenizer), corpus, options.steps, options.checkpoint)
    write(net, tokenizer)
    options.checkpoint.unlink(missing_ok=True)
    seconds = time.perf_counter() - started
    written = AutoModelForCausalLM.from_pretrained(FOLDER)
    score = held_out_loss(written, tokenizer, unseen.values())
    print(f"held-out loss: {score.nats_per_token:.4f} nats per token, {score.bits_per_byte:.4f} bits per byte")
    print(f"of {score.tokens:,} tokens in {', '.join(unseen)}")
    size_bytes = sum(path.stat().st_size for path in FOLDER.iterdir())
    print(f"wrote {FOLDER}: {written.num_parameters():,} parameters, {size_bytes:,} bytes, in {seconds:.0f} s")


if __name__ == "__main__":
    main()
