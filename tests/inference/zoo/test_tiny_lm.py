"""tiny-lm as it is shipped: what its folder holds, how well it predicts Python, and how its training goes on."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from headwater.zoo.training import train_tiny_lm
from headwater.zoo.training.tiny_lm_data import SYSTEM_PROMPTS, chats, collect, is_held_out
from headwater.zoo.training.train_tiny_lm import FOLDER, SPECIAL, Corpus, held_out_loss, learning_rate, train

# Written for this test, so in no corpus.
UNSEEN = '''"""Keep the lines of a log that a reader has not yet seen."""

import os
import time


class LogReader:
    """Read a growing file, line by line.

    The file may be replaced while it is being read.
    """

    def __init__(self, path, encoding="utf-8"):
        self.path = path
        self.encoding = encoding
        self._file = None
        self._lines = []

    def open(self):
        if self._file is not None:
            raise ValueError("file is already open")
        self._file = open(self.path, "r", encoding=self.encoding)
        return self

    def close(self):
        """Close the file. It is not an error to close it twice."""
        if self._file is None:
            return
        try:
            self._file.close()
        finally:
            self._file = None

    def __iter__(self):
        for line in self._file:
            if not line.strip():
                continue
            yield line

    def __len__(self):
        return len(self._lines)


def main(args=None):
    if args is None:
        args = sys.argv[1:]
    for name in args:
        if not os.path.exists(name):
            print("no such file: %s" % name)
            continue
        with LogReader(name) as reader:
            for number, line in enumerate(reader):
                print(number, line)


if __name__ == "__main__":
    main()
'''


@pytest.fixture(scope="module")
def net() -> LlamaForCausalLM:
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    net = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert isinstance(net, LlamaForCausalLM)
    return net


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    """The tokenizer as the gateway reads it, without transformers."""
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def generate(net: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, max_new_tokens: int) -> list[int]:
    """The ids that follow greedily, the last of them perhaps one that ends a text or a chat's reply."""
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    mask = torch.ones_like(ids)
    # transformers' own annotation of its `self` doesn't hold for a Llama.
    both = net.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)  # type: ignore[misc]
    assert isinstance(both, Tensor)
    return both[0, ids.shape[1] :].tolist()


class TestTheFolder:
    def test_it_is_at_most_16_mb(self) -> None:
        assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 16_000_000

    def test_everyone_may_read_it(self) -> None:
        assert all(path.stat().st_mode & 0o444 == 0o444 for path in FOLDER.iterdir())

    def test_it_is_loaded_as_float32_with_a_context_of_512(self, net: LlamaForCausalLM) -> None:
        assert {weight.dtype for weight in net.parameters()} == {torch.float32}
        assert net.config.max_position_embeddings == 512

    def test_it_has_4_million_parameters(self, net: LlamaForCausalLM) -> None:
        assert net.num_parameters() == 4_000_000

    def test_a_reply_ends_at_the_end_of_a_text_or_of_a_message(self, net: LlamaForCausalLM, plain: Tokenizer) -> None:
        ends = [plain.token_to_id("<|endoftext|>"), plain.token_to_id("<|im_end|>")]
        assert net.generation_config is not None
        assert net.generation_config.eos_token_id == net.config.eos_token_id == ends
        assert net.config.bos_token_id == net.config.pad_token_id == ends[0]

    def test_model_and_tokenizer_have_one_vocabulary(
        self, net: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        assert net.config.vocab_size == len(tokenizer) == 4096

    def test_it_says_where_the_text_comes_from(self) -> None:
        readme = (FOLDER / "README.md").read_text()
        assert "standard library" in readme
        assert "PSF" in readme


class TestTheTokenizer:
    @given(text=st.text(st.characters(exclude_categories=["Cs"])))
    def test_any_text_comes_back(self, plain: Tokenizer, text: str) -> None:
        assert plain.decode(plain.encode(text).ids, skip_special_tokens=False) == text

    @pytest.mark.parametrize(
        "text",
        ["", " ", "\x00\x1f\x7f", "👩‍👩‍👧 🏳️‍🌈", "流れる水は腐らず", "a\u0301 \r\n\t  def", "ﷺ\u202e", "<|im_end|>"],
    )
    def test_both_readers_agree_on_it(self, plain: Tokenizer, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
        ids = plain.encode(text).ids
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == plain.decode(ids, skip_special_tokens=False) == text

    def test_each_byte_is_a_token(self, plain: Tokenizer) -> None:
        alphabet = ByteLevel.alphabet()
        assert len(set(alphabet)) == 256
        assert plain.get_vocab().keys() >= set(alphabet)

    def test_nothing_is_put_before_or_behind_a_text(self, plain: Tokenizer) -> None:
        assert plain.encode("").ids == []

    def test_special_tokens_are_one_id_each(self, plain: Tokenizer) -> None:
        assert [plain.encode(token).ids for token in SPECIAL] == [[0], [1], [2]]

    def test_a_chat_is_rendered(self, tokenizer: PreTrainedTokenizerFast) -> None:
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{{ x }}\n"}]
        assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{{ x }}\n<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_a_rendered_reply_continues_its_prompt(self, tokenizer: PreTrainedTokenizerFast) -> None:
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
        assert tokenizer.apply_chat_template(chat, tokenize=False) == f"{prompt}b<|im_end|>\n"


class TestTheModel:
    def test_it_predicts_a_text_that_it_has_not_seen(self, net: LlamaForCausalLM, plain: Tokenizer) -> None:
        assert held_out_loss(net, plain, [UNSEEN]).nats_per_token < 2.23  # measured: 2.185

    def test_it_predicts_held_out_files_of_the_standard_library(self, net: LlamaForCausalLM, plain: Tokenizer) -> None:
        _, unseen = collect()
        files = [
            unseen[name] for name in ("chunk.py", "sched.py", "secrets.py", "zoneinfo/__init__.py") if name in unseen
        ]
        assert held_out_loss(net, plain, files).nats_per_token < 3.73  # measured: 3.674 with Python 3.11

    def test_it_completes_python(self, net: LlamaForCausalLM, plain: Tokenizer) -> None:
        prompt = "class Stack:\n    def __init__(self"
        code = prompt + plain.decode(generate(net, plain, prompt, 64))
        # The last line may be cut short.
        assert any(
            parses(code[:end]) for end in range(len(prompt) + 2, len(code) + 1) if "\n" in code[len(prompt) : end]
        )
        assert "self." in code

    @pytest.mark.parametrize(
        # Not every greedy reply of so small a model ends: some repeat themselves.
        "request_",
        ["Complete this Python code:\ndef close(self):", "Hello"],
    )
    def test_a_chat_stops_by_itself(
        self, net: LlamaForCausalLM, plain: Tokenizer, tokenizer: PreTrainedTokenizerFast, request_: str
    ) -> None:
        chat = [{"role": "user", "content": request_}]
        prompt = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        reply = generate(net, plain, prompt, 384)
        assert reply[-1] == plain.token_to_id("<|im_end|>")
        assert len(reply) > 4


def parses(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


class TestTheCorpus:
    def test_files_are_held_out_by_name(self) -> None:
        held_out = ["chunk.py", "sched.py", "secrets.py", "zoneinfo/__init__.py"]
        assert all(map(is_held_out, held_out))
        assert not any(map(is_held_out, ["abc.py", "json/decoder.py", "zoneinfo/_common.py"]))

    def test_about_one_in_twenty_is_held_out_and_not_trained_on(self) -> None:
        trained, unseen = collect()
        assert 0.02 < len(unseen) / (len(unseen) + len(trained)) < 0.09
        assert not trained.keys() & unseen.keys()
        assert not set(trained.values()) & set(unseen.values())

    def test_tests_packages_and_generated_files_are_left_out(self, tmp_path: Path) -> None:
        for name in ("kept.py", "test/a.py", "site-packages/b.py", "_sysconfigdata_x.py", "config-3/c.py", "empty.py"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("" if name == "empty.py" else "x = 1\n")
        (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
        trained, unseen = collect(tmp_path)
        assert (trained | unseen) == {"kept.py": "x = 1\n"}

    def test_a_chat_asks_for_a_function_or_its_rest(self) -> None:
        source = 'class A:\n    def twice(self, x):\n        """Double it."""\n        return 2 * x\n'
        function = 'def twice(self, x):\n    """Double it."""\n    return 2 * x'
        seen = set()
        for seed in range(40):
            (chat,) = chats({"a.py": source}, seed)
            request, reply = (message["content"] for message in chat[-2:])
            if request.startswith("Complete"):
                assert request.split("\n", 1)[1] + "\n" + reply == function
            else:
                assert request in {"Write a Python function called twice.", "Write a Python function: Double it."}
                assert reply == function
            seen.add((request.split("\n")[0], len(chat)))
            assert len(chat) == 2 or chat[0]["content"] in SYSTEM_PROMPTS
        assert len(seen) == 6

    def test_chats_are_the_same_each_time(self) -> None:
        files = {"a.py": UNSEEN}
        assert list(chats(files, 0)) == list(chats(files, 0)) != list(chats(files, 1))

    def test_rows_begin_with_a_chat_or_anywhere(self, plain: Tokenizer) -> None:
        corpus = Corpus(plain, {str(index): UNSEEN for index in range(8)})
        rows = [row for step in range(16) for row in corpus.rows(step)]
        assert {row.shape for row in rows} == {(513,)}
        assert [index for index, row in enumerate(rows) if row[0] == plain.token_to_id("<|im_start|>")] == [
            0,
            16,
            32,
            48,
        ]


class Rows(Corpus):
    """Random ids; at one step, an interruption."""

    def __init__(self, interrupted_at: int | None = None) -> None:
        self.interrupted_at = interrupted_at

    def rows(self, step: int) -> Tensor:
        if step == self.interrupted_at:
            raise InterruptedError
        return torch.randint(16, (2, 9), generator=torch.Generator().manual_seed(step))


class TestTraining:
    CONFIG = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        tie_word_embeddings=True,
    )

    @pytest.fixture(autouse=True)
    def _checkpoint_every_2_steps(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(train_tiny_lm, "STEPS_PER_CHECKPOINT", 2)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)

    def test_a_run_that_was_interrupted_ends_with_the_same_weights(self, tmp_path: Path) -> None:
        whole = train(self.CONFIG, Rows(), 6, tmp_path / "whole.pt")
        with pytest.raises(InterruptedError):
            train(self.CONFIG, Rows(interrupted_at=5), 6, tmp_path / "parts.pt")
        resumed = Rows(interrupted_at=3)  # before the checkpoint: not asked for again
        parts = train(self.CONFIG, resumed, 6, tmp_path / "parts.pt")
        for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
            assert torch.equal(one, other)

    def test_a_checkpoint_of_a_longer_run_is_not_gone_on_from(self, tmp_path: Path) -> None:
        train(self.CONFIG, Rows(), 6, tmp_path / "a.pt")
        with pytest.raises(InterruptedError):
            train(self.CONFIG, Rows(interrupted_at=0), 4, tmp_path / "a.pt")

    def test_the_learning_rate_rises_and_falls(self) -> None:
        rates = [learning_rate(step, 2400) for step in range(2400)]
        assert rates[99] == rates[100] == max(rates) == 2e-3
        assert rates[:100] == sorted(rates[:100])
        assert rates[100:] == sorted(rates[100:], reverse=True)
        assert rates[-1] == pytest.approx(1e-4, rel=0.01)
