"""The entries that coverage is measured on: transformers' causal-LM and image-text-to-text mappings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CAUSAL, IMAGE_TEXT = "causal-lm", "image-text-to-text"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of a mapping."""

    mapping: str
    model_type: str
    class_name: str

    @property
    def key(self) -> str:
        """What identifies the entry in a results file."""
        return f"{self.mapping}/{self.model_type}"

    @property
    def config(self) -> dict[str, Any]:
        """The smallest ``config.json`` that means this entry: every size is the class's default."""
        return {"model_type": self.model_type, "architectures": [self.class_name]}


def all_entries() -> list[Entry]:
    """Every entry of both mappings, in the order of transformers."""
    from transformers.models.auto import modeling_auto

    mappings = {
        CAUSAL: modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        IMAGE_TEXT: modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    return [
        Entry(mapping=mapping, model_type=model_type, class_name=name if isinstance(name, str) else name[0])
        for mapping, names in mappings.items()
        for model_type, name in names.items()
    ]
