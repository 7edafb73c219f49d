"""Makes a BLIP-2 of random weights, some MB. An interpreter that has vLLM runs it: ``tiny_blip2.py TOKENIZER FOLDER``.
Of the models that take images, vLLM computes it without torchvision.

The tokenizer is that of the folder TOKENIZER, with a token for images.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["IMAGE_TOKENS", "main"]

IMAGE_TOKENS = 8
"""Tokens of an image in the prompt."""
IMAGE_SIZE = 56
TEMPLATE = """\
{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}{% else %}\
{% for part in message.content or [] %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{% endfor %}assistant: """


def main() -> None:
    """Write the model."""
    import torch
    from transformers import (
        AutoTokenizer,
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        BlipImageProcessor,
        OPTConfig,
    )

    source, folder = sys.argv[1:]
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.bos_token = tokenizer.bos_token or tokenizer.eos_token
    tokenizer.chat_template = TEMPLATE
    images = BlipImageProcessor(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})
    make_processor: Any = Blip2Processor  # untyped
    make_processor(images, tokenizer, num_query_tokens=IMAGE_TOKENS).save_pretrained(folder)
    vision = Blip2VisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=IMAGE_SIZE
    )
    former = Blip2QFormerConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, encoder_hidden_size=64
    )
    text = OPTConfig(
        vocab_size=len(tokenizer), hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=512, word_embed_proj_dim=64, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    image_token: Any = tokenizer.convert_tokens_to_ids("<image>")
    config = Blip2Config(
        vision_config=vision.to_dict(), qformer_config=former.to_dict(), text_config=text.to_dict(),
        num_query_tokens=IMAGE_TOKENS, image_token_index=image_token,
    )  # fmt: skip
    Blip2ForConditionalGeneration(config).save_pretrained(folder)


if __name__ == "__main__":
    main()
