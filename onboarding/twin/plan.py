"""The twin as plain data. Free of torch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TwinPlan:
    """What :func:`onboarding.twin.build` needs, as plain data."""

    config: dict[str, Any]
    """Fields of the twin's config, ``model_type`` among them."""
    class_name: str
    layers: tuple[int, ...]
    """For each layer of the twin, the layer of the full model whose kind it has."""
    sizes: dict[str, int | str]
    """The telling sizes: layers, hidden, heads, experts, parameters ..."""

    def to_json(self) -> str:
        """Canonical JSON; :meth:`from_json` reads it back."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TwinPlan:
        """The plan that :meth:`to_json` wrote."""
        data = json.loads(text)
        return cls(**{**data, "layers": tuple(data["layers"])})
