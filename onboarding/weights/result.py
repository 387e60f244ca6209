"""What is known of a published checkpoint: how every parameter of the model comes out of it. Free of torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from onboarding.architecture import Record

How = Literal["exact", "renamed", "fused", "split", "tied"]
"""Taken as it is; under another name; made of several tensors; one of several made of a tensor; shared with another."""


class Placement(Record):
    """One parameter (or stored buffer) of the model and the tensors of the checkpoint that it is made of."""

    target: str
    sources: list[str]
    """Names in the checkpoint, in the order in which they are put together; of a tied one, its owner in the model."""
    how: How
    rule: str = ""
    """In words, for ``fused`` and ``split``: transformers' operations, in order."""
    stored: str = ""
    """How the values are stored where they are no plain numbers: ``fp8 in blocks``, ``mxfp4`` ..."""


class PatternRow(Record):
    """Placements that differ in layer and expert numbers only."""

    target: str
    """With ``*`` for numbers."""
    sources: str
    how: How
    stored: str = ""
    parameters: int
    """How many of the model's tensors."""
    tensors: int
    """How many of the checkpoint's."""


class WeightsReport(Record):
    """A checkpoint's index against the model."""

    files: int
    tensors: int
    total_bytes: int
    """As the index states it; 0 where it does not."""
    placed: int
    """Tensors of the model that are filled."""
    expected: int
    """Tensors of the model."""
    rows: list[PatternRow]
    missing: list[str] = Field(default_factory=list)
    """Patterns of the model's tensors that nothing fills."""
    extra: list[str] = Field(default_factory=list)
    """Patterns of the checkpoint's tensors that have no place."""
    extra_why: dict[str, str] = Field(default_factory=dict)
    """Of those, what they are where it is known: layers for several next tokens, buffers of older versions ..."""
    wrong_shapes: list[str] = Field(default_factory=list)
    hints: list[str] = Field(default_factory=list)
    proven: str = ""
    """What the synthetic checkpoint of the twin showed; empty where it was not run."""

    @property
    def complete(self) -> bool:
        """Every parameter is filled, and by the right shape."""
        return self.placed == self.expected and not self.wrong_shapes
