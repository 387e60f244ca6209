"""Vision backbones of the package timm, where it is not installed: an empty stand-in, so that the rest can be read.

The backbone is then neither counted nor traced, and the architecture says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn
from transformers.utils import is_timm_available


class MissingBackbone(nn.Module):
    """In the place of a timm model."""

    def __init__(self, architecture: str) -> None:
        super().__init__()
        self.architecture = architecture

    def forward_features(self, *_: Any, **__: Any) -> Any:
        """Raises: nothing is computed here."""
        raise NotImplementedError(f"the backbone {self.architecture} needs the package timm")

    forward = forward_features


@contextmanager
def missing_backbones() -> Iterator[None]:
    """Let models be built whose vision tower comes from timm."""
    if is_timm_available():
        yield
        return
    from transformers.models.timm_wrapper import modeling_timm_wrapper as wrapper

    def stand_in(config: Any, **_: Any) -> nn.Module:
        return MissingBackbone(str(config.architecture))

    with (
        patch.object(wrapper, "requires_backends", lambda *_: None),
        patch.object(wrapper, "_create_timm_model_with_error_handling", stand_in),
    ):
        yield


def missing_in(model: nn.Module) -> str | None:
    """The name of the backbone that is not there, or None."""
    return next((m.architecture for m in model.modules() if isinstance(m, MissingBackbone)), None)
