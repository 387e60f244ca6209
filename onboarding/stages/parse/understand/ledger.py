"""Where claims are collected while a twin is examined, and how the twin's sizes become the published ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from onboarding.architecture import Component, NovelReference, Proof

DEFINITION = "the part against its definition on fresh inputs: outputs and gradients"
IDENTITY = "algebra on the values of one step"
DISTURBED = "which outputs move when one input position is disturbed"
SHIFTED = "queries and keys with all positions moved on"


@dataclass
class Ledger:
    """Claims and proofs about some layers of the published model."""

    layers: list[int] = field(default_factory=list)
    proofs: list[Proof] = field(default_factory=list)
    novel: list[NovelReference] = field(default_factory=list)

    def claim(self, part: Component, claim: str, check: str, error: float, limit: float, reason: str = "") -> bool:
        """Note a claim; it is proven when its error is within the limit."""
        proven = error <= limit
        if not proven and not reason:
            reason = f"error {error:.1e}, allowed {limit:.0e}"
        shown = None if error == float("inf") else float(error)
        self.proofs.append(
            Proof(
                part=part,
                claim=claim,
                check=check,
                error=shown,
                proven=proven,
                reason="" if proven else reason,
                layers=list(self.layers),
            )
        )
        return proven

    def unproven(self, part: Component, claim: str, reason: str) -> None:
        """Note a claim that could not be checked."""
        self.proofs.append(
            Proof(part=part, claim=claim, check="none", proven=False, reason=reason, layers=list(self.layers))
        )


@dataclass(frozen=True)
class Sizes:
    """From a size of the twin to the published one, by the name under which both models hold it."""

    twin: nn.Module
    full: nn.Module
    twin_fields: dict[str, Any]
    full_fields: dict[str, Any]

    def of(self, value: Any, *patterns: str) -> Any:
        """The published value of a twin's setting.

        Args:
            value: in the twin.
            patterns: regular expressions for the names of settings that may hold it, the likeliest first.

        Returns:
            The published value, or the twin's where no setting of that name holds it.
        """
        for pattern in patterns:
            for twin, full in self._pairs(re.compile(pattern)):
                if type(twin) is type(value) is type(full) and twin == value:
                    return full
        return value

    def _pairs(self, pattern: re.Pattern[str]) -> Iterator[tuple[Any, Any]]:
        full = dict(self.full.named_modules())
        for path, module in self.twin.named_modules():
            if path in full:
                yield from _matching(vars(module), vars(full[path]), pattern)
        yield from _matching(self.twin_fields, self.full_fields, pattern)

    def dim(self, path: str, name: str) -> int:
        """A size of a published module by its path in the layer, e.g. ``in_features``."""
        return int(getattr(self.full.get_submodule(path), name))


def _matching(twin: Mapping[str, Any], full: Mapping[str, Any], pattern: re.Pattern[str]) -> Iterator[tuple[Any, Any]]:
    for name, value in twin.items():
        if name not in full:
            continue
        if isinstance(value, dict) and isinstance(full[name], dict):
            yield from _matching(value, full[name], pattern)
        elif pattern.search(name):
            yield value, full[name]
