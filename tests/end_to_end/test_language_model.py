"""What a language model says over HTTP: what transformers says, the same for a seed, and the same streamed."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from headwater_server.lm.text.tokenizer import Tokenizer as OurTokenizer
from tests.end_to_end.conftest import language_model
from tests.inference.lm.llamas import TIE, generated
from tests.running import Running, serve
from tests.token_streams import Stream, left_alone, open_stream, run, text_of, together, whole, worker_of

FOLDER = Path(__file__).parents[2] / "inference" / "headwater" / "zoo" / "weights" / "tiny_lm"
PROMPTS = 56
AT_ONCE = 32
TOKENS = 40
VOCAB_SIZE = 4096
EOS_IDS = {0, 2}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 40}
SEEDS = range(8)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Pieces of a text that is always the same, of 1 to 250 tokens, in no order of length.

    transformers' own arithmetic decides ties in `references`; a text of each Python's own could have some.
    """
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    lengths = [1 + round(249 * (number / (PROMPTS - 1)) ** 2) for number in range(PROMPTS)]
    shuffled = random.Random(0)
    shuffled.shuffle(lengths)
    return [ids[start : start + length] for length in lengths for start in [shuffled.randrange(len(ids) - 250)]]


@pytest.fixture(scope="module")
def references(prompts: list[list[int]]) -> Iterator[list[tuple[list[int], list[float]]]]:
    """What transformers' `generate` makes of each prompt, and by how much each token leads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(FOLDER, dtype=torch.float32).eval()
    yield [generated(model, prompt, TOKENS) for prompt in prompts]
    torch.set_num_threads(threads)


def tokens_of(stream: Stream) -> list[str]:
    """The tokens of a stream with logprobs, each on its own, as text."""
    assert stream.status == 200, stream.body
    assert stream.error is None
    choices = [choice for event in stream.events for choice in event.get("choices", [])]
    return [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]


class TestGreedy:
    """Texts and tokens are transformers' own; where the best two logits are nearer than `TIE`, they may differ."""

    @pytest.fixture
    def differing(
        self, references: list[tuple[list[int], list[float]]], tokenizer: Tokenizer
    ) -> Callable[[Sequence[Stream], Sequence[int]], int]:
        texts = OurTokenizer(FOLDER).texts

        def compare(streams: Sequence[Stream], lengths: Sequence[int]) -> int:
            ties = 0
            for stream, (ids, leads), length in zip(streams, references, lengths, strict=True):
                end = next((place for place, id in enumerate(ids[:length]) if id in EOS_IDS), None)
                expected = ids[: length if end is None else end + 1]
                got = tokens_of(stream)
                shown = [texts.shown(id)[0] for id in expected]
                if got == shown or (end is not None and got == shown[:-1]):
                    assert text_of(stream.events) == tokenizer.decode(expected, skip_special_tokens=True)
                    finish = next(
                        choice["finish_reason"]
                        for event in reversed(stream.events)
                        for choice in event["choices"]
                        if choice["finish_reason"]
                    )
                    assert finish == ("length" if end is None else "stop")
                else:
                    place = next(n for n, pair in enumerate(zip(got, shown, strict=False)) if pair[0] != pair[1])
                    assert leads[place] < TIE, f"{got[place]!r} instead of {shown[place]!r}, by {leads[place]}"
                    ties += 1
            return ties

        return compare

    def ask(self, lm: Running, prompt: list[int], max_tokens: int) -> Any:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 0}
        return whole(lm, body)

    def test_alone(self, lm: Running, prompts: list[list[int]], differing: Any) -> None:
        streams = run(together([self.ask(lm, prompt, TOKENS) for prompt in prompts], at_once=1))
        print(differing(streams, [TOKENS] * PROMPTS), "answers differ, at ties")

    def test_among_neighbours(self, lm: Running, prompts: list[list[int]], differing: Any) -> None:
        lengths = [10 + 7 * number % 31 for number in range(PROMPTS)]
        asks = [self.ask(lm, prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
        print(differing(run(together(asks, AT_ONCE)), lengths), "answers differ, at ties")


@pytest.fixture(scope="module")
def alone(lm: Running, prompts: list[list[int]]) -> list[list[str]]:
    """The tokens of each seed, with nothing beside."""
    found = [tokens_of(run(whole(lm, seeded(prompts, seed)))) for seed in SEEDS]
    assert len({tuple(one) for one in found}) == len(SEEDS)
    return found


def seeded(prompts: list[list[int]], seed: int) -> dict[str, Any]:
    """A request's body."""
    return {"model": "tiny", "prompt": prompts[5], "seed": seed, "logprobs": 0, "ignore_eos": True, **SAMPLED}


class TestSeeds:
    """The same seed gives the same tokens, whatever else goes on."""

    def test_again(self, lm: Running, prompts: list[list[int]], alone: list[list[str]]) -> None:
        assert [tokens_of(run(whole(lm, seeded(prompts, seed)))) for seed in SEEDS] == alone

    def test_batched(self, lm: Running, prompts: list[list[int]], alone: list[list[str]]) -> None:
        others = [
            {"model": "tiny", "prompt": prompt, "max_tokens": 10 + 5 * number, "temperature": number % 2}
            for number, prompt in enumerate(prompts[:24])
        ]
        streams = run(together([whole(lm, body) for body in (*others, *(seeded(prompts, seed) for seed in SEEDS))]))
        assert [tokens_of(stream) for stream in streams[-len(SEEDS) :]] == alone

    def test_beside_a_cancelled_neighbour(self, lm: Running, prompts: list[list[int]], alone: list[list[str]]) -> None:
        async def ask() -> list[Stream]:
            body = {"model": "tiny", "prompt": prompts[3], "max_tokens": 300, "ignore_eos": True, "stream": True}
            async with open_stream(lm, "/v1/completions", body) as before:
                await before.read(1)
                streams = []
                for seed in SEEDS:
                    async with (
                        open_stream(lm, "/v1/completions", body) as beside,
                        open_stream(lm, "/v1/completions", {**seeded(prompts, seed), "stream": True}) as stream,
                    ):
                        await asyncio.gather(beside.read(2), stream.read(2))
                        beside.leave()  # a row of the cache is free now, and another one moves there
                        before.leave()
                        streams.append(await stream.rest())
                return streams

        with left_alone(lm, "tiny"):
            assert [tokens_of(stream) for stream in run(ask())] == alone

    def test_through_two_gateway_workers(self, prompts: list[list[int]], alone: list[list[str]]) -> None:
        config = {
            "deployments": {"tiny": language_model(max_sequences=16, batch_invariant=True)},
            "server": {"workers": 2},
        }
        asked = set()
        with serve(config) as running:

            async def ask(seed: int) -> Stream:
                body = {**seeded(prompts, seed), "stream": True}
                async with open_stream(running, "/v1/completions", body) as stream:
                    asked.add(worker_of(running, stream.port))
                    return await stream.rest()

            # Who takes a connection is the system's choice: ask until both workers had some.
            for _ in range(30):
                assert [tokens_of(stream) for stream in run(together([ask(seed) for seed in SEEDS]))] == alone
                assert tokens_of(run(ask(0))) == alone[0]
                if len(asked - {None}) == 2:
                    return
            raise AssertionError(f"expected both workers to have been asked, got {asked}")


class TestStreamedText:
    """A stream's pieces together are the whole answer's text, which is what the tokenizer makes of the tokens."""

    async def both(self, lm: Running, body: dict[str, Any], path: str = "/v1/completions") -> tuple[str, str, Stream]:
        stream = await whole(lm, body, path)
        async with open_stream(lm, path, body) as answer:
            assert (stream.status, answer.status) == (200, 200), (stream.body, answer.body)
            assert stream.error is None
            return text_of(stream.events), json.loads(answer.body)["choices"][0]["text"], stream

    def test_all_tokens_of_the_vocabulary_in_turn(self, lm: Running, tokenizer: Tokenizer) -> None:
        body = {"model": "null", "prompt": [1], "max_tokens": VOCAB_SIZE}
        streamed, answered, _ = run(self.both(lm, body))
        expected = tokenizer.decode(list(range(VOCAB_SIZE)), skip_special_tokens=True)
        assert streamed == answered == expected

    def test_one_token_an_event(self, lm: Running, tokenizer: Tokenizer) -> None:
        """The first few hundred are single bytes: hardly any sequence of them is a character."""
        body = {"model": "faulty", "prompt": [1], "max_tokens": 270}
        streamed, answered, stream = run(self.both(lm, body))
        expected = tokenizer.decode(list(range(270)), skip_special_tokens=True)
        assert streamed == answered == expected
        assert expected.count("\ufffd") > 20
        assert len(stream.events) > 150

    def test_cut_off_ends(self, lm: Running, tokenizer: Tokenizer) -> None:
        async def ask() -> None:
            for length in range(150, 270, 3):
                body = {"model": "null", "prompt": [1], "max_tokens": length}
                streamed, answered, _ = await self.both(lm, body)
                assert streamed == answered == tokenizer.decode(list(range(length)), skip_special_tokens=True)

        run(ask())

    def test_random_tokens(self, lm: Running, prompts: list[list[int]]) -> None:
        async def ask() -> list[tuple[str, str, Stream]]:
            bodies = [
                {"model": "tiny", "prompt": prompts[seed], "seed": seed, "temperature": 2, "max_tokens": 100}
                for seed in range(32)
            ]
            return await together([self.both(lm, {**body, "ignore_eos": True}) for body in bodies])

        found = run(ask())
        assert all(streamed == answered for streamed, answered, _ in found)
        assert any("\ufffd" in streamed for streamed, *_ in found)

    @pytest.mark.parametrize(
        "prompt",
        [
            "日本語のテキスト、",
            "👩‍👩‍👧‍👦 🏳️‍🌈 ",
            "e\u0301\u0323 n\u0303o\u0308",
            "שלום עולם",
            "\u0000\x7f\r\n\t",
            "naïve café ",
        ],
    )
    @pytest.mark.parametrize("echo", [False, True])
    def test_prompts_of_all_kinds(self, lm: Running, prompt: str, echo: bool) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 30, "temperature": 0, "echo": echo}
        streamed, answered, _ = run(self.both(lm, body))
        assert streamed == answered
        assert streamed.startswith(prompt if echo else "")

    @pytest.mark.parametrize("ids", [[160, 161], [200], list(range(100, 300))])
    def test_prompts_that_end_within_a_character(self, lm: Running, ids: list[int]) -> None:
        body = {"model": "tiny", "prompt": ids, "max_tokens": 30, "temperature": 1.5, "seed": 3}
        streamed, answered, _ = run(self.both(lm, body))
        assert streamed == answered


class TestGenerate:
    """Triton's generate extension says the same."""

    PARAMETERS: ClassVar[dict[str, Any]] = {"max_tokens": 20, "temperature": 0}

    def test_whole_and_streamed(self, lm: Running) -> None:
        body = {"text_input": "import os\n\n\ndef ", "parameters": self.PARAMETERS}
        answer = lm.client.post(f"{lm.url}/v2/models/tiny/generate", json=body).json()
        stream = run(whole(lm, body, "/v2/models/tiny/generate_stream"), 20)
        openai_body = {"model": "tiny", "prompt": body["text_input"], **self.PARAMETERS}
        expected = lm.client.post(f"{lm.url}/v1/completions", json=openai_body).json()
        assert answer["text_output"] == expected["choices"][0]["text"]
        assert "".join(event.get("text_output", "") for event in stream.events) == answer["text_output"]
        assert stream.events[-1]["final"] is True
        assert answer["parameters"]["finish_reason"] == "length"
        for told in (answer["parameters"], stream.events[-1].get("parameters", stream.events[-1])):
            assert told["prompt_tokens"] == expected["usage"]["prompt_tokens"]
            assert told["completion_tokens"] == 20
