"""The unmodified ``openai`` client against ``/v1``."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from headwater.zoo.text import DIMENSION, Text, weights_folder
from tests.running import Running

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "seven", "lazy", "wizards", "drinking", "harbour", "tea"]
SENTENCES = ["A cat sleeps.", "Zwei Straßen weiter: 💛 東京!", "Taxes are due in April, as they were last year."]

LONG = "dog " * 300

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(scope="module")
def client(demo: Running) -> Iterator[openai.OpenAI]:
    """A client of the demo, whose model ``text`` is all-MiniLM-L6-v2."""
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def shortening(services: Running) -> Iterator[openai.OpenAI]:
    """A client of the services, whose model ``short`` embeds a text as its first 8 bytes, or fewer if asked to."""
    with openai.OpenAI(base_url=f"{services.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def direct() -> Callable[[Sequence[str]], tuple[Array, list[int]]]:
    """The model called in this process: embeddings and numbers of tokens."""
    model = Text()
    model.load("cpu")

    def embed(texts: Sequence[str]) -> tuple[Array, list[int]]:
        outputs = [model(text=np.array([[text.encode()]], object)) for text in texts]
        vectors = np.concatenate([output["embedding"].numpy() for output in outputs])
        return vectors, [int(output["tokens"]) for output in outputs]

    return embed


@pytest.fixture(scope="module")
def reference() -> Any:
    from sentence_transformers import SentenceTransformer  # which all of pytest's workers would import with this module

    return SentenceTransformer(str(weights_folder()), device="cpu", local_files_only=True)


def vectors_of(response: openai.types.CreateEmbeddingResponse) -> Array:
    assert [item.index for item in response.data] == list(range(len(response.data)))
    return np.array([item.embedding for item in response.data], np.float32)


def mixed_texts(count: int) -> list[str]:
    """Texts of 1 to about 80 words in no order of length, no two alike."""
    random = np.random.default_rng(0)
    lengths = random.permutation(np.geomspace(1, 80, count).astype(int))
    return [f"{number} " + " ".join(random.choice(WORDS, length)) for number, length in enumerate(lengths)]


def refused(create: Callable[[], object], kind: type[openai.APIStatusError]) -> openai.APIStatusError:
    """The error; it has a request id, and OpenAI's fields."""
    with pytest.raises(kind) as caught:
        create()
    error = caught.value
    assert error.request_id
    assert isinstance(error.body, dict)
    assert set(error.body) == {"message", "type", "param", "code"}
    assert error.type == "invalid_request_error"
    assert error.code is None or isinstance(error.code, str)
    return error


class TestEmbeddings:
    # The client asks for base64 when it is not told, and decodes that itself.
    @pytest.mark.parametrize("form", [{}, {"encoding_format": "float"}], ids=["default", "float"])
    @pytest.mark.parametrize("text", SENTENCES)
    def test_a_string(self, client: openai.OpenAI, direct: Any, form: dict[str, Any], text: str) -> None:
        response = client.embeddings.create(model="text", input=text, **form)
        assert (response.object, response.model, len(response.data)) == ("list", "text", 1)
        assert np.abs(vectors_of(response) - direct([text])[0]).max() < 1e-5

    def test_a_list_of_strings(self, client: openai.OpenAI, direct: Any) -> None:
        response = client.embeddings.create(model="text", input=SENTENCES)
        assert np.abs(vectors_of(response) - direct(SENTENCES)[0]).max() < 1e-5

    def test_it_agrees_with_sentence_transformers(self, client: openai.OpenAI, reference: Any) -> None:
        response = client.embeddings.create(model="text", input=SENTENCES)
        expected = reference.encode(SENTENCES, show_progress_bar=False)
        assert np.abs(vectors_of(response) - expected).max() < 1e-5

    def test_base64_on_request_is_little_endian_float32(self, client: openai.OpenAI, direct: Any) -> None:
        response = client.embeddings.create(model="text", input=SENTENCES[0], encoding_format="base64")
        text: Any = response.data[0].embedding
        vector = np.frombuffer(base64.b64decode(text, validate=True), "<f4")
        assert vector.shape == (DIMENSION,)
        assert np.abs(vector - direct(SENTENCES[:1])[0][0]).max() < 1e-5

    def test_float_and_base64_are_the_same_numbers(self, shortening: openai.OpenAI) -> None:
        as_float = shortening.embeddings.create(model="short", input="abc", encoding_format="float")
        as_base64 = shortening.embeddings.create(model="short", input="abc")
        assert vectors_of(as_float).tolist() == vectors_of(as_base64).tolist() == [[97, 98, 99, 0, 0, 0, 0, 0]]

    def test_100_texts_of_mixed_lengths_keep_their_order(self, client: openai.OpenAI, direct: Any) -> None:
        texts = mixed_texts(100)
        response = client.embeddings.create(model="text", input=texts)
        assert len(response.data) == 100
        assert np.abs(vectors_of(response) - direct(texts)[0]).max() < 1e-5

    def test_token_ids_are_as_good_as_the_text(self, client: openai.OpenAI, reference: Any) -> None:
        ids = [reference.tokenizer(sentence)["input_ids"] for sentence in SENTENCES]
        of_texts = client.embeddings.create(model="text", input=SENTENCES)
        of_ids = client.embeddings.create(model="text", input=ids)
        assert np.abs(vectors_of(of_ids) - vectors_of(of_texts)).max() < 1e-5
        assert of_ids.usage == of_texts.usage
        (one,) = vectors_of(client.embeddings.create(model="text", input=ids[0]))
        assert np.abs(one - vectors_of(of_texts)[0]).max() < 1e-5

    def test_2048_inputs_in_one_request(self, shortening: openai.OpenAI) -> None:
        response = shortening.embeddings.create(model="short", input=[chr(97 + n % 26) for n in range(2048)])
        assert vectors_of(response)[:, 0].tolist() == [97 + n % 26 for n in range(2048)]

    def test_usage_counts_the_tokens(self, client: openai.OpenAI, direct: Any) -> None:
        usage = client.embeddings.create(model="text", input=SENTENCES).usage
        assert usage.prompt_tokens == usage.total_tokens == sum(direct(SENTENCES)[1])

    def test_the_end_users_label_changes_nothing(self, shortening: openai.OpenAI) -> None:
        plain, labelled = (
            shortening.embeddings.create(model="short", input="abc", user=user) for user in (openai.omit, "u-1")
        )
        assert vectors_of(plain).tolist() == vectors_of(labelled).tolist()

    def test_many_asynchronous_requests_at_once(self, demo: Running, direct: Any) -> None:
        texts = mixed_texts(24)

        async def embed_all() -> list[openai.types.CreateEmbeddingResponse]:
            async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="unused", max_retries=0) as client:
                forms: list[dict[str, Any]] = [{}, {"encoding_format": "float"}]
                return await asyncio.gather(
                    *[
                        client.embeddings.create(model="text", input=text, **forms[number % 2])
                        for number, text in enumerate(texts)
                    ]
                )

        responses = asyncio.run(embed_all())
        vectors, tokens = direct(texts)
        assert np.abs(np.concatenate([vectors_of(response) for response in responses]) - vectors).max() < 1e-5
        assert [response.usage.prompt_tokens for response in responses] == tokens


class TestDimensions:
    @pytest.mark.parametrize("dimensions", [1, 3, 8])
    def test_a_model_that_can_shortens(self, shortening: openai.OpenAI, dimensions: int) -> None:
        response = shortening.embeddings.create(model="short", input=["abcdefgh", "xy"], dimensions=dimensions)
        whole = [[97, 98, 99, 100, 101, 102, 103, 104], [120, 121, 0, 0, 0, 0, 0, 0]]
        assert vectors_of(response).tolist() == [row[:dimensions] for row in whole]

    def test_requests_of_different_dimensions_at_once_each_get_their_own(self, services: Running) -> None:
        asked = [1, None, 3, 8, 2, None, 5, 4] * 8

        async def embed_all() -> list[openai.types.CreateEmbeddingResponse]:
            async with openai.AsyncOpenAI(base_url=f"{services.url}/v1", api_key="unused", max_retries=0) as client:
                return await asyncio.gather(
                    *[
                        client.embeddings.create(
                            model="short", input="abc", dimensions=openai.omit if dimensions is None else dimensions
                        )
                        for dimensions in asked
                    ]
                )

        lengths = [len(response.data[0].embedding) for response in asyncio.run(embed_all())]
        assert lengths == [dimensions or 8 for dimensions in asked]

    @pytest.mark.parametrize("dimensions", [-1, 0, 9, 10**20])
    def test_a_number_out_of_range(self, shortening: openai.OpenAI, dimensions: int) -> None:
        error = refused(
            lambda: shortening.embeddings.create(model="short", input="abc", dimensions=dimensions),
            openai.BadRequestError,
        )
        assert error.param == "dimensions"
        assert "dimensions" in error.message
        assert str(dimensions) in error.message

    def test_a_model_that_can_not(self, client: openai.OpenAI) -> None:
        error = refused(
            lambda: client.embeddings.create(model="text", input="abc", dimensions=64), openai.BadRequestError
        )
        assert error.param == "dimensions"
        assert "`text`" in error.message


class TestModels:
    def test_list(self, client: openai.OpenAI) -> None:
        models = list(client.models.list())
        assert sorted(model.id for model in models) == ["digits", "scale", "text", "tiny-lm"]
        assert {model.object for model in models} == {"model"}
        assert all(time.time() - 3600 < model.created <= time.time() for model in models)

    def test_retrieve(self, client: openai.OpenAI) -> None:
        model = client.models.retrieve("text")
        assert (model.id, model.object, model.owned_by) == ("text", "model", "headwater")

    def test_retrieve_an_unknown_one(self, client: openai.OpenAI) -> None:
        error = refused(lambda: client.models.retrieve("nope"), openai.NotFoundError)
        assert "'nope'" in error.message

    def test_asynchronously(self, demo: Running) -> None:
        async def names() -> list[str]:
            async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="unused", max_retries=0) as client:
                return [model.id async for model in client.models.list()]

        assert sorted(asyncio.run(names())) == ["digits", "scale", "text", "tiny-lm"]


class TestErrors:
    def test_an_unknown_model(self, client: openai.OpenAI) -> None:
        error = refused(lambda: client.embeddings.create(model="nope", input="abc"), openai.NotFoundError)
        assert error.param == "model"
        assert "'nope'" in error.message
        assert "`text`" in error.message

    def test_a_model_without_embeddings(self, client: openai.OpenAI) -> None:
        error = refused(lambda: client.embeddings.create(model="digits", input="abc"), openai.BadRequestError)
        assert error.param == "model"
        assert "`digits`" in error.message
        assert "`text`" in error.message

    @pytest.mark.parametrize("tokens", [[1, 2, 3], [[1, 2], [3]]], ids=["one", "several"])
    def test_token_ids_for_a_model_that_reads_text_only(self, shortening: openai.OpenAI, tokens: Any) -> None:
        error = refused(lambda: shortening.embeddings.create(model="short", input=tokens), openai.BadRequestError)
        assert error.param == "input"
        assert "token ids are not supported" in error.message

    @pytest.mark.parametrize("given", [LONG, [101] * 300], ids=["text", "ids"])
    def test_an_input_longer_than_the_model(self, client: openai.OpenAI, given: Any) -> None:
        error = refused(lambda: client.embeddings.create(model="text", input=given), openai.BadRequestError)
        assert error.param == "input"
        assert "maximum context length is 256 tokens" in error.message
        answer = client.embeddings.create(model="text", input=given, extra_body={"truncate_prompt_tokens": 7})
        assert answer.usage.prompt_tokens == 7

    def test_a_token_id_of_another_tokenizer(self, client: openai.OpenAI) -> None:
        error = refused(lambda: client.embeddings.create(model="text", input=[101, 99_999]), openai.BadRequestError)
        assert "this model's tokenizer, from 0 to 30521" in error.message

    def test_an_empty_list(self, client: openai.OpenAI) -> None:
        answer = client.embeddings.with_raw_response.create(model="text", input=[])
        assert json.loads(answer.content)["data"] == []
        with pytest.raises(ValueError, match="No embedding data received"):  # the client's own error
            client.embeddings.create(model="text", input=[])

    def test_an_unknown_field_is_named(self, client: openai.OpenAI) -> None:
        error = refused(
            lambda: client.embeddings.create(model="text", input="abc", extra_body={"priority": 1}),
            openai.BadRequestError,
        )
        assert error.param == "priority"
        assert "'priority'" in error.message

    def test_an_unknown_encoding(self, client: openai.OpenAI) -> None:
        form: Any = "hex"
        error = refused(
            lambda: client.embeddings.create(model="text", input="abc", encoding_format=form), openai.BadRequestError
        )
        assert error.param == "encoding_format"
        assert "hex" in error.message

    def test_an_unknown_route(self, client: openai.OpenAI) -> None:
        refused(
            lambda: client.moderations.create(input="abc"),
            openai.NotFoundError,
        )

    @pytest.mark.parametrize(
        ("body", "param", "said"),
        [
            (b"", "body", "expected a JSON object"),
            (b"[]", "body", "expected an object, got an array"),
            (b'{"model": "text"}', "input", "got an object without it"),
            (b'{"model": 5, "input": "abc"}', "model", "expected a string, got an integer"),
            (b'{"model": "text", "input": null}', "input", "got null; this model takes a string or an array"),
            (b'{"model": "text", "input": ["abc", 1]}', "input[1]", "input[1]: expected a string, got an integer"),
            (b'{"model": "text", "input": "abc", "dimensions": 1.5}', "dimensions", "expected an integer"),
            (b'{"model": "text", "input": "\xff"}', "input", "UTF-8, got byte 0xff"),
            (b'{"model": "\xff", "input": "abc"}', "body", "UTF-8, got byte 0xff"),
            (b'{"model": "text", "input": "\\ud800"}', "body", "got a lone surrogate"),
            (b'{"model": "text", "input": ' + b"[" * 50_000, "body", "nested too deeply"),
        ],
        ids=lambda value: value[:40].decode("latin-1") if isinstance(value, bytes) else "",
    )
    def test_a_body_that_no_client_would_send(self, demo: Running, body: bytes, param: str, said: str) -> None:
        answer = httpx.post(f"{demo.url}/v1/embeddings", content=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert said in error["message"]

    async def test_asynchronously(self, demo: Running) -> None:
        with pytest.raises(openai.NotFoundError, match="'nope'"):
            async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="unused", max_retries=0) as client:
                await client.embeddings.create(model="nope", input="abc")


class TestRequestIds:
    def test_each_answer_has_its_own(self, client: openai.OpenAI) -> None:
        answers = [client.embeddings.with_raw_response.create(model="text", input="abc") for _ in range(2)]
        ids = {answer.headers["x-request-id"] for answer in answers}
        assert len(ids) == 2
        assert all(ids)

    def test_the_clients_own_is_kept(self, client: openai.OpenAI) -> None:
        answer = client.embeddings.with_raw_response.create(
            model="text", input="abc", extra_headers={"X-Request-Id": "mine-1"}
        )
        assert answer.headers["x-request-id"] == "mine-1"
