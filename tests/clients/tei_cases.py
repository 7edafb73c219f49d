"""Clients of text-embeddings-inference: huggingface_hub's and LlamaIndex's."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from cases import URL, raised, run
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

TEXTS = ["The harbour lay still.", "Boats slept in the port."]
DOCUMENTS = ["the tax is due.", "a cat sleeps.", "a dog barks in berlin."]


def at(path: str) -> Any:
    return InferenceClient(f"{URL}{path}")


def features() -> None:
    vectors = at("/embed").feature_extraction(TEXTS)
    assert vectors.shape == (2, 384)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    for client in (at("/embed?model=text"), InferenceClient(base_url=f"{URL}/embed")):
        again = client.feature_extraction(TEXTS[0], normalize=True, truncate=True, truncation_direction="right")
        assert np.allclose(again, vectors[:1], atol=1e-6)


def features_asynchronously() -> None:
    assert asyncio.run(AsyncInferenceClient(f"{URL}/embed").feature_extraction(TEXTS)).shape == (2, 384)


def longer_texts() -> None:
    error = raised(HfHubHTTPError, at("/embed").feature_extraction, text="word " * 400, truncate=False)
    assert error.response.status_code == 400
    assert "maximum context length is 256 tokens" in error.response.json()["error"]
    error = raised(HfHubHTTPError, at("/embed").feature_extraction, text="x", truncation_direction="left")
    assert error.response.json()["error"].startswith("truncation_direction: expected")


def similarities() -> None:
    for path in ("/similarity", "/similarity?model=text", "/"):
        same, other = at(path).sentence_similarity(TEXTS[0], TEXTS)
        assert abs(same - 1) < 1e-5
        assert -1 <= other < same
    vectors = at("/embed").feature_extraction(TEXTS)
    assert abs(vectors[0] @ vectors[1] - other) < 1e-5


def labels() -> None:
    for path in ("/predict", "/?model=classifier"):
        first, second = at(path).text_classification("the tax is due.")
        assert {first.label, second.label} == {"tax", "animal"}
        assert first.score >= second.score
        assert abs(first.score + second.score - 1) < 1e-5
    (best,) = at("/predict").text_classification("the tax is due.", top_k=1)
    assert best.label == first.label


def the_root_answers_what_one_model_can() -> None:
    assert at("/?model=text").feature_extraction(TEXTS).shape == (2, 384)
    error = raised(HfHubHTTPError, at("/").feature_extraction, text=TEXTS)
    assert "models that can be meant" in error.response.json()["error"]


def llama_index_embeds() -> None:
    embeddings = TextEmbeddingsInference(model_name="text", base_url=URL, embed_batch_size=1)
    vectors = embeddings.get_text_embedding_batch([*TEXTS, "word " * 400])
    assert [len(vector) for vector in vectors] == [384] * 3


def llama_index_ranks() -> None:
    nodes = [NodeWithScore(node=TextNode(text=text), score=0) for text in DOCUMENTS]
    ranked = TextEmbeddingInference(base_url=URL, top_n=2).postprocess_nodes(nodes, query_str="the cat")
    assert len(ranked) == 2
    assert ranked[0].score >= ranked[1].score


run(
    features, features_asynchronously, longer_texts, similarities, labels, the_root_answers_what_one_model_can,
    llama_index_embeds, llama_index_ranks,
)  # fmt: skip
