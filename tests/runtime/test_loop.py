"""Byte batches and the single-process loop."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from runtime.data import byte_batches, corpus_words, standard_library_sources
from runtime.loop import train


def test_batches_are_windows_of_the_text_and_repeat_with_the_seed(tmp_path: Path) -> None:
    text = bytes(range(256)) * 4
    (tmp_path / "a").write_bytes(text)
    first = list(islice(byte_batches([tmp_path / "a"], 3, 17, seed=5), 4))
    again = list(islice(byte_batches([tmp_path / "a"], 3, 17, seed=5), 4))
    other = next(byte_batches([tmp_path / "a"], 3, 17, seed=6))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], other)
    for row in torch.cat(first):
        assert bytes(row.tolist()) in text


def test_a_corpus_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"short")
    with pytest.raises(ValueError, match="fewer than one sequence"):
        next(byte_batches([tmp_path / "a"], 1, 6, seed=0))


def test_the_corpus_is_the_librarys_own_source_and_says_its_digest() -> None:
    paths = standard_library_sources(8)
    assert [p.name for p in paths] == sorted(p.name for p in paths)
    assert "class ABC" in (paths[0].parent / "abc.py").read_text()
    assert corpus_words(paths).startswith("8 files, ")


class Bigram(nn.Module):
    """Logits by the previous byte alone, with a transformers-like call."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(256, 256))

    def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool) -> Bigram:
        logits = self.table[input_ids[:, :-1]]
        self.loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        return self


def test_training_learns_a_periodic_text_and_is_deterministic(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abcd" * 200)
    seen: list[tuple[int, float]] = []

    def run() -> list[float]:
        return train(
            Bigram(),
            byte_batches([tmp_path / "a"], 4, 33, seed=1),
            steps=12,
            lr=1.0,
            weight_decay=0.0,
            on_step=lambda step, loss: seen.append((step, loss)),
        )

    losses = run()
    assert losses[0] == pytest.approx(math.log(256), rel=1e-6)  # zero logits: uniform over the bytes
    assert losses[-1] < 0.01
    assert seen == list(enumerate(losses, 1))
    assert run() == losses


def test_a_diverging_loss_is_named_by_its_step(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abcd" * 200)
    model = Bigram()
    with torch.no_grad():
        model.table.fill_(math.nan)
    with pytest.raises(ArithmeticError, match="step 1"):
        train(model, byte_batches([tmp_path / "a"], 1, 9, seed=0), steps=2)
    with pytest.raises(ValueError, match="0 batches for 1 steps"):
        train(Bigram(), [], steps=1)
