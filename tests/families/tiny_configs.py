"""A small configuration of each of transformers' architectures: its class's defaults with fewer and smaller layers."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = ["CONTEXT", "VOCAB_SIZE", "WINDOW", "tiny_config"]

VOCAB_SIZE = 96
CONTEXT = 128
WINDOW = 8

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "unpadded_vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 8,
    "embedding_size": 64,
    "embedding_dim": 64,
    "word_embed_proj_dim": 64,
    "input_embedding_size": 64,
    "output_embedding_size": 64,
    "intermediate_size": 96,
    "dense_intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "moe_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 96,
    "ffn_dim": 96,
    "dff": 96,
    "dim_ff": 96,
    "d_inner": 96,
    "feed_forward_size": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "num_hidden_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "swa_num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "swa_num_key_value_heads": 2,
    "head_dim": 16,
    "swa_head_dim": 16,
    "global_head_dim": 16,
    "dim_head": 16,
    "d_head": 16,
    "kv_channels": 16,
    "attention_head_size": 16,
    "attention_head_dim": 32,
    "attention_hidden_size": 128,
    "rotary_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "index_topk": 4,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "max_position_embeddings": CONTEXT,
    "n_positions": CONTEXT,
    "n_ctx": CONTEXT,
    "max_seq_len": CONTEXT,
    "max_target_positions": CONTEXT,
    "model_max_length": CONTEXT,
    "window_size": WINDOW,
    "local_attention": 2 * WINDOW,
    "attention_window_size": WINDOW,
    "sliding_window_size": WINDOW,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "keep_window_size": WINDOW,
    "router_hidden_size": 16,
    "adapter_rank": 8,
    "laurel_rank": 8,
    "gated_norm_rank": 4,
    "hc_lowrank": 8,
    "lru_width": 64,
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_d_state": 8,
}
"""Fields that a configuration gets if its defaults have a number there. Other names of the same field, such as
``n_embd``, are known to the configuration's class."""
PART_SIZES: dict[str, Any] = {
    "depth": 2,
    "embed_dim": 64,
    "num_heads": 4,
    "out_hidden_size": 64,
    "output_hidden_size": 64,
    "projector_hidden_size": 64,
    "image_size": 64,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [1],
    "num_query_tokens": 4,
    "adapter_in_dim": 64,
    "codebook_size": 32,
    "vision_output_dim": 64,
}
"""Further fields of a model's parts, such as encoders of images."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")
LAYER_LISTS = ("layer_types", "mlp_layer_types")
DECODER: dict[str, Any] = {"is_decoder": True}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "bert",
            "bert-generation",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
        ),
        DECODER,
    ),
    "big_bird": {**DECODER, "attention_type": "original_full"},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": 96,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4},
    "reformer": {
        **DECODER,
        "axial_pos_embds_dim": [16, 48],
        "axial_pos_shape": [8, 16],
        "attn_layers": ["local", "lsh"],
    },
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    **{
        kind: {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}}
        for kind in ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm_ocr_text", "paddleocr_vl_text")
    },
    "step3p5": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.5,
        },
        "first_k_dense_replace": 1,
    },
    # As long as the context, which may not be longer.
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": CONTEXT // 2},
    "doge": {"keep_window_size": CONTEXT // 2},
    "xmod": {**DECODER, "default_language": "en_XX"},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}},
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 8, "mamba_d_head": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"zero_expert_num": 2, "num_layers": 2, "head_dim": 8, "qk_head_dim": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "roc_bert": {**DECODER, "pronunciation_vocab_size": 32, "shape_vocab_size": 32},
    "rwkv": {"attention_hidden_size": 64},
    "xlm": {"causal": True},
    "zamba": {"num_hidden_layers": 3, "layer_types": ["linear_attention", "linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "glm4_moe": {"first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": 1},
    "dbrx": {
        "attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
}
"""Further fields of kinds of models."""


def tiny_config(kind: str) -> PreTrainedConfig:
    """The small configuration of a ``model_type``."""
    config_class: Any = CONFIG_MAPPING[kind]
    config: PreTrainedConfig = config_class(**_fields(config_class(), kind))
    return config


def _fields(default: Any, kind: str, *, is_whole: bool = True) -> dict[str, Any]:
    content = default.to_dict()
    text = default.get_text_config(decoder=True)
    names = {**{name: name for name in content}, **default.attribute_map}
    fields: dict[str, Any] = {}
    for name, value in {**SIZES, **({} if is_whole else PART_SIZES)}.items():
        present = content.get(names.get(name, ""))
        if isinstance(present, (int, list)) and not isinstance(present, bool) and present:
            fields[names[name]] = value
    rope = content.get("rope_parameters") or {}
    if "original_max_position_embeddings" in rope:
        fields["rope_parameters"] = {**rope, "original_max_position_embeddings": CONTEXT // 4}
    elif "mrope_section" in rope:
        is_partial = rope.get("partial_rotary_factor", 1) < 1
        fields["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1] if is_partial else [2, 3, 3]}
    if content.get("head_dim") is not None and content.get("head_dim") == content.get("qk_rope_head_dim"):
        del fields["head_dim"]
    if "kv_lora_rank" in fields:
        fields["num_key_value_heads"] = SIZES["num_attention_heads"]
    lists = {name: list(dict.fromkeys(content[name])) for name in LAYER_LISTS if content.get(name)}
    if lists:
        layers = max(2, *map(len, lists.values()))
        fields |= {name: (kinds * layers)[:layers] for name, kinds in lists.items()}
        fields[names["num_hidden_layers"]] = layers
    for name in TOKENS:
        if isinstance(content.get(name), int) and content[name] >= VOCAB_SIZE:
            fields[name] = 0
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if part is not None and name not in SPECIAL.get(kind, {}):
            fields[name] = {**_fields(part, part.model_type, is_whole=part is text), "model_type": part.model_type}
    return {**fields, **SPECIAL.get(kind, {})}
