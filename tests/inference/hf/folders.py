"""Small Hugging Face folders with random weights, made by the libraries themselves."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from scipy.io import wavfile
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers.models.bert import modeling_bert
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

LIBRARY: Any = transformers
"""Its classes have no types, or too narrow ones for dictionaries of arguments."""
pipeline: Any = transformers.pipeline
RATE = 16_000
"""Samples a second that networks of speech hear."""
WORDS = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "the", "cat", "dog", "sleeps", "barks", "in", "berlin", "ann", "##s",
    "query", ":", "tax", "is", "due", ".",
]  # fmt: skip
TEXTS = ["a cat sleeps.", "the dogs", "ann barks in berlin. the tax is due in berlin.", "query: cats", "zebra"]


def tokenizer(folder: Path) -> None:
    """Write a WordPiece tokenizer of `WORDS`."""
    made = Tokenizer(models.WordPiece({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    LIBRARY.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        model_max_length=16, model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip


def bert(folder: Path, kind: str, labels: tuple[str, ...] = (), **config: Any) -> Path:
    """Write a tiny BERT of a class, such as ``BertForSequenceClassification``, and its tokenizer."""
    torch.manual_seed(3)
    if labels:
        config |= {"id2label": dict(enumerate(labels)), "label2id": {label: n for n, label in enumerate(labels)}}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    made = getattr(modeling_bert, kind)(
        LIBRARY.BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, initializer_range=0.6, **sizes, **config)
    )
    made.save_pretrained(folder)
    tokenizer(folder)
    return folder


def sentences(folder: Path, *modes: str, dense: int = 0, normalizes: bool = True, **prompts: Any) -> Path:
    """Write a sentence-transformers folder around a tiny BERT."""
    inner = bert(folder.with_name(f"{folder.name}-inner"), "BertModel")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reads = Transformer(str(inner), max_seq_length=12)
        parts: list[Any] = [reads, Pooling(16, pooling_mode=modes or ("mean",), include_prompt=not prompts)]
        if dense:
            torch.manual_seed(4)
            parts.append(Dense(16 * max(1, len(modes)), dense, activation_function=torch.nn.Tanh()))
        parts += [Normalize()] if normalizes else []
        SentenceTransformer(modules=parts, **prompts).save_pretrained(str(folder))
    return folder


def vit(folder: Path, labels: tuple[str, ...]) -> Path:
    """Write a tiny vision transformer for images of 16 x 16, and its image processor."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = LIBRARY.ViTConfig(
        image_size=16, patch_size=8, initializer_range=0.8, id2label=dict(enumerate(labels)), **sizes
    )
    LIBRARY.ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    return folder


def wav2vec2(folder: Path) -> Path:
    """Write a tiny Wav2Vec2 that hears the letters A to G at 16 kHz, and its processor."""
    torch.manual_seed(7)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    convolutions = {"conv_dim": (8, 8), "conv_stride": (40, 8), "conv_kernel": (40, 8), "num_feat_extract_layers": 2}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    LIBRARY.Wav2Vec2ForCTC(LIBRARY.Wav2Vec2Config(vocab_size=12, **sizes, **convolutions, **positions)).save_pretrained(
        folder
    )
    letters = {
        "<pad>": 0,
        "<s>": 1,
        "</s>": 2,
        "<unk>": 3,
        "|": 4,
        **{letter: 5 + n for n, letter in enumerate("ABCDEFG")},
    }
    (folder / "vocab.json").write_text(json.dumps(letters))
    processor = LIBRARY.Wav2Vec2Processor(
        feature_extractor=LIBRARY.Wav2Vec2FeatureExtractor(),
        tokenizer=LIBRARY.Wav2Vec2CTCTokenizer(str(folder / "vocab.json")),
    )
    processor.save_pretrained(folder)
    return folder


def whisper(folder: Path) -> Path:
    """Write a tiny Whisper that hears a second and knows the languages en and de, and its processor."""
    tokens = [
        *"abcdefghijklmnopqrstuvwxyz",
        "<|endoftext|>",
        "<|startoftranscript|>",
        "<|en|>",
        "<|de|>",
        "<|translate|>",
    ]
    tokens += ["<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    ids = {token: index for index, token in enumerate(tokens)}
    special = [token for token in tokens if token.startswith("<|")]
    LIBRARY.WhisperTokenizer(vocab=ids, merges=[], additional_special_tokens=special[1:]).save_pretrained(folder)
    LIBRARY.WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
    torch.manual_seed(1)
    end = ids["<|endoftext|>"]
    about = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end}
    about["decoder_start_token_id"] = ids["<|startoftranscript|>"]
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = LIBRARY.WhisperConfig(
        vocab_size=len(ids), num_mel_bins=8, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, init_std=1.0,
        max_source_positions=50, max_target_positions=24, suppress_tokens=None, begin_suppress_tokens=None, **sizes,
        **about,
    )  # fmt: skip
    network = LIBRARY.WhisperForConditionalGeneration(config)
    network.generation_config = LIBRARY.GenerationConfig(
        max_length=20,
        is_multilingual=True,
        lang_to_id={name: ids[name] for name in ("<|en|>", "<|de|>")},
        task_to_id={name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        return_timestamps=False,
        **about,
    )
    network.save_pretrained(folder)
    return folder


def wav(samples: Any, rate: int = RATE) -> bytes:
    """A WAV file of samples, [n] or [n, channels]."""
    file = io.BytesIO()
    wavfile.write(file, rate, samples)
    return file.getvalue()


def change(path: Path, **fields: Any) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
