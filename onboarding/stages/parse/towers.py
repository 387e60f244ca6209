"""The vision tower: found beside the decoder, run on one image, traced forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from onboarding.stages.parse.inputs import Inputs, image_inputs, parameters_of, picture_of

_NAMES = ("vis", "image", "vqmodel", "vqvae", "sam_")


@dataclass(frozen=True, kw_only=True)
class TowerCall:
    """A call that runs a vision tower (and the projector behind it, where the class has a function for both)."""

    function: Callable[..., Any]
    inputs: Inputs
    words: str

    def run(self) -> list[torch.Tensor]:
        """Features that a gradient can go back from."""
        outputs = self.function(**self.inputs)
        return [t for t in _tensors(outputs) if t.is_floating_point() and t.requires_grad]


def _tensors(outputs: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(dict(outputs) if hasattr(outputs, "keys") else outputs)
    found = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "keys"):
            found += _tensors(leaf)
    return found


def tower_modules(model: nn.Module, layers_prefix: str) -> dict[str, nn.Module]:
    """Outermost modules with weights that are named for vision and lie outside the decoder's layers."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not name or (layers_prefix + ".").startswith(name + ".") or (name + ".").startswith(layers_prefix + "."):
            continue
        if any((name + ".").startswith(outer + ".") for outer in found):
            continue
        last = name.rpartition(".")[2].lower()
        if any(word in last for word in _NAMES) and sum(p.dim() >= 2 for p in module.parameters()) > 1:
            found[name] = module
    return found


_FEATURES = ("get_image_features", "get_video_features", "get_img_features")


def _functions(model: Any, towers: dict[str, nn.Module]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What may run a tower, the call that does most of the work first."""
    owners = {"": model, "model": getattr(model, "model", None)}
    for owner in owners.values():
        for name in _FEATURES:
            function = getattr(owner, name, None)
            if callable(function) and parameters_of(function).keys() - {"args"}:
                yield name, function
    for path, module in towers.items():
        yield f"{path}.forward", module.forward
        for name in ("encode", *_FEATURES):  # an image tokenizer; a tower that its own forward mixes into the text
            function = getattr(module, name, None)
            if callable(function):
                yield f"{path}.{name}", function


def find_tower_call(
    model: Any, layers_prefix: str, dtype: torch.dtype, mode: Any
) -> tuple[TowerCall | None, list[str], Exception | None]:
    """The first call that runs, found by trying under the current fake mode.

    Args:
        model: the whole model.
        layers_prefix: name of the decoder's list of layers.
        dtype: of the tower.
        mode: the tracer, which settles what depends on data; the trial leaves nothing in its trace.

    Returns:
        The call, or None; what was tried, and the first failure.
    """
    first: Exception | None = None
    towers, tried = tower_modules(model, layers_prefix), list[str]()
    encoder = model.get_encoder() if hasattr(model, "get_encoder") and model.config.is_encoder_decoder else None
    if not towers and isinstance(encoder, nn.Module):
        towers = {"encoder": encoder}
    read = {m.in_features for tower in towers.values() for m in tower.modules() if isinstance(m, nn.Linear)}
    for name, function in _functions(model, towers):
        for inputs in image_inputs(parameters_of(function), model.config, dtype, read):
            try:
                with mode.silent(), mode:
                    function(**inputs)
            except Exception as error:  # any error only rules this layout out
                first = first or error
                shapes = {k: tuple(v.shape) for k, v in inputs.items() if isinstance(v, torch.Tensor)}
                tried.append(f"{name} {shapes}: {type(error).__name__}: {' '.join(str(error).split())[:120]}")
                continue
            picture = picture_of(model.config)
            words = f"one image of {picture.height} x {picture.width} by {name}"
            return TowerCall(function=function, inputs=inputs, words=words), tried, first
    return None, tried, first
