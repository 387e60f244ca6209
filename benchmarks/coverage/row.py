"""What is stored of one entry: one JSON line."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class Row:
    """The outcome of one entry; what was not reached keeps its default."""

    mapping: str
    model_type: str
    class_name: str
    instantiates: bool = False
    forward: bool = False
    backward: bool = False
    tower: bool | None = None
    """Whether the vision (or audio) tower was traced forward and backward; None where there is none."""
    total: int = 0
    tower_parameters: int = 0
    layers: int = 0
    kinds: int = 0
    roles_proven: int = 0
    """Claims about roles and variants that hold numerically on the twin, forward and backward."""
    roles_claimed: int = 0
    novel: list[str] = field(default_factory=list)
    twin: bool = False
    """The twin's loss fell in 20 steps, every value finite, every parameter that can get a gradient got one."""
    twin_parameters: int = 0
    twin_losses: tuple[float, float] | None = None
    seconds: float = 0.0
    """Parse."""
    twin_seconds: float = 0.0
    roles_seconds: float = 0.0
    problem: dict[str, Any] | None = None
    """problem+json of what stopped the parse."""
    twin_problem: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        """As in :class:`benchmarks.coverage.entries.Entry`."""
        return f"{self.mapping}/{self.model_type}"

    @property
    def complete(self) -> bool:
        """Everything that can be asked of the entry was shown."""
        return self.forward and self.backward and self.tower is not False and self.twin

    @property
    def incomplete(self) -> tuple[str, ...]:
        """The parts that did not show everything, or were not measured."""
        parsed = self.forward and self.backward and self.tower is not False
        return tuple(
            part
            for part, done in (("parse", parsed), ("twin", self.twin), ("roles", self.roles_claimed > 0))
            if not done
        )

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> Row:
        """The row that :meth:`to_json` wrote."""
        data = json.loads(line)
        losses = data.get("twin_losses")
        return cls(**{**data, "twin_losses": tuple(losses) if losses else None})
