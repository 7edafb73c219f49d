"""How tiny-lm's training takes its rows, sets its learning rate and resumes after an interruption."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig

from examples.training import train_tiny_lm
from examples.training.train_tiny_lm import FOLDER, Corpus, learning_rate, train

pytestmark = pytest.mark.heavy


def test_rows_begin_with_a_chat_or_anywhere() -> None:
    plain = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    source = Path(ast.__file__).read_text()
    corpus = Corpus(plain, {str(index): source for index in range(8)})
    rows = [row for step in range(16) for row in corpus.rows(step)]
    assert {row.shape for row in rows} == {(513,)}
    chat = plain.token_to_id("<|im_start|>")
    assert [index for index, row in enumerate(rows) if row[0] == chat] == [0, 16, 32, 48]


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
