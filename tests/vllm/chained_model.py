"""A model whose answers are known: each token of a chain is followed by the next, whatever stands before it.

It is a Llama without attention: its layers add nothing, so that the last token's embedding alone decides what follows.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.app.lm.tool_text import TEMPLATES, tool_folder

__all__ = ["CALL", "CONTEXT_LENGTH", "ENDLESS", "TEXT", "THOUGHT", "chained_folder"]

THOUGHT = "Let me see."
TEXT = ("It is", " late.")
CALL = '{"name": "clock", "arguments": {"zone": "UTC"}}'
ENDLESS = (" and", " round")
"""Texts that follow each other for ever. As bytes, these are no tokens of the vocabulary."""
CONTEXT_LENGTH = 2048
SIZE = 256
LOGIT = 20.0
"""That of the token that follows; other tokens have less than half of it."""

_ANSWER = ("<think>", THOUGHT, "</think>", *TEXT, "<tool_call>", CALL, "</tool_call>", "<|im_end|>")


def chained_folder(folder: Path) -> Path:
    """Write the model, with a template that opens ``<think>``, and closes it at once if ``enable_thinking`` is false.

    It thinks `THOUGHT`, says the texts of `TEXT`, and calls the function `CALL`. After one of the texts of `ENDLESS` it
    never ends.
    """
    tool_folder(folder, "hermes")
    template = TEMPLATES["hermes"].replace("message.content", "message.content or ''")
    opened = "{%- if add_generation_prompt %}<think>{% if enable_thinking is false %}</think>{% endif %}{% endif %}"
    (folder / "chat_template.jinja").write_text(template + opened)
    ids = _add_tokens(folder / "tokenizer.json")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "vocab_size": max(ids.values()) + 1, "max_position_embeddings": CONTEXT_LENGTH, "num_hidden_layers": 1,
        "hidden_size": SIZE, "intermediate_size": SIZE, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config, ids), folder / "model.safetensors", {"format": "pt"})
    return folder


def _add_tokens(path: Path) -> dict[str, int]:
    """Add a token for each text of the chains to a tokenizer. Returns the ids by text."""
    tokenizer: dict[str, Any] = json.loads(path.read_text())
    known = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    next_id = len(tokenizer["model"]["vocab"])
    for text in (*_ANSWER, *ENDLESS):
        if text not in known:
            known[text] = next_id
            about = {"id": next_id, "content": text, "special": False}
            tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], **about})
            next_id += 1
    path.write_text(json.dumps(tokenizer))
    return known


def _weights(config: dict[str, Any], ids: dict[str, int]) -> dict[str, NDArray[np.float32]]:
    embeddings = np.random.default_rng(0).normal(size=(config["vocab_size"], SIZE)).astype(np.float32)
    head = np.zeros_like(embeddings)
    for text, follower in (*pairwise(_ANSWER), ENDLESS, ENDLESS[::-1]):
        head[ids[follower]] = LOGIT / SIZE * embeddings[ids[text]]
    query, key = (config["head_dim"] * config[name] for name in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "self_attn.q_proj": (query, SIZE), "self_attn.k_proj": (key, SIZE), "self_attn.v_proj": (key, SIZE),
        "self_attn.o_proj": (SIZE, query), "mlp.gate_proj": (SIZE, SIZE), "mlp.up_proj": (SIZE, SIZE),
        "mlp.down_proj": (SIZE, SIZE),
    }  # fmt: skip
    norms = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")
    return {
        "model.embed_tokens.weight": embeddings,
        "lm_head.weight": head,
        **{f"model.layers.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in layer.items()},
        **{f"{name}.weight": np.ones(SIZE, np.float32) for name in norms},
    }
