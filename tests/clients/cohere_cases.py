"""Cohere's client, in both versions of its API: embeddings and ranks."""

from __future__ import annotations

import math
from typing import Any

import cohere
from cases import URL, raised, run

TEXTS = ["The harbour lay still.", "Boats slept in the port."]
DOCUMENTS = ["the tax is due.", "a cat sleeps.", "a dog barks in berlin."]
client: Any = cohere.ClientV2(api_key="none", base_url=URL)
first: Any = cohere.Client(api_key="none", base_url=URL)


def close(one: Any, two: Any) -> bool:
    return all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(one, two, strict=True))


def embeddings() -> None:
    answer = client.embed(model="text", texts=TEXTS, input_type="search_document", embedding_types=["float"])
    assert [len(vector) for vector in answer.embeddings.float_] == [384, 384]
    assert answer.meta.billed_units.input_tokens > 4
    assert answer.texts == TEXTS


def embeddings_of_every_type() -> None:
    kinds = ["float", "binary", "ubinary", "base64"]
    answer = client.embed(model="text", texts=TEXTS, input_type="search_query", embedding_types=kinds).embeddings
    bits = [int(number > 0) for number in answer.float_[0]]
    packed = [sum(bit << (7 - place) for place, bit in enumerate(bits[at : at + 8])) for at in range(0, 384, 8)]
    assert (answer.ubinary[0], answer.binary[0]) == (packed, [byte - 128 for byte in packed])
    assert len(answer.base64[0]) == 384 * 4 // 3 * 4
    error = raised(cohere.BadRequestError, client.embed, model="text", texts=TEXTS, input_type="search_query",
                   embedding_types=["int8"])  # fmt: skip
    assert "embedding_types[0]" in str(error.body)


def longer_texts() -> None:
    arguments = {"model": "text", "texts": ["word " * 400], "input_type": "search_query"}
    assert client.embed(**arguments).embeddings.float_
    error = raised(cohere.BadRequestError, client.embed, truncate="NONE", **arguments)
    assert "maximum context length is 256 tokens" in str(error.body)


def the_first_version_embeds() -> None:
    answer = first.embed(model="text", texts=TEXTS)
    assert answer.response_type == "embeddings_floats"
    again = client.embed(model="text", texts=TEXTS, input_type="search_query").embeddings.float_
    assert close(answer.embeddings[1], again[1])
    assert first.embed(texts=TEXTS, embedding_types=["float"]).embeddings.float_


def ranks() -> None:
    results = client.rerank(model="reranker", query="the cat", documents=DOCUMENTS).results
    assert sorted(result.index for result in results) == [0, 1, 2]
    scores = [result.relevance_score for result in results]
    assert scores == sorted(scores, reverse=True)
    best = client.rerank(model="reranker", query="the cat", documents=DOCUMENTS, top_n=1).results
    assert [result.index for result in best] == [results[0].index]


def the_first_version_ranks() -> None:
    documents = [{"text": text, "id": str(n)} for n, text in enumerate(DOCUMENTS)]
    results = first.rerank(query="the cat", documents=documents, return_documents=True).results
    assert all(result.document.text == DOCUMENTS[result.index] for result in results)
    assert all(result.document.id == str(result.index) for result in results)


def an_unknown_model_is_not_found() -> None:
    raised(cohere.NotFoundError, client.rerank, model="nobody", query="x", documents=["y"])


run(
    embeddings, embeddings_of_every_type, longer_texts, the_first_version_embeds, ranks, the_first_version_ranks,
    an_unknown_model_is_not_found,
)  # fmt: skip
