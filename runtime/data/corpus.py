"""Byte-level text batches: real text for any model whose vocabulary holds the 256 bytes, no tokenizer needed."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor


def standard_library_sources(count: int = 64) -> list[Path]:
    """Text that every machine has: the first ``count`` top-level modules of Python's own library, by name."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))[:count]


def read_corpus(paths: Sequence[Path]) -> bytes:
    """All files in the given order, one after another.

    Raises:
        OSError: a file cannot be read.
    """
    return b"\n".join(path.read_bytes() for path in paths)


def corpus_words(paths: Sequence[Path]) -> str:
    """The corpus in words, with its digest: what a result must say to be repeatable."""
    text = read_corpus(paths)
    digest = hashlib.sha256(text).hexdigest()[:16]
    return f"{len(paths)} files, {len(text)} bytes, sha256 {digest}"


def byte_batches(paths: Sequence[Path], batch: int, sequence_length: int, seed: int) -> Iterator[Tensor]:
    """Endless batches of byte windows, int64 [batch, sequence_length]; the same seed gives the same batches.

    Raises:
        ValueError: the text is shorter than one sequence.
    """
    text = torch.frombuffer(bytearray(read_corpus(paths)), dtype=torch.uint8)
    last = text.numel() - sequence_length
    if last < 0:
        raise ValueError(f"the corpus has {text.numel()} bytes, fewer than one sequence of {sequence_length}")
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(sequence_length)
    while True:
        start = torch.randint(last + 1, (batch, 1), generator=generator)
        yield text[start + window].long()
